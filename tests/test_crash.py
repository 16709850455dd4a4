"""Issue 2, must hold 5, and invariants I2, I9: writers die at any moment, or stop.

After each death the directory is opened at once. Every block whose dump had been reported is there with its
bytes; every other block is right or absent; no byte fails its checksum; and a later writer takes back what
the dead one had reserved.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from diskkit import evicting_writer
from faults import CHANGES, WRITES
from storekit import (
    allocated,
    assert_no_lock_is_held,
    dump,
    ids_of,
    load,
    memory_directory,
    open_store,
)
from workers import Point, Promise, Worker, batch_ids, one_dump, scripted_writer, tireless_writer

from posix_store import Reason
from posix_store.segment import PUT, decode_records

LENGTH, COUNT, BATCHES = 3000, 3, 5
SEG, IDX = ".seg", ".idx"
CREATE = ("open for writing",)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


class Survivors:
    """What the dead of one directory had promised, and what a newcomer must find."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._promised: dict[int, list[np.ndarray]] = {1: [], 2: []}
        self._tried: dict[int, list[np.ndarray]] = {1: [], 2: []}

    def note(self, reports: list[object]) -> None:
        for report in reports:
            if isinstance(report, Promise):
                self._promised[report.shards].append(report.ids)

    def tried(self, seed: int, batches: int, count: int) -> None:
        for batch in range(batches):
            self._tried[1 + batch % 2].append(batch_ids(seed, batch, count))

    def check(self) -> None:
        started = time.monotonic()
        with open_store(self.root, io_threads=1) as store:
            assert time.monotonic() - started < 2, "the store does not open at once"
            for shards in (1, 2):
                for batches, promised in ((self._promised, True), (self._tried, False)):
                    if not batches[shards]:
                        continue
                    ids = np.concatenate(batches[shards])
                    found = store.lookup(ids)
                    batches_found = found.reshape(-1, COUNT).sum(axis=1) if not promised else found[:0]
                    assert np.isin(batches_found, (0, COUNT)).all(), "a part of a batch is visible"
                    assert found.all() or not promised, "a block reported stored is lost"
                    for shard in range(shards):
                        status = load(store, ids, LENGTH, shard)
                        assert (status == np.where(found, Reason.OK, Reason.ABSENT)).all(), status
            report = store.verify()
            assert report.ok, report

    def check_reclaimed(self) -> None:
        """After the next writer's first dump, nothing is left of what no block uses."""
        with open_store(self.root) as store:
            assert (dump(store, ids_of(999_999, 1), 100) == Reason.OK).all()
        assert_no_lock_is_held(self.root)
        data, journals = ({p.stem: p for p in self.root.glob(f"*/*{kind}")} for kind in (SEG, IDX))
        assert data.keys() == journals.keys(), "half a pair was left behind"
        for path in [*data.values(), *journals.values()]:
            status = path.stat()
            assert status.st_blocks * 512 <= -(-status.st_size // 4096) * 4096, (
                f"reserved space at the end of {path}"
            )
        for path in journals.values():
            assert path.stat().st_size >= 128, f"{path} and its segment hold no record"

    def check_nothing_unpublished(self) -> None:
        """The dead writers' segments end where their last published block ends."""
        for path in self.root.glob(f"*/*{IDX}"):
            records, _, _ = decode_records(path.read_bytes()[64:])
            puts = records[records["kind"] == PUT]
            assert len(puts), f"{path} and its segment hold no block"
            assert path.with_suffix(SEG).stat().st_size == (puts["offset"] + puts["length"]).max()


def die(survivors: Survivors, seed: int, point: Point, batches: int = BATCHES) -> bool:
    """Run a scripted writer up to its death and check what is left; False if it reached its end alive."""
    arguments = (str(survivors.root), seed, batches, COUNT, LENGTH, point)
    with Worker(scripted_writer, *arguments) as worker:
        survivors.note(list(worker.reports()))
        died = worker.process.exitcode == -signal.SIGKILL
        assert died or worker.process.exitcode == 0
    survivors.tried(seed, batches, COUNT)
    survivors.check()
    return died


