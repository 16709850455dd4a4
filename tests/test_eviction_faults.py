"""Issue 3, must hold 2, and invariants I1 to I4: a system call fails or falls short while blocks are evicted.

Scripted lives of an evicting store (`evictionlives`) are run again and again, each time with a fault at
another system call. After each, a store without faults must find what the journals say and nothing that was
evicted, every byte right, no block lost that was not evicted, no lock held, no descriptor open, room for as
many blocks as ever, and nothing left when all of it is evicted.

    UCM_ALL_FAULTS=1    at every single call, for hours; without it, at a few that are the same each time.
"""

import errno
import functools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from evictionkit import Times, assert_locks_are_free
from evictionlives import (
    INTERLEAVED,
    LIVES,
    Interleaved,
    Life,
    Overflowing,
    OvertakenUnverified,
    Tidying,
    WholeSegments,
)
from faults import KINDS, READS, WRITES, Fault
from storekit import held_open, memory_directory

ALL = os.environ.get("UCM_ALL_FAULTS") == "1"
ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES)
ONCE, FOREVER = 1, float("inf")
GOLDEN = 0.618

pytestmark = pytest.mark.timeout(7200 if ALL else 300)

struck = 0
"""Lives with a fault so far."""


@pytest.fixture(scope="module", autouse=True)
def tell(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    request.config.get_terminal_writer().line(f"\n{struck} faults injected into lives of evicting stores")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    monkeypatch.setattr(logging.getLogger("posix_store"), "disabled", True)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("posix_store"):
            monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    times = Times()
    times.install(monkeypatch)
    return times


def live(root: Path, times: Times, life_type: type[Life], *faults: Fault) -> Life:
    """One life, and all that must hold afterwards."""
    life = life_type(root, times, *faults)
    life.run()
    assert_locks_are_free(root)
    assert held_open(root) == [], "descriptors leaked"
    if (root / "STORE.json").exists():
        life.remains.check()
        life.remains.check_space()
        assert held_open(root) == [], "descriptors leaked"
    return life


@functools.cache
def counts_of(life_type: type[Life]) -> Counter[str]:
    """How many calls of each kind a life without faults makes."""
    with memory_directory() as root, pytest.MonkeyPatch.context() as patch:
        times = Times()
        times.install(patch)
        if issubclass(life_type, Interleaved):
            life: Life = life_type(root / "store", times, 1 << 60)
        else:
            life = life_type(root / "store", times)
        life.run()
        return life.calls.counts


def calls_in(life_type: type[Life], kinds: Collection[str]) -> int:
    return sum(counts_of(life_type)[kind] for kind in kinds)


def points(life_type: type[Life], kinds: Collection[str], sample: int, number: int) -> Iterator[int]:
    """The calls to strike: all of them, or `sample` spread evenly, others for each test `number`."""
    count = calls_in(life_type, kinds)
    assert count, f"{life_type.__name__} makes no such calls"
    if ALL:
        yield from range(1, count + 1)
    else:
        sample = min(sample, count)
        yield from (1 + int((i + number * GOLDEN % 1) * count / sample) for i in range(sample))


def strike(root: Path, times: Times, life_type: type[Life], faults: list[Fault]) -> None:
    global struck  # noqa: PLW0603
    try:
        live(root, times, life_type, *faults)
    except Exception as error:
        raise AssertionError(f"{life_type.__name__} with {faults}") from error
    struck += faults[0].fired


def test_the_lives_do_what_they_say(root: Path, times: Times) -> None:
    """The instrument: without a fault, blocks leave, by holes and with segments; journals are rewritten."""
    for life_type in LIVES:
        life = live(root / life_type.__name__, times, life_type)
        assert life.ledger.lost() and life.ledger.evicted, "nothing was evicted"
        assert not life.ledger.dropped, "blocks went without a record"
        assert not life.raised
        seen = life.freed
        assert seen["punch"] or not life.punching or life_type is OvertakenUnverified
        if life_type is Tidying:
            assert seen["unlink"] and seen["compact"] and life.calls.counts["rmdir"] == 1
            assert life.ledger.carried, "no eviction was carried over"
        if life_type is WholeSegments:
            assert seen["unlink"] and not seen["punch"]


@pytest.mark.parametrize("times_struck", [ONCE, FOREVER], ids=["once", "forever"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("life_type", LIVES)
def test_calls_fail(root: Path, times: Times, life_type: type[Life], error: int, times_struck: float) -> None:
    """Must hold 2: a call fails, once or with all that follow it."""
    number = 2 * ERRORS.index(error) + (times_struck > 1)
    for nth in points(life_type, KINDS, 1, number):
        strike(root / str(nth), times, life_type, [Fault(nth, times=times_struck, error=error)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("fadvise", "set_direct")])
def test_one_kind_of_call_fails_for_good(root: Path, times: Times, kind: str) -> None:
    """Must hold 2: from some point on no call of one kind succeeds, while all others do."""
    lives = [life_type for life_type in LIVES if calls_in(life_type, (kind,))]
    assert lives, "no life makes such calls"
    error = errno.EROFS if kind in ("unlink", "rename") else errno.EIO
    for life_type in lives if ALL else lives[:1]:
        for nth in points(life_type, (kind,), 1, KINDS.index(kind)):
            where = root / f"{life_type.__name__}{nth}"
            strike(where, times, life_type, [Fault(nth, (kind,), times=FOREVER, error=error)])


@pytest.mark.parametrize("short", [0, 1, 100])
@pytest.mark.parametrize("life_type", LIVES)
def test_transfers_fall_short(root: Path, times: Times, life_type: type[Life], short: int) -> None:
    """Must hold 2: a read or write moves fewer bytes than it was asked for, or none."""
    for nth in points(life_type, READS + WRITES, 2, short):
        strike(root / str(nth), times, life_type, [Fault(nth, READS + WRITES, short=short)])


@pytest.mark.parametrize("life_type", [Overflowing, WholeSegments, Tidying])
def test_writes_stop_half_way(root: Path, times: Times, life_type: type[Life]) -> None:
    """Must hold 2, I2: a write, also of EVICT records, puts down a part and fails."""
    for nth in points(life_type, WRITES, 4, 0):
        faults = [Fault(nth, WRITES, short=70), Fault(nth + 1, WRITES, error=errno.ENOSPC)]
        strike(root / str(nth), times, life_type, faults)


@pytest.mark.parametrize("life_type", INTERLEAVED)
def test_others_come_between_two_calls(root: Path, times: Times, life_type: type[Interleaved]) -> None:
    """Must hold 1, I1: what others do comes between any two calls of a load or an eviction."""
    count = calls_in(life_type, KINDS)
    for nth in range(1, count + 1) if ALL else range(1 + count // 14, count, count // 7):
        life = life_type(root / str(nth), times, nth)
        try:
            life.run()
            life.remains.check()
            life.remains.check_space()
        except Exception as error:
            raise AssertionError(f"{life_type.__name__}, before call {nth}") from error
