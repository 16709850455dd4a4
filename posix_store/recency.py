"""Uses of blocks, noted in the index at once and in the journal now and then.

A use of a block is a use of all blocks before it in its chain, and the order of eviction already says so
(`chains`). So of a chain only the last block that was used has to be noted, once a minute at most.
"""

from __future__ import annotations

import threading

import numpy as np

from posix_store.chains import parent_rows
from posix_store.clock import Clock
from posix_store.index import Index
from posix_store.segment import touch_records
from posix_store.writer import SegmentWriter

_MOST_WAITING = 2048
"""Batches of which the uses may wait for `settle`."""
NOTE_SECONDS = 60.0
"""A block's uses are written down at most so often."""


class Recency:
    """Uses of one namespace's blocks. Thread-safe; makes no system call.

    What is noted in the journal is found out by `settle`, at leisure.
    """

    def __init__(self, index: Index, writer: SegmentWriter, clock: Clock) -> None:
        self._index = index
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._noted: dict[bytes, float] = {}
        self._used: list[tuple[np.ndarray, float]] = []
        self._cleaned_at = 0.0

    def used(self, ids: np.ndarray) -> None:
        """Blocks (uint64 (n, 2)) were loaded, or were dumped while they were stored already."""
        if not len(ids):
            return
        now = self._clock.now()
        own = ids.copy()  # it may be a view of what the caller changes
        self._index.touch_soon(own, now)
        with self._lock:
            self._used.append((own, now))
            if len(self._used) < _MOST_WAITING:
                return
        self.settle()

    def settle(self) -> None:
        """Note for the journal what `used` was told, if its time has come."""
        with self._lock:
            used, self._used = self._used, []
        if not used:
            return
        used.reverse()  # of equal ids the first, which is the last use, counts
        every = np.concatenate([ids for ids, _ in used])
        when = np.repeat([now for _, now in used], [len(ids) for ids, _ in used])
        ids, first = np.unique(every, axis=0, return_index=True)
        when = when[first]
        above = parent_rows(ids, self._index.touch(ids, when))
        behind = np.full(len(ids), -np.inf)
        np.maximum.at(behind, above[above >= 0], when[above >= 0])
        is_last = behind < when  # no block behind it was used as late
        with self._lock:
            self._forget_old(used[0][1])
            due = [i for i in np.flatnonzero(is_last).tolist() if ids[i].tobytes() not in self._noted]
            self._noted.update((ids[i].tobytes(), when[i]) for i in due)
        if due:
            self._writer.note(touch_records(ids[due], when[due]))

    def parents_used(self, parents: np.ndarray) -> None:
        """Blocks were stored behind these (uint64 (n, 2)), which must not leave as if nothing followed."""
        self._index.touch_soon(parents.copy(), self._clock.now())

    def _forget_old(self, now: float) -> None:
        if now - self._cleaned_at > NOTE_SECONDS / 4:
            self._cleaned_at = now
            self._noted = {key: at for key, at in self._noted.items() if now - at < NOTE_SECONDS}
