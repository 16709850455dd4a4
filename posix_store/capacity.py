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
from posix_store.mount_type import COPY_ON_WRITE
from posix_store.reclaim import reclaim
from posix_store.root import DEFAULT_MIN_FREE_SHARE, StoreRoot
from posix_store.segment import EXTENT_ALIGNMENT, align
from posix_store.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate_in_steps

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LOCK_TIMEOUT = 1.0
"""Seconds a dump waits for the store lock before its blocks go unstored."""
RECLAIM_SECONDS = 0.25
"""Time that one reservation spends on what dead writers left; the next goes on."""
COUNT_SECONDS = 0.5
"""Time for adding up what is allocated; when it is not enough, the blocks go unstored."""
MAX_KEPT_BACK = 1 << 20
"""Bytes, at most, that dumps leave for the records of evictions, without which no space can be made."""
LOW_SHARE = 32
"""Room is made ahead when less than one part in so many of what the store may hold is free."""
SPARE_SHARE = 2
"""A writer reserves ahead at most one part in so many of what is left, so that others find some too."""
AHEAD_STEP = 4 << 20
"""Bytes reserved ahead in one go: on tmpfs that takes time, in which nobody can write to the file."""
LEAST_KEPT_BACK = 24 << 10
"""A new segment, and a few pages of its journal; less only in a store that has hardly room for blocks."""


@dataclass
class GrownFile:
    """A file that one writer appends to; `allocated` is how far space has been reserved for it."""

    fd: int
    path: str
    allocated: int = 0
    sized: bool = False
    """Is it made as long as what is reserved for it?"""


