"""The writing side of one process in one namespace: its segments, its journals, its extents.

A dump takes three steps, of which only the second is long and runs without any lock:
reserve an extent, write it, append all its records to the journal. Until that append has returned,
the batch does not exist for anybody (invariant I2).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posix_store.capacity import LOCK_TIMEOUT, GrownFile, SpaceKeeper
from posix_store.catalog import SegmentInfo
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    MAX_BATCH_RECORDS,
    RECORD,
    RECORD_BYTES,
    SEAL,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    SegmentName,
    align,
    encode_header,
    new_writer_name,
    seal_records,
)
from posix_store.syscalls import write_at

logger = logging.getLogger(__name__)


_CREATE_ATTEMPTS = 3


class _TakenForAbandonedError(OSError):
    """Another process deleted a segment file that was just being made."""


@dataclass(frozen=True)
class Extent:
    """Space for one batch: `offset` is 4 KiB-aligned in the segment."""

    segment: OpenSegment
    offset: int
    length: int

    @property
    def fd(self) -> int:
        return self.segment.data.fd


class OpenSegment:
    """A segment being written, and its journal."""

    def __init__(self, info: SegmentInfo, data: GrownFile, journal: GrownFile) -> None:
        self.data = data
        self.journal = journal
        self.cursor = SEGMENT_HEADER_BYTES
        self.journal_end = RECORD_BYTES
        self.info = info
        self.users = 0
        self.broken = False


class SegmentWriter:
    """Extents and records of one process in one namespace. Thread-safe.

    Nothing is created before the first reservation, so a process that only looks up never writes.

    Args:
        register: puts each new segment into the catalog.
        segment_bytes: a segment is closed and a new one begun when it would grow beyond this.
    """

    def __init__(
        self,
        root: StoreRoot,
        namespace: str,
        identity: Mapping[str, Any],
        space: SpaceKeeper,
        register: Callable[[SegmentName, bytes], SegmentInfo],
        segment_bytes: int,
    ) -> None:
        self._root = root
        self._calls = root.syscalls
        self._namespace = namespace
        self._identity = identity
        self._space = space
        self._register = register
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
            if not self._space.preallocates:
                # The store lock is then held for the whole dump. Waiting for it with the other lock in hand
                # would keep the dump that has it from publishing.
                stack.enter_context(self._one_at_a_time)
            with self._lock:
                segment = self._writable(length)
                ends = [
                    (segment.data, segment.cursor + length),
                    (segment.journal, segment.journal_end + records * RECORD_BYTES),
                ]
                stack.enter_context(self._space.reserve(ends))
                extent = Extent(segment, segment.cursor, length)
                segment.cursor = align(segment.cursor + length)
                segment.users += 1
            try:
                yield extent
            except BaseException:
                self._give_back(extent)
                raise
            finally:
                self._release(segment)

    def publish(self, segment: OpenSegment, records: np.ndarray) -> None:
        """Append records to a segment's journal: from its return on, everybody can see them.

        Raises `OSError` when they could not all be written; then none of them will ever be visible.
        """
        with self._lock:
            self._record_evictions(segment)
            self._append(segment, records)

    def evict(self, located: list[tuple[bytes, bytes, int]]) -> None:
        """Record that blocks, given as (id, segment uid, offset), are gone or damaged.

        A process that has stored nothing yet keeps this in mind until it does, so that one that only
        loads never writes. Best effort, since a block that is found damaged again is a miss again.
        """
        with self._lock:
            self._evictions = (self._evictions + located)[-MAX_BATCH_RECORDS:]
            if self._current is not None:
                self._record_evictions(self._current)

    def close(self) -> None:
        """Seal the current segment. Not needed for correctness (invariant I9). Idempotent."""
        with self._lock:
            self._retire()

    # -- callers hold the lock ----------------------------------------------------------------------

    def _writable(self, length: int) -> OpenSegment:
        if self._pid != os.getpid():  # a forked child must not append to its parent's files
            self._pid, self._writer, self._seq, self._current = os.getpid(), new_writer_name(), 0, None
        current = self._current
        if current is not None:
            full = current.cursor > SEGMENT_HEADER_BYTES and current.cursor + length > self._segment_bytes
            if full or current.info.dropped or self._unlinked(current):
                self._retire()
        if self._current is None:
            self._current = self._create()
        return self._current

    def _give_back(self, extent: Extent) -> None:
        with self._lock:
            if extent.segment.cursor == align(extent.offset + extent.length):
                extent.segment.cursor = extent.offset
            else:
                self._space.punch(extent.fd, extent.offset, extent.offset + extent.length)

    def _unlinked(self, segment: OpenSegment) -> bool:
        """Has `clear` in another process, or an operator, deleted the files?"""
        return any(self._calls.fstat(f.fd).st_nlink == 0 for f in (segment.data, segment.journal))

    def _create(self) -> OpenSegment:
        self._root.make_namespace(self._namespace, self._identity)
        for _ in range(_CREATE_ATTEMPTS - 1):
            with contextlib.suppress(_TakenForAbandonedError):
                return self._try_create()
        return self._try_create()

    def _try_create(self) -> OpenSegment:
        name = SegmentName(self._writer, self._seq)
        self._seq += 1
        uid = secrets.token_bytes(16)
        opened: list[GrownFile] = []
        try:
            for file_name in (name.data, name.journal):
                opened.append(self._open_new(file_name))
            data, journal = opened
            ends = [(data, SEGMENT_HEADER_BYTES), (journal, RECORD_BYTES)]
            with self._space.reserve(ends):
                self._write_header(data, SEGMENT_MAGIC, uid, SEGMENT_HEADER_BYTES)
                self._write_header(journal, JOURNAL_MAGIC, uid, RECORD_BYTES)
            return OpenSegment(self._register(name, uid), data, journal)
        except BaseException:
            for file in opened:
                with contextlib.suppress(OSError):
                    self._calls.unlink(file.path)
                with contextlib.suppress(OSError):
                    self._calls.close(file.fd)
            raise

    def _open_new(self, file_name: str) -> GrownFile:
        path = os.path.join(self._root.namespace_path(self._namespace), file_name)
        fd = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._mark_as_live(fd, path)
        except BaseException:
            self._calls.close(fd)
            raise
        return GrownFile(fd, path)

    def _mark_as_live(self, fd: int, path: str) -> None:
        """Take the lock that tells a living writer from a dead one; held for as long as this process lives.

        Others may hold it for a moment, to ask, or to delete the file because it looked abandoned.
        """
        try:
            locked = self._root.try_lock(fd, LOCK_TIMEOUT)
        except OSError as error:
            logger.debug("no lock on %s: %s; other processes will take it for live", path, error)
            return
        if not locked or self._calls.fstat(fd).st_nlink == 0:
            raise _TakenForAbandonedError(errno.EAGAIN, "taken for an abandoned segment", path)

    def _write_header(self, file: GrownFile, magic: bytes, uid: bytes, size: int) -> None:
        header = encode_header(magic, uid, bytes.fromhex(self._namespace), time.time_ns())
        write_at(self._calls, file.fd, header.ljust(size, b"\0"), 0)

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
        if segment.broken:
            raise OSError(errno.EBADF, "the journal is closed after a failed append")
        try:
            for start in range(0, len(records), MAX_BATCH_RECORDS):
                data = seal_records(records[start : start + MAX_BATCH_RECORDS])
                write_at(self._calls, segment.journal.fd, data, segment.journal_end)
                segment.journal_end += len(data)
        except OSError:
            # What was written of the batch is an unfinished tail, which readers ignore for as long as
            # nothing follows it. So nothing ever may.
            segment.broken = True
            if self._current is segment:
                self._retire()
            raise

    def _retire(self) -> None:
        """Take no more extents from the current segment; dumps under way may still publish."""
        segment, self._current = self._current, None
        if segment is not None and segment.users == 0:
            self._finish(segment)

    def _release(self, segment: OpenSegment) -> None:
        with self._lock:
            segment.users -= 1
            if segment is not self._current and segment.users == 0:
                self._finish(segment)

    def _finish(self, segment: OpenSegment) -> None:
        """Tell readers that nothing follows, give back what was reserved beyond the end, close the files."""
        if not segment.broken:
            record = np.zeros(1, RECORD)
            record["kind"] = SEAL
            record["time"] = int(time.time())
            with contextlib.suppress(OSError):
                self._append(segment, record)
        for file in (segment.data, segment.journal):
            self._space.trim(file.fd)
            with contextlib.suppress(OSError):
                self._calls.close(file.fd)
