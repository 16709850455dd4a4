"""Host pools of numpy memory for tests of layouts without an engine, with the methods a SGLang pool has."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ucm_sglang.layout import PoolLayout


class Buffer:
    """The part of a tensor that a layout uses, over numpy memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags["C_CONTIGUOUS"])

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)


class Pool:
    """What the stand-ins share: the addresses of a page are those of its parts, asked page by page."""

    page_size: int
    meta_calls = 0

    def page_parts(self, start: int) -> list[np.ndarray]:
        raise NotImplementedError

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        self.meta_calls += 1
        parts = [part for start in indices.tolist()[:: self.page_size] for part in self.page_parts(start)]
        return [part.ctypes.data for part in parts], [part.nbytes for part in parts]


class MHATokenToKVPoolHost(Pool):
    """Stand-in: K and V in the two halves of one array, axes as the layout says."""

    def __init__(self, layout: str, pages: int, page_size: int, layers: int, heads: int, dim: int) -> None:
        self.layout, self.page_size, self.size = layout, page_size, pages * page_size
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = layers, heads, dim, dim
        self.start_layer, self.end_layer = 0, layers
        self.dtype = np.dtype(np.uint16)
        self.size_per_token = 2 * layers * heads * dim * self.dtype.itemsize
        dims = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page_size, heads, dim),
            "page_head": (2, pages, heads, page_size, layers, dim),
        }[layout]
        self.array = np.arange(np.prod(dims), dtype=np.uint64).astype(np.uint16).reshape(dims)
        self.kv_buffer = Buffer(self.array)
        self.k_buffer, self.v_buffer = Buffer(self.array[0]), Buffer(self.array[1])

    def page_parts(self, start: int) -> list[np.ndarray]:
        """The arrays of one page in storage order: layer by layer K then V, or all of K then all of V."""
        if self.layout == "layer_first":
            return [
                self.array[half, layer, start : start + self.page_size]
                for layer in range(self.layer_num)
                for half in (0, 1)
            ]
        if self.layout == "page_first":
            return [self.array[half, start : start + self.page_size] for half in (0, 1)]
        return [self.array[half, start // self.page_size] for half in (0, 1)]


class MLATokenToKVPoolHost(Pool):
    """Stand-in: one latent row per token and layer."""

    def __init__(self, layout: str, pages: int, page_size: int, layers: int, dim: int) -> None:
        self.layout, self.page_size, self.size = layout, page_size, pages * page_size
        self.layer_num, self.kv_cache_dim = layers, dim
        self.kv_lora_rank, self.qk_rope_head_dim = dim - 1, 1
        self.dtype = np.dtype(np.uint16)
        self.size_per_token = layers * dim * self.dtype.itemsize
        dims = {
            "layer_first": (layers, self.size, 1, dim),
            "page_first": (self.size, layers, 1, dim),
            "page_first_direct": (pages, layers, page_size, 1, dim),
        }[layout]
        self.array = np.arange(np.prod(dims), dtype=np.uint64).astype(np.uint16).reshape(dims)
        self.kv_buffer = Buffer(self.array)

    def page_parts(self, start: int) -> list[np.ndarray]:
        if self.layout == "layer_first":
            return [self.array[layer, start : start + self.page_size] for layer in range(self.layer_num)]
        if self.layout == "page_first":
            return [self.array[start : start + self.page_size]]
        return [self.array[start // self.page_size]]


class PadPool:
    """A pool of a class nobody knows: two parts a page, of different size, with padding between pages."""

    def __init__(self, pages: int = 8, page_size: int = 4) -> None:
        self.page_size, self.size, self.layout = page_size, pages * page_size, "layer_first"
        self.dtype = "torch.uint8"
        self.array = np.zeros((pages, 128), np.uint8)
        self.sizes, self.meta_calls = [40, 24], 0

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        self.meta_calls += 1
        rows = [self.array[start // self.page_size] for start in indices.tolist()[:: self.page_size]]
        return [a for row in rows for a in (row.ctypes.data + 64, row.ctypes.data)], self.sizes * len(rows)


class FlatPool:
    """A pool that can only copy pages out and in."""

    page_size, size, layout, dtype = 4, 32, "layer_first", "torch.float16"

    def get_dummy_flat_data_page(self) -> Buffer:
        return Buffer(np.zeros(96, np.uint16))

    def get_data_page(self, index: int, flat: bool = True) -> Buffer:
        return Buffer(np.zeros(96, np.uint16))


def tokens(pages: list[int], page_size: int) -> np.ndarray:
    """Token indices of these pages, in this order."""
    return (np.array(pages, np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)


def bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size) if size else b""


def assert_equal_to_meta(layout: PoolLayout, pool: Any, indices: np.ndarray) -> None:
    pointers, sizes = pool.get_page_buffer_meta(indices)
    addresses = layout.addresses(indices)
    assert addresses.dtype == np.int64 and addresses.flags["C_CONTIGUOUS"]
    assert addresses.shape == (len(indices) // pool.page_size, layout.k)
    assert addresses.reshape(-1).tolist() == pointers
    assert np.tile(layout.sizes, len(addresses)).tolist() == sizes
    for start, row in zip(indices[:: pool.page_size].tolist(), addresses.tolist(), strict=True):
        found = [bytes_at(a, s) for a, s in zip(row, layout.sizes.tolist(), strict=True)]
        assert found == [part.tobytes() for part in pool.page_parts(start)]
