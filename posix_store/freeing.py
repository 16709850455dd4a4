"""Space of blocks that nobody finds any more, given back: holes in segments, and whole segments.

All of it happens after the blocks' EVICT records were appended, by the one process that holds the eviction
lock. A segment of a living writer is only punched where its journal says that something was, so what is
being written there and not published yet is safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time

import numpy as np

from posix_store.capacity import LOCK_TIMEOUT, NoSpace, SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.errors import Reason
from posix_store.eviction_stamp import EvictionStamp
from posix_store.known import SegmentInfo
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    EXTENT_ALIGNMENT,
    JOURNAL_MAGIC,
    MAX_BATCH_RECORDS,
    PUT,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    FormatError,
    as_halves,
    decode_header,
    decode_records,
    evict_records,
)
from posix_store.syscalls import close_quietly, read_at
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

IDLE_WRITER_SECONDS = 600.0
"""A segment without blocks whose journal was not touched for so long is deleted, whoever its writer is."""
_MUCH_GARBAGE = 0.25


class Freer:
    """Frees space in the segments of one namespace. Used by one thread at a time, under the eviction lock.

    Args:
        stamp: of the eviction lock; None: only whole segments are freed.
    """

    def __init__(
        self,
        root: StoreRoot,
        space: SpaceKeeper,
        catalog: Catalog,
        writer: SegmentWriter,
        stamp: EvictionStamp | None = None,
    ) -> None:
        self._calls = root.syscalls
        self._root = root
        self._space = space
        self._catalog = catalog
        self._writer = writer
        self._stamp = stamp

    def free(self, segments: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> int:
        """Give back the space of blocks that were just evicted; about how many bytes that was.

        Args:
            segments: int32 (n,), numbers of their segments. offsets, lengths: int64 (n,), where they were.
        """
        numbers = np.unique(segments)
        live_segment, live_offset, live_length = self._catalog.index.ranges_in(numbers)
        freed = 0
        holes: list[tuple[SegmentInfo, Runs]] = []
        for number in numbers.tolist():
            segment = self._catalog.segment(number)
            of, live = segments == number, live_segment == number
            waiting = self._catalog.waiting_ranges(number)
            if segment.dropped:
                continue
            if not live.any() and not waiting and (given := self.delete(segment)):
                freed += given
                continue
            kept = _runs(*_with(live_offset[live], live_length[live], waiting))
            holes.append((segment, _without(_runs(offsets[of], lengths[of]), kept)))
        return freed + self._punch(holes)

    def sweep(self, segment: SegmentInfo, blocks: int, held: int) -> int:
        """Give back what no block uses in a sealed segment, if that is much; bytes freed.

        Args:
            blocks: entries in the segment. held: bytes of their payload.
        """
        try:
            status = self._calls.stat(self._catalog.path(segment))
        except OSError:
            return 0
        allocated = status.st_blocks * 512 - SEGMENT_HEADER_BYTES
        much = max(allocated * _MUCH_GARBAGE, EXTENT_ALIGNMENT)
        if allocated - held - blocks * EXTENT_ALIGNMENT <= much:
            return 0
        _, offset, length = self._catalog.index.ranges_in(np.array([segment.number]))
        waiting = self._catalog.waiting_ranges(segment.number)
        kept = _runs(*_with(offset, length, waiting))
        if allocated - int((kept[1] - kept[0]).sum()) * EXTENT_ALIGNMENT <= much:
            return 0
        try:
            self._record_dead(segment, np.concatenate([offset, [start for start, _ in waiting]]))
        except (NoSpace, OSError, FormatError) as error:
            logger.debug("%s is not swept: %s", segment.name.data, error)
            return 0
        pages = (SEGMENT_HEADER_BYTES // EXTENT_ALIGNMENT, -(-status.st_size // EXTENT_ALIGNMENT))
        return self._punch([(segment, _without((np.array([pages[0]]), np.array([pages[1]])), kept))])

    def _record_dead(self, segment: SegmentInfo, alive: np.ndarray) -> None:
        """Record as evicted what a journal has put and nobody finds, so that it is not found later.

        `alive`: int64 (n,), offsets of what stays. Raises `NoSpace`, `OSError`, `FormatError`.
        """
        records, _ = read_journal(self._root, self._catalog, segment)
        puts = records[records["kind"] == PUT]
        dead = puts[~np.isin(puts["offset"], alive.astype(np.uint64))]
        uids = np.full(len(dead), np.void(segment.uid), "V16")
        evictions = evict_records(
            as_halves(dead["id"]), uids, dead["offset"].astype(np.int64), self._catalog.clock.now()
        )
        for start in range(0, len(evictions), MAX_BATCH_RECORDS):
            self._writer.record(evictions[start : start + MAX_BATCH_RECORDS])

    def delete(self, segment: SegmentInfo, with_blocks: bool = False) -> int:
        """Delete a segment that holds no block, unless it may still be written to; bytes freed.

        Args:
            with_blocks: delete it although it holds blocks.
        """
        if segment.name == self._writer.current or not self.is_finished(segment):
            return 0
        # Only now that nothing can follow: a dump may have published its blocks since the caller counted.
        if not with_blocks and self._is_held(segment):
            return 0
        try:
            # Before anything is deleted: what its journal says of other segments must not be lost, or the
            # blocks evicted there would be found again.
            self._carry_over(segment)
        except (NoSpace, OSError) as error:
            logger.debug("%s stays: %s", segment.name.data, error)
            return 0
        freed = 0
        for name in (segment.name.data, segment.name.journal):
            path = os.path.join(self._catalog.directory, name)
            try:
                freed += self._delete_file(path)
            except OSError as error:
                logger.warning("cannot delete %s: %s", path, error)
                return freed
        self._catalog.forget(segment.name)
        return freed

    def _delete_file(self, path: str) -> int:
        """Delete a file and free its space, also of those who have it open; bytes freed. Raises `OSError`.

        First the name goes: who reads from the file meanwhile then sees that it is gone. This needs no stamp
        of evictions: a file that is cut to nothing reads as nothing, and not as zeros.
        """
        try:
            fd = self._calls.open(path, os.O_RDWR)
        except FileNotFoundError:
            return 0
        try:
            size = self._calls.fstat(fd).st_blocks * 512
            # Under the store lock: without a name it is not counted any more, and its space is not free yet.
            with self._root.lock(LOCK_TIMEOUT):
                with contextlib.suppress(FileNotFoundError):
                    self._calls.unlink(path)
                with contextlib.suppress(OSError):
                    self._calls.ftruncate(fd, 0)
            self._root.changed(path)
        finally:
            close_quietly(self._calls, fd)
        return size

    def _is_journal_only(self, segment: SegmentInfo) -> bool:
        return self._calls.stat(self._catalog.path(segment)).st_blocks * 512 <= SEGMENT_HEADER_BYTES

    def _is_held(self, segment: SegmentInfo) -> bool:
        held, _, _ = self._catalog.index.ranges_in(np.array([segment.number]))
        return bool(len(held)) or bool(self._catalog.waiting_ranges(segment.number))

    def is_finished(self, segment: SegmentInfo) -> bool:
        """Can nothing follow in a segment's journal that is not known here yet?"""
        if segment.sealed:
            return True
        try:
            status = self._calls.stat(os.path.join(self._catalog.directory, segment.name.journal))
            if not segment.own and status.st_size != segment.size:
                return False  # there is something new, which the next look will find
            if segment.name.is_of_this_host:
                return self._is_unlocked(self._catalog.path(segment))
            # A lock held elsewhere may not be seen here. If the writer lives, it finds its files deleted and
            # begins others.
            return time.time() - status.st_mtime > IDLE_WRITER_SECONDS
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _is_unlocked(self, path: str) -> bool:
        """Is the writer of a file on this host dead, or has it closed it? Raises `OSError`."""
        fd = self._calls.open(path, os.O_RDONLY)
        try:
            self._calls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            close_quietly(self._calls, fd)
        return True

    def forget_shards_of_the_dead(self) -> None:
        """Blocks of which a dead writer has stored some shards only will never be whole: let them go."""
        waiting = self._catalog.segments_with_waiting_shards()
        writers = {self._catalog.segment(number).name.writer for number in waiting}
        for writer in writers:
            segments = [each for each in self._catalog.segments if each.name.writer == writer]
            if all(each.name != self._writer.current and self.is_finished(each) for each in segments):
                self._catalog.forget_waiting(writer)

    def _carry_over(self, segment: SegmentInfo) -> None:
        """Append the evictions in a segment's journal that still matter to this process's own journal.

        Raises `NoSpace` and `OSError`.
        """
        if not segment.evicts:
            return
        try:
            records = read_journal(self._root, self._catalog, segment)[0]
        except (FileNotFoundError, FormatError):
            return  # nobody can read it anyway
        evictions = records[records["kind"] == EVICT]
        evictions = evictions[evictions["parent"] != np.void(segment.uid)]
        matter = evictions[self._catalog.matters(evictions)].copy()
        if len(matter) and self._writer.current is None and self._is_journal_only(segment):
            raise NoSpace(Reason.FULL, "to move its evictions to a new journal would gain nothing")
        for start in range(0, len(matter), MAX_BATCH_RECORDS):
            self._writer.record(matter[start : start + MAX_BATCH_RECORDS])

    def _punch(self, holes: list[tuple[SegmentInfo, Runs]]) -> int:
        """Punch out runs of 4 KiB pages that blocks used, whose evictions are recorded; bytes freed.

        Only between two stamps, or loads without checksums would take the holes for blocks.
        """
        holes = [(segment, runs) for segment, runs in holes if len(runs[0])]
        if not holes or not self._space.punches or self._stamp is None:
            return 0
        freed = 0
        try:
            with self._stamp.punching():
                for segment, runs in holes:
                    freed += self._punch_segment(segment, runs)
        except (OSError, NoSpace) as error:
            logger.debug("nothing punched: %s", error)
        return freed

    def _punch_segment(self, segment: SegmentInfo, runs: Runs) -> int:
        try:
            fd = self._calls.open(self._catalog.path(segment), os.O_RDWR)
        except OSError as error:
            logger.debug("cannot open %s: %s", self._catalog.path(segment), error)
            return 0
        try:
            freed = 0
            for first, end in zip(*(bound.tolist() for bound in runs), strict=True):
                if self._space.punch(fd, first * EXTENT_ALIGNMENT, end * EXTENT_ALIGNMENT):
                    freed += (end - first) * EXTENT_ALIGNMENT
            self._root.changed(self._catalog.path(segment))
            return freed
        finally:
            close_quietly(self._calls, fd)


