"""Issue 3, and invariants I1, I2, I4, I9: processes are killed while they evict.

After each death the directory is opened at once. No lock is held, the capacity is kept, and a newcomer finds
what the journals say: no wrong byte, whether bytes are verified or not, nothing that was evicted, everything
that was reported stored and not evicted. There is room for new blocks, and when all are evicted in the end,
nothing is left of the dead.

    UCM_ALL_FAULTS=1    death before every single call that changes something, within every write, and 120
                        deaths at random moments; without it, a few of each.
"""

import functools
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import mini_reader
import numpy as np
import pytest
from crc32c import crc32c
from evictionkit import CAPACITY, LENGTH, NAMESPACES, Ledger, Remains, Times, dump_chain
from evictionlives import LIVES, Life, Tidying, evict_until_killed, live_and_die
from faults import CHANGES, WRITES, Fault
from storekit import NAMESPACE, allocated, ids_of, load, memory_directory, open_store
from test_crash import wait_until_stopped
from workers import Point, Worker, batch_ids

from posix_store import Reason, dumping

ALL = os.environ.get("UCM_ALL_FAULTS") == "1"
CHANGING = (*CHANGES, "open for writing", "flock", "close")
LIVING = [life for life in LIVES if not life.__name__.startswith("Overtaken")]
GENERATIONS = 8
"""Deaths in one directory."""

pytestmark = pytest.mark.timeout(7200 if ALL else 300)

killed = 0
"""Processes so far."""


