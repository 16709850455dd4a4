"""Page addresses without an engine: small pools of numpy memory that have the methods a SGLang pool has.

Each stand-in lays out true bytes and answers `get_page_buffer_meta` page by page, so an address is checked
twice: against that answer and against the bytes found there.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_pools import (
    Buffer,
    FlatPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PadPool,
    assert_equal_to_meta,
    tokens,
)

from ucm_sglang.layout import PoolLayout

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]

geometry = st.tuples(
    st.integers(1, 9),  # pages
    st.sampled_from([1, 2, 3, 16]),  # page size
    st.integers(1, 5),  # layers
    st.integers(1, 3),  # heads
    st.integers(1, 7),  # head size
)


@given(geometry=geometry, layout=st.sampled_from(LAYOUTS), data=st.data())
def test_mha_addresses_are_the_bytes_of_the_page(geometry: Any, layout: str, data: Any) -> None:
    """I1: any geometry, any batch of pages in any order, also twice the same page: address by address."""
    pool = MHATokenToKVPoolHost(layout, *geometry)
    found = PoolLayout.of(pool)
    assert found.kind == "mha-fast" and not found.flat
    batch = data.draw(st.lists(st.integers(0, geometry[0] - 1), max_size=12))
    assert_equal_to_meta(found, pool, tokens(batch, pool.page_size))


@given(geometry=geometry, layout=st.sampled_from(LAYOUTS[:3]), data=st.data())
def test_mla_addresses_are_the_bytes_of_the_page(geometry: Any, layout: str, data: Any) -> None:
    """I1, as above, for the one latent row of MLA."""
    pages, page_size, layers, _, dim = geometry
    pool = MLATokenToKVPoolHost(layout, pages, page_size, layers, dim + 1)
    found = PoolLayout.of(pool)
    assert found.kind == "mla-fast"
    batch = data.draw(st.lists(st.integers(0, pages - 1), max_size=12))
    assert_equal_to_meta(found, pool, tokens(batch, page_size))


def test_a_known_pool_is_not_asked_again() -> None:
    """I6: get_page_buffer_meta runs once, at attach, and never in a batch."""
    pool = MHATokenToKVPoolHost("layer_first", 8, 16, 4, 2, 8)
    layout = PoolLayout.of(pool)
    asked = pool.meta_calls
    for _ in range(5):
        layout.addresses(tokens([3, 1, 7], 16))
    assert pool.meta_calls == asked == 1


def test_an_unknown_pool_is_asked_once_a_batch() -> None:
    """I5, I6: the pool's own answer, in its own order, in one call however many pages there are."""
    pool = PadPool()
    layout = PoolLayout.of(pool)
    assert (layout.kind, layout.k, layout.page_bytes, layout.contiguous_bytes) == ("meta", 2, 64, 24)
    assert layout.flat_offsets is None and layout.alignment() == 1
    before = pool.meta_calls
    indices = tokens([5, 0, 3], 4)
    addresses = layout.addresses(indices)
    assert pool.meta_calls == before + 1
    assert addresses.reshape(-1).tolist() == pool.get_page_buffer_meta(indices)[0]
    assert layout.sizes.tolist() == [40, 24]
    assert layout.addresses(tokens([], 4)).shape == (0, 2)


def test_a_subclass_with_its_own_order_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """I5: a pool of a known family that answers otherwise is believed, and the log says that it is slower."""

    class Swapped(MHATokenToKVPoolHost):
        def page_parts(self, start: int) -> list[np.ndarray]:
            return super().page_parts(start)[::-1]

    pool = Swapped("page_first", 8, 4, 3, 2, 8)
    with caplog.at_level(logging.WARNING):
        layout = PoolLayout.of(pool)
    assert layout.kind == "meta"
    assert "Swapped" in caplog.text and "differ" in caplog.text
    assert_equal_to_meta(layout, pool, tokens([7, 2, 5], 4))


