"""The map from (block id, shard) to a location, in numpy columns and an open-addressing table.

A location costs 40 bytes of columns and 8 to 16 of table, whatever the number of blocks, and a batch
is one vectorised pass: a dict would need Python objects and a Python step for each key.
Thread-safe: one lock, held for the pass.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

_EMPTY, _TOMBSTONE = -1, -2
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True)
class Locations:
    """Where n entries are. Entries with `segment` -1 are absent; their other fields mean nothing."""

    segment: np.ndarray
    """int32 (n,): number of the segment in the catalog, -1 when absent."""
    offset: np.ndarray
    """int64 (n,): bytes from the start of the segment file."""
    length: np.ndarray
    """int64 (n,): bytes of the payload."""
    crc: np.ndarray
    """uint32 (n,): CRC-32C of the payload."""
    last_shard: np.ndarray
    """uint16 (n,): index of the last shard of the block, 0 for a block that is not sharded."""

    @property
    def present(self) -> np.ndarray:
        return self.segment >= 0

    def take(self, which: np.ndarray) -> Locations:
        return Locations(
            self.segment[which],
            self.offset[which],
            self.length[which],
            self.crc[which],
            self.last_shard[which],
        )


@dataclass(frozen=True)
class Entries:
    """Keys and locations to record: `ids` uint64 (n, 2) and `shard` uint16 (n,)."""

    ids: np.ndarray
    shard: np.ndarray
    at: Locations

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: np.ndarray) -> Entries:
        return Entries(self.ids[which], self.shard[which], self.at.take(which))


class Index:
    """id and shard -> location. The last `put` of a key wins."""

    _COLUMNS = ("_ids", "_offset", "_length", "_crc", "_segment", "_shard", "_last_shard")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        rows = 1024
        self._ids = np.empty((rows, 2), np.uint64)
        self._offset = np.empty(rows, np.int64)
        self._length = np.empty(rows, np.uint32)
        self._crc = np.empty(rows, np.uint32)
        self._segment = np.full(rows, -1, np.int32)
        self._shard = np.empty(rows, np.uint16)
        self._last_shard = np.empty(rows, np.uint16)
        self._used = 0
        self._free: list[int] = []
        self._slots = np.full(4096, _EMPTY, np.int32)
        self._filled = 0
        self._blocks = 0
        self._bytes = 0

    def __len__(self) -> int:
        """Number of complete blocks."""
        return self._blocks

    @property
    def bytes(self) -> int:
        """Sum of payload bytes of all entries."""
        return self._bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the columns and the table take."""
        return int(self._slots.nbytes + sum(getattr(self, name).nbytes for name in self._COLUMNS))

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): is the block of each id (uint64 (n, 2)) recorded? Blocks appear only when complete."""
        with self._lock:
            return self._find(ids, np.zeros(len(ids), np.uint16)) >= 0

    def locate(self, ids: np.ndarray, shards: np.ndarray) -> Locations:
        """Locations of (id, shard) pairs, copied, so that they stay what they are."""
        with self._lock:
            return self._locations(self._find(ids, shards))

    def put(self, entries: Entries) -> None:
        """Record entries; all shards of a block must come in one call."""
        entries = _last_of_each_key(entries)
        with self._lock:
            rows = self._find(entries.ids, entries.shard)
            known = rows >= 0
            self._bytes -= int(self._length[rows[known]].sum())
            fresh = np.flatnonzero(~known)
            if fresh.size:
                rows[fresh] = self._allocate(fresh.size)
                self._ids[rows[fresh]] = entries.ids[fresh]
                self._shard[rows[fresh]] = entries.shard[fresh]
                self._insert(rows[fresh])
                self._blocks += int((entries.shard[fresh] == 0).sum())
            self._last_shard[rows] = entries.at.last_shard
            self._segment[rows] = entries.at.segment
            self._offset[rows] = entries.at.offset
            self._length[rows] = entries.at.length
            self._crc[rows] = entries.at.crc
            self._bytes += int(entries.at.length.sum())

    def drop(self, ids: np.ndarray, shards: np.ndarray, at: Locations) -> int:
        """Forget the blocks of entries that are still where `at` says; the number of blocks forgotten."""
        with self._lock:
            rows = self._find(ids, shards)
            same = rows >= 0
            same &= (self._segment[rows] == at.segment) & (self._offset[rows] == at.offset)
            return self._remove(rows[same])

    def drop_at(self, segment: int, offsets: np.ndarray) -> np.ndarray:
        """Forget the blocks stored at these offsets of a segment; bool: which offsets were known."""
        with self._lock:
            rows = np.flatnonzero(self._segment[: self._used] == segment)
            hit = np.isin(self._offset[rows], offsets)
            known = np.isin(offsets, self._offset[rows[hit]])
            self._remove(rows[hit])
            return known

    def drop_segment(self, segment: int) -> int:
        """Forget everything in a segment; the number of blocks forgotten."""
        with self._lock:
            return self._remove(np.flatnonzero(self._segment[: self._used] == segment))

    def entries(self) -> Entries:
        """A copy of every entry, in the order of segment and offset."""
        with self._lock:
            rows = np.flatnonzero(self._segment[: self._used] >= 0)
            rows = rows[np.lexsort((self._offset[rows], self._segment[rows]))]
            return Entries(self._ids[rows], self._shard[rows], self._locations(rows))

    # -- callers hold the lock -----------------------------------------------------------------------

    def _locations(self, rows: np.ndarray) -> Locations:
        """Copies, so that they stay what they are. Row -1 is absent."""
        return Locations(
            np.where(rows >= 0, self._segment[rows], np.int32(-1)),
            self._offset[rows],
            self._length[rows].astype(np.int64),
            self._crc[rows],
            self._last_shard[rows],
        )

    def _home(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """First slot of each key: multiply-shift, so that ids need not be uniform."""
        mixed = (ids * _MULTIPLIERS[:2]).sum(axis=1) + shards * _MULTIPLIERS[2]
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MULTIPLIERS[1]
        return (mixed >> np.uint64(32)).astype(np.int64) & (len(self._slots) - 1)

    def _find(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """int64 (n,): row of each key, -1 when absent."""
        rows = np.full(len(ids), -1, np.int64)
        slot = self._home(ids, shards)
        mask = len(self._slots) - 1
        pending = np.arange(len(ids))
        while pending.size:
            row = self._slots[slot]
            match = (row >= 0) & (self._ids[row] == ids[pending]).all(axis=1)
            match &= self._shard[row] == shards[pending]
            rows[pending[match]] = row[match]
            onward = (row != _EMPTY) & ~match
            pending = pending[onward]
            slot = (slot[onward] + 1) & mask
        return rows

    def _insert(self, rows: np.ndarray) -> None:
        """Put rows whose keys are distinct and absent into the table."""
        if self._filled + len(rows) > len(self._slots) // 2:
            self._rehash(len(rows))
        slot = self._home(self._ids[rows], self._shard[rows])
        mask = len(self._slots) - 1
        pending = np.arange(len(rows))
        while pending.size:
            empty = self._slots[slot[pending]] == _EMPTY
            claim = pending[empty]
            self._slots[slot[claim]] = rows[claim]
            # Several keys may have claimed one slot: the last assignment stands, the others move on.
            pending = pending[self._slots[slot[pending]] != rows[pending]]
            slot[pending] = (slot[pending] + 1) & mask
        self._filled += len(rows)

    def _rehash(self, extra: int) -> None:
        # Rows being inserted have their segment still unset, so they are not counted here.
        rows = np.flatnonzero(self._segment[: self._used] >= 0)
        size = len(self._slots)
        while (len(rows) + extra) * 2 > size // 2:
            size *= 2
        self._slots = np.full(size, _EMPTY, np.int32)
        self._filled = 0
        if rows.size:
            self._insert(rows)

    def _allocate(self, count: int) -> np.ndarray:
        """Row numbers for new entries; their segment is -1 until the caller sets it."""
        reused = self._free[max(0, len(self._free) - count) :]
        del self._free[max(0, len(self._free) - count) :]
        needed = self._used + count - len(reused)
        if needed > len(self._segment):
            self._grow(max(needed, len(self._segment) * 3 // 2))
        rows = np.concatenate([np.array(reused, np.int64), np.arange(self._used, needed)])
        self._used = needed
        self._segment[rows] = -1
        return rows

    def _grow(self, size: int) -> None:
        for name in self._COLUMNS:
            old = getattr(self, name)
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def _remove(self, rows: np.ndarray) -> int:
        """Forget rows, and the other shards of the same blocks; the number of blocks forgotten."""
        rows = np.unique(self._with_siblings(rows))
        if not rows.size:
            return 0
        slot = self._home(self._ids[rows], self._shard[rows])
        mask = len(self._slots) - 1
        pending = np.arange(len(rows))
        while pending.size:
            found = self._slots[slot[pending]] == rows[pending]
            self._slots[slot[pending[found]]] = _TOMBSTONE
            pending = pending[~found]
            slot[pending] = (slot[pending] + 1) & mask
        blocks = int((self._shard[rows] == 0).sum())
        self._bytes -= int(self._length[rows].sum())
        self._blocks -= blocks
        self._segment[rows] = -1
        self._free.extend(rows.tolist())
        return blocks

    def _with_siblings(self, rows: np.ndarray) -> np.ndarray:
        sharded = rows[self._last_shard[rows] > 0]
        if not sharded.size:
            return rows
        _, first = np.unique(self._ids[sharded].view("V16"), return_index=True)
        one_of_each = sharded[first]
        counts = self._last_shard[one_of_each].astype(np.int64) + 1
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        shards = (np.arange(len(starts)) - starts).astype(np.uint16)
        siblings = self._find(np.repeat(self._ids[one_of_each], counts, axis=0), shards)
        return np.concatenate([rows, siblings[siblings >= 0]])


def _last_of_each_key(entries: Entries) -> Entries:
    """Entries without those whose key comes again later."""
    if len(entries) < 2:
        return entries
    ids = entries.ids
    halves = np.sort(ids[:, 0])
    if (halves[1:] != halves[:-1]).all():
        return entries  # the usual case, at a fraction of the cost of what follows
    order = np.lexsort((entries.shard, ids[:, 1], ids[:, 0]))
    a, b = order[:-1], order[1:]
    same = (ids[a] == ids[b]).all(axis=1) & (entries.shard[a] == entries.shard[b])
    if not same.any():
        return entries
    kept = np.ones(len(entries), bool)
    kept[a[same]] = False
    return entries.take(np.flatnonzero(kept))
