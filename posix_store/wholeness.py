"""What is known to be whole: segments in which no hole lies under a block.

A block is written whole, and a hole is never filled. So what was found whole stays whole until somebody makes
holes, which `EvictionWatch` tells. Then the journals are followed, and each segment is gone through once more
when something is loaded from it, so that this needs no journal: somebody may have deleted one.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from posix_store.catalog import Catalog
from posix_store.eviction_stamp import EvictionWatch, Stamp
from posix_store.files import SegmentFiles
from posix_store.index import Locations
from posix_store.syscalls import Syscalls

MOST_SEEKS = 64
"""In one load; the next goes on. Each may cost a turn of the GIL."""
_CANNOT_TELL = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_ALL = sys.maxsize


@dataclass(frozen=True)
class _Whole:
    """No block of a segment that ends at or before `end` has a hole. `revision`: that of the segment then."""

    end: int
    revision: int
    is_final: bool = False
    """Will it stay like that, because the first block behind `end` has a hole?"""


@dataclass(frozen=True)
class Known:
    """What was known when a load began. Nothing is added to it later: that may come from a look at an index
    in which a block that the load has found before is not any more."""

    stamp: Stamp | None
    """None: nothing is known yet."""
    whole: Mapping[int, _Whole]
    """By number of the segment."""


class Wholeness:
    """What this process knows to be whole. Thread-safe."""

    def __init__(self, catalog: Catalog, files: SegmentFiles, watch: EvictionWatch, calls: Syscalls) -> None:
        self._catalog = catalog
        self._files = files
        self._watch = watch
        self._calls = calls
        self._known = Known(None, {})
        self._lock = threading.Lock()
        self._scanning = threading.Lock()  # held during system calls, so nobody waits for it

    def begin(self) -> Known | None:
        """What is known to be whole; None when that cannot be told. Asked before blocks are located.

        The blocks that are located after that have no eviction in a journal of before.
        """
        stamp = self._watch.stamp()
        known = self._known
        if stamp is None or known.stamp == stamp:
            return None if stamp is None else known
        # Who makes holes has recorded what for before the stamp. So all of that is read here.
        if not self._catalog.follow_all():
            return None
        with self._lock:
            if self._known.stamp != stamp:
                self._known = Known(stamp, {})
            return self._known

    def covers(self, known: Known, at: Locations) -> bool:
        """Are all these blocks known to be whole? To be asked after they were located."""
        return not self._missing(known, at)

    def learn(self, known: Known, at: Locations) -> None:
        """Go through the segments of these blocks, as far as that is still to be done and is worth it."""
        if not self._scanning.acquire(blocking=False):
            return  # another thread is at it
        try:
            for number in self._missing(known, at):
                current = self._known
                if current.stamp != known.stamp:
                    return
                found = self._scan(number, current.whole.get(number))
                with self._lock:
                    if found is not None and self._known.stamp == known.stamp:
                        self._known = replace(self._known, whole={**self._known.whole, number: found})
        finally:
            self._scanning.release()

    def is_still(self, known: Known) -> bool:
        """Is what was known whole whole now? Asked after blocks were read."""
        return known.stamp is not None and self._watch.is_still(known.stamp)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._watch.close()

    def _missing(self, known: Known, at: Locations) -> list[int]:
        """Numbers of the segments in which not all of these blocks are known to be whole."""
        if not len(at.segment):
            return []
        first = int(at.segment[0])
        ends = at.offset + at.length
        if (at.segment == first).all():
            return [] if self._is_whole(known, first, int(ends.max())) else [first]
        return [
            number
            for number in np.unique(at.segment).tolist()
            if not self._is_whole(known, number, int(ends[at.segment == number].max()))
        ]

    def _is_whole(self, known: Known, number: int, end: int) -> bool:
        whole = known.whole.get(number)
        # A journal that was rewritten brings back blocks that were dropped because of their holes.
        return (
            whole is not None
            and end <= whole.end
            and whole.revision == self._catalog.segment(number).revision
        )

    def _scan(self, number: int, before: _Whole | None) -> _Whole | None:
        """Go on through the blocks of a segment; None when nothing is learned."""
        revision = self._catalog.segment(number).revision
        if before is None or before.revision != revision:
            before = _Whole(0, revision)
        if before.is_final:
            return None
        with self._files.opened([number]) as (fds, _):
            if number not in fds:
                return None
            _, begins, lengths = self._catalog.index.ranges_in(np.array([number]))
            # Ranges may overlap where a journal is damaged.
            ends = np.maximum.accumulate(begins + lengths)
            at = int(np.searchsorted(ends, before.end, "right"))
            for _ in range(MOST_SEEKS):
                if at >= len(begins):
                    return _Whole(_ALL, revision)
                begin = int(begins[at])
                try:
                    hole = max(begin, self._calls.seek_hole(fds[number], begin))
                except OSError as error:
                    if error.errno in _CANNOT_TELL:  # never, on this file system: only journals help
                        return _Whole(_ALL, revision)
                    if error.errno != errno.ENXIO:
                        return None
                    hole = begin  # behind the end of the file
                at = int(np.searchsorted(ends, hole, "right"))
                if at < len(begins) and begins[at] <= hole:
                    return _Whole(int(ends[at - 1]) if at else 0, revision, is_final=True)
            return _Whole(int(ends[at - 1]) if at else 0, revision)