def test_a_subclass_that_differs_only_on_the_last_page_is_asked() -> None:
    """I5: agreeing on page 0 is not enough to be computed."""

    class Tail(MHATokenToKVPoolHost):
        def page_parts(self, start: int) -> list[np.ndarray]:
            return super().page_parts(start if start < self.size - self.page_size else 0)

    pool = Tail("page_first_direct", 8, 4, 3, 2, 8)
    layout = PoolLayout.of(pool)
    assert layout.kind == "meta"
    assert_equal_to_meta(layout, pool, tokens([7, 2, 0], 4))


def test_a_subclass_that_answers_the_same_is_computed() -> None:
    """Overriding the method is no reason to be slow where the answers are equal."""

    class Same(MHATokenToKVPoolHost):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            return super().get_page_buffer_meta(indices)

    assert PoolLayout.of(Same("page_head", 8, 4, 3, 2, 8)).kind == "mha-fast"


def test_a_family_member_without_the_needed_attributes_is_asked() -> None:
    """I5: a class name alone proves nothing."""
    pool = MHATokenToKVPoolHost("page_first", 8, 4, 3, 2, 8)
    del pool.v_head_dim
    layout = PoolLayout.of(pool)
    assert layout.kind == "meta"
    assert_equal_to_meta(layout, pool, tokens([1, 6], 4))


def test_scales_outside_the_pages_are_refused() -> None:
    """I5: a pool that counts more bytes a token than its pages hold would come back incomplete."""
    pool = MHATokenToKVPoolHost("page_first", 8, 4, 3, 2, 8)
    pool.size_per_token += 6
    with pytest.raises(ValueError, match="incomplete"):
        PoolLayout.of(pool)


def test_a_pool_without_addresses_is_flat(caplog: pytest.LogCaptureFixture) -> None:
    """The caller must stage: it learns the size of a page and never gets an address."""
    with caplog.at_level(logging.WARNING):
        layout = PoolLayout.of(FlatPool())
    assert layout.flat and layout.kind == "flat"
    assert (layout.k, layout.page_bytes, layout.contiguous_bytes) == (1, 192, 192)
    assert layout.flat_offsets is not None and layout.flat_offsets.tolist() == [0]
    assert layout.page_starts(tokens([4, 2], 4)).tolist() == [16, 8]
    with pytest.raises(ValueError, match="flat pages only"):
        layout.addresses(tokens([4, 2], 4))
    assert layout.describe()["object_layout"] == "flat"
    assert "copied one by one" in caplog.text


def test_a_pool_that_refuses_addresses_in_this_layout_is_flat() -> None:
    """Sidecar pools raise for layer_first; that is an answer, not a failure (I3)."""

    class Sidecar(FlatPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError("Unsupported layout: layer_first")

    assert PoolLayout.of(Sidecar()).flat


def test_a_pool_whose_pages_move_is_flat() -> None:
    """I1: an address of a compacting pool is stale once its lease ends, so it is never taken."""

    class Moving(FlatPool):
        shared_allocation_domain = object()

        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise AssertionError("must not be asked for addresses")

        def get_data_page(self, index: int, flat: bool = True) -> Buffer:
            raise AssertionError("page 0 is not allocated")

    assert PoolLayout.of(Moving()).flat


def test_a_pool_without_any_way_is_refused_with_both_reasons() -> None:
    """I3, I5: what fits neither path fails at attach, and says what to change."""

    class Scaled(FlatPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise NotImplementedError("scales live elsewhere")

        def get_dummy_flat_data_page(self) -> Buffer:
            raise NotImplementedError("no flat pages yet")

    with pytest.raises(ValueError, match=r"Scaled.*scales live elsewhere.*no flat pages yet.*layout"):
        PoolLayout.of(Scaled())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logical_size": 96}, "span 96 tokens"),
        ({"page_size": 5}, "whole pages"),
        ({"page_size": None}, "not usable"),
        ({"size": -4}, "not usable"),
        ({"device": "cuda:0"}, "not in host memory"),
    ],
)
def test_an_unusable_index_space_is_refused(change: dict[str, Any], says: str) -> None:
    """I5: context-parallel and interleaved pools, device pools and nonsense are refused at attach."""
    pool = MHATokenToKVPoolHost("page_first", 8, 4, 3, 2, 8)
    vars(pool).update(change)
    with pytest.raises(ValueError, match=says):
        PoolLayout.of(pool)


