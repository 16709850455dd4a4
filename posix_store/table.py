"""An open-addressing hash table of row numbers, whose keys are in columns that others hold.

Not thread-safe. A batch is one pass, in C where that was built, else vectorised.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from posix_store.compiled import native

_EMPTY, _TOMBSTONE = -1, -2
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_LEAST_SLOTS = 4096


class Table:
    """(id, shard) -> row. `ids` is a uint64 (rows, 2) column and `shards` a uint16 (rows,) one.

    Args:
        compiled: False does without C, for tests.
    """

    def __init__(self, compiled: bool = True) -> None:
        self._slots = np.full(_LEAST_SLOTS, _EMPTY, np.int32)
        self._filled = 0
        self._native = native if compiled else None

    @property
    def nbytes(self) -> int:
        return int(self._slots.nbytes)

    def find(self, ids: np.ndarray, shards: np.ndarray, wanted: np.ndarray, of: np.ndarray) -> np.ndarray:
        """int64 (n,): the row of each key (ids uint64 (n, 2), shards uint16 (n,)), -1 when absent."""
        if self._native is not None:
            found = np.empty(len(wanted), np.int64)
            self._native.find(self._slots, ids, shards, np.ascontiguousarray(wanted), of, found)
            return found
        rows = np.full(len(wanted), -1, np.int64)
        slot = self._home(wanted, of)
        mask = len(self._slots) - 1
        pending = np.arange(len(wanted))
        while pending.size:
            row = self._slots[slot]
            match = (row >= 0) & (ids[row] == wanted[pending]).all(axis=1)
            match &= shards[row] == of[pending]
            rows[pending[match]] = row[match]
            onward = (row != _EMPTY) & ~match
            pending = pending[onward]
            slot = (slot[onward] + 1) & mask
        return rows

    def insert(
        self, ids: np.ndarray, shards: np.ndarray, rows: np.ndarray, others: Callable[[], np.ndarray]
    ) -> None:
        """Put in rows (int64 (n,)) whose keys are distinct and absent.

        Args:
            others: gives all rows that are in the table, for when it has to grow.
        """
        if self._filled + len(rows) > len(self._slots) // 2:
            old = others()
            size = len(self._slots)
            while (len(old) + len(rows)) * 2 > size // 2:
                size *= 2
            self._slots = np.full(size, _EMPTY, np.int32)
            self._filled = 0
            self._insert(ids, shards, old)
        self._insert(ids, shards, rows)

    def _insert(self, ids: np.ndarray, shards: np.ndarray, rows: np.ndarray) -> None:
        self._filled += len(rows)
        if self._native is not None:
            self._native.insert(self._slots, ids, shards, rows)
            return
        slot = self._home(ids[rows], shards[rows])
        mask = len(self._slots) - 1
        pending = np.arange(len(rows))
        while pending.size:
            empty = self._slots[slot[pending]] == _EMPTY
            claim = pending[empty]
            self._slots[slot[claim]] = rows[claim]
            # Several keys may have claimed one slot: the last assignment stands, the others move on.
            pending = pending[self._slots[slot[pending]] != rows[pending]]
            slot[pending] = (slot[pending] + 1) & mask

    def remove(self, ids: np.ndarray, shards: np.ndarray, rows: np.ndarray) -> None:
        """Take out rows that are in the table."""
        slot = self._home(ids[rows], shards[rows])
        mask = len(self._slots) - 1
        pending = np.arange(len(rows))
        while pending.size:
            found = self._slots[slot[pending]] == rows[pending]
            self._slots[slot[pending[found]]] = _TOMBSTONE
            pending = pending[~found]
            slot[pending] = (slot[pending] + 1) & mask

    def _home(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """First slot of each key: multiply-shift, so that ids need not be uniform."""
        mixed = (ids * _MULTIPLIERS[:2]).sum(axis=1) + shards * _MULTIPLIERS[2]
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MULTIPLIERS[1]
        return (mixed >> np.uint64(32)).astype(np.int64) & (len(self._slots) - 1)