@pytest.fixture(scope="module", autouse=True)
def tell(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    request.config.get_terminal_writer().line(f"\n{killed} processes killed while they evicted")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("posix_store"):
            monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    times = Times()
    times.install(monkeypatch)
    return times


@functools.cache
def calls_in(life_type: type[Life], kinds: tuple[str, ...]) -> int:
    """How many calls of these kinds a life makes."""
    with memory_directory() as root, pytest.MonkeyPatch.context() as patch:
        times = Times()
        times.install(patch)
        watch = Fault(nth=1 << 60, kinds=kinds)
        life_type(root / "store", times, watch).run()
        return watch.seen


def points(life_type: type[Life], kinds: tuple[str, ...], sample: int) -> Iterator[int]:
    """Numbers of the calls before which to die: all of them, or `sample` spread evenly."""
    count = calls_in(life_type, kinds)
    yield from (range(1, count + 1) if ALL else (1 + i * count // sample for i in range(sample)))


def die(remains: Remains, life_type: type[Life], seed: int, point: Point) -> None:
    """Live in another process up to a point, and look at what is left."""
    global killed  # noqa: PLW0603
    life = life_type(remains.root, remains.times, seed=seed)
    for namespace in NAMESPACES:
        remains.whole.setdefault(namespace, []).extend(life.chains[namespace])
    remains.sharded.append(life.sharded)
    remains.times.pass_by(20)
    arguments = (str(remains.root), LIVES.index(life_type), seed, remains.times.ahead, point)
    with Worker(live_and_die, *arguments) as worker:
        for ledger in worker.reports():
            remains.ledger.merge(ledger)
        assert worker.process.exitcode in (0, -signal.SIGKILL), "the life went wrong"
        killed += worker.process.exitcode != 0
    remains.check()


def die_again_and_again(root: Path, times: Times, life_type: type[Life], deaths: list[Point]) -> None:
    """The dead pile up in a few directories; in the end everything is given back."""
    for start in range(0, len(deaths), GENERATIONS):
        where = root / str(start)
        remains = Remains(
            where, times, Ledger(where), segment_bytes=life_type.segment_bytes, punching=life_type.punching
        )
        for number, point in enumerate(deaths[start : start + GENERATIONS]):
            try:
                die(remains, life_type, number, point)
                remains.store_more(range(10 + number, 11 + number))
            except Exception as error:
                raise AssertionError(f"{life_type.__name__}, death {number} of {where}: {point}") from error
        remains.check_space()


@pytest.mark.parametrize("life_type", LIVING)
def test_killed_before_each_call_that_changes_anything(
    root: Path, times: Times, life_type: type[Life]
) -> None:
    """Must hold 1, 2: death before every single change."""
    deaths = [Point(nth, CHANGING) for nth in points(life_type, CHANGING, 8)]
    die_again_and_again(root, times, life_type, deaths)


@pytest.mark.parametrize("life_type", LIVING)
def test_killed_within_each_write(root: Path, times: Times, life_type: type[Life]) -> None:
    """Must hold 1, 2: death after a part of a write: of EVICT records, of rewritten journals, of blocks."""
    deaths = [Point(nth, WRITES, short=70) for nth in points(life_type, WRITES, 4)]
    die_again_and_again(root, times, life_type, deaths)


def test_killed_at_random(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Must hold 1: pairs of processes with threads, evicting from each other, killed at random moments."""
    global killed  # noqa: PLW0603
    monkeypatch.setattr(mini_reader, "crc32c", crc32c)
    monkeypatch.setattr(dumping, "MOST_WAIT", 60.0)
    chance = random.Random(20_250_103)
    options = {"capacity": CAPACITY, "segment_bytes": 64 << 10, "maintenance": True}
    remains = Remains(root, Times(), Ledger(root), watched=True)
    watchers = [open_store(root, capacity=CAPACITY, verify=verify) for verify in (True, False)]
    for pair in range(60 if ALL else 4):
        seeds = [2 * pair + i for i in range(2)]
        arguments = [(str(root), seed, options) for seed in seeds]
        with (
            Worker(evict_until_killed, *arguments[0]) as one,
            Worker(evict_until_killed, *arguments[1]) as two,
        ):
            last = [worker.receive() for worker in (one, two)]
            for worker in (one, two):
                end = time.monotonic() + chance.uniform(0.02, 0.2)
                while time.monotonic() < end:
                    for watcher in watchers:
                        load(watcher, batch_ids(seeds[0], last[0], 3), LENGTH)
                worker.kill()
            last = [list(worker.reports())[-1:] or [0] for worker in (one, two)]
            killed += 2
        for seed, (batch,) in zip(seeds, last, strict=True):
            for number in range(batch + 2):
                ids = batch_ids(seed, number, 3)
                remains.whole.setdefault(NAMESPACES[1], []).append(ids)
                (remains.sharded if number % 2 else remains.whole.setdefault(NAMESPACE, [])).append(ids)
        # What was stored before may have been evicted since, by records that are gone with their journals.
        remains.ledger.promised.clear()
        remains.check()
        remains.store_more(range(10 + pair, 11 + pair))
    for watcher in watchers:
        watcher.close()
    remains.check_space()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(Point(1, ("unlink",), ".seg", signal=signal.SIGSTOP), id="deleting"),
        # After STORE.json and two NAMESPACE.json, and after the records of two dumps.
        pytest.param(Point(4, ("rename",), signal=signal.SIGSTOP), id="rewriting-a-journal"),
        pytest.param(Point(6, ("pwrite",), ".idx", signal=signal.SIGSTOP), id="recording"),
    ],
)
def test_a_stopped_evictor_stops_nobody_else(
    root: Path, times: Times, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11, must hold 1: others load and look up at once, and dumps that need room give up."""
    monkeypatch.setattr(dumping, "MOST_WAIT", 0.2)
    remains = Remains(root, times, Ledger(root), segment_bytes=Tidying.segment_bytes, watched=True)
    life = Tidying(root, times)
    remains.whole = {namespace: list(chains) for namespace, chains in life.chains.items()}
    with Worker(live_and_die, str(root), LIVES.index(Tidying), 0, 0.0, point) as worker:
        wait_until_stopped(worker.pid)
        with open_store(root, **{**remains.options(), "timeout": 2.0}) as store:
            started = time.monotonic()
            every = np.concatenate(life.chains[NAMESPACE])
            found = store.lookup(every)
            assert found.any()
            assert (load(store, every, LENGTH)[found] == Reason.OK).all()
            assert time.monotonic() - started < 2, "a load waited for the stopped process"
            refused = 0
            for seed in range(4):
                started = time.monotonic()
                fresh = ids_of(900 + seed, 9)
                remains.whole[NAMESPACE].append(fresh)
                status = dump_chain(store, fresh)
                assert np.isin(status, (Reason.OK, Reason.FULL, Reason.TIMEOUT)).all(), status
                assert time.monotonic() - started < 5, "a dump waited for the stopped process"
                assert allocated(root) <= remains.capacity
                refused += int((status != Reason.OK).sum())
            assert refused, "nothing needed room"
        os.kill(worker.pid, signal.SIGCONT)
        for ledger in worker.reports():
            remains.ledger.evicted |= ledger.evicted
        assert worker.process.exitcode == 0, "the stopped process did not go on"
    remains.check()
    remains.check_space()
