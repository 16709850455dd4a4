"""An open-addressing hash table of row numbers, whose keys are in rows that others hold.

Not thread-safe. A batch is one pass, in C where that was built, else vectorised.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from posix_store.compiled import native

_EMPTY, _TOMBSTONE = -1, -2
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_LEAST_SLOTS = 4096

Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
ROW = np.dtype(
    [
        ("id", "<u8", 2), ("parent", "<u8", 2), ("offset", "<i8"), ("stored", "<f8"), ("used", "<f8"),
        ("length", "<u4"), ("crc", "<u4"), ("segment", "<i4"), ("shard", "<u2"), ("last_shard", "<u2"),
    ]
)  # fmt: skip
"""What the index knows of a shard, as `struct row` in _table.h: one or two lines of the cache."""


class Table:
    """(id, shard) -> row. `rows` is the array (`ROW`) that row numbers are places in.

    Args:
        compiled: False does without C, for tests.
    """

    def __init__(self, compiled: bool = True) -> None:
        self._slots = np.full(_LEAST_SLOTS, _EMPTY, np.int32)
        self._filled = 0
        self._native = native if compiled else None

    @property
    def compiled(self) -> bool:
        return self._native is not None

    @property
    def nbytes(self) -> int:
        return int(self._slots.nbytes)

    def find(self, rows: np.ndarray, wanted: np.ndarray, of: np.ndarray) -> np.ndarray:
        """int64 (n,): the row of each key (ids uint64 (n, 2), shards uint16 (n,)), -1 when absent."""
        if self._native is not None:
            found = np.empty(len(wanted), np.int64)
            self._native.locate(self._slots, rows, np.ascontiguousarray(wanted), of, found)
            return found
        found = np.full(len(wanted), -1, np.int64)
        slot = self._home(wanted, of)
        mask = len(self._slots) - 1
        pending = np.arange(len(wanted))
        while pending.size:
            row = self._slots[slot]
            match = (row >= 0) & (rows["id"][row] == wanted[pending]).all(axis=1)
            match &= rows["shard"][row] == of[pending]
            found[pending[match]] = row[match]
            onward = (row != _EMPTY) & ~match
            pending = pending[onward]
            slot = (slot[onward] + 1) & mask
        return found

    def locate(self, rows: np.ndarray, wanted: np.ndarray, of: np.ndarray) -> Columns:
        """`find`, and the columns `segment` (-1 when absent), `offset`, `length`, `crc`, `last_shard`."""
        n = len(wanted)
        if self._native is None:
            found = self.find(rows, wanted, of)
            there = rows[found]
            segment = np.where(found >= 0, there["segment"], np.int32(-1))
            length = there["length"].astype(np.int64)
            return segment, there["offset"], length, there["crc"], there["last_shard"]
        columns = (
            np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.uint32),
            np.empty(n, np.uint16),
        )  # fmt: skip
        self._native.locate(
            self._slots, rows, np.ascontiguousarray(wanted), of, np.empty(n, np.int64), *columns
        )
        return columns

    def insert(self, rows: np.ndarray, new: np.ndarray, others: Callable[[], np.ndarray]) -> None:
        """Put in rows (numbers int64 (n,)) whose keys are distinct and absent.

        Args:
            others: gives the numbers of all rows that are in the table, for when it has to grow.
        """
        self._make_room(rows, len(new), others)
        self._insert(rows, new)

    def insert_records(
        self,
        rows: np.ndarray,
        new: np.ndarray,
        others: Callable[[], np.ndarray],
        records: np.ndarray,
        segment: int,
        when: float,
    ) -> bool:
        """`insert` rows, filled from PUT records of blocks that are not sharded. False without C."""
        if self._native is None:
            return False
        self._make_room(rows, len(new), others)
        self._filled += len(new)
        self._native.insert(self._slots, rows, new, records, segment, when)
        return True

    def _make_room(self, rows: np.ndarray, extra: int, others: Callable[[], np.ndarray]) -> None:
        if self._filled + extra <= len(self._slots) // 2:
            return
        old = others()
        size = len(self._slots)
        while (len(old) + extra) * 2 > size // 2:
            size *= 2
        self._slots = np.full(size, _EMPTY, np.int32)
        self._filled = 0
        self._insert(rows, old)

    def _insert(self, rows: np.ndarray, new: np.ndarray) -> None:
        self._filled += len(new)
        if self._native is not None:
            self._native.insert(self._slots, rows, np.ascontiguousarray(new))
            return
        slot = self._home(rows["id"][new], rows["shard"][new])
        mask = len(self._slots) - 1
        pending = np.arange(len(new))
        while pending.size:
            empty = self._slots[slot[pending]] == _EMPTY
            claim = pending[empty]
            self._slots[slot[claim]] = new[claim]
            # Several keys may have claimed one slot: the last assignment stands, the others move on.
            pending = pending[self._slots[slot[pending]] != new[pending]]
            slot[pending] = (slot[pending] + 1) & mask

    def remove(self, rows: np.ndarray, old: np.ndarray) -> None:
        """Take out rows (numbers int64 (n,)) that are in the table."""
        slot = self._home(rows["id"][old], rows["shard"][old])
        mask = len(self._slots) - 1
        pending = np.arange(len(old))
        while pending.size:
            found = self._slots[slot[pending]] == old[pending]
            self._slots[slot[pending[found]]] = _TOMBSTONE
            pending = pending[~found]
            slot[pending] = (slot[pending] + 1) & mask

    def _home(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """First slot of each key: multiply-shift, so that ids need not be uniform."""
        mixed = (ids * _MULTIPLIERS[:2]).sum(axis=1) + shards * _MULTIPLIERS[2]
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MULTIPLIERS[1]
        return (mixed >> np.uint64(32)).astype(np.int64) & (len(self._slots) - 1)
