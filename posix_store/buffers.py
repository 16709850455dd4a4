"""Addresses of buffer objects, for `load` and `dump`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def addresses_of(buffers: Sequence[Any], writable: bool) -> tuple[np.ndarray, np.ndarray]:
    """Address matrix int64 (n, k) and component sizes int64 (k,) of n buffers or n sequences of k.

    A buffer is a contiguous object of the buffer protocol (bytes, bytearray, numpy array), or has
    `data_ptr()` and `nbytes` (a torch tensor on the CPU, contiguous).

    Raises:
        ValueError: sizes differ from block to block, or a buffer is not contiguous or not writable.
    """
    rows = [list(item) if isinstance(item, list | tuple) else [item] for item in buffers]
    pairs = [[_address(part, writable) for part in row] for row in rows]
    if len({tuple(size for _, size in row) for row in pairs}) > 1:
        raise ValueError("all blocks of one call must have components of the same sizes")
    if not pairs:
        return np.empty((0, 1), np.int64), np.ones(1, np.int64)
    table = np.array(pairs, np.int64)
    return np.ascontiguousarray(table[:, :, 0]), table[0, :, 1].copy()


def _address(buffer: Any, writable: bool) -> tuple[int, int]:
    if hasattr(buffer, "data_ptr"):
        if not buffer.is_contiguous():
            raise ValueError("a tensor is not contiguous")
        return int(buffer.data_ptr()), int(buffer.nbytes)
    view = memoryview(buffer)
    if not view.c_contiguous or (writable and view.readonly):
        raise ValueError("a buffer is not contiguous, or is not writable")
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return int(array.ctypes.data), view.nbytes


def scratch(length: int) -> np.ndarray:
    """Page-aligned memory, uint8 (length,)."""
    whole = np.empty(length + 4096, np.uint8)
    skip = -whole.ctypes.data % 4096
    return whole[skip : skip + length]