def test_an_index_space_without_pool_is_refused() -> None:
    """I5: a group of pools, or any other object, is not taken for a pool."""
    with pytest.raises(ValueError, match="SimpleNamespace"):
        PoolLayout.of(SimpleNamespace(anchor_entry=None))


BAD_INDICES = {
    "not whole pages": (np.arange(6), "whole pages"),
    "negative": (np.arange(-4, 0), "outside"),
    "one page past the end": (np.arange(32, 36), "outside"),
    "far outside": (np.arange(2**62, 2**62 + 4), "outside"),
    "not aligned": (np.arange(2, 6), "does not begin a page"),
    "not consecutive": (np.array([0, 1, 3, 2]), "consecutive"),
    "one page repeated in another": (np.array([0, 1, 2, 3, 4, 5, 2, 7]), "consecutive"),
    "float": (np.arange(4.0), "integers"),
    "bool": (np.zeros(4, bool), "integers"),
    "two axes": (np.arange(4).reshape(1, 4), "1-D"),
    "a list": ([0, 1, 2, 3], "tensor"),
}


@pytest.mark.parametrize("case", BAD_INDICES)
@pytest.mark.parametrize("make", [PadPool, FlatPool, None], ids=["meta", "flat", "fast"])
def test_bad_indices_never_become_addresses(case: str, make: Any) -> None:
    """I5: an index that is not a whole, aligned page of the pool is an error, never a guess."""
    pool = MHATokenToKVPoolHost("layer_first", 8, 4, 3, 2, 8) if make is None else make()
    layout = PoolLayout.of(pool)
    indices, says = BAD_INDICES[case]
    with pytest.raises(ValueError, match=says):
        layout.page_starts(indices)
    with pytest.raises(ValueError, match=says):
        layout.addresses(indices)


def test_indices_of_a_narrower_type_are_widened() -> None:
    """int32 indices give the same int64 addresses: nothing overflows at 2 GiB."""
    pool = MHATokenToKVPoolHost("page_first", 8, 4, 3, 2, 8)
    layout = PoolLayout.of(pool)
    wide = tokens([6, 1], 4)
    assert (layout.addresses(wide.astype(np.int32)) == layout.addresses(wide)).all()


def test_page_starts_do_not_alias_the_callers_indices() -> None:
    """I1: the engine may reuse its index tensor while our I/O runs."""
    layout = PoolLayout.of(FlatPool())
    indices = tokens([4, 2], 4)
    starts = layout.page_starts(indices)
    indices[:] = 0
    assert starts.tolist() == [16, 8]


@pytest.mark.parametrize("change", ["fewer", "other sizes", "ragged"])
def test_a_pool_that_changes_its_answer_is_an_error(change: str) -> None:
    """I1: sizes are part of the identity of a page; a pool that changes them later is not served."""
    pool: Any = PadPool()
    layout = PoolLayout.of(pool)
    if change == "ragged":
        pool.get_page_buffer_meta = lambda indices: ([1, 2, 3], [40, 24, 40])
    else:
        pool.sizes = [40] if change == "fewer" else [40, 25]
    with pytest.raises(ValueError, match="get_page_buffer_meta"):
        layout.addresses(tokens([0, 1], 4))


def test_a_pool_without_bytes() -> None:
    """The logical anchor of some models has slots and no memory: no components, no error."""

    class Logical(FlatPool):
        def get_page_buffer_meta(self, indices: Any) -> None:
            return None

    layout = PoolLayout.of(Logical())
    assert (layout.kind, layout.k, layout.page_bytes, layout.contiguous_bytes) == ("empty", 0, 0, 0)
    assert layout.addresses(tokens([3, 1], 4)).shape == (2, 0)
    assert layout.describe()["components"] == []


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_a_stage_without_layers(layout_name: str) -> None:
    """A pipeline stage can own no attention layer: pages of zero bytes, not a crash."""
    pool = MHATokenToKVPoolHost(layout_name, 8, 4, 0, 2, 8)
    layout = PoolLayout.of(pool)
    assert layout.page_bytes == 0
    assert_equal_to_meta(layout, pool, tokens([3, 1], 4))


