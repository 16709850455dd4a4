"""Two circuit breakers and a bound on waiting writes: what a sick disk may cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from posix_store.breaker import Breaker
from posix_store.counters import Counters
from posix_store.errors import Reason
from posix_store.write_queue import WriteQueue


class Health:
    """Two circuit breakers, so that a disk that does not write still reads, and a bound on waiting writes.

    Thread-safe.
    """

    def __init__(
        self, path: str, failures: int, open_seconds: float, slow_seconds: float, queue_bytes: int
    ) -> None:
        self.reads = Breaker(failures, open_seconds, slow_seconds, name=f"reads of {path}")
        self.writes = Breaker(failures, open_seconds, slow_seconds, name=f"writes to {path}")
        self.queue = WriteQueue(queue_bytes)

    def load(
        self, work: Callable[[], np.ndarray], counters: Counters, count: int, length: int, deadline: float
    ) -> np.ndarray:
        """Run a load of `count` blocks of `length` bytes, which returns uint8 (n,) of `Reason`."""
        with self.reads.operation(count * length, deadline) as operation:
            if not operation.allowed:
                status = np.full(count, Reason.BREAKER, np.uint8)
                counters.loaded(status, length)
                return status
            status = work()
            if not np.count_nonzero(status):
                operation.ended(count * length)
                return status
            moved = np.isin(status, (Reason.OK, Reason.CHECKSUM)).sum()
            operation.ended(
                int(moved) * length,
                errors=int((status == Reason.IO_ERROR).sum()),
                late=int((status == Reason.TIMEOUT).sum()),
            )
        return status

    def snapshot(self) -> dict[str, Any]:
        """Plain values, for reports."""
        return {
            "reads": self.reads.state,
            "writes": self.writes.state,
            "times_opened": self.reads.times_opened + self.writes.times_opened,
            "last_failure": self.writes.last_failure or self.reads.last_failure,
            "queued_bytes": self.queue.bytes,
            "most_queued_bytes": self.queue.most_bytes,
        }
