"""SGLang's real cache controller, device pool and host pool in this process, around any storage backend.

    with ControllerRig(kind="mla", layout="page_first", io_backend="kernel", backend="file") as rig:
        trip = rig.round_trip(pages=20)
        assert trip.completed_pages == 20 and trip.identical

Pages are allocated in shuffled order on both sides, so that a backend that mixes up pages is caught. Only
the rig's copies between device and host are stand-ins (see README.md); the controller's threads, queues,
hashing, and its calls into the backend are SGLang's.

`cpu_engine.install()` must have run before SGLang was imported. A rig belongs to the thread that made it,
and only one may be open at a time in a process, because SGLang's configuration is global.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import cpu_engine

cpu_engine.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_group  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.utils import get_hash_str  # noqa: E402

_FILE_BACKEND_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@dataclass(frozen=True)
class Ranks:
    """This process's place in a parallel layout; ranks of the attention groups follow from it as in SGLang.

    tp_size counts all ranks of a stage: attention TP x attention CP x attention DP (`dp_size`, which turns
    DP attention on when above 1). The other ranks do not exist: nothing waits for them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1

    def widths(self) -> dict[str, int]:
        """The sizes, under SGLang's names for the server arguments."""
        return {
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "attn_cp_size": self.cp_size,
            "attn_dp_size": self.dp_size,
        }

    def places(self) -> dict[str, int]:
        """The ranks, derived as SGLang's launcher does."""
        attn_tp_size = runtime_context.derive_attn_tp_size(
            tp_size=self.tp_size, attn_cp_size=self.cp_size, attn_dp_size=self.dp_size
        )
        attn_tp_rank, attn_dp_rank = runtime_context.derive_attention_ranks(
            tp_rank=self.tp_rank, attn_tp_size=attn_tp_size, attn_cp_size=self.cp_size
        )
        return {
            "tp_rank": self.tp_rank,
            "pp_rank": self.pp_rank,
            "attn_cp_rank": self.tp_rank // attn_tp_size % self.cp_size,
            "attn_tp_rank": attn_tp_rank,
            "attn_dp_rank": attn_dp_rank,
            "attn_dcp_rank": 0,
        }


@dataclass(frozen=True)
class Prefetch:
    """What a prefetch brought: hit_pages pages were reported present, completed_pages of them arrived.

    host_indices: int64, one per token of the pages that arrived; allocated until `ControllerRig.free_host`.
    """

    hit_pages: int
    completed_pages: int
    hashes: list[str]
    host_indices: torch.Tensor


@dataclass(frozen=True)
class RoundTrip:
    """A round trip's counts, and whether the pages that arrived hold the bytes that were written."""

    stored_pages: int
    hit_pages: int
    completed_pages: int
    identical: bool