def read_journal(root: StoreRoot, catalog: Catalog, segment: SegmentInfo) -> tuple[np.ndarray, int]:
    """All intact records of a journal (`RECORD` array), and its generation.

    Raises `OSError` and `FormatError`.
    """
    fd = root.syscalls.open(os.path.join(catalog.directory, segment.name.journal), os.O_RDONLY)
    try:
        size = root.syscalls.fstat(fd).st_size
        data = read_at(root.syscalls, fd, size, 0)
    finally:
        close_quietly(root.syscalls, fd)
    if len(data) < size:
        raise OSError("the journal could not be read whole")
    namespace = bytes.fromhex(os.path.basename(catalog.directory))
    uid, generation = decode_header(data[:RECORD_BYTES], JOURNAL_MAGIC, namespace)
    if uid != segment.uid:
        raise FormatError(f"journal is of segment {uid.hex()}, it was of {segment.uid.hex()}")
    return decode_records(memoryview(data)[RECORD_BYTES:])[0], generation


Runs = tuple[np.ndarray, np.ndarray]
"""First pages, and pages behind the last, of runs of 4 KiB pages: int64 (n,), sorted, with gaps between."""


def _with(
    offsets: np.ndarray, lengths: np.ndarray, more: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    if not more:
        return offsets, lengths
    others = np.array(more, np.int64).reshape(-1, 2)
    return np.concatenate([offsets, others[:, 0]]), np.concatenate([lengths, others[:, 1]])


def _runs(offsets: np.ndarray, lengths: np.ndarray) -> Runs:
    """The 4 KiB pages that ranges (int64 (n,)) touch."""
    order = np.argsort(offsets, kind="stable")  # in order already, as a rule
    first = offsets[order] // EXTENT_ALIGNMENT
    # Ranges may overlap where a journal is damaged: a page is touched as long as any range goes on.
    end = np.maximum.accumulate(-(-(offsets + lengths)[order] // EXTENT_ALIGNMENT))
    begins = np.ones(len(first), bool)
    begins[1:] = first[1:] > end[:-1]
    starts = np.flatnonzero(begins)
    return first[starts], end[np.append(starts[1:], len(first)) - 1] if len(first) else end


def _without(runs: Runs, kept: Runs) -> Runs:
    """The pages of `runs` that are not in `kept`."""
    edges = np.unique(np.concatenate([*runs, *kept]))
    gone = _inside(edges, runs) & ~_inside(edges, kept)
    before = np.concatenate([[False], gone[:-1]])
    return edges[gone & ~before], edges[~gone & before]


def _inside(pages: np.ndarray, runs: Runs) -> np.ndarray:
    return np.searchsorted(runs[0], pages, "right") > np.searchsorted(runs[1], pages, "right")