def test_the_memory_outlives_the_pool() -> None:
    """I1: SGLang may drop its pool while our threads still read or write its pages."""
    pool: Any = MHATokenToKVPoolHost("page_first", 8, 4, 3, 2, 8)
    alive = weakref.ref(pool.kv_buffer)
    layout = PoolLayout.of(pool)
    pool.kv_buffer = pool.k_buffer = pool.v_buffer = None
    gc.collect()
    assert alive() is not None
    del layout, pool
    gc.collect()
    assert alive() is None


def test_flat_offsets_take_a_flat_page_apart() -> None:
    """I1: a page moved through get_data_page can be stored in component order, byte for byte."""
    pool = MHATokenToKVPoolHost("layer_first", 5, 4, 3, 2, 8)
    layout = PoolLayout.of(pool)
    flat = pool.array[:, :, 8:12].tobytes()  # what get_data_page(8, flat=True) gives in this layout
    assert layout.flat_offsets is not None
    parts = [
        flat[o : o + n] for o, n in zip(layout.flat_offsets.tolist(), layout.sizes.tolist(), strict=True)
    ]
    assert parts == [part.tobytes() for part in pool.page_parts(8)]
    assert len(set(layout.flat_offsets.tolist())) == layout.k and sum(map(len, parts)) == len(flat)


@pytest.mark.parametrize(
    ("base", "page_bytes", "expected"), [(0, 4096, 4096), (0, 8192, 4096), (512, 4096, 512), (0, 192, 64)]
)
def test_alignment_is_what_every_address_and_size_have(base: int, page_bytes: int, expected: int) -> None:
    """Used to decide on direct I/O: base, page stride and size all count, and 4096 is the ceiling."""
    pool = MLATokenToKVPoolHost("page_first", 4, 1, 1, page_bytes // 2)
    memory = np.zeros(4 * page_bytes + 8192, np.uint8)
    offset = -memory.ctypes.data % 4096 + base
    pool.array = memory[offset : offset + 4 * page_bytes].view(np.uint16).reshape(4, 1, 1, page_bytes // 2)
    pool.kv_buffer = Buffer(pool.array)
    layout = PoolLayout.of(pool)
    assert layout.alignment() == expected
    assert (layout.addresses(np.arange(4)) % expected == 0).all()


def test_describe_tells_pools_apart() -> None:
    """I5: each of these differences changes the bytes of a page, so each must show."""
    base: dict[str, Any] = {
        "layout": "page_first",
        "pages": 8,
        "page_size": 4,
        "layers": 3,
        "heads": 2,
        "dim": 8,
    }
    seen = [PoolLayout.of(MHATokenToKVPoolHost(**base)).describe()]
    changes = {"layout": "page_head", "page_size": 8, "layers": 4, "heads": 1, "dim": 4}
    for name, value in changes.items():
        seen.append(PoolLayout.of(MHATokenToKVPoolHost(**(base | {name: value}))).describe())
    seen.append(PoolLayout.of(MLATokenToKVPoolHost("page_first", 8, 4, 3, 32)).describe())
    other: Any = MHATokenToKVPoolHost(**base)
    other.dtype = np.dtype(np.int16)
    seen.append(PoolLayout.of(other).describe())
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_describe_does_not_depend_on_the_size_of_the_pool() -> None:
    """I5: a larger host pool after a restart must find the same pages."""
    small, large = (MHATokenToKVPoolHost("layer_first", pages, 4, 3, 2, 8) for pages in (8, 50))
    assert PoolLayout.of(small).describe() == PoolLayout.of(large).describe()


def test_components_are_run_length_coded() -> None:
    """Two pools with equal page_bytes but other parts must not share a namespace (I5)."""
    pool: Any = PadPool()
    sizes = [16, 16, 8, 16, 8]
    pool.get_page_buffer_meta = lambda indices: ([0] * 5 * (len(indices) // 4), sizes * (len(indices) // 4))
    assert PoolLayout.of(pool).describe()["components"] == [[16, 2], [8, 1], [16, 1], [8, 1]]


def test_importing_the_module_imports_no_engine() -> None:
    """The command line and the core suite use this module where no engine is installed."""
    code = (
        "import sys, ucm_sglang.layout; print([m for m in ('torch', 'sglang', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
