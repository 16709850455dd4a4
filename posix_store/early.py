"""Evictions of blocks that are not known yet: the journal of who evicts may be read before the writer's."""

from __future__ import annotations

import numpy as np


class EarlyEvictions:
    """Offsets by the uid of their segment. Not thread-safe: its catalog's lock guards it."""

    def __init__(self) -> None:
        self._now: dict[bytes, set[int]] = {}
        self._before: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return sum(len(offsets) for offsets in (*self._now.values(), *self._before.values()))

    def knows(self, uid: bytes) -> bool:
        """Is any eviction in this segment remembered?"""
        return bool(self._now.get(uid) or self._before.get(uid))

    def add(self, uid: bytes, offsets: np.ndarray) -> None:
        """Remember evictions at offsets (int64 (n,)) of which nothing is known."""
        self._now.setdefault(uid, set()).update(offsets.tolist())

    def take(self, uid: bytes, offsets: np.ndarray) -> np.ndarray:
        """bool (n,): which offsets (uint64 (n,)) of a segment were evicted. They are forgotten here."""
        gone = np.zeros(len(offsets), bool)
        for early in (self._now, self._before):
            evicted = early.get(uid)
            if evicted:
                found = np.isin(offsets, np.fromiter(evicted, np.uint64, len(evicted))) & ~gone
                evicted.difference_update(offsets[found].tolist())
                gone |= found
        return gone

    def forget(self, uid: bytes) -> None:
        """A segment has gone."""
        self._now.pop(uid, None)
        self._before.pop(uid, None)

    def looked(self) -> None:
        """Drop evictions of what was unknown at two complete looks.

        A block is in a journal before its eviction is, so the second look would have found it.
        """
        self._before, self._now = self._now, {}
