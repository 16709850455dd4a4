"""The writing side of one process in one namespace: its segments, its journals, its extents.

A dump takes three steps, of which only the second is long and runs without any lock:
reserve an extent, write it, append all its records to the journal. Until that append has returned,
the batch does not exist for anybody (invariant I2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posix_store.capacity import NoSpace, SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.open_segment import OpenSegment, create_segment
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    EXTENT_ALIGNMENT,
    MAX_BATCH_RECORDS,
    RECORD,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentName,
    align,
    new_writer_name,
)

logger = logging.getLogger(__name__)

_NEW_SEGMENT_BYTES = 4 * EXTENT_ALIGNMENT
"""Allocated before the first extent: a directory, NAMESPACE.json, and the two headers."""


@dataclass(frozen=True)
class Extent:
    """Space for one batch: `offset` is 4 KiB-aligned in the segment."""

    segment: OpenSegment
    offset: int
    length: int

    @property
    def fd(self) -> int:
        return self.segment.data.fd


class SegmentWriter:
    """Extents and records of one process in one namespace. Thread-safe.

    Nothing is created before the first reservation, so a process that only looks up never writes.

    Args:
        catalog: told of new segments and of what is published.
        segment_bytes: a segment is closed and a new one begun when it would grow beyond this.
    """

    def __init__(
        self,
        root: StoreRoot,
        namespace: str,
        identity: Mapping[str, Any],
        space: SpaceKeeper,
        catalog: Catalog,
        segment_bytes: int,
    ) -> None:
        self._root = root
        self._calls = root.syscalls
        self._namespace = namespace
        self._identity = identity
        self._space = space
        self._catalog = catalog
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._pid = os.getpid()
        self._writer = new_writer_name()
        self._seq = 0
        self._current: OpenSegment | None = None
        self._evictions: list[tuple[bytes, bytes, int]] = []

    @contextlib.contextmanager
    def extent(self, length: int, records: int) -> Iterator[Extent]:
        """An extent of `length` bytes for a batch of `records` blocks, for the body of the `with`.

        If the body raises, the extent is given back.

        Raises:
            NoSpace: the batch must go unstored.
            OSError: the file system failed.
        """
        with contextlib.ExitStack() as stack:
            with self._lock:
                self._leave_parents_files()
                if self._current is None:
                    self._current = self._create()  # which finds out whether space can be preallocated
            if not self._space.preallocates:
                # The store lock is then held for the whole dump. Waiting for it with the other lock in hand
                # would keep the dump that has it from publishing.
                stack.enter_context(self._one_at_a_time)
            with self._lock:
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
            try:
                yield extent
            except BaseException:
                self._give_back(extent)
                raise
            finally:
                self._release(segment, promise)

    def publish(self, segment: OpenSegment, records: np.ndarray) -> bool:
        """Append records to a segment's journal: from its return on, everybody can see them.

        False when the segment has been deleted or refused meanwhile: nobody will. Raises `OSError` when the
        records could not all be written; then none of them will ever be visible.
        """
        # One step for all dumps: shards of a block that are dumped at once must agree on their copy.
        with self._lock:
            self._record_evictions(segment)
            self._catalog.assign_copies(segment.info, records)
            self._append(segment, records)
            return self._catalog.publish_own(segment.info, records)

    def evict(self, located: list[tuple[bytes, bytes, int]]) -> None:
        """Record that blocks, given as (id, segment uid, offset), are gone or damaged.

        A process that has stored nothing yet keeps this in mind until it does, so that one that only
        loads never writes. Best effort, since a block that is found damaged again is a miss again.
        """
        with self._lock:
            self._leave_parents_files()
            self._evictions = (self._evictions + located)[-MAX_BATCH_RECORDS:]
            segment = self._current
            if segment is None or not self._space.preallocates:
                return
            ends = [(segment.journal, self._journal_end(segment))]
            with contextlib.suppress(NoSpace, OSError), self._space.reserve(ends):
                self._record_evictions(segment)

    def close(self) -> None:
        """Seal the current segment. Not needed for correctness (invariant I9). Idempotent."""
        with self._lock:
            self._leave_parents_files()
            self._retire()

    # -- callers hold the lock ----------------------------------------------------------------------

    def _leave_parents_files(self) -> None:
        """In a forked child, begin anew: the files that are open belong to the parent."""
        if self._pid != os.getpid():
            self._pid, self._writer, self._seq, self._current = os.getpid(), new_writer_name(), 0, None

    def _writable(self, length: int) -> OpenSegment:
        current = self._current
        if current is not None:
            full = current.cursor > SEGMENT_HEADER_BYTES and current.cursor + length > self._segment_bytes
            if full or current.info.dropped or current.deleted():
                self._retire()
        if self._current is None:
            self._current = self._create()
        return self._current

    def _journal_end(self, segment: OpenSegment) -> int:
        """Where the journal ends when all that is promised, waiting to be recorded, and SEAL are in it."""
        return segment.journal_end + segment.promised + self._waiting_bytes()

    def _waiting_bytes(self) -> int:
        return (len(self._evictions) + 1) * RECORD_BYTES

    def _give_back(self, extent: Extent) -> None:
        with self._lock:
            if extent.segment.cursor == align(extent.offset + extent.length):
                extent.segment.cursor = extent.offset
            else:
                self._space.punch(extent.fd, extent.offset, extent.offset + extent.length)

    def _create(self) -> OpenSegment:
        with self._space.locked():
            self._space.require(_NEW_SEGMENT_BYTES, divisible=False)
            self._root.make_namespace(self._namespace, self._identity)
            name = SegmentName(self._writer, self._seq)
            self._seq += 1
            return create_segment(
                self._root, self._namespace, name, self._space, self._catalog.add_own, self._waiting_bytes()
            )

    def _record_evictions(self, segment: OpenSegment) -> None:
        located, self._evictions = self._evictions, []
        if not located:
            return
        records = np.zeros(len(located), RECORD)
        records["kind"] = EVICT
        records["time"] = int(time.time())
        records["id"] = [np.void(block) for block, _, _ in located]
        records["parent"] = [np.void(uid) for _, uid, _ in located]
        records["offset"] = [offset for _, _, offset in located]
        try:
            self._append(segment, records)
        except OSError as error:
            logger.warning("cannot record %d damaged blocks in the journal: %s", len(located), error)

    def _append(self, segment: OpenSegment, records: np.ndarray) -> None:
        try:
            segment.append(records)
        finally:
            if segment.broken and segment is self._current:
                self._retire()

    def _retire(self) -> None:
        """Take no more extents from the current segment; dumps under way may still publish."""
        segment, self._current = self._current, None
        if segment is not None and segment.users == 0:
            self._finish(segment)

    def _release(self, segment: OpenSegment, promise: int) -> None:
        with self._lock:
            segment.users -= 1
            segment.promised -= promise
            if segment is not self._current and segment.users == 0:
                self._finish(segment)

    def _finish(self, segment: OpenSegment) -> None:
        if not segment.finish():
            self._catalog.forget(segment.info.name)
