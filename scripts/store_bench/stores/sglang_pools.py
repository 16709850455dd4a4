"""SGLang's real host pools on a CPU, of given bytes a page, and its controller's calls into a backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from store_bench.geometries import GEOMETRIES, PAGE_SIZES
from store_bench.memory import Blocks
from store_bench.stores.base import CannotRun

LAYOUT = "page_first_direct"
_SPARE_BYTES = 1 << 30


def _modules() -> Any:
    """SGLang's modules, made importable on a CPU. Raises `CannotRun`."""
    try:
        import cpu_engine

        cpu_engine.install()
        import torch
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache import hicache_storage, memory_pool
        from sglang.srt.mem_cache.pool_host import base, mha, mla
    except Exception as error:
        raise CannotRun(f"import of sglang failed: {error}") from error
    return SimpleNamespace(
        torch=torch,
        base=base,
        controller=HiCacheController,
        storage=hicache_storage,
        device=memory_pool,
        mha=mha,
        mla=mla,
    )


def _shape(page_bytes: int, mla: bool) -> tuple[int, int, int, int]:
    """(layers, heads, head size or latent, page size) that make a page of so many bytes."""
    for geometry in GEOMETRIES:
        for page in PAGE_SIZES:
            if geometry.block_bytes(page) == page_bytes and bool(geometry.latent) == mla:
                heads = max(1, geometry.kv_heads // geometry.tp)
                return geometry.layers, heads, geometry.latent or geometry.head_dim, page
    # A size that no model has: one head of 64, pages of 16 tokens, or of 1 where that is too much.
    for page in (16, 1):
        layers, rest = divmod(page_bytes, 2 * page * 64 * 2)
        if layers and not rest:
            return layers, 1, 64, page
    raise CannotRun(f"no host pool has pages of {page_bytes} bytes")


class HostPool:
    """A real host pool with room for `pages` pages, one `Blocks` over its memory, and its token indices."""

    def __init__(self, page_bytes: int, pages: int, mla: bool) -> None:
        self.sglang = sgl = _modules()
        layers, heads, width, self.page_size = _shape(page_bytes, mla)
        type_, page = sgl.torch.bfloat16, self.page_size
        settings: dict[str, Any] = {"pin_memory": False, "host_token_capacity": pages * page}
        if mla:
            device = sgl.device.MLATokenToKVPool(2 * page, page, type_, width - 64, 64, layers, "cpu", False)
            make: Any = sgl.mla.MLATokenToKVPoolHost
            settings |= {"start_layer": 0, "end_layer": layers, "target_layer_num": layers}
        else:
            device = sgl.device.MHATokenToKVPool(2 * page, page, type_, heads, width, layers, "cpu", False)
            make = sgl.mha.get_mha_host_pool_cls(device.get_device_pool_infos()[0].buffer_info)
            settings |= {"start_layer": device.start_layer, "end_layer": device.end_layer}
        info = device.get_device_pool_infos()[0].buffer_info
        # SGLang would leave 10 GB of the machine's memory alone, which a small one need not have.
        with sgl.base.host_memory_budget_scope(2 * page_bytes * pages + _SPARE_BYTES):
            self.pool: Any = make(info, 1.0, 0, page, LAYOUT, device_capacity_tokens=device.size, **settings)
        raw = self.pool.kv_buffer.view(sgl.torch.uint8).numpy().reshape(-1)
        halves = raw.reshape(1 if mla else 2, -1)
        self.blocks = Blocks([half.reshape(len(half) * len(halves) // page_bytes, -1) for half in halves])
        if self.blocks.block_bytes != page_bytes:
            raise CannotRun(f"a page has {self.blocks.block_bytes} bytes, not {page_bytes}")

    def indices(self, first: int, count: int) -> Any:
        """The token indices of pages `first` and following."""
        page = self.page_size
        return self.sglang.torch.arange(first * page, (first + count) * page, dtype=self.sglang.torch.int64)

    def storage_config(self, extra: dict[str, Any] | None = None) -> Any:
        mla = len(self.blocks.components) == 1
        return self.sglang.storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
            enable_storage_metrics=False, is_page_first_layout=False, model_name="bench", extra_config=extra,
        )  # fmt: skip

    def controller(self, backend: Any) -> tuple[Any, Any]:
        """(get, set): the controller's own `_generic_page_get` and `_generic_page_set` over this pool.

        get(hashes, indices) is the number of leading pages that arrived; set(hashes, indices) a truth value.
        """
        place = SimpleNamespace(
            storage_host_pool=self.pool,
            mem_pool_host=self.pool,
            storage_backend=backend,
            page_size=self.page_size,
        )
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        cls = self.sglang.controller
        return (
            lambda hashes, indices: cls._generic_page_get(place, operation, hashes, indices),
            lambda hashes, indices: cls._generic_page_set(place, hashes, indices),
        )
