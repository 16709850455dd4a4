"""The store's verbs over a dict: what `PosixStore` must do, with everything hard left out.

It is put through the same contract as the real store, and the state machine compares the two. Written for
reading, not for speed; shares no code with posix_store but the names of the outcomes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from posix_store import Reason

Views = list[list[memoryview]]
"""For each block, its components."""


class MemoryDisk:
    """What the instances of one namespace share: complete blocks, as tuples of shards."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes, ...]] = {}
        self.lock = threading.Lock()


class MemoryTask:
    def __init__(self, status: list[Reason]) -> None:
        self._status = np.array(status, np.uint8)

    def done(self) -> bool:
        return True

    def status(self, timeout: float | None = None) -> np.ndarray:
        return self._status

    def results(self, timeout: float | None = None) -> np.ndarray:
        return self._status == Reason.OK


class MemoryStore:
    """One writer: shards of a block are put together when this instance was given all of them."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self._waiting: dict[tuple[bytes, int], dict[int, bytes]] = {}

    def lookup(self, ids: Any) -> np.ndarray:
        return np.array([i in self.disk.blocks for i in _ids(ids)], bool)

    def lookup_on_prefix(self, ids: Any) -> int:
        found = [*self.lookup(ids).tolist(), False]
        return found.index(False) - 1

    def prefetch(self, ids: Any) -> None:
        _ids(ids)

    def load(self, ids: Any, shards: Any, buffers: Sequence[Any], *, background: bool = True) -> MemoryTask:
        return self._load(_ids(ids), shards, _buffers(buffers, writable=True))

    def load_data(
        self, ids: Any, shards: Any, addresses: Any, sizes: Any, *, background: bool = True
    ) -> MemoryTask:
        return self._load(_ids(ids), shards, _memory(addresses, sizes))

    def dump(
        self,
        ids: Any,
        shards: Any,
        buffers: Sequence[Any],
        *,
        n_shards: int = 1,
        parents: Any = None,
        background: bool = True,
    ) -> MemoryTask:
        return self._dump(_ids(ids), shards, _buffers(buffers, writable=False), n_shards, parents)

    def dump_data(
        self,
        ids: Any,
        shards: Any,
        addresses: Any,
        sizes: Any,
        *,
        n_shards: int = 1,
        parents: Any = None,
        background: bool = True,
    ) -> MemoryTask:
        return self._dump(_ids(ids), shards, _memory(addresses, sizes), n_shards, parents)

    def check(self, task: MemoryTask) -> bool:
        return task.done()

    def wait(self, task: MemoryTask, timeout: float | None = None) -> np.ndarray:
        return task.results(timeout)

    def clear(self) -> int:
        with self.disk.lock:
            count = len(self.disk.blocks)
            self.disk.blocks.clear()
            self._waiting.clear()
            return count

    def forget_shards(self) -> None:
        """Shards of blocks that are not whole may leave a store that is full."""
        self._waiting.clear()

    def close(self) -> None:
        pass

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, ids: list[bytes], shards: Any, memory: Views) -> MemoryTask:
        _agree(len(ids), len(memory), "buffers")
        with self.disk.lock:
            numbers = _shards(shards, len(ids))
            return MemoryTask([self._load_one(*row) for row in zip(ids, numbers, memory, strict=True)])

    def _load_one(self, block: bytes, shard: int, views: list[memoryview]) -> Reason:
        stored = self.disk.blocks.get(block, ())
        if shard >= len(stored):
            return Reason.ABSENT
        data = memoryview(stored[shard])
        if len(data) != sum(view.nbytes for view in views):
            return Reason.LENGTH
        for view in views:
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        return Reason.OK

    def _dump(self, ids: list[bytes], shards: Any, memory: Views, n_shards: int, parents: Any) -> MemoryTask:
        _agree(len(ids), len(memory), "buffers")
        _agree(len(ids), len(ids) if parents is None else len(_ids(parents)), "parents")
        numbers = _shards(shards, len(ids))
        if not 0 < n_shards <= 1 << 16 or any(shard >= n_shards for shard in numbers):
            raise ValueError(f"shards {numbers} of {n_shards}")
        with self.disk.lock:
            for block, shard, views in zip(ids, numbers, memory, strict=True):
                if block not in self.disk.blocks:
                    data = b"".join(views)
                    parts = self._waiting.setdefault((block, n_shards), {})
                    parts[shard] = data
                    if len(parts) == n_shards:
                        del self._waiting[block, n_shards]
                        self.disk.blocks[block] = tuple(parts[i] for i in range(n_shards))
        return MemoryTask([Reason.OK] * len(ids))


def _ids(ids: Any) -> list[bytes]:
    if isinstance(ids, bytes | bytearray | memoryview | np.ndarray):
        packed = ids.tobytes() if isinstance(ids, np.ndarray | memoryview) else bytes(ids)
        ids = [packed[start : start + 16] for start in range(0, len(packed), 16)]
    if any(len(item) != 16 for item in ids):
        raise ValueError("an id is 16 bytes")
    return [bytes(item) for item in ids]


def _shards(shards: Any, count: int) -> list[int]:
    if shards is None or np.ndim(shards) == 0:
        shards = [shards or 0] * count
    numbers = [int(shard) for shard in shards]
    _agree(count, len(numbers), "shards")
    if any(not 0 <= shard < 1 << 16 for shard in numbers):
        raise ValueError(f"shards {numbers}")
    return numbers


def _buffers(buffers: Sequence[Any], writable: bool) -> Views:
    rows = [row if isinstance(row, list | tuple) else [row] for row in buffers]
    views = [[memoryview(part) for part in row] for row in rows]
    if any(not v.c_contiguous or (writable and v.readonly) or not v.nbytes for row in views for v in row):
        raise ValueError("buffers must be contiguous, not empty, and writable for a load")
    if len({tuple(v.nbytes for v in row) for row in views}) > 1:
        raise ValueError("components differ in size from block to block")
    return [[v.cast("B") for v in row] for row in views]


def _memory(addresses: Any, sizes: Any) -> Views:
    matrix = np.asarray(addresses, np.int64)
    matrix = matrix.reshape(-1, 1) if matrix.ndim == 1 else matrix
    if matrix.ndim != 2:
        raise ValueError("addresses must be (blocks, components)")
    widths = np.asarray(sizes, np.int64).reshape(-1).tolist()
    widths = widths * matrix.shape[1] if len(widths) == 1 else widths
    _agree(matrix.shape[1], len(widths), "sizes")
    if not widths or min(widths) <= 0:
        raise ValueError(f"sizes {widths}")
    types = [ctypes.c_char * width for width in widths]
    return [
        [memoryview(kind.from_address(at)).cast("B") for kind, at in zip(types, row, strict=True)]
        for row in matrix.tolist()
    ]


def _agree(expected: int, found: int, what: str) -> None:
    if expected != found:
        raise ValueError(f"{found} {what}, {expected} expected")