# A segment takes three extents, so its journal is written five times: header, three appends, seal.
NAMED = {
    "before the data file is made": Point(1, CREATE, SEG),
    "data file made, not locked": Point(1, ("flock",), SEG),
    "data file without a journal": Point(1, CREATE, IDX),
    "journal made, not locked": Point(1, ("flock",), IDX),
    "nothing reserved for the headers": Point(1, ("fallocate",), SEG),
    "half a data header": Point(1, ("pwrite",), SEG, short=50),
    "no journal header": Point(1, ("pwrite",), IDX),
    "half a journal header": Point(1, ("pwrite",), IDX, short=40),
    "both headers, no extent": Point(1, ("pwrite",), IDX, after=True),
    "before the first extent is reserved": Point(2, ("fallocate",), SEG),
    "first extent reserved": Point(1, ("pwritev",), SEG),
    "extent reserved": Point(3, ("pwritev",), SEG),
    "in the middle of a write": Point(3, ("pwritev",), SEG, short=5000),
    "written, not in the journal": Point(3, ("pwritev",), SEG, after=True),
    "first append torn": Point(2, ("pwrite",), IDX, short=100),
    "append torn inside a record": Point(3, ("pwrite",), IDX, short=100),
    "append torn between records": Point(3, ("pwrite",), IDX, short=128),
    "appended": Point(3, ("pwrite",), IDX, after=True),
    "rolling: seal torn": Point(5, ("pwrite",), IDX, short=30),
    "rolling: sealed": Point(5, ("pwrite",), IDX, after=True),
    "rolling: data file trimmed": Point(1, ("ftruncate",), SEG, after=True),
    "rolling: journal trimmed": Point(1, ("ftruncate",), IDX, after=True),
    "rolling: next data file made": Point(2, CREATE, SEG, after=True),
    "rolling: next journal made": Point(2, CREATE, IDX, after=True),
}


@pytest.mark.parametrize("name", NAMED)
def test_killed_at_a_named_point(tmp_path: Path, name: str) -> None:
    """Must hold 5: death at the points where the state on disk changes; three writers, one after another."""
    survivors = Survivors(tmp_path / "store")
    for seed in range(2):
        assert die(survivors, seed, NAMED[name]), "the point was not reached"
    survivors.check_reclaimed()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(Point(2, ("pwritev",), SEG, short=5000), id="in-a-write"),
        pytest.param(Point(2, ("pwritev",), SEG, after=True), id="written"),
        pytest.param(Point(2, ("pwrite",), IDX, short=100), id="first-append-torn"),
    ],
)
def test_unpublished_bytes_are_reclaimed(root: Path, point: Point) -> None:
    """Must hold 5, I4: what a writer had written but not published when it died is no use to anybody."""
    survivors = Survivors(root)
    assert die(survivors, 1, point), "the point was not reached"
    survivors.check_reclaimed()
    survivors.check_nothing_unpublished()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("kind", ["pwrite", "ftruncate", "close"])
def test_killed_while_closing(root: Path, kind: str, nth: int) -> None:
    """Must hold 5: death in the last steps, when the only segment is sealed, trimmed and let go of."""
    survivors = Survivors(root)
    # Two batches fit one segment: a header, an append for the first, two for the shards of the second, a seal
    at = {"pwrite": 5, "ftruncate": 1, "close": 1}[kind]
    suffix = IDX if nth == 2 or kind == "pwrite" else SEG
    point = Point(at, (kind,), suffix, short=10 if (kind, nth) == ("pwrite", 2) else None)
    assert die(survivors, 1, point, batches=2), "the point was not reached"
    survivors.check_reclaimed()


def test_killed_before_each_call_that_changes_anything(root: Path) -> None:
    """Must hold 5: death before every single change, in a directory where the dead pile up."""
    changing = (*CHANGES, *CREATE, "flock")
    rounds = 0
    for directory in range(100):
        survivors = Survivors(root.with_name(f"store{directory}"))
        for seed in range(20):
            if not die(survivors, seed, Point(rounds + 1, changing)):
                assert rounds > 60, f"only {rounds} points"
                return
            rounds += 1
        survivors.check_reclaimed()


@pytest.mark.parametrize("short", [64, 4097])
def test_killed_within_each_write(root: Path, short: int) -> None:
    """Must hold 5, I2: death after a part of every single write."""
    survivors = Survivors(root)
    for nth in range(1, 200):
        if not die(survivors, nth, Point(nth, WRITES, short=short)):
            break
    assert nth > 15, "few writes"
    survivors.check_reclaimed()


