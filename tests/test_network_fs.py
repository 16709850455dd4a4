"""Several machines on one network or distributed file system: two mounts of it, each with a host of its own.

`scripts/network_fs.sh` mounts one and runs these tests. They need root, and in the environment

    UCM_FS_CLIENT_A, UCM_FS_CLIENT_B   directories in which two clients have mounted the same file system
    UCM_FS_BACKING                     optional: the directories (with `:` between) where its server keeps the
                                       files, for the true count of what is allocated
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from machines import COUNT, LENGTH, Machine, machine
from storekit import NAMESPACE, allocated, ids_of
from workers import batch_ids

from posix_store import Reason
from posix_store.abilities import probe
from posix_store.root import StoreRoot

CLIENTS = tuple(os.environ.get(f"UCM_FS_CLIENT_{name}", "") for name in "AB")
BACKING = [Path(path) for path in os.environ.get("UCM_FS_BACKING", "").split(":") if path]
CAPACITY = 8 << 20
BATCHES = CAPACITY // (COUNT * LENGTH)
"""That fill the capacity."""
PATIENCE = 4.0
"""Seconds in which a machine must see what another has done: caches of attributes live for one or two."""

pytestmark = pytest.mark.skipif(
    not all(CLIENTS),
    reason="NOT TESTED ON A NETWORK FILE SYSTEM: no UCM_FS_CLIENT_A and _B; run scripts/network_fs.sh",
)


@dataclass(frozen=True)
class Share:
    """One directory as two machines see it."""

    a: Path
    b: Path
    lag: float
    """Seconds until one machine sees the size of what the other has appended to."""
    locks: bool
    """Does a lock on one machine exclude the other?"""

    def on_server(self) -> int:
        """Bytes allocated to the store where the server keeps it; 0 where that is not known."""
        return sum(allocated(path / self.a.name) for path in BACKING)


@pytest.fixture(scope="module")
def habits() -> tuple[float, bool]:
    """Lag and locks of the file system."""
    name = f"habits-{secrets.token_hex(4)}"
    here, there = (Path(client) / name for client in CLIENTS)
    here.write_bytes(b"1")
    try:
        assert eventually(there.exists) is not None, "A and B are not the same file system"
        with here.open("r+b") as mine, there.open("r+b") as theirs:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks = False
            try:
                fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locks = True
            there.stat()
            os.pwrite(mine.fileno(), b"22", 0)
            lag = eventually(lambda: there.stat().st_size == 2)
            assert lag is not None, "sizes are cached for longer than the store can do with"
        return lag, locks
    finally:
        here.unlink()


def eventually(condition: object, patience: float = PATIENCE) -> float | None:
    """Seconds until a condition is met; None when it is not in time."""
    assert callable(condition)
    began = time.monotonic()
    while time.monotonic() - began < patience:
        if condition():
            return time.monotonic() - began
        time.sleep(0.002)
    return None


@pytest.fixture
def share(habits: tuple[float, bool]) -> Iterator[Share]:
    """A directory for a store, empty, known to both machines."""
    name = f"store-{secrets.token_hex(4)}"
    here, there = (Path(client) / name for client in CLIENTS)
    here.mkdir()
    try:
        assert eventually(there.is_dir) is not None
        yield Share(here, there, *habits)
    finally:
        shutil.rmtree(here, ignore_errors=True)


@contextlib.contextmanager
def two_machines(share: Share, **options: object) -> Iterator[tuple[Machine, Machine]]:
    with machine("machine-a", share.a, **options) as a, machine("machine-b", share.b, **options) as b:
        yield a, b


def test_what_one_stores_the_other_finds(share: Share) -> None:
    """I1: in both directions, from the first segment on, in bounded time; and the bytes are right."""
    found_after = []
    with two_machines(share) as (a, b):
        for seed in range(6):
            ids = ids_of(seed, COUNT)
            writer, reader = (a, b) if seed % 2 else (b, a)
            assert not reader.ask("lookup", ids).any()
            assert (writer.ask("dump", ids) == Reason.OK).all()
            seconds = reader.ask("find", ids, PATIENCE)
            assert seconds is not None, f"batch {seed} was not found within {PATIENCE} s"
            found_after.append(round(seconds, 3))
            assert (reader.ask("load", ids) == Reason.OK).all()
        for each in (a, b):
            assert each.ask("verify") == 0
            assert each.ask("stats").catalog["truncated_blocks"] == 0
            assert set(each.ask("counters")["misses"]) <= {"absent"}
    print(f"found after {sorted(found_after)} s")


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not verified"])
def test_new_blocks_are_right_from_the_first_moment(share: Share, verify: bool) -> None:
    """I1, I2: caches on the reading machine never show a part of a block, or make a good one look damaged."""
    with two_machines(share, verify=verify) as (a, b):
        a.begin("dump_for_ever", 7)
        seen = np.zeros(max(Reason) + 1, np.int64)
        for _ in range(12):
            batch = a.end()
            ids = batch_ids(7, batch, COUNT)
            began = time.monotonic()
            while time.monotonic() - began < PATIENCE:
                status = b.ask("load", ids)
                seen += np.bincount(status, minlength=len(seen))
                if (status == Reason.OK).all():
                    break
            else:
                pytest.fail(f"batch {batch} was not loaded within {PATIENCE} s")
        assert set(np.flatnonzero(seen)) <= {Reason.OK, Reason.ABSENT}
        assert b.ask("stats").catalog["truncated_blocks"] == 0


def test_both_dump_at_once(share: Share) -> None:
    """I1, I2: what both store, the same blocks and others, is all there and right on both."""
    with two_machines(share) as (a, b):
        for each, seed in ((a, 1), (b, 2), (a, 3), (b, 3)):
            if seed == 3:
                each.begin("dump_batches", seed, 8)
                continue
            each.begin("dump_batches", seed, 8)
            assert each.end()[Reason.OK] == 8 * COUNT
        for each in (a, b):
            assert each.end()[Reason.OK] == 8 * COUNT
        ids = np.concatenate([batch_ids(seed, batch, COUNT) for seed in (1, 2, 3) for batch in range(8)])
        for each in (a, b):
            assert each.ask("find", ids, PATIENCE) is not None
            assert (each.ask("load", ids) == Reason.OK).all()
            assert each.ask("verify") == 0


class Watch:
    """The most that was allocated at any instant of the body of a `with`; samples with the store locked."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = self.most_on_server = self.samples = 0

    def _run(self) -> None:
        # Where locks are local, the store is still when both machines' locks are held.
        roots = (self._share.a,) if self._share.locks else (self._share.a, self._share.b)
        while not self._end.wait(0.02):
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
                for root in roots:
                    lock = stack.enter_context(open(root / "STORE.lock", "r+b"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
                self.most = max(self.most, allocated(self._share.a))
                self.most_on_server = max(self.most_on_server, self._share.on_server())
                self.samples += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_the_capacity_holds_for_both_together(share: Share) -> None:
    """I4: each stores as much as the capacity, and all files together never take more.

    Two exceptions. Where a machine sees only after a while what another has written, it is more by what was
    written then. And a server may allocate more than it tells: GlusterFS does not count what lies behind the
    end of a file, where XFS below it allocates ahead.
    """
    with two_machines(share, capacity=CAPACITY) as (a, b), Watch(share) as watch:
        for each, seed in ((a, 1), (b, 2)):
            each.begin("dump_batches", seed, BATCHES)
        outcomes = a.end() + b.end()
        print(f"at most {watch.most} of {CAPACITY} bytes ({watch.most_on_server} on the server), {outcomes}")
        assert_most_are_stored(outcomes)
        assert watch.samples > 5
        bound = CAPACITY + max(CAPACITY // 100, 2 * COUNT * LENGTH)
        if share.lag < 0.1:
            assert watch.most <= bound
        assert watch.most_on_server <= bound + CAPACITY // 8
        time.sleep(min(2 * share.lag, 2.0))
        assert allocated(share.a) <= bound
        assert a.ask("verify") == b.ask("verify") == 0


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not verified"])
def test_evictions_are_seen_by_the_other(share: Share, verify: bool) -> None:
    """I1: B goes on loading blocks that A evicts; it gets right bytes or misses, and in the end misses."""
    with two_machines(share, capacity=CAPACITY, verify=verify) as (a, b):
        assert a.ask("dump_batches", 1, 8)[Reason.OK] == 8 * COUNT
        ids = np.concatenate([batch_ids(1, batch, COUNT) for batch in range(8)])
        assert b.ask("find", ids, PATIENCE) is not None
        b.begin("load_for_ever", 1, 8)
        assert_most_are_stored(a.ask("dump_batches", 2, BATCHES + 8))
        b.begin("lose", ids, PATIENCE)
        loads = b.end()
        lost = b.end()
        print(f"loads by reason {loads}; lost after {lost} s")
        assert loads[Reason.OK] > 0
        assert lost is not None, "B still finds what A has evicted"
        # Good blocks that were taken for damaged would be evicted for all.
        assert a.ask("verify") == b.ask("verify") == 0


def assert_most_are_stored(outcomes: np.ndarray) -> None:
    """Of blocks by reason. A dump that must wait for space gives up; on a slow network that happens."""
    assert set(np.flatnonzero(outcomes)) <= {Reason.OK, Reason.FULL, Reason.TIMEOUT}, outcomes
    assert outcomes[Reason.OK] > 0.75 * outcomes.sum(), outcomes


def test_a_writer_is_killed(share: Share) -> None:
    """I2: what A reported stored is found by B; B leaves A's files alone; A's next process tidies up."""
    stored = []
    with machine("machine-b", share.b) as b:
        with machine("machine-a", share.a) as a:
            a.begin("dump_for_ever", 5)
            stored += [a.end() for _ in range(5)]
            a.worker.kill()
            stored += [report for report in a.worker.reports() if isinstance(report, int)]
        ids = np.concatenate([batch_ids(5, batch, COUNT) for batch in stored])
        assert b.ask("find", ids, PATIENCE) is not None
        assert (b.ask("load", ids) == Reason.OK).all()
        assert (b.ask("dump", ids_of(1, COUNT)) == Reason.OK).all()
        with machine("machine-a", share.a) as again:
            assert again.ask("find", ids, PATIENCE) is not None
            assert (again.ask("dump", ids_of(2, COUNT)) == Reason.OK).all()
            for each in (again, b):
                assert (each.ask("load", ids) == Reason.OK).all()
                assert each.ask("verify") == 0


def test_b_leaves_the_living_a_alone(share: Share) -> None:
    """I2: A holds its files open and idle; B, another host, neither cuts nor deletes them."""
    with two_machines(share) as (a, b):
        assert (a.ask("dump", ids_of(1, COUNT)) == Reason.OK).all()
        names = {path.name for path in (share.a / NAMESPACE).iterdir()}
        assert eventually(lambda: names <= set(os.listdir(share.b / NAMESPACE))) is not None
        for seed in (2, 3):
            assert (b.ask("dump", ids_of(seed, COUNT)) == Reason.OK).all()
        assert (a.ask("dump", ids_of(4, COUNT)) == Reason.OK).all()
        assert names <= set(os.listdir(share.a / NAMESPACE))
        for seed in (1, 4):
            assert b.ask("find", ids_of(seed, COUNT), PATIENCE) is not None
            assert (b.ask("load", ids_of(seed, COUNT)) == Reason.OK).all()


def test_one_clears(share: Share) -> None:
    """I7, I1: B misses what A has cleared, also its own blocks; soon what it stores is found by A again."""
    with two_machines(share) as (a, b):
        mine, theirs = ids_of(1, COUNT), ids_of(2, COUNT)
        assert (a.ask("dump", mine) == Reason.OK).all() and (b.ask("dump", theirs) == Reason.OK).all()
        assert b.ask("find", mine, PATIENCE) is not None and a.ask("find", theirs, PATIENCE) is not None
        assert (b.ask("load", mine) == Reason.OK).all()
        a.ask("clear")
        lost = b.ask("lose", np.concatenate([mine, theirs]), PATIENCE)
        assert lost is not None, "B still finds what A has cleared"
        assert eventually(lambda: dumped_and_found(b, a), 2 * PATIENCE) is not None
        assert a.ask("verify") == b.ask("verify") == 0


def dumped_and_found(writer: Machine, reader: Machine) -> bool:
    """Dump a new batch; a dump right after a clear may go into a deleted file."""
    ids = ids_of(secrets.randbits(30), COUNT)
    return bool((writer.ask("dump", ids) == Reason.OK).all()) and reader.ask("find", ids, 1.5) is not None


def test_what_the_file_system_can_do(share: Share) -> None:
    """The probe says that it is shared, and both machines find the same."""
    found = [probe(StoreRoot(str(root))) for root in (share.a, share.b)]
    for abilities in found:
        print(abilities.describe(), abilities.errors)
        assert abilities.shared_between_machines is not False
        assert abilities.exclusive_create and abilities.replace
        assert any("More than one machine" in text for text in abilities.consequences())
    assert found[0].punching is found[1].punching and found[0].preallocation is found[1].preallocation
    assert not [path for path in share.a.iterdir() if ".probe-" in path.name]