class ControllerRig:
    """Pools, controller and storage backend, wired as a server wires them.

    Args:
        kind: "mha" (K and V) or "mla" (one latent).
        page_size: tokens in a page. pages: capacity of the device pool; the host pool has twice that.
        layout, io_backend: a pair of `settings.IO_LAYOUTS_MHA` or `IO_LAYOUTS_MLA`.
        backend: SGLang's name of the storage backend.
        extra_config: the backend's configuration; "dynamic" needs backend_name, module_path, class_name.
        file_dir: directory for backend "file".
        dtype: type of the KV cache.
        layers, heads, head_dim: geometry on this rank; "mla" uses kv_lora_rank and rope_dim instead.
        model_name: what the backend is told the served model is called.
        ranks: place in a parallel layout.
        controller: "hybrid" is what a server uses; "base" is its base class.
        server_args: more SGLang server arguments to publish, e.g. model_path, for a backend that reads them.
        seed: of the shuffles and of the bytes written by `fill`.

    Raises whatever attaching the backend raises; nothing is left behind then.
    """

    def __init__(
        self,
        kind: Literal["mha", "mla"] = "mha",
        *,
        page_size: int = 16,
        layout: str = "page_first_direct",
        io_backend: str = "direct",
        backend: str = "file",
        extra_config: Mapping[str, Any] | None = None,
        file_dir: Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        pages: int = 64,
        layers: int = 4,
        heads: int = 2,
        head_dim: int = 64,
        kv_lora_rank: int = 512,
        rope_dim: int = 64,
        model_name: str = "rig",
        ranks: Ranks | None = None,
        controller: Literal["hybrid", "base"] = "hybrid",
        server_args: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.kind = kind
        self.page_size = page_size
        self._random = torch.Generator().manual_seed(seed)
        self._ranks = ranks or Ranks()
        self._requests = 0
        self._scopes = contextlib.ExitStack()
        try:
            published = {
                "page_size": page_size,
                "hicache_mem_layout": layout,
                "hicache_io_backend": io_backend,
                "hicache_ratio": 2.0,
                "hicache_size": 0,
                "hicache_storage_backend": backend,
                **self._ranks.widths(),
                **(server_args or {}),
            }
            self._enter_configuration(published, file_dir)
            if kind == "mha":
                size = (page_size * pages, page_size, dtype, heads, head_dim, layers)
                self.device_pool: Any = MHATokenToKVPool(*size, "cpu", False)
            else:
                latent = (page_size * pages, page_size, dtype, kv_lora_rank, rope_dim, layers)
                self.device_pool = MLATokenToKVPool(*latent, "cpu", False)
            self._build_host_pool(layers)
            self._build_controller(controller, io_backend, backend, dict(extra_config or {}), model_name)
        except BaseException:
            self._scopes.close()
            raise

    # ---- life ---------------------------------------------------------------------------------------

    def __enter__(self) -> ControllerRig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detach the backend, which closes it, and give SGLang's global configuration back."""
        try:
            self.controller.detach_storage_backend()
        finally:
            self._scopes.close()

    @property
    def storage(self) -> Any:
        """The storage backend object that SGLang made."""
        return self.controller.storage_backend

    def _enter_configuration(self, server_args: Mapping[str, Any], file_dir: Path | None) -> None:
        enter = self._scopes.enter_context
        published = enter(runtime_context.get_context().override_server_args(**server_args))
        for name, value in server_args.items():
            # SGLang publishes these as resolved values only; a server has them in its raw arguments, too.
            runtime_context.msgspec.Struct.__setattr__(published, name, value)
        enter(runtime_context.get_parallel().override(**self._ranks.places()))
        enter(runtime_context.get_flags().dp.override(enabled=self._ranks.dp_size > 1))
        if file_dir is not None:
            enter(_environment(_FILE_BACKEND_DIR, str(file_dir)))

    def _build_host_pool(self, layers: int) -> None:
        device = self.device_pool
        self.allocator: Any = PagedTokenToKVPoolAllocator(
            device.size, self.page_size, device.dtype, "cpu", device, False
        )
        self._host_group: Any = build_kv_only_group(
            page_size=self.page_size,
            kv_pool=device,
            full_layer_mapping={layer: layer for layer in range(layers)},
            use_mla=self.kind == "mla",
        )
        self.host_pool: Any = self._host_group.anchor_entry.host_pool
        self.allocator.free_pages = self._shuffle(self.allocator.free_pages)
        pages = self.host_pool.free_slots.view(-1, self.page_size)
        self.host_pool.free_slots = self._shuffle(pages).reshape(-1)

    def _build_controller(
        self, name: str, io_backend: str, backend: str, extra_config: dict[str, Any], model_name: str
    ) -> None:
        base = HiCacheController if name == "base" else HybridCacheController
        self._named_requests = name == "base"
        group = _group_of_one()
        cp_place = self._ranks.places()["attn_cp_rank"], self._ranks.cp_size
        # SGLang reads this pair off a process group, which would need the other ranks to exist.
        cls = type(base.__name__, (base,), {"get_attn_cp_rank_and_size": lambda controller: cp_place})
        self.controller: Any = cls(
            self.allocator,
            self.host_pool if name == "base" else self._host_group,
            self.page_size,
            group,
            threading.Event(),
            attn_tp_group=group,
            write_policy="write_through",
            io_backend=io_backend,
            storage_backend=backend,
            prefetch_threshold=self.page_size,
            model_name=model_name,
            storage_backend_extra_config=extra_config,
        )

    def _shuffle(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[torch.randperm(len(rows), generator=self._random)]

    # ---- tokens ---------------------------------------------------------------------------------------

    def tokens(self, pages: int, seed: int = 0) -> list[int]:
        """Random token ids that fill `pages` pages."""
        rng = random.Random(seed)
        return [rng.randrange(1 << 15) for _ in range(pages * self.page_size)]

    def hashes(self, tokens: Sequence[int], prior: str | None = None) -> list[str]:
        """SGLang's hash of each full page: 64 hex digits, chained to the page before."""
        return list(get_hash_str(list(tokens), prior, self.page_size))

    # ---- device and host ------------------------------------------------------------------------------

    def fill(self, pages: int) -> torch.Tensor:
        """Allocate `pages` device pages with random contents; returns int64 indices, one per token."""
        indices = self.allocator.alloc(pages * self.page_size)
        if indices is None:
            raise MemoryError(f"device pool has no {pages} free pages")
        for buffer in self.device_buffers():
            raw = buffer.view(torch.uint8)
            shape = (len(indices), *raw.shape[1:])
            raw[indices] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self._random)
        return torch.as_tensor(indices)

    def device_buffers(self) -> list[torch.Tensor]:
        """The device pool's tensors, ``[tokens, heads, dim]`` each: all K then all V, or MLA's latents."""
        pool = self.device_pool
        return list(pool.k_buffer) + list(pool.v_buffer) if self.kind == "mha" else list(pool.kv_buffer)

    def read_device(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the rows at `indices`, as uint8, in the order of `device_buffers`."""
        return [buffer.view(torch.uint8)[indices].clone() for buffer in self.device_buffers()]

    def read_host(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the host pages that start at every page_size-th of `indices`, flat, as uint8."""
        starts = indices[:: self.page_size].tolist()
        return [self.host_pool.get_data_page(i).view(torch.uint8).clone() for i in starts]

    def to_host(self, device_indices: torch.Tensor) -> torch.Tensor:
        """Copy device pages to newly allocated host pages; returns their indices, one per token."""
        host_indices = self.controller.write(device_indices)
        if host_indices is None:
            raise MemoryError("host pool has no room")
        self.controller.ack_write_queue.clear()
        return torch.as_tensor(host_indices)

    def load(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Copy host pages to newly allocated device pages; returns their indices, one per token."""
        device_indices = self.controller.load(host_indices)
        if device_indices is None:
            raise MemoryError("device pool has no room")
        self.controller.start_loading()
        self.controller.ack_load_queue.clear()
        return torch.as_tensor(device_indices)

    def scramble(self) -> None:
        """Overwrite both pools, so that nothing read afterwards can be left from before."""
        self.host_pool.kv_buffer.view(torch.uint8).fill_(0xA5)
        for buffer in self.device_buffers():
            buffer.view(torch.uint8).fill_(0x5A)

    def free_host(self, indices: torch.Tensor) -> None:
        self.host_pool.free(indices)

    def free_device(self, indices: torch.Tensor) -> None:
        self.allocator.free(indices)

    # ---- host and storage -----------------------------------------------------------------------------

    def backup(
        self,
        host_indices: torch.Tensor,
        tokens: Sequence[int],
        hashes: Sequence[str] | None = None,
        prefix_keys: list[str] | None = None,
        timeout: float = 30.0,
    ) -> int:
        """Write host pages to the storage; returns how many pages SGLang counts as written.

        hashes: the pages' keys, by default the tokens' chain. prefix_keys: the chain before them.
        """
        keys = list(hashes) if hashes is not None else self.hashes(tokens)
        self.controller.write_storage(host_indices, list(tokens), keys, prefix_keys)
        operation = _take(self.controller.ack_backup_queue, "backup", timeout)
        return int(operation.completed_tokens) // self.page_size

    def prefetch(
        self,
        tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        timeout: float = 30.0,
    ) -> Prefetch:
        """Look the tokens' pages up and read those present into newly allocated host pages.

        last_hash: hash of the page before the first. Pages that did not arrive are freed again.
        """
        self._requests += 1
        name = f"request-{self._requests}"
        request = name if self._named_requests else CacheRequestHandle(name, 0)
        self.controller.prefetch(request, list(tokens), last_hash, prefix_keys)
        operation = _take(self.controller.prefetch_hit_queue, "storage lookup", timeout)
        hit_pages = operation.storage_hit_count // self.page_size
        if hit_pages == 0:
            return Prefetch(0, 0, [], torch.empty(0, dtype=torch.int64))
        host_indices = self.controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
        if host_indices is None:
            raise MemoryError("host pool has no room")
        operation.host_indices = host_indices
        self.controller.prefetch_buffer.put(operation)
        completed = self._await_prefetch(timeout)
        self.free_host(host_indices[completed:])
        return Prefetch(
            hit_pages, completed // self.page_size, list(operation.hash_value), host_indices[:completed]
        )

    def _await_prefetch(self, timeout: float) -> int:
        completed = 0
        while True:
            ack = _take(self.controller.ack_prefetch_queue, "storage read", timeout)
            completed = max(completed, ack.completed_tokens or 0)
            if ack.completed_req:
                return completed

    def reset(self) -> None:
        """What a cache flush does to the controller: stop its storage threads and start new ones."""
        self.controller.reset()

    def round_trip(self, pages: int = 20, tokens_seed: int = 0) -> RoundTrip:
        """Device, host, storage, then back over scrambled pools; compares the bytes on the device."""
        tokens = self.tokens(pages, tokens_seed)
        source = self.fill(pages)
        wanted = self.read_device(source)
        host = self.to_host(source)
        stored = self.backup(host, tokens)
        self.scramble()
        self.free_host(host)
        self.free_device(source)
        got = self.prefetch(tokens)
        identical = True
        if got.completed_pages:
            loaded = self.load(got.host_indices)
            rows = len(loaded)
            pairs = zip(wanted, self.read_device(loaded), strict=True)
            identical = all(torch.equal(a[:rows], b) for a, b in pairs)
            self.free_device(loaded)
            self.free_host(got.host_indices)
        return RoundTrip(stored, got.hit_pages, got.completed_pages, identical)


def _take(source: queue.Queue[Any], what: str, timeout: float) -> Any:
    try:
        return source.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError(f"{what} did not finish within {timeout:.0f} s") from None


def _group_of_one() -> Any:
    """The process group of this process alone, made on first use."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