def test_killed_at_random(root: Path) -> None:
    """Must hold 5: pairs of writers with several threads, killed at random moments."""
    chance = random.Random(20_240_601)
    for directory in range(4):
        survivors = Survivors(root.with_name(f"store{directory}"))
        for pair in range(8):
            arguments = [(str(survivors.root), 2 * pair + i, COUNT, LENGTH) for i in range(2)]
            with Worker(tireless_writer, *arguments[0]) as one, Worker(tireless_writer, *arguments[1]) as two:
                for worker in (one, two):
                    early = []
                    while (report := worker.receive()) != "started":
                        early.append(report)
                    survivors.note(early)
                for worker in (one, two):
                    time.sleep(chance.uniform(0, 0.012))
                    worker.kill()
                for worker, (_, seed, *_) in zip((one, two), arguments, strict=True):
                    reports = list(worker.reports())
                    assert worker.process.exitcode == -signal.SIGKILL
                    survivors.note(reports)
                    survivors.tried(seed, len(reports) // 2 + 3, 2 * COUNT)
            survivors.check()
        survivors.check_reclaimed()


def test_killed_while_evicting(root: Path) -> None:
    """Issue 3, I1, I2, I4: death before single changes of writers that evict their own and others' blocks.

    No block is found whose space was given back, with or without checksums; what was stored last is there;
    and the next process stores on within the capacity.
    """
    capacity = 40 * 4096
    options = {"capacity": capacity, "segment_bytes": 32 << 10}
    changing = (*CHANGES, *CREATE, "flock")
    tried: list[np.ndarray] = []
    deaths = 0
    for seed, nth in enumerate([*range(3, 200, 17), *range(200, 320, 9)]):
        point = Point(nth, changing, after=seed % 3 == 0)
        with Worker(evicting_writer, str(root), seed, 14, COUNT, LENGTH, point, options) as worker:
            promised = [report.ids for report in worker.reports() if isinstance(report, Promise)]
            deaths += worker.process.exitcode == -signal.SIGKILL
        tried += [batch_ids(seed, batch, COUNT) for batch in range(14)]
        ids = np.concatenate(tried[-60:])
        for verify in (True, False):
            with open_store(root, io_threads=1, verify=verify, **options) as store:
                assert allocated(root) <= capacity
                found = store.lookup(ids)
                assert (load(store, ids, LENGTH) == np.where(found, Reason.OK, Reason.ABSENT)).all()
                assert store.verify().ok
                if promised:
                    assert store.lookup(promised[-1]).all(), "what was stored last is the last to go"
                assert (dump(store, ids_of(1_000_000 + 2 * seed + verify, 2), LENGTH) == Reason.OK).all()
                assert allocated(root) <= capacity
    assert deaths > 15, "few points were reached"
    assert_no_lock_is_held(root)


@pytest.mark.parametrize(
    ("point", "stored"),
    [
        pytest.param(Point(1, ("pwritev",), signal=signal.SIGSTOP), True, id="in-a-write"),
        pytest.param(Point(1, ("pwrite",), IDX, short=64, signal=signal.SIGSTOP), True, id="in-an-append"),
        pytest.param(Point(1, ("statvfs",), signal=signal.SIGSTOP), False, id="holding-the-store-lock"),
    ],
)
def test_a_stopped_writer_stops_nobody_else(root: Path, point: Point, stored: bool) -> None:
    """I11, must hold 5: others dump and load on, or give up on storing within the lock's time-out."""
    first, second = batch_ids(1, 0, 2), batch_ids(1, 1, 2)
    length = 300_000  # so that the second dump needs more than was reserved with the first
    with Worker(one_dump, str(root), 1, length, point) as worker:
        assert len(worker.receive().ids) == 2
        wait_until_stopped(worker.pid)
        with open_store(root) as store:
            started = time.monotonic()
            assert (load(store, first, length) == Reason.OK).all()
            assert not store.lookup(second).any(), "half a batch is visible"
            assert time.monotonic() - started < 0.5, "a load waited for the stopped process"
            status = dump(store, ids_of(5, 2), length)
            assert time.monotonic() - started < 2.5, "a dump waited for the stopped process"
            assert (status == (Reason.OK if stored else Reason.TIMEOUT)).all()
            os.kill(worker.pid, signal.SIGCONT)
            assert len(worker.receive().ids) == 2, "the stopped process did not go on"
            time.sleep(0.03)
            assert (load(store, second, length) == Reason.OK).all()
            assert (dump(store, ids_of(5, 2), length) == Reason.OK).all()
            assert store.verify().ok


@pytest.mark.parametrize("suffix", [SEG, IDX])
@pytest.mark.parametrize("kind", ["flock", "fallocate", "pwrite"])
def test_files_that_are_just_being_made_are_not_taken_for_a_dead_writers(
    root: Path, kind: str, suffix: str
) -> None:
    """Must hold 5, I7: a writer's first dump while another process reclaims space."""
    with open_store(root) as store:
        point = Point(1, (kind,), suffix, signal=signal.SIGSTOP)
        with Worker(scripted_writer, str(root), 1, 3, COUNT, LENGTH, point) as worker:
            wait_until_stopped(worker.pid)
            dump(store, ids_of(5, 2), LENGTH)
            os.kill(worker.pid, signal.SIGCONT)
            promises = list(worker.reports())
            assert worker.process.exitcode == 0
        time.sleep(0.03)
        for promise in promises:
            assert (load(store, promise.ids, LENGTH) == Reason.OK).all(), "blocks reported stored are lost"
        # The one dump that came to its files too late may go unstored.
        assert [len(promise.ids) for promise in promises[1:]] == [COUNT, COUNT]


def wait_until_stopped(pid: int) -> None:
    for _ in range(2000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.005)
    raise AssertionError("the writer did not come to its point")
