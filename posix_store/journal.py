"""The end of a journal that this process writes: whole batches of records, one after the other."""

from __future__ import annotations

import errno
import threading
import time
from typing import Protocol

import numpy as np

from posix_store.segment import seal_records
from posix_store.syscalls import Syscalls, write_at


class Journal(Protocol):
    """The end of a journal file. Thread-safe: appends take turns."""

    @property
    def fd(self) -> int: ...

    @property
    def end(self) -> int:
        """Where the next append goes, in bytes."""

    @property
    def broken(self) -> int:
        """Did an append fail? What it may have left is an unfinished tail, which readers ignore for as long
        as nothing follows it. So nothing ever may."""

    def append(self, records: np.ndarray, deadline: float) -> None:
        """Append the records (`RECORD` array, sealed here) of one batch; everybody sees them then.

        Raises:
            OSError: none of them will ever be visible. `ETIMEDOUT`: other appends took until `deadline`.
        """


class PythonJournal:
    """A `Journal` in Python."""

    def __init__(self, calls: Syscalls, fd: int, end: int) -> None:
        self.fd = fd
        self.end = end
        self.broken = 0
        self._calls = calls
        self._lock = threading.Lock()

    def append(self, records: np.ndarray, deadline: float) -> None:
        """See `Journal.append`."""
        data = seal_records(records)
        patience = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=patience):
            raise OSError(errno.ETIMEDOUT, "other appends to the journal took too long")
        try:
            if self.broken:
                raise OSError(errno.EBADF, "the journal is closed after a failed append")
            try:
                write_at(self._calls, self.fd, data, self.end)
            except BaseException:
                self.broken = 1
                raise
            self.end += len(data)
        finally:
            self._lock.release()
