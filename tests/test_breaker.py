"""The circuit breaker: issue 3 (sick disks), I11. A fake clock, so that nothing waits."""

import logging
import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from posix_store.breaker import MOST_HUNG_PROBES, SLOW_BYTES_PER_SECOND, Breaker, Operation

FAILURES, OPEN, SLOW = 3, 30.0, 1.0
LONG = 2 * SLOW
MB = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(FAILURES, OPEN, SLOW, clock, name="reads of /kv")


def fail(breaker: Breaker) -> bool:
    """An operation that fails; was it let through?"""
    with breaker.operation(4096) as operation:
        operation.ended(0, errors=1)
    return operation.allowed


def succeed(breaker: Breaker) -> bool:
    with breaker.operation(4096) as operation:
        operation.ended(4096)
    return operation.allowed


def begin(breaker: Breaker, nbytes: int = 4096, deadline: float = math.inf) -> Operation:
    """An operation that goes on until `finish`."""
    operation = breaker.operation(nbytes, deadline)
    operation.__enter__()
    return operation


def finish(operation: Operation, moved: int = 4096) -> None:
    operation.ended(moved)
    operation.__exit__(None, None, None)


def trip(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        assert fail(breaker)
    assert breaker.state == "open"


def test_it_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    """Issue 3: N failures in a row open it, then nothing is let through."""
    for number in range(1, FAILURES):
        assert fail(breaker)
        assert breaker.allows() and breaker.state == "closed" and breaker.failures_in_a_row == number
    assert fail(breaker)
    assert not breaker.allows() and breaker.state == "open"
    assert not succeed(breaker) and not fail(breaker)
    assert (breaker.times_opened, breaker.refused, breaker.failures_in_a_row) == (1, 2, FAILURES)


def test_a_success_ends_the_row(breaker: Breaker) -> None:
    """Issue 3: failures here and there do not open it."""
    for _ in range(10):
        for _ in range(FAILURES - 1):
            assert fail(breaker)
        assert succeed(breaker)
    assert breaker.state == "closed" and breaker.failures_in_a_row == 0 and breaker.times_opened == 0


def test_what_asks_nothing_of_the_disk_proves_nothing(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: an empty batch between failures does not hide them, and as a probe it does not close it."""
    for _ in range(FAILURES):
        assert fail(breaker)
        with breaker.operation() as operation:
            operation.ended(0)
    assert breaker.state == "open"
    clock.now += OPEN
    with breaker.operation() as operation:
        assert operation.allowed and operation.probe
    assert breaker.state == "half-open", "the next caller may try at once"
    assert succeed(breaker) and breaker.state == "closed"


def test_one_probe_after_the_time(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: after T seconds one operation is let through, and its success closes the breaker."""
    trip(breaker)
    clock.now += OPEN - 0.001
    assert not breaker.allows() and not succeed(breaker)
    clock.now += 0.001
    assert breaker.allows() and breaker.allows(), "asking takes nobody's turn"
    assert breaker.state == "half-open"
    with breaker.operation(4096) as probe:
        assert probe.allowed and probe.probe
        assert not breaker.allows() and not succeed(breaker) and breaker.state == "half-open"
        probe.ended(4096)
    assert breaker.state == "closed" and breaker.failures_in_a_row == 0
    assert fail(breaker) and breaker.state == "closed", "a full row is needed again"


def test_a_failed_probe_opens_it_again(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: a failed probe costs another T seconds, however often."""
    trip(breaker)
    for _ in range(3):
        clock.now += OPEN
        assert fail(breaker)
        assert not breaker.allows() and breaker.state == "open"
    assert breaker.times_opened == 1, "it was never closed in between"
    clock.now += OPEN
    assert succeed(breaker) and breaker.allows()


def test_a_hanging_call_is_noticed_while_it_hangs(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: threads stuck in system calls open it for those who come; whoever looks, each counts once."""
    hung = [begin(breaker) for _ in range(FAILURES)]
    clock.now += SLOW - 0.001
    assert breaker.allows() and breaker.failures_in_a_row == 0
    finish(hung.pop())
    clock.now += 0.001
    for _ in range(3):
        assert breaker.allows() and breaker.failures_in_a_row == FAILURES - 1
    assert fail(breaker)
    assert not breaker.allows() and breaker.times_opened == 1
    for operation in hung:
        finish(operation)
    assert breaker.failures_in_a_row == FAILURES, "their end is neither another failure nor a success"
    assert not breaker.allows()


@pytest.mark.parametrize("looks", [1, 10])
def test_one_thread_that_hangs(breaker: Breaker, clock: Clock, looks: int) -> None:
    """Issue 3: where only one thread works, its call is the only one that can hang, and it must suffice."""
    started = clock.now
    hung = begin(breaker)
    while looks > 1 and clock.now + SLOW / looks < started + FAILURES * SLOW:
        clock.now += SLOW / looks
        assert breaker.allows()
        assert breaker.failures_in_a_row == int((clock.now - started) / SLOW + 1e-6)
    clock.now = started + FAILURES * SLOW
    assert not breaker.allows() and breaker.failures_in_a_row == FAILURES
    clock.now += OPEN
    assert succeed(breaker)
    for _ in range(10):  # a thread that is lost for ever is no news of the disk
        clock.now += OPEN
        assert breaker.allows() and breaker.failures_in_a_row == 0
    finish(hung)
    assert breaker.times_opened == 1


def test_one_thread_that_hangs_among_others(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: while others succeed, one call that hangs does not open it."""
    begin(breaker)
    for _ in range(10 * FAILURES):
        clock.now += SLOW / 2
        assert succeed(breaker)
    assert breaker.times_opened == 0


def test_a_slow_operation_alone(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: slowness counts also when nobody looks while it lasts."""
    for _ in range(FAILURES):
        operation = begin(breaker)
        clock.now += LONG
        finish(operation)
    assert breaker.state == "open" and "4096 bytes in 2 s" in breaker.last_failure


def test_hung_probes_are_bounded(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: no thread piles up behind a disk that hangs for ever."""
    trip(breaker)
    hung: list[Operation] = []
    for _ in range(10):
        clock.now += OPEN
        operation = begin(breaker)
        if operation.allowed:
            hung.append(operation)
        clock.now += SLOW
        assert not breaker.allows(), "a hung probe keeps it open, for another T seconds"
    assert len(hung) == MOST_HUNG_PROBES
    assert breaker.state == "open"
    finish(hung.pop())
    assert breaker.state == "half-open", "a thread came back, so another may try"
    assert succeed(breaker) and breaker.state == "closed"
    finish(hung.pop())
    assert breaker.state == "closed" and breaker.failures_in_a_row == 0


def test_a_hung_probe_counts_from_when_it_hangs(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: the second probe comes T seconds after the first was given up, and may close it."""
    trip(breaker)
    clock.now += OPEN
    hung = begin(breaker)
    clock.now += SLOW
    assert not breaker.allows()
    clock.now += OPEN - 0.001
    assert not breaker.allows()
    clock.now += 0.001
    assert succeed(breaker) and breaker.state == "closed"
    finish(hung)
    assert breaker.state == "closed"


def test_an_operation_from_before_does_not_close_it(breaker: Breaker) -> None:
    """Issue 3: only a probe does; what began before the trouble says nothing about now."""
    early = begin(breaker)
    trip(breaker)
    finish(early)
    assert breaker.state == "open" and breaker.failures_in_a_row == FAILURES


@pytest.mark.parametrize(
    ("asked", "moved", "seconds", "late", "failed"),
    [
        pytest.param(100 * MB, 100 * MB, 9.9, 0, False, id="huge and at a healthy rate"),
        pytest.param(100 * MB, 100 * MB, 10.1, 0, True, id="huge and slow"),
        pytest.param(4096, 4096, SLOW, 0, False, id="small, in time"),
        pytest.param(4096, 4096, 1.01 * SLOW, 0, True, id="small and slow"),
        pytest.param(900 * MB, 100 * MB, 5.0, 3, False, id="cut off by the deadline at a healthy rate"),
        pytest.param(900 * MB, 10 * MB, 5.0, 3, True, id="cut off by the deadline and slow"),
        pytest.param(4096, 2048, 0.5, 1, True, id="late before it is slow"),
        pytest.param(4096, 0, 0.0, 1, True, id="nothing in time"),
    ],
)
def test_what_is_slow(
    breaker: Breaker, clock: Clock, asked: int, moved: int, seconds: float, late: int, failed: bool
) -> None:
    """Issue 3: slow means slow_seconds and less than 10 MB/s; a batch that is only huge is healthy."""
    assert SLOW_BYTES_PER_SECOND == 10 * MB
    with breaker.operation(asked) as operation:
        clock.now += seconds
        operation.ended(moved, late=late)
    assert breaker.failures_in_a_row == failed


def test_when_a_huge_batch_hangs(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: it has the time that its bytes take at 10 MB/s, but not longer than its deadline allows."""
    for nbytes, deadline, seconds in ((30 * MB, math.inf, 3.0), (1000 * MB, clock.now + 5, 6.0)):
        operation = begin(breaker, nbytes, deadline)
        clock.now += seconds - 0.1
        assert breaker.allows() and breaker.failures_in_a_row == 0
        clock.now += 0.2
        assert breaker.allows() and breaker.failures_in_a_row == 1
        finish(operation)
        assert succeed(breaker)
        clock.now = 1000.0


def test_errors_that_escape(breaker: Breaker, clock: Clock) -> None:
    """I3: an OSError is a failure, others say nothing; all are raised, and none keeps the probe's turn."""
    for _ in range(FAILURES):
        with pytest.raises(OSError), breaker.operation():
            raise OSError
    assert breaker.state == "open" and "OSError" in breaker.last_failure
    clock.now += OPEN
    with pytest.raises(KeyError), breaker.operation():
        raise KeyError
    assert breaker.state == "half-open"
    assert succeed(breaker) and breaker.state == "closed"


def test_one_line_when_it_opens_and_one_when_it_closes(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """I3: what, for how long, and why; once for each time of trouble, however many probes fail in it."""
    trip(breaker)
    (opened,) = caplog.messages
    for part in ("reads of /kv", "30 s", "3 operations in a row", "failed 1 blocks"):
        assert part in opened
    for _ in range(3):
        clock.now += OPEN
        fail(breaker)
    assert len(caplog.messages) == 1
    clock.now += OPEN
    succeed(breaker)
    assert "reads of /kv go on" in caplog.messages[1] and "120 s" in caplog.messages[1]
    assert len(caplog.messages) == 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


class NoLock:
    """Stands in for a lock that must not be taken."""

    def __enter__(self) -> None:
        raise AssertionError("a lock was taken")

    def __exit__(self, *_: object) -> None: ...


def test_a_closed_breaker_takes_no_lock(breaker: Breaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: `allows` is on every look-up."""
    begin(breaker)
    monkeypatch.setattr(breaker, "_lock", NoLock())
    assert breaker.allows()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` ... `work(count - 1)` at once; what one of them raises is raised."""
    barrier, raised = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_threads_race_for_the_probe(breaker: Breaker, clock: Clock) -> None:
    """Issue 3: of many threads that come when a probe is due, one gets through, each time."""
    trip(breaker)
    for _ in range(20):
        clock.now += OPEN
        allowed: list[int] = []
        tried = threading.Barrier(16)

        def race(number: int, allowed: list[int] = allowed, tried: threading.Barrier = tried) -> None:
            breaker.allows()
            with breaker.operation(4096) as operation:
                if operation.allowed:
                    allowed.append(number)
                tried.wait(10)
                operation.ended(0, errors=1)

        in_threads(16, race)
        assert len(allowed) == 1
    assert breaker.refused == 20 * 15


def test_threads_on_a_disk_that_comes_and_goes(clock: Clock) -> None:
    """Issue 3: nothing is lost or counted twice under contention, and it recovers."""
    breaker = Breaker(5, 0.0, SLOW, clock)  # a probe is due as soon as none is running
    lock, probing, most, sick = threading.Lock(), [0], [0], threading.Event()

    def work(number: int) -> None:
        for turn in range(300):
            if number == 0 and turn % 50 == 0:
                (sick.clear if sick.is_set() else sick.set)()
            with breaker.operation(4096) as operation:
                with lock:
                    probing[0] += operation.probe
                    most[0] = max(most[0], probing[0])
                operation.ended(4096, errors=sick.is_set())
                with lock:
                    probing[0] -= operation.probe
            breaker.allows()

    in_threads(12, work)
    assert most[0] <= 1
    assert succeed(breaker) and breaker.state == "closed" and breaker.failures_in_a_row == 0
    assert not breaker._running and breaker._next_overdue == math.inf


class Model(RuleBasedStateMachine):
    """Issue 3: closed, it never refuses; open, at most one probe that is not hung; it always recovers.

    The model keeps the operations under way and the failures in a row by the rules in the docstrings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(FAILURES, OPEN, SLOW, self.clock)
        self.running: list[Operation] = []
        self.hung: list[Operation] = []
        self.due_at: dict[Operation, float] = {}
        self.failures = 0
        self.open_until: float | None = None

    def failed(self, probe: bool) -> None:
        self.failures += 1
        if probe or (self.open_until is None and self.failures >= FAILURES):
            self.open_until = self.clock.now + OPEN
            for operation in self.hung:
                self.due_at[operation] = math.inf

    @property
    def probes(self) -> list[Operation]:
        return [operation for operation in self.running if operation.probe]

    @property
    def due(self) -> bool:
        if self.open_until is None or self.clock.now < self.open_until or self.probes:
            return False
        return sum(operation.probe for operation in self.hung) < MOST_HUNG_PROBES

    @rule(seconds=st.sampled_from([0.3, SLOW, OPEN / 2, OPEN]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.breaker.allows()  # somebody always comes by
        for operation in list(self.due_at):
            while self.clock.now >= self.due_at[operation]:
                if operation in self.running:
                    self.running.remove(operation)
                    self.hung.append(operation)
                self.due_at[operation] += SLOW
                self.failed(operation.probe)
                if self.open_until is not None:
                    self.due_at[operation] = math.inf

    @rule()
    def begins(self) -> None:
        expected = self.open_until is None or self.due
        assert self.breaker.allows() == expected
        operation = begin(self.breaker)
        assert operation.allowed == expected
        assert operation.probe == (expected and self.open_until is not None)
        if expected:
            self.running.append(operation)
            self.due_at[operation] = self.clock.now + SLOW

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(["success", "failure", "nothing", "error"]))
    def ends(self, data: st.DataObject, outcome: str) -> None:
        operation = data.draw(st.sampled_from(self.running))
        self.running.remove(operation)
        del self.due_at[operation]
        if outcome != "error":
            operation.ended(4096 if outcome == "success" else 0, errors=outcome == "failure")
        error = OSError("sick") if outcome == "error" else None
        operation.__exit__(type(error) if error else None, error, None)
        if outcome in ("failure", "error"):
            self.failed(operation.probe)
        elif outcome == "success" and (operation.probe or self.open_until is None):
            self.failures, self.open_until = 0, None

    @precondition(lambda self: self.hung)
    @rule(data=st.data())
    def hangs_no_more(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.hung))
        self.hung.remove(operation)
        del self.due_at[operation]
        finish(operation)

    @invariant()
    def agrees(self) -> None:
        assert (self.breaker.state == "closed") == (self.open_until is None)
        assert self.breaker.failures_in_a_row == self.failures
        assert self.breaker.allows() == (self.open_until is None or self.due)
        assert len(self.probes) <= 1
        assert sum(operation.probe for operation in self.hung) <= MOST_HUNG_PROBES

    def teardown(self) -> None:
        """The disk recovers: what hangs returns, and within the open time all is as before."""
        for operation in self.running + self.hung:
            finish(operation)
        self.clock.now += OPEN
        assert succeed(self.breaker)
        assert self.breaker.state == "closed" and self.breaker.failures_in_a_row == 0


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40)
