"""What an engine is: it moves a transfer, and makes what it has written visible."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from posix_store.errors import Reason
from posix_store.journal import Journal
from posix_store.transfer import Transfer

_REASONS = {
    errno.ENOSPC: Reason.FULL,
    errno.EDQUOT: Reason.FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.ENOENT: Reason.EVICTED,
    errno.ESTALE: Reason.EVICTED,
    errno.ETIMEDOUT: Reason.TIMEOUT,
}


def reason_of(error: OSError) -> Reason:
    """The reason under which a failed system call is counted."""
    return _REASONS.get(error.errno or 0, Reason.IO_ERROR)


@dataclass
class Publication:
    """How an engine makes a transfer visible, as the last part of a write of which every block succeeded."""

    journal: Journal
    records: np.ndarray
    """`RECORD` (n,), in the order of the transfer; the engine fills in the checksums."""
    done: bool = False
    """Are the records in the journal? Set by the engine."""
    gone: bool = False
    """Were the files deleted in the meantime, so that nobody will find the records? Set by the engine."""
    error: OSError | None = None
    """Why they are not, if that was tried. Set by the engine."""


class Engine(Protocol):
    """Moves transfers. Thread-safe. Errors become block statuses; nothing is raised for them."""

    name: str

    def read(
        self, transfer: Transfer, deadline: float, verify: bool = True, find_holes: bool = False
    ) -> None:
        """Fill memory from files and set `status`.

        Args:
            deadline: in `time.monotonic()` seconds: blocks whose turn comes later get `TIMEOUT`.
            verify: compare each block with its `crc`.
            find_holes: blocks in which the file has a hole, once they are read, get `EVICTED`.

        When it returns, nothing writes to the memory any more.
        """

    def write(self, transfer: Transfer, deadline: float, publication: Publication | None = None) -> None:
        """Write memory to files; set `status` and `crc`. If every block succeeds, publish."""

    def journal(self, fd: int, end: int) -> Journal:
        """The journal in an open file, whose next append goes to `end`."""

    def close(self) -> None:
        """Let go of threads. Idempotent."""
