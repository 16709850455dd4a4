"""The store on real file systems: images of ext4, xfs and btrfs, tmpfs, and overlay on top of tmpfs.

What this machine cannot mount is skipped with what is missing. `UCM_REQUIRE_FILE_SYSTEMS=1` makes that a
failure.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mounts import KINDS, CannotMount, Kind, mounted, used_bytes
from storekit import (
    allocated,
    assert_counters_add_up,
    assert_no_lock_is_held,
    dump,
    held_open,
    ids_of,
    load,
    open_store,
)
from workers import Promise, Worker, batch_ids, obedient, tireless_writer

from posix_store import PosixStore, Reason
from posix_store.abilities import Abilities, probe

LENGTH = 16 << 10
CAPACITY = 4 << 20
COUNT = 8
"""Blocks of a batch."""


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def disk(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Path]]:
    """A mounted file system for all tests of this module."""
    kind: Kind = request.param
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(mounted(kind))
        except CannotMount as why:
            if os.environ.get("UCM_REQUIRE_FILE_SYSTEMS"):
                raise
            pytest.skip(f"NOT TESTED ON {kind.name.upper()}: {why}")
        yield kind, place


@pytest.fixture
def root(disk: tuple[Kind, Path], request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of a store that is not there yet; the file system is empty again afterwards."""
    place = disk[1] / f"store-{abs(hash(request.node.name)) % 10**8}"
    yield place
    assert held_open(disk[1]) == []
    for path in sorted(disk[1].rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


class Watch:
    """The most that was allocated to a tree at any instant of the body of a `with`.

    Samples under the store lock: nobody gets more space meanwhile, so the files add up to what there was when
    the lock was taken, or to less.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = self.samples = 0

    def _run(self) -> None:
        while not self._end.wait(0.01):
            with contextlib.suppress(FileNotFoundError), open(self._root / "STORE.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.most = max(self.most, allocated(self._root))
                self.samples += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, allocated(self._root))


def within(capacity: int) -> int:
    """The bound that is promised for a capacity: 1 % or one extent more."""
    return capacity + max(capacity // 100, COUNT * LENGTH)


def test_round_trip_and_restart(root: Path) -> None:
    """I1, I2: whole blocks and shards come back with their bytes, in this process's life and the next."""
    whole, sharded = ids_of(1, 40), ids_of(2, 12)
    with open_store(root) as store:
        assert (dump(store, whole, 5000) == Reason.OK).all()
        for shard in range(3):
            assert not store.lookup(sharded).any()
            assert (dump(store, sharded, 700, shard, 3) == Reason.OK).all()
        check(store, whole, sharded)
        assert_counters_add_up(store)
    with open_store(root) as store:
        check(store, whole, sharded)
        assert not store.verify().bad
        assert store.clear() == 52
    assert_no_lock_is_held(root)


def check(store: PosixStore, whole: np.ndarray, sharded: np.ndarray) -> None:
    assert store.lookup(whole).all() and store.lookup(sharded).all()
    assert (load(store, whole, 5000) == Reason.OK).all()
    for shard in range(3):
        assert (load(store, sharded, 700, shard) == Reason.OK).all()


def test_two_processes(root: Path) -> None:
    """Each finds what the other has stored, within 100 ms of a miss."""
    with open_store(root) as here, Worker(obedient, str(root), {}, LENGTH) as there:
        there.receive()
        for seed in (10, 20):
            mine, theirs = ids_of(seed, COUNT), ids_of(seed + 1, COUNT)
            assert (dump(here, mine, LENGTH) == Reason.OK).all()
            assert (ask(there, "dump", theirs) == Reason.OK).all()
            time.sleep(0.1)
            assert (load(here, theirs, LENGTH) == Reason.OK).all()
            assert (ask(there, "load", mine) == Reason.OK).all()
        assert here.counters.snapshot()["misses"] == {}


def ask(worker: Worker, verb: str, ids: np.ndarray) -> np.ndarray:
    worker.send((verb, ids))
    answer = worker.receive()
    assert isinstance(answer, np.ndarray)
    return answer


def test_killed_writers(root: Path) -> None:
    """I2: after SIGKILL what was reported stored is there and right, nothing is damaged or locked."""
    promises: list[Promise] = []
    for seed in (1, 2):
        with Worker(tireless_writer, str(root), seed, 6, LENGTH) as worker:
            while len(promises) < 4 * seed:
                report = worker.receive()
                promises += [report] if isinstance(report, Promise) else []
            worker.kill()
            promises += [report for report in worker.reports() if isinstance(report, Promise)]
    assert_no_lock_is_held(root)
    with open_store(root) as store:
        for promise in promises:
            for shard in range(promise.shards):
                assert (load(store, promise.ids, LENGTH, shard) == Reason.OK).all()
        assert (dump(store, ids_of(77, 4), LENGTH) == Reason.OK).all()
        assert not store.verify().bad


def test_the_capacity_holds_while_much_more_is_written(disk: tuple[Kind, Path], root: Path) -> None:
    """I4: two processes store several times the capacity; neither the tree nor the file system exceeds it."""
    before = used_bytes(disk[1])
    options: dict[str, Any] = {"capacity": CAPACITY, "segment_bytes": 1 << 20}
    with open_store(root, **options):
        pass
    with (
        Watch(root) as watch,
        Worker(steady_dumper, str(root), 1, 64, options) as one,
        Worker(steady_dumper, str(root), 2, 64, options) as two,
    ):
        outcomes = one.receive() + two.receive()
    assert watch.most <= within(CAPACITY), f"{watch.most} of {CAPACITY} bytes"
    assert watch.samples > 5
    assert outcomes[Reason.OK] * LENGTH > 3 * CAPACITY, f"blocks by reason: {outcomes}"
    used = used_bytes(disk[1]) - before
    assert used <= within(CAPACITY) + (1 << 20), f"{used} bytes of the disk are used"
    with open_store(root, **options) as store:
        assert store.stats().blocks * LENGTH > CAPACITY // 2, "most of the capacity holds blocks"
        assert not store.verify().bad


def test_what_is_evicted_between_blocks_that_stay_is_free(disk: tuple[Kind, Path], root: Path) -> None:
    """I4: one block in eight stays in use. The file system itself says that the space of the others is free.

    (On btrfs a hole frees nothing while a part of its extent is left.)
    """
    before = used_bytes(disk[1])
    with open_store(root, capacity=CAPACITY, maintenance=False) as store:
        for batch in range(64):
            assert (dump(store, batch_ids(3, batch, COUNT), LENGTH) == Reason.OK).all()
            if batch % 8 == 7:
                load(store, np.concatenate([batch_ids(3, each, COUNT)[:1] for each in range(batch)]), LENGTH)
        assert used_bytes(disk[1]) - before <= within(CAPACITY) + (1 << 20)
        assert not store.verify().bad


def steady_dumper(
    connection: Connection, root: str, seed: int, batches: int, options: dict[str, Any]
) -> None:
    """Dump so many batches; answer with the blocks by reason, int64 (reasons,)."""
    with open_store(root, **options) as store:
        outcomes = [dump(store, batch_ids(seed, batch, COUNT), LENGTH) for batch in range(batches)]
    connection.send(np.bincount(np.concatenate(outcomes), minlength=max(Reason) + 1))


def test_a_disk_that_others_have_filled(disk: tuple[Kind, Path], root: Path) -> None:
    """I4: blocks go unstored, what is stored stays right; with space again, so are blocks."""
    kept = ids_of(1, COUNT)
    filler = disk[1] / "of-others"
    with open_store(root, maintenance=False) as store:
        assert (dump(store, kept, LENGTH) == Reason.OK).all()
        fill(filler)
        outcomes = [dump(store, ids_of(100 + batch, COUNT), LENGTH) for batch in range(40)]
        assert set(np.concatenate(outcomes).tolist()) <= {Reason.OK, Reason.FULL}
        assert Reason.FULL in outcomes[-1] or store.stats().blocks < 41 * COUNT
        loaded = load(store, kept, LENGTH)
        assert set(loaded.tolist()) <= {Reason.OK, Reason.ABSENT, Reason.EVICTED}
        assert not store.verify().bad
        filler.unlink()
        used_bytes(disk[1])  # waits until the space is free
        assert (dump(store, ids_of(999, COUNT), LENGTH) == Reason.OK).all()
        assert (load(store, ids_of(999, COUNT), LENGTH) == Reason.OK).all()
        assert_counters_add_up(store)


def fill(path: Path) -> None:
    """Take all the space of a file system, in ever smaller pieces."""
    with path.open("wb") as file:
        end, piece = 0, 1 << 30
        while piece >= 4096:
            try:
                os.posix_fallocate(file.fileno(), end, piece)
                end += piece
            except OSError:
                piece //= 2


EXPECTED: dict[str, dict[str, bool]] = {
    "ext4": {},
    "xfs": {},
    "btrfs": {"punching": False},
    "tmpfs": {},
    "overlay": {},
}
"""What differs from a file system that can do everything."""


def test_abilities(disk: tuple[Kind, Path], root: Path) -> None:
    """The probe says of each file system what it can do, and leaves nothing."""
    kind = disk[0]
    with open_store(root) as store:
        before = sorted(os.listdir(root))
        found = probe(store.root)
        assert sorted(os.listdir(root)) == before
    able = dict.fromkeys(
        ("preallocation", "allocation_counted", "punching", "direct_io", "flock", "flock_directory",
         "exclusive_create", "replace", "append_visible"), True,
    )  # fmt: skip
    assert found.file_system == kind.name
    assert {name: getattr(found, name) for name in able} == {**able, **EXPECTED[kind.name]}, found.errors
    assert found.direct_alignment in (512, 4096)
    assert found.attribute_seconds == 0.0
    assert found.metadata_seconds is not None and 0 < found.metadata_seconds < 0.05
    assert found.shared_between_machines is False
    assert Abilities(**{k: v for k, v in found.to_dict().items() if k != "shared_between_machines"}) == found