class NoSpace(Exception):
    """The blocks of a dump cannot be stored; `reason` says which limit stands in the way."""

    def __init__(self, reason: Reason, message: str, missing: int = 0, divisible: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.missing = missing
        """Bytes that would have to be free in addition; 0 when it is not space that is missing."""
        self.divisible = divisible
        """Would a smaller dump help?"""


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
        self.chunk = chunk
        self.preallocates = True
        """False once the file system has refused: reservations then hold the store lock while they last."""
        self.is_low = False
        """Was there little space left when it was last asked for? Then it is time to make room ahead."""
        self.punches = True
        """False once the file system has refused to free a part of a file."""
        self._said_full = False
        self._reclaiming = reclaim(root)

    @property
    def root_path(self) -> str:
        return self._root.path

    @property
    def min_free(self) -> int:
        """The floor in bytes. Raises `OSError`."""
        if self._min_free is not None:
            return self._min_free
        disk = self._root.syscalls.statvfs(self._root.path)
        return int(disk.f_blocks * disk.f_frsize * DEFAULT_MIN_FREE_SHARE)

    def available(self, urgent: bool = True, exact: bool = True) -> int:
        """Bytes that may still be allocated; without `urgent`, less what is kept back for evictions.

        Without `exact` it may be more: see `StoreRoot.allocated_bytes`. Raises `OSError`.
        """
        disk = self._root.syscalls.statvfs(self._root.path)
        allocated = self._root.allocated_bytes(COUNT_SECONDS, exact)
        room = min(
            self._root.current_capacity() - allocated,
            disk.f_bavail * disk.f_frsize - self.min_free,
        )
        size = allocated + max(0, room)
        self.is_low = room < size // LOW_SHARE
        kept_back = min(MAX_KEPT_BACK, max(size // 64, min(LEAST_KEPT_BACK, size // 4)))
        return room if urgent else room - kept_back // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT

    @property
    def kept_back(self) -> int:
        """Bytes that only the records of evictions may use. Raises `OSError`."""
        return self.available() - self.available(urgent=False)

    @contextlib.contextmanager
    def reserve(self, ends: list[tuple[GrownFile, int]], urgent: bool = False) -> Iterator[None]:
        """Make room for files to grow to the given ends, for the body of the `with`.

        With `urgent` it may use what is kept back.

        Raises:
            NoSpace: the blocks must go unstored.
            OSError: the file system failed.
        """
        if self.preallocates and all(end <= file.allocated for file, end in ends):
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.locked())
            self.admit(ends, urgent)
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

    def require(self, needed: int, divisible: bool = True, urgent: bool = False) -> int:
        """Bytes that may be allocated now; raises `NoSpace` when there are fewer than `needed`.

        With `urgent` they include what is kept back. `divisible`: would a smaller batch help?
        """
        available = self.available(urgent, exact=False)
        if needed > available and self._root.remembers_sizes:
            available = self.available(urgent)
        if urgent and available < 0 and needed <= LEAST_KEPT_BACK:
            # The capacity was lowered, or others have filled the disk: without this it could not be kept.
            return needed
        if needed > available:
            raise NoSpace(
                Reason.FULL,
                f"{needed} bytes needed, {max(0, available)} may be allocated (capacity "
                f"{self._root.capacity}, floor of free space {self.min_free})",
                needed - available,
                divisible,
            )
        return available

    def admit(self, ends: list[tuple[GrownFile, int]], urgent: bool = False) -> None:
        """Make room for files to grow to the given ends. The caller holds the store lock."""
        needed = sum(max(0, align(end) - file.allocated) for file, end in ends)
        available = self.require(needed, urgent=urgent)
        most = min(self.chunk, self._root.capacity // 32)
        if urgent or self._root.file_system in COPY_ON_WRITE:  # there a spare would stay when it is cut off
            most = 0
        spare = min(most, (available - needed) // SPARE_SHARE)
        for file, end in ends:
            # The journal grows by a record where the segment grows by a block: a small share is plenty.
            share = spare if file.path.endswith(".seg") else spare // 64
            if self.preallocates and end > file.allocated:
                self._preallocate(file, align(end), align(end) + share // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT)

    def grow_ahead(self, ends: list[tuple[GrownFile, int]]) -> None:
        """Make room for files to grow to the given ends, or as far as others are left as much. Best effort.

        Takes the store lock.
        """
        if self._root.file_system in COPY_ON_WRITE or not self.preallocates:
            return
        with self.locked():
            spare = self.available(urgent=False, exact=False) // SPARE_SHARE
            for file, wanted in ends:
                end = min(wanted, file.allocated + spare) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
                if end > file.allocated:
                    spare -= end - file.allocated
                    self._preallocate(file, end, end, step=AHEAD_STEP)

    def _preallocate(self, file: GrownFile, needed: int, wanted: int, step: int | None = None) -> None:
        for end in (wanted, needed):
            try:
                mode = 0 if file.sized else FALLOC_KEEP_SIZE
                start, calls = file.allocated, self._root.syscalls
                if step is None:
                    calls.fallocate(file.fd, mode, start, end - start)
                else:
                    fallocate_in_steps(calls, file.fd, mode, start, end - start, step)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    self._cannot_preallocate(error)
                    return
                if error.errno != errno.ENOSPC or end == needed:
                    raise
            else:
                # Asked of a new file only: of others a part may have been punched out.
                fresh = file.allocated == 0
                if fresh and self._root.syscalls.fstat(file.fd).st_blocks * 512 < end:
                    # (GlusterFS.) Others would not see what was promised here, and promise it again.
                    self._cannot_preallocate("what is preallocated is not counted")
                    # Nobody would see it, and nobody give it back.
                    size = 0 if file.sized else self._root.syscalls.fstat(file.fd).st_size
                    self._root.syscalls.ftruncate(file.fd, size)
                    return
                file.allocated = max(file.allocated, end)
                return

    def _cannot_preallocate(self, why: object) -> None:
        self.preallocates = False
        logger.warning(
            "posix_store %s: no preallocation on this file system (%s): one process at a time writes",
            self._root.path, why,
        )  # fmt: skip

    def say_full(self, why: NoSpace) -> None:
        """Say once that nothing can be evicted any more to make room, and what to do."""
        if self._said_full:
            return
        self._said_full = True
        logger.warning(
            "posix_store %s is full and nothing can be evicted: %s. Pages go unstored until space is made: "
            "raise `capacity`, lower `min_free`, unpin, or clear old namespaces.",
            self._root.path, why,
        )  # fmt: skip

    def punch(self, fd: int, start: int, end: int) -> bool:
        """Give the whole 4 KiB blocks in [start, end) back to the file system; the file keeps its size.

        False when that did not work.
        """
        start, end = align(start), end // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        if end <= start:
            return True
        try:
            self._root.syscalls.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, start, end - start)
        except OSError as error:
            if error.errno in _UNSUPPORTED and self.punches:
                self.punches = False
                logger.warning(
                    "posix_store %s: parts of files cannot be freed on this file system (%s): whole segments "
                    "are evicted instead of blocks",
                    self._root.path, error,
                )  # fmt: skip
            return False
        return True
