"""The writing side of one process in one namespace: its segments, its journals, its extents.

A dump takes three steps, of which only the second is long and runs without any lock:
reserve an extent, write it, append all its records to the journal. Until that append has returned,
the batch does not exist for anybody (invariant I2).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posix_store.capacity import LOCK_TIMEOUT, LOW_SHARE, NoSpace, SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.errors import Reason
from posix_store.journal import Journal, PythonJournal
from posix_store.open_segment import OpenSegment, create_segment
from posix_store.root import StoreRoot
from posix_store.segment import (
    EXTENT_ALIGNMENT,
    MAX_BATCH_RECORDS,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentName,
    align,
    new_writer_name,
)

logger = logging.getLogger(__name__)

_NEW_SEGMENT_BYTES = 4 * EXTENT_ALIGNMENT
"""Allocated before the first extent: a directory and NAMESPACE.json, if new, and the two headers."""
_MAX_JOURNAL_BYTES = 64 << 20
"""A journal that has grown beyond this, by evictions and uses, is sealed, so that it can be compacted."""
_SEGMENTS_IN_CAPACITY = 16
"""Segments are no larger than this share of the capacity: a segment may have to be evicted whole."""
_LEAST_SEGMENT_BYTES = 64 << 10
_AHEAD_BYTES = 256 << 20
"""Reserved ahead of what is written, if the capacity is large enough."""
_RESERVE_SECONDS = 0.25
"""How long no more is reserved ahead, when there was less than was wanted."""
_LOOK_SECONDS = 0.5
"""How often a writer asks whether somebody has deleted its files before it writes into them."""


@dataclass
class Extent:
    """Space for one batch: `offset` is 4 KiB-aligned in the segment."""

    segment: OpenSegment
    offset: int
    length: int
    named: bool = False
    """May a record in the journal name it? Then it is never given back: somebody may load from it."""

    @property
    def fd(self) -> int:
        return self.segment.data.fd


class SegmentWriter:
    """Extents and records of one process in one namespace. Thread-safe.

    Nothing is created before the first reservation, so a process that only looks up never writes.

    Args:
        identity: written to NAMESPACE.json; None leaves that file alone.
        catalog: told of new segments and of what is published.
        segment_bytes: a segment is closed and a new one begun when it would grow beyond this.
        open_journal: makes the end of a journal from its descriptor and where appends begin; an engine's,
            if it is to append.
        direct: extents will be written around the page cache.
        on_create: called when the namespace's directory is sure to be there.
    """

    def __init__(
        self,
        root: StoreRoot,
        namespace: str,
        identity: Mapping[str, Any] | None,
        space: SpaceKeeper,
        catalog: Catalog,
        segment_bytes: int,
        open_journal: Callable[[int, int], Journal] | None = None,
        direct: bool = False,
        on_create: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._calls = root.syscalls
        self._namespace = namespace
        self._identity = identity
        self._space = space
        self._catalog = catalog
        self._segment_bytes = segment_bytes
        self._direct = direct
        self._open_journal = open_journal or functools.partial(PythonJournal, root.syscalls)
        self._on_create = on_create
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._pid = os.getpid()
        self._writer = new_writer_name()
        self._seq = 0
        self._current: OpenSegment | None = None
        self._looked_at = float("-inf")
        self._largest = 0
        self._reserve_after = float("-inf")
        self._ended: list[tuple[OpenSegment, int, Extent | None]] = []
        self._noted_lock = threading.Lock()
        self._noted: list[np.ndarray] = []

    @property
    def current(self) -> SegmentName | None:
        """The segment that takes extents now."""
        segment = self._current
        return segment.info.name if segment is not None else None

    @property
    def noted_records(self) -> int:
        """Records that wait for the next append."""
        return sum(len(records) for records in self._noted)

    @contextlib.contextmanager
    def extent(self, length: int, records: int, deadline: float = float("inf")) -> Iterator[Extent]:
        """An extent of `length` bytes for a batch of `records` blocks, for the body of the `with`.

        If the body raises, an extent that is not `named` is given back. It does not wait for other dumps
        beyond `deadline`, in `time.monotonic()` seconds.

        Raises:
            NoSpace: the batch must go unstored.
            OSError: the file system failed.
        """
        with contextlib.ExitStack() as stack:
            if self._current is None or self._pid != os.getpid():
                with self._locked(deadline):
                    self._leave_parents_files()
                    if self._current is None:
                        self._current = self._create()  # which finds out whether space can be preallocated
            if not self._space.preallocates:
                stack.enter_context(self._alone(deadline))
            with self._locked(deadline):
                segment = self._writable(length)
                promise = records * RECORD_BYTES
                ends = [
                    (segment.data, segment.cursor + length),
                    (segment.journal, self._journal_end(segment) + promise),
                ]
                stack.enter_context(self._space.reserve(ends))
                extent = Extent(segment, segment.cursor, length)
                segment.cursor = align(segment.cursor + length)
                segment.users += 1
                segment.promised += promise
                self._largest = max(self._largest, length)
            try:
                yield extent
            except BaseException:
                self._ended.append((segment, promise, None if extent.named else extent))
                raise
            else:
                self._ended.append((segment, promise, None))
            finally:
                # When a sick disk holds up whoever has the lock, the next who gets it does this as well.
                with contextlib.suppress(NoSpace), self._locked(max(deadline, time.monotonic() + 0.1)):
                    self._settle()

    def publish(self, extent: Extent, records: np.ndarray, deadline: float = float("inf")) -> bool:
        """Append an extent's records to its journal: from its return on, everybody can see them.

        False when the segment has been deleted or refused meanwhile: nobody will.

        Raises:
            NoSpace: other dumps did not let it have its turn before `deadline`.
            OSError: the records could not all be written; then none of them will ever be visible.
        """
        # One step for all dumps: shards of a block that are dumped at once must agree on their copy.
        segment = extent.segment
        with self._locked(deadline):
            self._append_noted(segment)
            self._catalog.assign_copies(segment.info, records)
            extent.named = True  # also when an exception of another kind comes in between
            try:
                self._append(segment, records, deadline)
            except OSError:
                extent.named = len(records) > MAX_BATCH_RECORDS  # several appends
                raise
            if segment.deleted():
                return False
            return self._catalog.publish_own(segment.info, records)

    def published(self, segment: OpenSegment, records: np.ndarray) -> bool:
        """An engine has appended records (of blocks that are not sharded) to a segment's journal.

        False when the segment has been refused meanwhile.
        """
        return self._catalog.publish_own(segment.info, records)

    def note(self, records: np.ndarray) -> None:
        """Append EVICT or TOUCH records (`RECORD` array) at the next `flush`, or before what comes next.

        So a process that only loads never writes. Never waits for the disk. Best effort: of a great many,
        the oldest are forgotten.
        """
        with self._noted_lock:
            self._noted.append(records)
            while sum(len(each) for each in self._noted) > MAX_BATCH_RECORDS and len(self._noted) > 1:
                self._noted.pop(0)

    def flush(self) -> None:
        """Append what was noted, if this process has a segment. Best effort."""
        if self._noted and self._current is not None:
            with contextlib.suppress(NoSpace, OSError):
                self._flush()

    def _flush(self) -> None:
        now = time.monotonic()  # waits for nobody
        with self._alone(now), self._locked(now):
            self._leave_parents_files()
            segment = self._current
            if segment is None or not self._noted:
                return
            ends = [(segment.journal, self._journal_end(segment))]
            with self._space.reserve(ends, urgent=True):
                self._append_noted(segment)

    def record(self, records: np.ndarray) -> None:
        """Append EVICT records now; from its return on, everybody can see them.

        It may use the space that is kept back for this.

        Raises:
            NoSpace: there is no room for them. OSError: the file system failed. Then nobody will see them.
        """
        with self._alone(time.monotonic() + LOCK_TIMEOUT), self._locked(time.monotonic() + LOCK_TIMEOUT):
            self._leave_parents_files()
            if self._current is not None and self._current.journal_end > _MAX_JOURNAL_BYTES:
                self._retire()
            self._looked_at = float("-inf")  # nobody asks afterwards
            segment = self._writable(0, urgent=True)
            ends = [(segment.journal, self._journal_end(segment) + len(records) * RECORD_BYTES)]
            with self._space.reserve(ends, urgent=True):
                self._append(segment, records, time.monotonic() + LOCK_TIMEOUT)

    @property
    def wants_space(self) -> bool:
        """Is there little space left that is reserved already?"""
        segment = self._current
        if segment is None or segment.data.allocated - segment.cursor >= self._ahead() // 2:
            return False
        if segment.data.allocated >= self._most_bytes() // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT:
            return False
        return time.monotonic() > self._reserve_after

    def reserve_ahead(self) -> None:
        """Reserve space for what is stored next, so that dumps need not. May take the store lock.

        Raises what `SpaceKeeper` raises.
        """
        with self._locked(time.monotonic() + LOCK_TIMEOUT):
            self._leave_parents_files()
            segment = self._current
            if segment is None or not self.wants_space:
                return
            segment.users += 1  # it stays open, although this writer's lock is let go of
            most = self._most_bytes() - segment.cursor
            ahead = min(self._ahead(), max(0, most))
            ends = [
                (segment.data, segment.cursor + ahead),
                (segment.journal, self._journal_end(segment) + ahead // 64),
            ]
            self._largest //= 2
        try:
            self._space.grow_ahead(ends)
        finally:
            if segment.data.allocated < ends[0][1]:
                self._reserve_after = time.monotonic() + _RESERVE_SECONDS
            self._ended.append((segment, 0, None))
            with contextlib.suppress(NoSpace), self._locked(time.monotonic() + LOCK_TIMEOUT):
                pass

    def _ahead(self) -> int:
        capacity = self._root.capacity
        enough = max(min(self._space.chunk, capacity // LOW_SHARE), min(_AHEAD_BYTES, capacity // 64))
        return max(enough, min(3 * self._largest, capacity // LOW_SHARE))

    def look_again(self) -> None:
        """Somebody may just have deleted the current segment."""
        self._looked_at = float("-inf")

    def let_go_of_deleted(self) -> None:
        """Close files that others have deleted: while they are open, their space is not free."""
        with contextlib.suppress(NoSpace, OSError), self._locked(time.monotonic()):
            self._looked_at = time.monotonic()
            if self._current is not None and self._current.deleted():
                self._retire()

    def retire(self) -> None:
        """Begin another segment with the next dump, so that the current one can be deleted."""
        with self._locked(time.monotonic() + LOCK_TIMEOUT):
            self._retire()

    def close(self) -> None:
        """Seal the current segment. Not needed for correctness (invariant I9). Idempotent."""
        with contextlib.suppress(NoSpace), self._locked(time.monotonic() + LOCK_TIMEOUT):
            self._leave_parents_files()
            self._retire()

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """This writer's lock. Raises `NoSpace` when a sick disk holds up whoever has it for too long."""
        if not self._lock.acquire(blocking=False):
            _acquire(self._lock, deadline)
        try:
            self._settle()
            yield
        finally:
            self._lock.release()

    def _alone(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Where space cannot be preallocated, the store lock is held for a whole dump. Waiting for that with
        this writer's lock in hand would keep the dump that has it from publishing."""
        return contextlib.nullcontext() if self._space.preallocates else _held(self._one_at_a_time, deadline)

    # -- callers hold the lock ----------------------------------------------------------------------

    def _leave_parents_files(self) -> None:
        """In a forked child, begin anew: the files that are open belong to the parent."""
        if self._pid != os.getpid():
            self._pid, self._writer, self._seq, self._current = os.getpid(), new_writer_name(), 0, None

    def _writable(self, length: int, urgent: bool = False) -> OpenSegment:
        current = self._current
        if current is not None:
            if current.info.dropped or self._is_deleted(current):
                self._retire()
            elif current.cursor > SEGMENT_HEADER_BYTES and current.cursor + length > self._most_bytes():
                # It stays until there is another: evictions, which make room for that, are recorded in it.
                new = self._create(urgent)
                self._retire()
                self._current = new
        if self._current is None:
            self._current = self._create(urgent)
        return self._current

    def _most_bytes(self) -> int:
        share = max(_LEAST_SEGMENT_BYTES, self._root.capacity // _SEGMENTS_IN_CAPACITY)
        return min(self._segment_bytes, share)

    def _is_deleted(self, segment: OpenSegment) -> bool:
        """Asked again after each append, so that not every dump has to ask before."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        return segment.deleted()

    def _journal_end(self, segment: OpenSegment) -> int:
        """Where the journal ends when all that is promised, waiting to be recorded, and SEAL are in it."""
        return segment.journal_end + segment.promised + self._waiting_bytes()

    def _waiting_bytes(self) -> int:
        return (self.noted_records + 1) * RECORD_BYTES

    def _settle(self) -> None:
        """Account for extents whose dumps have ended; those that hold nothing are given back."""
        if self._current is not None and self._current.broken:
            self._retire()
        while self._ended:
            segment, promise, unused = self._ended.pop()
            if unused is not None and segment.cursor == align(unused.offset + unused.length):
                segment.cursor = unused.offset
            elif unused is not None:
                self._space.punch(unused.fd, unused.offset, unused.offset + unused.length)
            segment.users -= 1
            segment.promised -= promise
            if segment is not self._current and segment.users == 0:
                self._finish(segment)

    def _create(self, urgent: bool = False) -> OpenSegment:
        with self._space.locked():
            known = self._root.has_namespace(self._namespace)
            needed = _NEW_SEGMENT_BYTES // 2 if known else _NEW_SEGMENT_BYTES
            self._space.require(needed, divisible=False, urgent=urgent)
            self._root.make_namespace(self._namespace, self._identity)
            self._on_create()
            name = SegmentName(self._writer, self._seq)
            self._seq += 1
            return create_segment(
                self._root, self._namespace, name, self._space, self._catalog.add_own, self._open_journal,
                self._waiting_bytes(), urgent, self._direct,
            )  # fmt: skip

    def _append_noted(self, segment: OpenSegment) -> None:
        with self._noted_lock:
            noted, self._noted = self._noted, []
        if not noted:
            return
        records = np.concatenate(noted)
        # Room was made for what was noted until then; more may have come in the meantime.
        room = (segment.journal.allocated - segment.journal_end - segment.promised) // RECORD_BYTES - 1
        if self._space.preallocates and room < len(records):
            self.note(records[max(0, room) :])
            records = records[: max(0, room)]
        try:
            if len(records):
                self._append(segment, records, time.monotonic() + LOCK_TIMEOUT)
        except OSError as error:
            logger.warning("cannot note %d evictions and uses in the journal: %s", len(records), error)

    def _append(self, segment: OpenSegment, records: np.ndarray, deadline: float) -> None:
        try:
            segment.append(records, deadline)
        finally:
            self._settle()

    def _retire(self) -> None:
        """Take no more extents from the current segment; dumps under way may still publish."""
        segment, self._current = self._current, None
        if segment is not None and segment.users == 0:
            self._finish(segment)

    def _finish(self, segment: OpenSegment) -> None:
        if not segment.finish():
            self._catalog.forget(segment.info.name)


@contextlib.contextmanager
def _held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    _acquire(lock, deadline)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: threading.Lock, deadline: float) -> None:
    patience = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
    if not lock.acquire(timeout=patience):
        raise NoSpace(Reason.TIMEOUT, f"other dumps held it up for {patience:.1f} s")
