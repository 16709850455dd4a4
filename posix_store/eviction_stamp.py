"""The stamp of evictions: eight bytes that tell a load, without waiting, that no hole was made under it.

They lie in the file that evictors lock. Who is about to free parts of files writes an odd number there, makes
the holes, and writes an even one. No number comes twice (they are random), so who reads the same even number
before and after reading a block knows that no hole was made in between, whatever has become of journals. A
process that dies half-way leaves an odd number; who has the lock next writes an even one.

Who reads the number keeps the GIL: letting go of it costs up to 5 ms beside a thread that runs Python. The
file is not mapped, because to read from a map of a file that somebody has cut kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from posix_store.capacity import NoSpace, SpaceKeeper
from posix_store.root import EVICTION_LOCK_FILE, StoreRoot
from posix_store.segment import EXTENT_ALIGNMENT
from posix_store.syscalls import Syscalls, close_quietly, read_at, write_at

logger = logging.getLogger(__name__)

STAMP_BYTES = 8
LOOK_SECONDS = 1.0
"""How often it is asked whether the file still has its name, or can be had now."""
_IN_MEMORY = ("tmpfs", "ramfs")
_LAYERED = ("overlay",)
"""A file that is open for reading stays the old one there when somebody writes to it for the first time."""


class EvictionStamp:
    """Written by who holds the eviction lock. Used by one thread at a time.

    Args:
        space: for the page that the file takes on disk, once.
    """

    def __init__(self, root: StoreRoot, space: SpaceKeeper) -> None:
        self._root = root
        self._calls = root.syscalls
        self._space = space
        self._fd: int | None = None

    @contextlib.contextmanager
    def held(self, fd: int) -> Iterator[None]:
        """The caller has locked this file of stamps for the body of the `with`. Best effort."""
        try:
            stamp = self._stamp_in(fd)
            if stamp is not None and stamp % 2:  # its writer has died, and with it all that it was doing
                _write(self._calls, fd, _even())
            self._fd = fd
        except OSError as error:
            logger.debug("posix_store %s: no stamp of evictions: %s", self._root.path, error)
        try:
            yield
        finally:
            self._fd = None

    def make(self) -> None:
        """Make the file where it is missing or too short, unless somebody evicts. Best effort."""
        try:
            with self._root.locked_file(0, EVICTION_LOCK_FILE) as fd:
                if fd is not None and self._stamp_in(fd) is None:
                    self._begin_file(fd)
        except (OSError, NoSpace) as error:
            logger.debug("posix_store %s: no stamp of evictions: %s", self._root.path, error)

    @contextlib.contextmanager
    def punching(self) -> Iterator[None]:
        """Holes may be made under blocks that were published, in the body of the `with`.

        Their EVICT records are in a journal. Raises `OSError` and `NoSpace` when the stamp cannot be written:
        then loads would not notice, and no hole may be made.
        """
        fd = self._fd
        if fd is None:
            raise OSError(errno.ENOLCK, "there is no stamp of evictions")
        if self._stamp_in(fd) is None:
            self._begin_file(fd)
        _write(self._calls, fd, _even() | 1)
        # After that: whoever opens the file from now on reads the odd number, if this is the file.
        if not self._calls.fstat(fd).st_nlink:
            raise OSError(errno.ESTALE, "the eviction lock was deleted")
        yield
        # Not after an error: holes may be under way, and what is odd is put right by who has the lock next.
        with contextlib.suppress(OSError):
            _write(self._calls, fd, _even())

    def _stamp_in(self, fd: int) -> int | None:
        return _decode(read_at(self._calls, fd, STAMP_BYTES, 0))

    def _begin_file(self, fd: int) -> None:
        """Raises `OSError` and `NoSpace`."""
        with self._space.locked():
            self._space.require(EXTENT_ALIGNMENT, divisible=False, urgent=True)
            _write(self._calls, fd, _even())


@dataclass(frozen=True)
class Stamp:
    """What was read, and from which of the files that this process has opened: a copy of one says nothing of
    what is done under the lock of the other."""

    number: int
    file: int


class EvictionWatch:
    """Reads the stamp. Thread-safe, and never waits for a disk but to open the file."""

    def __init__(self, root: StoreRoot) -> None:
        self._calls = root.syscalls
        self._path = os.path.join(root.path, EVICTION_LOCK_FILE)
        self._in_memory = root.file_system in _IN_MEMORY
        self._writes = root.read_only_because is None
        self._usable = self._writes or root.file_system not in _LAYERED
        self._file: _OpenFile | None = None
        self._opened = 0
        self._looked_at = float("-inf")
        self._lock = threading.Lock()

    def stamp(self) -> Stamp | None:
        """The stamp; None when there is none to be had, or somebody is making holes."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._look()
                self._looked_at = now
            finally:
                self._lock.release()
        stamp = self._read(self._file)
        return None if stamp is None or stamp.number % 2 else stamp

    def is_still(self, stamp: Stamp) -> bool:
        """Was no hole made since `stamp` was read? Asked after the bytes were read.

        The kernel takes a reference to the page of the file before it copies from it, which orders that
        behind what was read before, on all processors; and a hole is made by a later system call of who has
        written the stamp. If the file still has a name then, nobody has begun another one before.
        """
        file = self._file
        try:
            if self._read(file) == stamp and file is not None and self._calls.peek_links(file.fd):
                return True
        except OSError as error:
            logger.debug("%s: %s", self._path, error)
        self._looked_at = float("-inf")
        return False

    def close(self) -> None:
        """Let go of the file; there is no stamp from now on. Idempotent."""
        with self._lock:
            self._usable, self._file, self._looked_at = False, None, float("inf")

    def _look(self) -> None:
        file, self._file = self._file, None
        if not self._usable:
            return
        try:
            if file is not None and os.path.samestat(
                self._calls.stat(self._path), self._calls.fstat(file.fd)
            ):
                self._file = file
                return
            flags = os.O_RDWR if self._writes else os.O_RDONLY
            fd = self._calls.open(self._path, flags)
            self._opened += 1
            self._file = _OpenFile(self._calls, fd, self._opened)
        except OSError as error:
            logger.debug("%s: no stamp of evictions: %s", self._path, error)

    def _read(self, file: _OpenFile | None) -> Stamp | None:
        if file is None:
            return None
        try:
            data = self._calls.peek(file.fd, STAMP_BYTES, self._in_memory)
        except OSError:
            # Not in the page cache, or a file system that does not tell whether it is.
            try:
                data = self._calls.pread(file.fd, STAMP_BYTES, 0)
            except OSError as error:
                logger.debug("%s: %s", self._path, error)
                return None
        number = _decode(data)
        return None if number is None else Stamp(number, file.number)


class _OpenFile:
    """A descriptor that is closed when no thread uses it any more."""

    def __init__(self, calls: Syscalls, fd: int, number: int) -> None:
        self.fd = fd
        self.number = number
        self._calls = calls

    def __del__(self) -> None:
        close_quietly(self._calls, self.fd)


def _even() -> int:
    return secrets.randbits(8 * STAMP_BYTES) & ~1


def _write(calls: Syscalls, fd: int, stamp: int) -> None:
    write_at(calls, fd, stamp.to_bytes(STAMP_BYTES, "little"), 0)


def _decode(data: bytes) -> int | None:
    return int.from_bytes(data, "little") if len(data) == STAMP_BYTES else None
