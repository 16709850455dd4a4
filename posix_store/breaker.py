"""A circuit breaker: what a sick disk costs is paid a few times, and not by everybody who comes.

One breaker stands for one direction, reads or writes, of one root. It is told of every operation that makes
system calls, begins refusing when several of them in a row fail or are slow, and then lets one through now
and then to see whether the disk has recovered. A system call that hangs is noticed while it hangs, by
whoever asks next: there is no thread that watches.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

logger = logging.getLogger(__name__)

SLOW_BYTES_PER_SECOND = 10_000_000
"""An operation that moved bytes faster than this was not slow, however long it took."""
MOST_HUNG_PROBES = 2
"""Probes that may hang at the same time; there is no other until one of them returns."""


class Breaker:
    """Refuses operations while the disk is sick. Thread-safe; never waits, makes no system call.

    Closed, it lets everything through. It opens when `failures` operations in a row have failed, refuses for
    `open_seconds`, and then lets a single operation through as a probe. When the probe succeeds it closes;
    when it fails or hangs, it refuses for another `open_seconds`.

    **What counts as failure** is decided by `Operation.ended` and, while an operation runs, by the clock: one
    that runs for longer than `slow_seconds` and would by then be done at 10 MB/s, or that runs `slow_seconds`
    past its deadline, hangs. That is one failure, whatever becomes of it later, and one more for every
    further `slow_seconds` until the breaker opens: where one thread does all the work, it is the only one
    that can hang.

    **Use**: `allows` before work that makes no system call (a look-up answers "absent" when it is False), and
    `operation` around work that does::

        with breaker.operation(nbytes, deadline) as operation:
            if not operation.allowed:
                return np.full(count, Reason.BREAKER, np.uint8)
            ...
            operation.ended(moved_bytes, errors=io_errors, late=timeouts)

    `allows` is True as soon as a probe is due, although that takes nobody's turn: a look-up must then find
    blocks, or nobody would load them and the breaker would never close.

    Args:
        failures: operations in a row that open it, 1 or more.
        open_seconds: how long it refuses before it lets a probe through.
        slow_seconds: what a healthy operation may take, whatever it moves.
        clock: seconds that only grow; the clock of the deadlines given to `operation`.
        name: what it stands for, for the log: "reads of /kv".
    """

    def __init__(
        self,
        failures: int,
        open_seconds: float,
        slow_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "operations",
    ) -> None:
        self.name = name
        self.slow_seconds = slow_seconds
        self.times_opened = 0
        """How often it went from closed to open; a probe that fails is not counted."""
        self.refused = 0
        """Operations that were not let through."""
        self.last_failure = ""
        """What the last failure was, for people."""
        self._failures = failures
        self._open_seconds = open_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._open_until: float | None = None  # None: closed
        self._opened_at = 0.0
        self._probe: Operation | None = None
        self._running: dict[Operation, None] = {}
        self._next_overdue = math.inf
        self._news: list[str] = []

    def allows(self) -> bool:
        """Is it closed, or is a probe due? Takes no lock while it is closed and nothing hangs."""
        if self._open_until is None and self._clock() < self._next_overdue:
            return True
        with self._step() as now:
            return self._open_until is None or self._probe_due(now)

    def operation(self, nbytes: int = 0, deadline: float = math.inf) -> Operation:
        """An operation, for one `with`. See there.

        Args:
            nbytes: bytes that it is to move. Metadata counts as 0.
            deadline: when it will end by itself, but for one system call.
        """
        return Operation(self, nbytes, deadline)

    @property
    def state(self) -> str:
        """`closed`, `open` (refuses), or `half-open` (a probe is due or running)."""
        with self._step() as now:
            if self._open_until is None:
                return "closed"
            return "half-open" if self._probe is not None or self._probe_due(now) else "open"

    @property
    def failures_in_a_row(self) -> int:
        """Failures since the last success."""
        with self._step():
            return self._in_a_row

    def _begin(self, operation: Operation) -> None:
        with self._lock:
            now = self._clock()
            if self._open_until is None and now < self._next_overdue:  # the usual case
                self._let_through(operation, now)
                return
        with self._step() as now:
            if self._open_until is not None:
                if not self._probe_due(now):
                    self.refused += 1
                    return
                self._probe = operation
                operation.probe = True
            self._let_through(operation, now)

    def _end(self, operation: Operation) -> None:
        with self._lock:
            now = self._clock()
            well = not operation.counted and not operation.problem(now)
            if well and self._open_until is None and now < self._next_overdue:  # the usual case
                del self._running[operation]
                self._next_overdue = min((running.overdue_at for running in self._running), default=math.inf)
                if operation.moved:
                    self._in_a_row = 0
                return
        with self._step(ending=operation) as now:
            if not operation.counted:
                why = operation.problem(now)
                if why:
                    self._count_failure(operation, why, now)
                elif operation.moved:
                    self._count_success(operation, now)
            if operation is self._probe:  # it said nothing, so the next caller may try at once
                self._probe = None

    # -- callers hold the lock ----------------------------------------------------------------------

    def _let_through(self, operation: Operation, now: float) -> None:
        operation.begin(now)
        self._running[operation] = None
        self._next_overdue = min(self._next_overdue, operation.overdue_at)

    @contextmanager
    def _step(self, ending: Operation | None = None) -> Iterator[float]:
        """The lock, once operations that hang have been counted; logs after it has let go of the lock."""
        with self._lock:
            now = self._clock()
            if ending is not None:
                del self._running[ending]
            if ending is not None or now >= self._next_overdue:
                self._count_hung(now)
            try:
                yield now
            finally:
                news, self._news = self._news, []
        for line in news:
            logger.warning("%s", line)

    def _probe_due(self, now: float) -> bool:
        if self._open_until is None or self._probe is not None or now < self._open_until:
            return False
        return sum(running.probe and running.counted for running in self._running) < MOST_HUNG_PROBES

    def _count_hung(self, now: float) -> None:
        for operation in self._running:
            while now >= operation.overdue_at:
                self._count_failure(operation, f"no end after {now - operation.started:.3g} s", now)
                closed = self._open_until is None
                operation.overdue_at = operation.overdue_at + self.slow_seconds if closed else math.inf
        self._next_overdue = min((running.overdue_at for running in self._running), default=math.inf)

    def _count_failure(self, operation: Operation, why: str, now: float) -> None:
        operation.counted = True
        self._in_a_row += 1
        self.last_failure = why
        if operation is self._probe:
            self._probe = None
            self._open_until = now + self._open_seconds
            logger.debug("posix_store: %s: still failing: %s", self.name, why)
        elif self._open_until is None and self._in_a_row >= self._failures:
            self.times_opened += 1
            self._opened_at = now
            self._open_until = now + self._open_seconds
            for hung in self._running:
                if hung.counted:  # one that hangs for ever opens it once, not again and again
                    hung.overdue_at = math.inf
            self._news.append(
                f"posix_store: {self.name} stop for {self._open_seconds:g} s, because {self._in_a_row} "
                f"operations in a row failed or were slow, the last: {why}. Then one is tried, and they go "
                "on when it succeeds"
            )

    def _count_success(self, operation: Operation, now: float) -> None:
        if operation is self._probe:
            self._open_until = None
            stopped = now - self._opened_at
            self._news.append(f"posix_store: {self.name} go on, {stopped:.3g} s after they stopped")
        elif self._open_until is not None:
            return  # it began before the trouble did
        self._in_a_row = 0


class Operation:
    """One operation of a `Breaker`, from `with` to its end. Belongs to one thread.

    Attributes:
        allowed: set by `with`: may the body go on? If False, it must make no system call.
        probe: set by `with`: is it the one that is let through while the breaker is open?

    An `OSError` that leaves the body is a failure. When the body ends otherwise without `ended`, the
    operation counts for nothing, unless it took too long.
    """

    def __init__(self, breaker: Breaker, nbytes: int, deadline: float) -> None:
        self.allowed = False
        self.probe = False
        self.counted = False
        self.started = 0.0
        self.overdue_at = math.inf
        self.moved = 0
        self._breaker = breaker
        self._nbytes = nbytes
        self._deadline = deadline
        self._errors = 0
        self._late = 0
        self._raised = ""

    def ended(self, moved: int, *, errors: int = 0, late: int = 0) -> None:
        """Say what came of it; the last call counts.

        Args:
            moved: bytes that the disk did move, right or wrong. With 0, and no error, the operation proves
                nothing: it neither ends a row of failures nor closes the breaker. So say 0 when nothing
                was asked of the disk.
            errors: blocks for which the file system returned an error: any is a failure.
            late: blocks whose turn did not come before the deadline: any is a failure if fewer than 10 MB
                were moved a second. A batch that is only huge is none.

        An operation of more than `slow_seconds` that moved fewer than 10 MB a second is a failure as well.
        """
        self.moved, self._errors, self._late = moved, errors, late

    def __enter__(self) -> Operation:
        self._breaker._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.allowed:
            return
        if isinstance(error, OSError):
            self._raised = f"{type(error).__name__}: {error}"
        self._breaker._end(self)

    def begin(self, now: float) -> None:
        """For the breaker: it is let through, at `now`."""
        self.allowed = True
        self.started = now
        slow = self._breaker.slow_seconds
        patience = min(self._nbytes / SLOW_BYTES_PER_SECOND, self._deadline - now + slow)
        self.overdue_at = now + max(slow, patience)

    def problem(self, now: float) -> str:
        """For the breaker: why it is a failure, or nothing."""
        if self._raised:
            return self._raised
        if self._errors:
            return f"the file system failed {self._errors} blocks"
        took = now - self.started
        if self.moved <= took * SLOW_BYTES_PER_SECOND and (self._late or took > self._breaker.slow_seconds):
            late = f", {self._late} blocks not reached in time" if self._late else ""
            return f"{self.moved} bytes in {took:.3g} s{late}"
        return ""
