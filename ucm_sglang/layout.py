"""Which host bytes make up page i of an SGLang host pool.

`PoolLayout.of(pool)` looks at a host pool once, at attach. After that `addresses()` turns the token indices
of a batch into one matrix: a row a page, a column a component (a run of contiguous bytes). The order of the
components is the order of the pool's own `get_page_buffer_meta`, so bytes written by either agree.

Page starts in the MHA and MLA pools of SGLang 0.5.23 are linear in the page number, in each of the layouts
layer_first, page_first, page_first_direct and page_head. So three short vectors (base, stride, size of each
component) describe the whole pool and a batch costs one multiply-add. The vectors are used only after they
gave the same answer as `get_page_buffer_meta` for a handful of pages; a pool that does not agree, or that
is not known, is asked by `get_page_buffer_meta` once a batch. A pool that has none is moved as flat pages
(`get_data_page`), which the caller stages. A pool for which none of this is certain is refused.

This module imports neither torch nor sglang: pools and tensors are used through their methods.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]

MAX_ALIGNMENT = 4096
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_MHA_POOL = "MHATokenToKVPoolHost"
_MLA_POOL = "MLATokenToKVPoolHost"

# describe() key -> attribute of the pool
_DESCRIBED = {
    "layout": "layout",
    "num_layers": "layer_num",
    "target_layers": "target_layer_num",
    "layer_start": "start_layer",
    "layer_end": "end_layer",
    "head_num": "head_num",
    "head_dim": "head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "row_dim": "kv_cache_dim",
    "format_tag": "storage_format_tag",
}


@dataclass(frozen=True)
class _Space:
    """The token slots that a pool's indices may name."""

    page_size: int
    n_tokens: int

    @property
    def n_pages(self) -> int:
        return self.n_tokens // self.page_size

    def page_starts(self, host_indices: Any) -> Int64Array:
        """First token of each page, after proving that the indices are whole, aligned pages of this pool."""
        indices = _as_int64(host_indices)
        n_pages, rest = divmod(len(indices), self.page_size)
        if rest:
            raise ValueError(f"{len(indices)} host indices are not whole pages of {self.page_size} tokens")
        pages = indices.reshape(n_pages, self.page_size)
        starts = pages[:, 0].copy()  # not a view: the caller's tensor may be reused
        bad = (starts < 0) | (starts > self.n_tokens - self.page_size)
        if bad.any():
            raise ValueError(f"host index {starts[bad][0]} is outside the pool's {self.n_tokens} tokens")
        bad = starts % self.page_size != 0
        if bad.any():
            raise ValueError(f"host index {starts[bad][0]} does not begin a page of {self.page_size} tokens")
        if not np.array_equal(pages, starts[:, None] + np.arange(self.page_size)):
            raise ValueError(f"the host indices of a page are not {self.page_size} consecutive tokens")
        return starts

    def sample(self) -> Int64Array:
        """Token indices of a few pages, out of order: first, last, middle and their neighbours."""
        last = self.n_pages - 1
        pages = dict.fromkeys(p for p in (last, 0, last // 2, 1, last - 1) if 0 <= p <= last)
        starts = np.fromiter(pages, dtype=np.int64, count=len(pages)) * self.page_size
        return (starts[:, None] + np.arange(self.page_size)).reshape(-1)


@dataclass(frozen=True)
class _Table:
    """Component j of page p is `sizes[j]` bytes at `bases[j] + p * strides[j]`.

    In the pool's flat page (`get_data_page`) the same bytes begin at `flat_offsets[j]`.
    """

    bases: Int64Array
    strides: Int64Array
    sizes: Int64Array
    flat_offsets: Int64Array

    def addresses(self, pages: Int64Array) -> Int64Array:
        return self.bases + pages[:, None] * self.strides


class PoolLayout:
    """The address map of one host pool. Made by `PoolLayout.of`; immutable; safe to use from any thread.

    It holds a reference to the pool's buffers: memory that is being read or written must not go away when
    SGLang drops its pool. Drop the layout to release it.

    Attributes:
        kind: "mha-fast" and "mla-fast" (computed here), "meta" (the pool is asked once a batch), "flat" (no
            addresses: move whole pages through `get_data_page` and `set_from_flat_data_page`), "empty"
            (the pool only hands out slots and has no bytes).
        flat: True for kind "flat" only.
        sizes: int64 (k,), bytes of each component of a page. One component, the whole page, if flat.
        flat_offsets: int64 (k,), where each component begins in the pool's flat page, so that a page staged
            by `get_data_page` can be stored in component order; None where this is not known (kind "meta").
        page_bytes: bytes of one page; 0 for a pool without bytes.
        page_size: tokens of one page.
        k: components of one page.
        contiguous_bytes: the smallest component in bytes, 0 for a pool without bytes.
    """

    def __init__(
        self, pool: Any, space: _Space, kind: str, sizes: Int64Array, table: _Table | None = None
    ) -> None:
        self._pool = pool
        self._space = space
        self._table = table
        self._buffers = _buffers_of(pool)
        self.kind = kind
        self.flat = kind == "flat"
        self.sizes = sizes
        self.flat_offsets: Int64Array | None = np.zeros(1, np.int64) if self.flat else None
        if table is not None:
            self.flat_offsets = table.flat_offsets
        self.page_size = space.page_size
        self.k = len(sizes)
        self.page_bytes = int(sizes.sum())
        self.contiguous_bytes = int(sizes.min()) if self.k else 0
        for array in (self.sizes, self.flat_offsets):
            if array is not None:
                array.setflags(write=False)

    @classmethod
    def of(cls, pool: Any) -> PoolLayout:
        """The layout of a host pool.

        Raises ValueError, saying what is wrong, for a pool whose bytes cannot be told with certainty.
        """
        space = _space_of(pool)
        if getattr(pool, "shared_allocation_domain", None) is not None:
            # Such a pool compacts: an address is good only while its lease is held, which the flat calls do.
            return cls._flat(pool, space, "its pages move", probe=False)
        sample = space.sample()
        try:
            meta = pool.get_page_buffer_meta(_as_tensor(sample))
        except Exception as e:  # whatever it raises, the pool will not give addresses in this layout
            return cls._flat(pool, space, f"get_page_buffer_meta: {type(e).__name__}: {e}", probe=True)
        if meta is None:
            return cls(pool, space, "empty", np.zeros(0, np.int64))
        addresses, sizes = _meta_matrix(meta, len(sample) // space.page_size, None)
        layout = cls._fast(pool, space, sample, addresses, sizes) or cls(pool, space, "meta", sizes)
        _check_accounted(pool, layout)
        logger.info("host pool %s: %s, %d components a page", _name(pool), layout.kind, layout.k)
        return layout

    @classmethod
    def _fast(
        cls, pool: Any, space: _Space, sample: Int64Array, addresses: Int64Array, sizes: Int64Array
    ) -> PoolLayout | None:
        attention = _attention(pool)
        if attention == "other" or getattr(pool, "layout", None) not in _LAYOUTS:
            return None
        try:
            table = (_mha_table if attention == "mha" else _mla_table)(pool, space)
        except (AttributeError, TypeError, ValueError) as e:
            logger.warning("host pool %s: %s; asking get_page_buffer_meta for each batch", _name(pool), e)
            return None
        fast = cls(pool, space, f"{attention}-fast", table.sizes, table)
        if not (np.array_equal(table.sizes, sizes) and np.array_equal(fast.addresses(sample), addresses)):
            logger.warning(
                "host pool %s: computed addresses differ from its get_page_buffer_meta; asking that for each "
                "batch, which is slower",
                _name(pool),
            )
            return None
        return fast

    @classmethod
    def _flat(cls, pool: Any, space: _Space, reason: str, probe: bool) -> PoolLayout:
        try:
            size = _nbytes(pool.get_dummy_flat_data_page())
            if probe and _nbytes(pool.get_data_page(0, flat=True)) != size:
                raise ValueError("get_data_page and get_dummy_flat_data_page differ in size")
        except Exception as e:
            raise ValueError(
                f"host pool {_name(pool)} cannot be stored: neither addresses ({reason}) nor flat pages "
                f"({type(e).__name__}: {e}). Use another --hicache-mem-layout, or run without storage."
            ) from e
        logger.warning("host pool %s: pages are copied one by one (%s)", _name(pool), reason)
        return cls(pool, space, "flat", np.array([size], np.int64))

    def page_starts(self, host_indices: Any) -> Int64Array:
        """The first token of each page of a batch, int64 (n_pages,).

        `host_indices` is an int64 CPU tensor or numpy array of n_pages * page_size token indices, pages in
        any order. Raises ValueError unless it names whole, aligned pages inside the pool.
        """
        return self._space.page_starts(host_indices)

    def addresses(self, host_indices: Any) -> Int64Array:
        """Where the pages of a batch lie: int64 (n_pages, k), in bytes of this process's memory.

        Takes what `page_starts` takes, with the same errors. Also ValueError for a flat pool, and for kind
        "meta" when the pool answers with another shape than at attach, or whatever the pool raises.
        """
        starts = self.page_starts(host_indices)
        if self._table is not None:
            return self._table.addresses(starts // self.page_size)
        if self.flat:
            raise ValueError(f"host pool {_name(self._pool)} has flat pages only, no addresses")
        if self.k == 0 or len(starts) == 0:
            return np.zeros((len(starts), self.k), np.int64)
        meta = self._pool.get_page_buffer_meta(_as_tensor(host_indices))
        return _meta_matrix(meta, len(starts), self.sizes)[0]

    def alignment(self) -> int:
        """The largest power of two, at most 4096, that divides every address and size this layout can give.

        1 where addresses are not computed here, since nothing is then promised.
        """
        if self._table is None:
            return 1
        numbers = (self._table.bases, self._table.strides, self._table.sizes)
        return math.gcd(MAX_ALIGNMENT, *np.concatenate(numbers).tolist())

    def describe(self) -> dict[str, Any]:
        """Everything about this pool that decides whether two processes' pages are interchangeable.

        Plain ints, strings and lists; None for what the pool does not have. `components` is run-length
        coded: [[bytes, how many in a row], ...]. `object_layout` is "flat" where a page can only be stored in
        the order of `get_data_page`, else "buffers": component by component. `dtype` is what the pool
        stores, which is uint8 for every kind of fp8: the logical dtype has to come from elsewhere.
        """
        described = {key: _plain(getattr(self._pool, name, None)) for key, name in _DESCRIBED.items()}
        return described | {
            "pool_class": type(self._pool).__name__,
            "attention": _attention(self._pool),
            "page_size": self.page_size,
            "dtype": _plain(getattr(self._pool, "dtype", None)),
            "page_bytes": self.page_bytes,
            "components": _run_lengths(self.sizes),
            "object_layout": "flat" if self.flat else "buffers",
        }


def _space_of(pool: Any) -> _Space:
    page_size, n_tokens = getattr(pool, "page_size", None), getattr(pool, "size", None)
    if not isinstance(page_size, int) or not isinstance(n_tokens, int) or page_size < 1 or n_tokens < 0:
        raise ValueError(
            f"host pool {_name(pool)}: page_size={page_size!r}, size={n_tokens!r} are not usable"
        )
    if n_tokens % page_size:
        raise ValueError(f"host pool {_name(pool)}: {n_tokens} tokens are not whole pages of {page_size}")
    # Context-parallel and page-interleaved pools hand out indices of a wider space than this rank's rows.
    logical = getattr(pool, "logical_size", n_tokens)
    if logical != n_tokens:
        raise ValueError(
            f"host pool {_name(pool)}: its indices span {logical} tokens but it holds {n_tokens} (decode "
            "context parallelism or page interleaving); storage is not supported with that"
        )
    device = str(getattr(pool, "device", "cpu"))
    if not device.startswith("cpu"):
        raise ValueError(f"host pool {_name(pool)} is on {device}, not in host memory")
    return _Space(page_size, n_tokens)


def _mha_table(pool: Any, space: _Space) -> _Table:
    """K and V lie in two equal halves of one buffer, or in two buffers if their head sizes differ."""
    row = pool.head_num * pool.dtype.itemsize
    k_bases, k_page = _slabs(pool, space, pool.k_buffer, row * pool.head_dim)
    v_bases, v_page = _slabs(pool, space, pool.v_buffer, row * pool.v_head_dim)
    slabs = len(k_bases)
    sizes = np.tile(np.array([k_page, v_page], np.int64), slabs)
    order = np.arange(slabs, dtype=np.int64)
    return _Table(
        bases=np.stack([k_bases, v_bases], axis=1).reshape(-1),
        strides=sizes,
        sizes=sizes,
        # The flat page has all of K before all of V, while the components alternate layer by layer.
        flat_offsets=np.stack([order * k_page, slabs * k_page + order * v_page], axis=1).reshape(-1),
    )


def _mla_table(pool: Any, space: _Space) -> _Table:
    bases, page = _slabs(pool, space, pool.kv_buffer, pool.kv_cache_dim * pool.dtype.itemsize)
    sizes = np.full(len(bases), page, np.int64)
    return _Table(
        bases, strides=sizes, sizes=sizes, flat_offsets=np.arange(len(bases), dtype=np.int64) * page
    )


def _slabs(pool: Any, space: _Space, buffer: Any, row_bytes: int) -> tuple[Int64Array, int]:
    """Start of each slab of a buffer, and the bytes of a page in one slab.

    A slab holds every page once. layer_first has a slab a layer; the other layouts have a single slab,
    where a page is all its layers in a row. `row_bytes` is one token of one layer. ValueError if the buffer
    is not made of just these slabs.
    """
    by_layer = pool.layout == "layer_first"
    slabs = pool.layer_num if by_layer else 1
    page_bytes = space.page_size * row_bytes * (1 if by_layer else pool.layer_num)
    if not buffer.is_contiguous() or buffer.nbytes != slabs * space.n_pages * page_bytes:
        raise ValueError(
            f"a buffer of {buffer.nbytes} bytes where {slabs} x {space.n_pages} pages of {page_bytes} "
            "contiguous bytes were expected"
        )
    slab_bytes = space.n_pages * page_bytes
    return buffer.data_ptr() + np.arange(slabs, dtype=np.int64) * slab_bytes, page_bytes


def _meta_matrix(meta: Any, n_pages: int, sizes: Int64Array | None) -> tuple[Int64Array, Int64Array]:
    """(addresses (n_pages, k), sizes (k,)) from what `get_page_buffer_meta` returned.

    Raises ValueError unless every page has the same component sizes, and those given in `sizes`, if any.
    """
    pointers, lengths = np.asarray(meta[0], np.int64), np.asarray(meta[1], np.int64)
    k = len(pointers) // n_pages if n_pages else 0
    if len(pointers) != k * n_pages or len(lengths) != len(pointers):
        raise ValueError(
            f"get_page_buffer_meta: {len(pointers)} addresses, {len(lengths)} sizes for {n_pages} pages"
        )
    rows = lengths.reshape(n_pages, k)
    expected = sizes if sizes is not None else (rows[0].copy() if n_pages else np.zeros(0, np.int64))
    if len(expected) != k or (rows != expected).any():
        raise ValueError("get_page_buffer_meta: the sizes of a page's parts differ from those seen at first")
    return pointers.reshape(n_pages, k), expected


def _check_accounted(pool: Any, layout: PoolLayout) -> None:
    """Refuse an MHA or MLA pool that keeps part of a token, such as scales, outside its pages."""
    per_token = getattr(pool, "size_per_token", None)
    if _attention(pool) == "other" or getattr(pool, "layout", None) not in _LAYOUTS or per_token is None:
        return
    if layout.page_bytes < per_token * layout.page_size:
        raise ValueError(
            f"host pool {_name(pool)}: a page has {layout.page_bytes} bytes, but {layout.page_size} tokens "
            f"of {per_token} bytes have {per_token * layout.page_size}; a stored page would be incomplete"
        )


def _buffers_of(pool: Any) -> list[Any]:
    every: list[Any] = [pool.get_hybrid_pool_buffer()] if hasattr(pool, "get_hybrid_pool_buffer") else []
    return [*every, *(getattr(pool, name, None) for name in ("kv_buffer", "k_buffer", "v_buffer"))]


def _as_int64(host_indices: Any) -> Int64Array:
    array = host_indices
    if not isinstance(array, np.ndarray):
        try:
            array = host_indices.numpy()
        except (AttributeError, TypeError, RuntimeError) as e:
            raise ValueError(f"host indices must be a CPU tensor or a numpy array: {e}") from e
    if array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError(f"host indices must be 1-D signed integers, not {array.ndim}-D {array.dtype}")
    indices: Int64Array = array.astype(np.int64, copy=False)
    return indices


def _as_tensor(host_indices: Any) -> Any:
    """What a true pool wants. Where there is one, its owner has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(host_indices, np.ndarray):
        return host_indices
    return torch.from_numpy(host_indices)


def _attention(pool: Any) -> str:
    names = {cls.__name__ for cls in type(pool).__mro__}
    if _MHA_POOL in names:
        return "mha"
    return "mla" if _MLA_POOL in names else "other"


def _name(pool: Any) -> str:
    return f"{type(pool).__name__}({getattr(pool, 'layout', None)})"


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _plain(value: Any) -> int | str | None:
    if value is None or isinstance(value, (int, str)):
        return value
    return str(value)


def _run_lengths(sizes: Int64Array) -> list[list[int]]:
    if len(sizes) == 0:
        return []
    first = np.flatnonzero(np.diff(sizes, prepend=sizes[0] - 1))
    counts = np.diff(first, append=len(sizes))
    return np.stack([sizes[first], counts], axis=1).tolist()
