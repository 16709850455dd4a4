"""Space: who may allocate how much, with the file system as the only ledger.

A writer preallocates what it is about to write while it holds the store lock, so the blocks that the
file system reports as allocated include everything promised to every writer, dead ones too. There is
no counter to lose. Where the file system cannot preallocate, the lock is held until the bytes are
written instead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from posix_store.errors import Reason
from posix_store.reclaim import reclaim
from posix_store.root import DEFAULT_MIN_FREE_SHARE, StoreRoot
from posix_store.segment import EXTENT_ALIGNMENT, align
from posix_store.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LOCK_TIMEOUT = 1.0
"""Seconds a dump waits for the store lock before its blocks go unstored."""
RECLAIM_SECONDS = 0.25
"""Time that one reservation spends on what dead writers left; the next goes on."""
COUNT_SECONDS = 0.25
"""Time for adding up what is allocated; when it is not enough, the blocks go unstored."""


@dataclass
class GrownFile:
    """A file that one writer appends to; `allocated` is how far space has been reserved for it."""

    fd: int
    path: str
    allocated: int = 0


class NoSpace(Exception):
    """The blocks of a dump cannot be stored; `reason` says which limit stands in the way."""

    def __init__(self, reason: Reason, message: str, missing: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.missing = missing
        """Bytes by which the dump is too large; None when a smaller one would not help."""


class SpaceKeeper:
    """Reserves space for one process under the capacity and above the free-space floor (invariant I4).

    Args:
        root: the store root.
        min_free: bytes that must stay free on the file system; None: 5 % of its size.
        chunk: bytes to reserve at a time, so that few dumps need the lock.
    """

    def __init__(self, root: StoreRoot, min_free: int | None, chunk: int) -> None:
        self._root = root
        self._min_free = min_free
        self._chunk = chunk
        self.preallocates = True
        """False once the file system has refused: reservations then hold the store lock while they last."""
        self._said_full = False
        self._reclaiming = reclaim(root)

    @property
    def min_free(self) -> int:
        """The floor in bytes. Raises `OSError`."""
        if self._min_free is not None:
            return self._min_free
        disk = self._root.syscalls.statvfs(self._root.path)
        return int(disk.f_blocks * disk.f_frsize * DEFAULT_MIN_FREE_SHARE)

    def available(self) -> int:
        """Bytes that may still be allocated. Raises `OSError`."""
        disk = self._root.syscalls.statvfs(self._root.path)
        return min(
            self._root.current_capacity() - self._root.allocated_bytes(COUNT_SECONDS),
            disk.f_bavail * disk.f_frsize - self.min_free,
        )

    @contextlib.contextmanager
    def reserve(self, ends: list[tuple[GrownFile, int]]) -> Iterator[None]:
        """Make room for files to grow to the given ends, for the body of the `with`.

        Raises:
            NoSpace: the blocks must go unstored.
            OSError: the file system failed.
        """
        if self.preallocates and all(end <= file.allocated for file, end in ends):
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.locked())
            self.admit(ends)
            if self.preallocates:
                stack.close()
                yield
            else:
                yield
                for file, end in ends:
                    file.allocated = max(file.allocated, align(end))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The store lock, for the body of the `with`. Raises `NoSpace` when it cannot be had in time."""
        with self._root.lock(LOCK_TIMEOUT) as held:
            if not held:
                raise NoSpace(Reason.TIMEOUT, f"the store lock was held by others for {LOCK_TIMEOUT} s")
            deadline = time.monotonic() + RECLAIM_SECONDS
            for _ in self._reclaiming:
                if time.monotonic() > deadline:
                    break
            yield

    def require(self, needed: int, divisible: bool = True) -> int:
        """Bytes that may be allocated now; raises `NoSpace` when there are fewer than `needed`.

        With `divisible`, the exception says by how much a batch would have to be smaller.
        """
        available = self.available()
        if needed > available:
            self._say_full(needed, available)
            raise NoSpace(
                Reason.FULL,
                f"{needed} bytes needed, {available} available",
                needed - available if divisible else None,
            )
        return available

    def admit(self, ends: list[tuple[GrownFile, int]]) -> None:
        """Make room for files to grow to the given ends. The caller holds the store lock."""
        needed = sum(max(0, align(end) - file.allocated) for file, end in ends)
        spare = min(self._chunk, (self.require(needed) - needed) // 8)
        for file, end in ends:
            # The journal grows by a record where the segment grows by a block: a small share is plenty.
            share = spare if file.path.endswith(".seg") else spare // 64
            if self.preallocates and end > file.allocated:
                self._preallocate(file, align(end), align(end) + share // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT)

    def _preallocate(self, file: GrownFile, needed: int, wanted: int) -> None:
        for end in (wanted, needed):
            try:
                self._root.syscalls.fallocate(file.fd, FALLOC_KEEP_SIZE, file.allocated, end - file.allocated)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    logger.warning(
                        "posix_store %s: no preallocation on this file system (%s)", self._root.path, error
                    )
                    self.preallocates = False
                    return
                if error.errno != errno.ENOSPC or end == needed:
                    raise
            else:
                file.allocated = end
                return

    def _say_full(self, needed: int, available: int) -> None:
        if self._said_full:
            return
        self._said_full = True
        logger.warning(
            "posix_store %s is full: a dump needs %d bytes, %d may be allocated (capacity %d, floor of free "
            "space %d). Pages go unstored until space is made: raise `capacity`, lower `min_free`, or clear "
            "old namespaces.",
            self._root.path, needed, max(0, available), self._root.capacity, self.min_free,
        )  # fmt: skip

    def punch(self, fd: int, start: int, end: int) -> None:
        """Give the whole 4 KiB blocks in [start, end) back to the file system; the file keeps its size."""
        start, end = align(start), end // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        if end <= start:
            return
        try:
            self._root.syscalls.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, start, end - start)
        except OSError as error:
            logger.debug("posix_store %s: cannot punch: %s", self._root.path, error)
