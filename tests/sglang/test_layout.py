"""Page addresses of SGLang's own host pools, built on the CPU: the same as the pool's, address by address.

The pools are real; only pinned memory is off, which needs an accelerator.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import statistics
import timeit
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ucm_sglang.layout import PoolLayout

pytestmark = pytest.mark.sglang

PAGES = 7
MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
PAGE_SIZES = [1, 16, 64]
# heads, head size, layers: common shapes, odd ones, one of each
MHA_SHAPES = [(2, 64, 4), (8, 128, 2), (1, 80, 3), (3, 33, 5), (1, 1, 1)]
# latent, rope, layers
MLA_SHAPES = [(512, 64, 4), (256, 32, 3), (7, 3, 5), (1, 1, 1)]
KEPT: list[Any] = []  # an operator is gone with the object that declared it


@pytest.fixture(scope="module")
def sgl() -> Any:
    """The modules of SGLang that these tests use, imported late: collecting needs no engine."""
    names = {
        "torch": "torch",
        "device": "sglang.srt.mem_cache.memory_pool",
        "info": "sglang.srt.mem_cache.device_pool_info",
        "base": "sglang.srt.mem_cache.pool_host.base",
        "mha": "sglang.srt.mem_cache.pool_host.mha",
        "mla": "sglang.srt.mem_cache.pool_host.mla",
        "mamba": "sglang.srt.mem_cache.pool_host.mamba",
        "unified": "sglang.srt.mem_cache.pool_host.unified",
        "v4": "sglang.srt.mem_cache.memory_pool_host",
    }
    torch = importlib.import_module("torch")
    if not hasattr(torch.ops.torchvision, "nms"):
        # The torchvision of PyPI is built for CUDA; beside a CPU torch it cannot be imported without these.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
    return SimpleNamespace(**{key: importlib.import_module(name) for key, name in names.items()})


@pytest.fixture(autouse=True)
def no_memory_reserve(sgl: Any) -> Iterator[None]:
    """SGLang leaves 10 GB of host memory free, which a small test machine need not have."""
    with sgl.base.host_memory_budget_scope(1 << 30):
        yield


def mha_pool(sgl: Any, layout: str, page_size: int, heads: int, dim: int, layers: int, **options: Any) -> Any:
    """A real host pool. `options`: pages, dtype, v_head_dim, start_layer."""
    dtype, start = options.get("dtype", sgl.torch.bfloat16), options.get("start_layer", 0)
    device = sgl.device.MHATokenToKVPool(
        page_size * 2,
        page_size,
        dtype,
        heads,
        dim,
        layers,
        "cpu",
        False,
        v_head_dim=options.get("v_head_dim"),
        start_layer=start,
        end_layer=start + layers,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return sgl.mha.get_mha_host_pool_cls(info)(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=options.get("pages", PAGES) * page_size,
    )


def mla_pool(sgl: Any, layout: str, page_size: int, rank: int, rope: int, layers: int, **options: Any) -> Any:
    device = sgl.device.MLATokenToKVPool(
        page_size * 2, page_size, options.pop("dtype", sgl.torch.bfloat16), rank, rope, layers, "cpu", False
    )
    return sgl.mla.MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        page_size * options.get("dcp_size", 1),
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        host_token_capacity=options.pop("pages", PAGES) * page_size,
        **options,
    )


def index_lists(sgl: Any, page_size: int) -> list[Any]:
    """Batches of token indices: in order, shuffled, one page, the ends, one page twice, none."""
    shuffled = np.random.default_rng(page_size).permutation(PAGES).tolist()
    lists = [list(range(PAGES)), shuffled, [3], [PAGES - 1, 0], [2, 2], []]
    return [
        (sgl.torch.tensor(pages, dtype=sgl.torch.int64)[:, None] * page_size + sgl.torch.arange(page_size))
        .reshape(-1)
        .contiguous()
        for pages in lists
    ]


def assert_equal_to_meta(sgl: Any, pool: Any, layout: PoolLayout) -> None:
    for indices in index_lists(sgl, pool.page_size):
        pointers, sizes = pool.get_page_buffer_meta(indices)
        addresses = layout.addresses(indices)
        n_pages = len(indices) // pool.page_size
        assert addresses.dtype == np.int64 and addresses.shape == (n_pages, layout.k)
        assert addresses.reshape(-1).tolist() == pointers
        assert np.tile(layout.sizes, n_pages).tolist() == sizes
        assert layout.addresses(indices.numpy()).tolist() == addresses.tolist()


def assert_equal_to_flat_page(sgl: Any, pool: Any, layout: PoolLayout) -> None:
    """The bytes at the addresses are the pool's flat page, taken apart at `flat_offsets`."""
    raw = pool.kv_buffer.view(sgl.torch.uint8).reshape(-1)
    raw.copy_(sgl.torch.randint(0, 256, raw.shape, dtype=sgl.torch.uint8))
    assert layout.flat_offsets is not None
    for page in (PAGES - 1, 0, 3):
        indices = sgl.torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
        flat = pool.get_data_page(indices[0], flat=True).contiguous().view(sgl.torch.uint8).numpy().tobytes()
        row = layout.addresses(indices)[0].tolist()
        for address, size, offset in zip(row, layout.sizes, layout.flat_offsets, strict=True):
            assert ctypes.string_at(address, int(size)) == flat[offset : offset + size]
        assert len(flat) == layout.page_bytes


