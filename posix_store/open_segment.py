"""A segment that this process is writing, and its journal."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from posix_store.capacity import LOCK_TIMEOUT, GrownFile, SpaceKeeper
from posix_store.journal import Journal
from posix_store.known import SegmentInfo
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    MAX_BATCH_RECORDS,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    SegmentName,
    encode_header,
    seal_record,
)
from posix_store.syscalls import Syscalls, close_quietly, write_at

logger = logging.getLogger(__name__)


class OpenSegment:
    """The files of one segment. Not thread-safe: its writer's lock guards it.

    Attributes:
        cursor: where the next extent begins.
        users: dumps that have an extent in it.
        promised: bytes of journal that those dumps may still append.
        tail: the end of the journal; engines append to it as well.
    """

    def __init__(
        self, calls: Syscalls, info: SegmentInfo, data: GrownFile, journal: GrownFile, tail: Journal
    ) -> None:
        self.info = info
        self.data = data
        self.journal = journal
        self.tail = tail
        self.cursor = SEGMENT_HEADER_BYTES
        self.users = 0
        self.promised = 0
        self._calls = calls
        self._direct_fd: int | None = None
        self._direct_lock = threading.Lock()

    def direct_fd(self) -> int:
        """A descriptor of the data file that goes around the page cache. Thread-safe. Raises `OSError`."""
        with self._direct_lock:
            return self._open_direct()

    def _open_direct(self) -> int:
        if self._direct_fd is None:
            fd = self._calls.open(self.data.path, os.O_WRONLY)
            try:
                if not os.path.samestat(self._calls.fstat(fd), self._calls.fstat(self.data.fd)):
                    raise OSError(errno.ESTALE, "another file is in the place of the segment")
                self._calls.set_direct(fd)
            except OSError:
                close_quietly(self._calls, fd)
                raise
            self._direct_fd = fd
        return self._direct_fd

    @property
    def journal_end(self) -> int:
        return self.tail.end

    @property
    def broken(self) -> bool:
        """Did a journal append fail, so that nothing may be appended any more?"""
        return bool(self.tail.broken)

    def append(self, records: np.ndarray, deadline: float) -> None:
        """Append records to the journal. Raises `OSError`; then none of the last append is ever visible."""
        for start in range(0, len(records), MAX_BATCH_RECORDS):
            self.tail.append(records[start : start + MAX_BATCH_RECORDS], deadline)
            self.info.evicts |= bool((records["kind"] == EVICT).any())

    def deleted(self) -> bool:
        """Has `clear` in another process, or an operator, deleted the files? Raises `OSError`."""
        return any(self._calls.fstat(f.fd).st_nlink == 0 for f in (self.data, self.journal))

    def finish(self) -> bool:
        """Tell readers that nothing follows, give back space that holds nothing published, close the files.

        A segment that holds no record is deleted; False then.
        """
        if self._direct_fd is not None:
            close_quietly(self._calls, self._direct_fd)
            self._direct_fd = None
        if self.journal_end == RECORD_BYTES:
            discard(self._calls, [self.data, self.journal])
            return False
        # The data first: what lies behind the end of a sealed segment is given back by nobody.
        self._cut(self.data, self.cursor)
        if not self.broken:
            with contextlib.suppress(OSError):
                self.append(seal_record(), time.monotonic() + LOCK_TIMEOUT)
                self.info.sealed = True
        self._cut(self.journal, self.journal_end)
        for file in (self.data, self.journal):
            close_quietly(self._calls, file.fd)
        return True

    def _cut(self, file: GrownFile, end: int) -> None:
        """Also frees what was preallocated behind the end, which punching does not on ext4."""
        with contextlib.suppress(OSError):
            self._calls.ftruncate(file.fd, min(end, self._calls.fstat(file.fd).st_size))


def create_segment(
    root: StoreRoot,
    namespace: str,
    name: SegmentName,
    space: SpaceKeeper,
    register: Callable[[SegmentName, bytes], SegmentInfo],
    open_journal: Callable[[int, int], Journal],
    journal_bytes: int,
    urgent: bool,
    sized: bool,
) -> OpenSegment:
    """Make the files of a new segment, with their headers and room for `journal_bytes` of records.

    With `urgent` it is for evictions, and may use what is kept back for them. The caller holds the store
    lock, so that no other process takes the empty files for a dead writer's. With `sized` the data file is as
    long as the space that is reserved for it: writes that make a file longer take turns in the kernel, which
    matters with direct I/O.

    Raises:
        NoSpace, OSError: nothing is left behind.
    """
    calls = root.syscalls
    uid = secrets.token_bytes(16)
    opened: list[GrownFile] = []
    try:
        for file_name in (name.data, name.journal):
            opened.append(_open_new(root, os.path.join(root.namespace_path(namespace), file_name)))
        data, journal = opened
        data.sized = sized
        space.admit([(data, SEGMENT_HEADER_BYTES), (journal, RECORD_BYTES + journal_bytes)], urgent)
        headers = ((data, SEGMENT_MAGIC, SEGMENT_HEADER_BYTES), (journal, JOURNAL_MAGIC, RECORD_BYTES))
        for file, magic, size in headers:
            header = encode_header(magic, uid, bytes.fromhex(namespace), time.time_ns())
            write_at(calls, file.fd, header.ljust(size, b"\0"), 0)
        tail = open_journal(journal.fd, RECORD_BYTES)
        return OpenSegment(calls, register(name, uid), data, journal, tail)
    except BaseException:
        discard(calls, opened)
        raise


def discard(calls: Syscalls, files: list[GrownFile]) -> None:
    """Delete and close files that hold nothing."""
    for file in files:
        with contextlib.suppress(OSError):
            calls.unlink(file.path)
        close_quietly(calls, file.fd)


def _open_new(root: StoreRoot, path: str) -> GrownFile:
    """Create a file, locked for as long as this process lives, so that others know its writer is alive."""
    fd = root.syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Somebody who asks whether the file has a writer holds the lock for a moment.
        if not root.try_lock(fd, LOCK_TIMEOUT):
            logger.warning("%s is locked by others; its space may be reclaimed while it is written", path)
    except OSError as error:
        logger.debug("no lock on %s: %s; other processes will take it for live", path, error)
    return GrownFile(fd, path)
