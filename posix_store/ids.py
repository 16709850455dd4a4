"""Block ids as callers give them, to the arrays the store works on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posix_store.segment import ID_BYTES, MAX_SHARDS

Ids = bytes | Sequence[bytes] | np.ndarray
"""Block ids: packed bytes (n * 16), a sequence of 16-byte strings, or an array of n * 16 bytes."""


def as_ids(ids: Ids) -> np.ndarray:
    """Ids as uint64 (n, 2).

    Raises:
        ValueError: an id is not 16 bytes long.
    """
    if isinstance(ids, np.ndarray):
        data = np.ascontiguousarray(ids).view(np.uint8).reshape(-1)
    elif isinstance(ids, bytes | bytearray | memoryview):
        data = np.frombuffer(ids, np.uint8)
    else:
        items = list(ids)
        if any(len(item) != ID_BYTES for item in items):
            raise ValueError(f"a block id is {ID_BYTES} bytes")
        data = np.frombuffer(b"".join(items), np.uint8)
    if data.size % ID_BYTES:
        raise ValueError(f"{data.size} bytes of ids are not a multiple of {ID_BYTES}")
    halves = data.view(np.uint64).reshape(-1, 2)
    return halves if halves.flags.aligned else halves.copy()


def as_shards(shards: int | Sequence[int] | np.ndarray | None, count: int) -> np.ndarray:
    """Shard indices as uint16 (count,); None means shard 0.

    Raises:
        ValueError: an index is negative or too large, or there are not `count` of them.
    """
    if shards is None:
        return np.zeros(count, np.uint16)
    array = np.asarray(shards, np.int64)
    if array.size and (array.min() < 0 or array.max() >= MAX_SHARDS):
        raise ValueError(f"shard indices must be in 0..{MAX_SHARDS - 1}")
    if array.ndim and array.shape != (count,):
        raise ValueError(f"{array.shape} shard indices for {count} blocks")
    return np.ascontiguousarray(np.broadcast_to(array, (count,)).astype(np.uint16))