@pytest.mark.parametrize("shape", MHA_SHAPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout_name", MHA_LAYOUTS)
def test_mha(sgl: Any, layout_name: str, page_size: int, shape: tuple[int, int, int]) -> None:
    """Issue 2, "Build", layout: equal to get_page_buffer_meta, and to the bytes of the flat page (I1)."""
    pool = mha_pool(sgl, layout_name, page_size, *shape)
    layout = PoolLayout.of(pool)
    assert layout.kind == "mha-fast"
    assert layout.page_bytes == pool.size_per_token * page_size
    assert_equal_to_meta(sgl, pool, layout)
    assert_equal_to_flat_page(sgl, pool, layout)


@pytest.mark.parametrize("shape", MLA_SHAPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout_name", MLA_LAYOUTS)
def test_mla(sgl: Any, layout_name: str, page_size: int, shape: tuple[int, int, int]) -> None:
    """As above, for MLA."""
    pool = mla_pool(sgl, layout_name, page_size, *shape)
    layout = PoolLayout.of(pool)
    assert layout.kind == "mla-fast"
    assert layout.page_bytes == pool.size_per_token * page_size
    assert_equal_to_meta(sgl, pool, layout)
    assert_equal_to_flat_page(sgl, pool, layout)


@pytest.mark.parametrize("dims", [(192, 128), (64, 80)], ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout_name", ["page_first", "page_first_direct"])
def test_mha_with_another_value_size(
    sgl: Any, layout_name: str, page_size: int, dims: tuple[int, int]
) -> None:
    """Models whose V heads differ from K have two buffers, and SGLang allows them two layouts."""
    pool = mha_pool(sgl, layout_name, page_size, 2, dims[0], 3, v_head_dim=dims[1])
    layout = PoolLayout.of(pool)
    assert layout.kind == "mha-fast" and layout.sizes[0] != layout.sizes[1]
    assert_equal_to_meta(sgl, pool, layout)
    assert (layout.describe()["head_dim"], layout.describe()["v_head_dim"]) == dims


@pytest.mark.parametrize("layout_name", MHA_LAYOUTS)
def test_the_base_class_with_another_value_size_is_refused(sgl: Any, layout_name: str) -> None:
    """I5: the symmetric class ignores v_head_dim in its addresses; a page would lack part of V."""
    wide = mha_pool(sgl, "page_first", 16, 2, 64, 3, v_head_dim=80)
    pool = sgl.mha.MHATokenToKVPoolHost(
        wide._buffer_infos[0],
        1.0,
        0,
        16,
        layout_name,
        pin_memory=False,
        device_capacity_tokens=32,
        start_layer=0,
        end_layer=3,
        host_token_capacity=PAGES * 16,
    )
    with pytest.raises(ValueError, match="incomplete"):
        PoolLayout.of(pool)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("make", [mha_pool, mla_pool])
def test_dtypes(sgl: Any, make: Any, dtype: str) -> None:
    """Sizes follow the stored dtype. fp8 of either kind is stored as uint8: see `describe`."""
    pool = make(sgl, "page_first", 16, 2, 64, 3, dtype=getattr(sgl.torch, dtype))
    layout = PoolLayout.of(pool)
    assert layout.kind.endswith("-fast")
    assert_equal_to_meta(sgl, pool, layout)
    stored = "uint8" if dtype.startswith("float8") else dtype
    assert layout.describe()["dtype"] == f"torch.{stored}"


@pytest.mark.parametrize("layout_name", MLA_LAYOUTS)
def test_mla_with_a_wider_row(sgl: Any, layout_name: str) -> None:
    """I5: packed fp8 latents have rows of another width than latent + rope, and describe shows it."""
    pool = mla_pool(sgl, layout_name, 16, 512, 64, 3, override_kv_cache_dim=656, dtype=sgl.torch.uint8)
    layout = PoolLayout.of(pool)
    assert layout.kind == "mla-fast" and layout.page_bytes == 656 * 3 * 16
    assert_equal_to_meta(sgl, pool, layout)
    assert layout.describe()["row_dim"] == 656


@pytest.mark.parametrize("layout_name", MHA_LAYOUTS)
def test_shared_memory_pools(sgl: Any, layout_name: str) -> None:
    """`"allocator": "shm"` changes where the memory comes from and nothing else."""
    info = mha_pool(sgl, layout_name, 16, 2, 64, 3)._buffer_infos[0]
    pool = sgl.mha.MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        16,
        layout_name,
        pin_memory=False,
        allocator_type="shm",
        device_capacity_tokens=32,
        start_layer=0,
        end_layer=3,
        host_token_capacity=PAGES * 16,
    )
    layout = PoolLayout.of(pool)
    assert layout.kind == "mha-fast"
    assert_equal_to_meta(sgl, pool, layout)


def test_slices_of_the_pools_own_allocation(sgl: Any) -> None:
    """What the controller passes: slices of alloc(), after freeing left the free list out of order."""
    pool = mha_pool(sgl, "layer_first", 16, 2, 64, 3)
    layout = PoolLayout.of(pool)
    taken = [pool.alloc(32) for _ in range(3)]
    for i in (2, 0, 1):
        pool.free(taken[i])
    indices = pool.alloc(7 * 16)
    for batch in (indices, indices[16:80], indices[96:]):
        assert layout.addresses(batch).reshape(-1).tolist() == pool.get_page_buffer_meta(batch)[0]


def test_the_memory_outlives_the_pool(sgl: Any) -> None:
    """I1: destroy() while a transfer runs must not unmap the memory under it."""
    pool = mha_pool(sgl, "page_first", 16, 2, 64, 3)
    pool.kv_buffer.fill_(1.0)
    layout = PoolLayout.of(pool)
    indices = sgl.torch.arange(16)
    want = pool.get_data_page(0).view(sgl.torch.uint8).numpy().tobytes()
    pool.destroy()
    assert pool.kv_buffer is None
    found = b"".join(
        ctypes.string_at(a, int(s))
        for a, s in zip(layout.addresses(indices)[0].tolist(), layout.sizes, strict=True)
    )
    assert found == want


def test_alignment_of_a_real_pool(sgl: Any) -> None:
    """The pool is page-aligned memory: what is left is the size of a page's parts."""
    assert PoolLayout.of(mha_pool(sgl, "page_first", 64, 2, 64, 4)).alignment() == 4096
    assert PoolLayout.of(mha_pool(sgl, "page_first_direct", 16, 3, 33, 5)).alignment() == 32


def test_describe_of_real_pools(sgl: Any) -> None:
    """I5: layer range, heads and sizes come from the pool, as plain values."""
    mha = PoolLayout.of(mha_pool(sgl, "page_head", 16, 2, 64, 4, start_layer=4)).describe()
    assert mha == {
        "pool_class": "MHATokenToKVPoolHost",
        "attention": "mha",
        "layout": "page_head",
        "page_size": 16,
        "dtype": "torch.bfloat16",
        "num_layers": 4,
        "target_layers": 4,
        "layer_start": 4,
        "layer_end": 8,
        "head_num": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "kv_lora_rank": None,
        "rope_dim": None,
        "row_dim": None,
        "format_tag": None,
        "page_bytes": 2 * 16 * 4 * 2 * 64 * 2,
        "components": [[16 * 4 * 2 * 64 * 2, 2]],
        "object_layout": "buffers",
    }
    mla = PoolLayout.of(mla_pool(sgl, "layer_first", 16, 512, 64, 3)).describe()
    assert (mla["attention"], mla["kv_lora_rank"], mla["rope_dim"], mla["row_dim"]) == ("mla", 512, 64, 576)
    assert (mla["head_num"], mla["head_dim"], mla["v_head_dim"]) == (None, None, None)
    assert mla["components"] == [[16 * 576 * 2, 3]]


def test_context_parallel_pools_are_refused(sgl: Any) -> None:
    """I5: with decode context parallelism an index is not a row of this rank."""
    pool = mla_pool(sgl, "page_first", 16, 512, 64, 3, dcp_size=2)
    with pytest.raises(ValueError, match="context parallelism"):
        PoolLayout.of(pool)


def test_allocator_only_pools_are_refused(sgl: Any) -> None:
    """I5: a rank without host bytes of its own cannot store anything, and says so at attach."""
    geometry = sgl.mla.MLAHostAllocation(
        dtype=sgl.torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dim=576, size_per_token=1152
    )
    pool = sgl.mla.MLATokenToKVPoolHost(
        geometry,
        1.0,
        0,
        16,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=32,
        start_layer=0,
        end_layer=1,
        target_layer_num=1,
    )
    with pytest.raises(ValueError, match="cannot be stored"):
        PoolLayout.of(pool)


def test_page_unified_is_refused(sgl: Any) -> None:
    """I5: SGLang 0.5.23 allocates this layout but has neither addresses nor flat pages for it."""
    pool = mha_pool(sgl, "page_unified", 16, 2, 64, 3)
    with pytest.raises(ValueError, match="page_unified"):
        PoolLayout.of(pool)


def mamba_pool(sgl: Any) -> Any:
    """State of a hybrid model: slots, not tokens, in parts of different size and dtype."""
    info = sgl.info.MambaStateBufferInfo(
        temporal=sgl.torch.zeros(3, 5, 2, 8), conv=(sgl.torch.zeros(3, 5, 6, 3, dtype=sgl.torch.bfloat16),)
    )
    return sgl.mamba.MambaPoolHost(info, 1.4, 0, device_capacity=5, layout="page_first", pin_memory=False)


def v4_pool(sgl: Any, layout: str) -> Any:
    """Compressed KV of DeepSeek V4: packed byte rows, in layer_first one buffer a layer."""
    buffers = [sgl.torch.zeros(4, 100, dtype=sgl.torch.uint8) for _ in range(3)]
    return sgl.v4.DeepSeekV4PagedHostPool("c4", buffers, 100, PAGES, 16, layout=layout, pin_memory=False)


@pytest.mark.parametrize("name", ["mamba", "v4 layer_first", "v4 page_first", "v4 page_first_direct"])
def test_pools_that_are_not_known_are_asked(sgl: Any, name: str) -> None:
    """Fallback: the answer of get_page_buffer_meta, as a matrix."""
    pool = mamba_pool(sgl) if name == "mamba" else v4_pool(sgl, name.split()[1])
    layout = PoolLayout.of(pool)
    assert layout.kind == "meta" and layout.describe()["attention"] == "other"
    assert_equal_to_meta(sgl, pool, layout)


@pytest.mark.parametrize("layout_name", MLA_LAYOUTS)
def test_index_key_sidecar(sgl: Any, layout_name: str) -> None:
    """A sidecar that has addresses in two layouts and only flat pages in the third takes both fallbacks."""
    anchor = mha_pool(sgl, layout_name, 16, 2, 64, 3)
    device = SimpleNamespace(
        store_dtype=sgl.torch.bfloat16,
        start_layer=0,
        end_layer=3,
        head_num=1,
        head_dim=64,
        layer_num=3,
        device="cpu",
        k_buffer=[sgl.torch.zeros(32, 1, 64, dtype=sgl.torch.bfloat16) for _ in range(3)],
    )
    pool = sgl.mha.MHATokenToKOnlyPoolHost(device, anchor, layout_name, pin_memory=False)
    layout = PoolLayout.of(pool)
    assert layout.page_bytes == 3 * 16 * 64 * 2
    if layout_name == "layer_first":
        assert layout.flat
    else:
        assert layout.kind == "meta"
        assert_equal_to_meta(sgl, pool, layout)


def test_logical_pools_are_empty(sgl: Any) -> None:
    """The anchor of DeepSeek V4 holds no bytes: no components, whatever the index."""
    pool = sgl.v4.LogicalHostPool(64, 16)
    layout = PoolLayout.of(pool)
    assert (layout.kind, layout.page_bytes, layout.k) == ("empty", 0, 0)
    assert layout.addresses(pool.alloc(32)).shape == (2, 0)


def test_pools_that_compact_are_flat(sgl: Any) -> None:
    """I1: SGLang moves the pages of a unified pool, so an address taken today is wrong tomorrow."""
    envelope = sgl.torch.zeros(3, 1024, dtype=sgl.torch.uint8)
    device = SimpleNamespace(
        page_size=16,
        size=32,
        host_capacity_tokens=None,
        start_layer=0,
        end_layer=3,
        device="cpu",
        grow_direction="up",
        get_page_envelope_buffer=lambda: envelope,
        get_contiguous_buf_infos=lambda: ([envelope.data_ptr()], [envelope.nbytes], [1024]),
    )
    pool = sgl.unified.UnifiedPageEnvelopeHostPool(device, 3.0, 0, 16, "page_first", pin_memory=False)
    layout = PoolLayout.of(pool)
    assert layout.flat and layout.page_bytes == 1024
    indices = pool.alloc(32)
    page = sgl.torch.arange(1024, dtype=sgl.torch.int64).to(sgl.torch.uint8)
    start = int(layout.page_starts(indices)[1])
    pool.set_from_flat_data_page(start, page)
    assert sgl.torch.equal(pool.get_data_page(start, flat=True), page)
    assert layout.describe()["format_tag"] == "unified-token-major"


def test_nothing_is_logged_as_slow_for_the_common_pools(sgl: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A warning here would be noise at every start of a server."""
    with caplog.at_level(logging.WARNING, "ucm_sglang"):
        PoolLayout.of(mha_pool(sgl, "layer_first", 16, 2, 64, 3))
        PoolLayout.of(mla_pool(sgl, "page_first", 16, 512, 64, 3))
    assert not [r for r in caplog.records if r.name.startswith("ucm_sglang")]


@pytest.mark.parametrize("make", [mha_pool, mla_pool])
def test_time_of_a_batch(sgl: Any, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """I6: 128 pages of 61 layers in layer_first cost a few array operations, not Python for each part.

    Measured a sixtieth of get_page_buffer_meta on a 2-core machine; a fifth leaves room for a busy one.
    """
    pool = make(sgl, "layer_first", 64, 1, 16, 61, pages=256)
    layout = PoolLayout.of(pool)
    pages = np.random.default_rng(0).permutation(256)[:128]
    indices = sgl.torch.from_numpy((pages[:, None] * 64 + np.arange(64)).reshape(-1))
    ours = statistics.median(timeit.repeat(lambda: layout.addresses(indices), number=1, repeat=50))
    pools = statistics.median(timeit.repeat(lambda: pool.get_page_buffer_meta(indices), number=1, repeat=20))
    with capsys.disabled():
        print(f"\n{layout.kind}, {layout.k} parts a page, 128 pages: addresses {ours * 1e6:.0f} us, ", end="")
        print(f"get_page_buffer_meta {pools * 1e6:.0f} us")
    assert ours < pools / 5
