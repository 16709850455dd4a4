"""Loads without checksums never take a hole for a block, and in the usual case cost no call that waits.

Defends I1 (what is returned was stored), I11 and issue 4 (an unverified load is as fast as a raw one).
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diskkit import look, soon
from faults import KINDS, Fault, FaultySyscalls
from storekit import (
    NAMESPACE,
    allocated,
    contents,
    dump,
    held_open,
    ids_of,
    load,
    memory_directory,
    open_store,
)
from workers import Point, Worker, batch_ids

from posix_store import PosixStore, Reason, catalog, compaction, eviction_stamp, wholeness
from posix_store.capacity import NoSpace
from posix_store.eviction_stamp import EvictionStamp

LENGTH = 4096
FOREVER = float("inf")
IDS = ids_of(1, 30)
CHEAP = {"preadv", "peek", "peek_links"}
"""What a load may do that is known to be whole: none of the others is over without a turn of the GIL."""


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is looked at when there is a reason, and not because a second has passed."""
    monkeypatch.setattr(catalog, "HIT_MAX_AGE", 1e9)
    monkeypatch.setattr(eviction_stamp, "LOOK_SECONDS", 1e9)


@contextlib.contextmanager
def opened(root: Path, **options: Any) -> Iterator[tuple[PosixStore, PosixStore, FaultySyscalls]]:
    """A store with `IDS` in it, a reader without checksums that knows that they are whole, and its calls."""
    calls = FaultySyscalls()
    with open_store(root, segment_bytes=4 << 20) as store:
        assert not dump(store, IDS, LENGTH).any()
        with open_store(root, verify=False, syscalls=calls, **options) as reader:
            assert not load(reader, IDS, LENGTH).any()
            yield store, reader, calls


def kinds_of_a_load(reader: PosixStore, calls: FaultySyscalls, ids: np.ndarray = IDS) -> set[str]:
    """Kinds of calls that one load makes."""
    calls.counts.clear()
    load(reader, ids, LENGTH)
    return {kind for kind in KINDS if calls.counts[kind]}


def evict(store: PosixStore, blocks: int) -> None:
    """In a store that has not stored these blocks the records go to a journal of its own."""
    store.evictor.evict(blocks * LENGTH, soon(), namespaces=[NAMESPACE])


def journals(root: Path) -> set[Path]:
    return set(root.glob("*/*.idx"))


def stamp_of(root: Path) -> bytes:
    return (root / "EVICT.lock").read_bytes()


# -- the usual case ---------------------------------------------------------------------------------------


def test_a_load_makes_no_call_that_waits(root: Path) -> None:
    with opened(root) as (store, reader, calls):
        assert kinds_of_a_load(reader, calls) == CHEAP
        assert calls.counts["preadv"] == 1 and calls.counts["peek"] == 2 and calls.counts["peek_links"] == 1
        evict(store, 3)
        assert "seek_hole" in kinds_of_a_load(reader, calls), "it has not noticed that holes were made"
        there = IDS[store.lookup(IDS)]
        assert 0 < len(there) < 30
        assert not load(reader, there, LENGTH).any()
        assert kinds_of_a_load(reader, calls, there) == CHEAP
        # What others store meanwhile is whole.
        dump(store, ids_of(2, 5), LENGTH)
        look(reader)
        assert kinds_of_a_load(reader, calls, np.concatenate([there, ids_of(2, 5)])) == CHEAP
        reader.close()
        assert held_open(root) and not [path for path in held_open(root) if "EVICT" in path]


def test_a_segment_with_many_holes_is_learned_bit_by_bit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wholeness, "MOST_SEEKS", 2)
    with opened(root) as (store, reader, calls):
        odd = store._catalog.index.entries_of(IDS[1::2].view(np.uint64))
        assert store.evictor.remove(NAMESPACE, odd, soon()).blocks == 15
        seen = [kinds_of_a_load(reader, calls, IDS[::2]) for _ in range(12)]
        assert "seek_hole" in seen[3] and seen[-1] == CHEAP
        assert (load(reader, IDS[1::2], LENGTH) == Reason.ABSENT).all()


def test_who_only_looks_writes_no_stamp(root: Path) -> None:
    """Without the file, or with that of a former release, a read-only store is slow, and right."""
    with open_store(root) as store:
        dump(store, IDS, LENGTH)
    for content in (None, b""):
        if content is not None:
            (root / "EVICT.lock").write_bytes(content)
        before = contents(root)
        calls = FaultySyscalls()
        with open_store(root, capacity=None, verify=False, writable=False, syscalls=calls) as reader:
            for _ in range(2):
                assert not load(reader, IDS, LENGTH).any()
                assert "seek_hole" in kinds_of_a_load(reader, calls, IDS[::-2])
                assert calls.counts["seek_hole"] == 1, "once for all blocks before the next hole"
            assert calls.changes == {} and contents(root) == before
    with open_store(root, verify=False, syscalls=(calls := FaultySyscalls())) as reader:
        assert len(stamp_of(root)) == 8
        load(reader, IDS, LENGTH)
        assert kinds_of_a_load(reader, calls) == CHEAP


def test_on_overlayfs_a_file_that_may_change_under_its_name_is_not_trusted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root):
        calls = FaultySyscalls()
        monkeypatch.setattr("posix_store.root.mount_type", lambda *_: "overlay")
        with open_store(root, capacity=None, verify=False, writable=False, syscalls=calls) as reader:
            load(reader, IDS, LENGTH)
            assert "seek_hole" in kinds_of_a_load(reader, calls)


def test_the_file_of_stamps_is_within_the_capacity(root: Path) -> None:
    """I4: it takes a page."""
    with open_store(root, capacity=64 << 10, segment_bytes=32 << 10) as store:
        for seed in range(8):
            dump(store, ids_of(seed, 4), LENGTH)
            assert allocated(root) <= 64 << 10
        (root / "EVICT.lock").write_bytes(b"")
        for seed in range(8, 20):
            assert not dump(store, ids_of(seed, 4), LENGTH).any()
            assert allocated(root) <= 64 << 10


# -- journals that are lost -------------------------------------------------------------------------------


def test_a_lost_journal_leaves_no_zeros(root: Path) -> None:
    """An operator deletes the journal with the evictions before anybody has read it."""
    with opened(root) as (_, reader, _calls):
        before = journals(root)
        with open_store(root) as other:
            evict(other, 12)
            gone = ~other.lookup(IDS)
        for path in journals(root) - before:
            path.unlink()
        assert gone.sum() >= 12
        for _ in range(3):
            assert (load(reader, IDS, LENGTH)[gone] != Reason.OK).all()
            assert (load(reader, IDS[~gone], LENGTH) == Reason.OK).all()
        with open_store(root, verify=False) as fresh:
            for _ in range(3):
                assert set(load(fresh, IDS, LENGTH)[gone]) <= {Reason.EVICTED, Reason.ABSENT}


@pytest.mark.parametrize("nth", [1, 2])
def test_a_journal_lost_while_holes_are_made(root: Path, nth: int) -> None:
    """The records go before a hole is made, and a load comes after it: only the stamp is left to tell."""
    with opened(root) as (_, reader, _calls):
        before = journals(root)
        odd = IDS[1::2].view(np.uint64)
        moments: list[bytes] = []

        def lose() -> None:
            for path in journals(root) - before:
                path.unlink()
            assert not load(reader, IDS[::2], LENGTH).any()

        def see() -> None:
            moments.append(stamp_of(root))
            assert (load(reader, IDS[::2], LENGTH) == Reason.OK).all()
            load(reader, IDS, LENGTH)

        hook = Fault(nth, kinds=["fallocate"], suffix=".seg", before=lose, after=see)
        with open_store(root, syscalls=(faulty := FaultySyscalls())) as other:
            other.evictor.remove(NAMESPACE, other._catalog.index.entries_of(odd[:1]), soon())
            faulty.faults = [hook]
            other.evictor.remove(NAMESPACE, other._catalog.index.entries_of(odd[1:]), soon())
        assert moments and moments[0][0] % 2 == 1 and stamp_of(root)[0] % 2 == 0
        for _ in range(3):
            assert (load(reader, IDS, LENGTH)[1::2] != Reason.OK).all()


def test_a_rewritten_journal_brings_no_hole_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block was dropped for its hole; a process that knows of no eviction writes its record once more."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 0)
    with opened(root) as (store, reader, calls):
        before = journals(root)
        with open_store(root) as other:
            entries = other._catalog.index.entries_of(IDS[:9].view(np.uint64))
            other.evictor.remove(NAMESPACE, entries, soon())
        for path in journals(root) - before:
            path.unlink()
        assert (load(reader, IDS, LENGTH)[:9] == Reason.EVICTED).all()
        # After another eviction it is gone through once more, now that it is known without those blocks.
        store.evictor.remove(NAMESPACE, store._catalog.index.entries_of(IDS[29:].view(np.uint64)), soon())
        assert not load(reader, IDS[9:29], LENGTH).any()
        assert kinds_of_a_load(reader, calls, IDS[9:29]) == CHEAP
        store._writer.retire()
        with open_store(root) as innocent:
            assert innocent.lookup(IDS[:29]).all()
            (segment,) = [each for each in innocent._catalog.segments if each.number == 0]
            assert compaction.compact(innocent.root, innocent._catalog, segment, force=True)
        look(reader)
        assert (load(reader, IDS, LENGTH)[:9] != Reason.OK).all()


# -- the file of stamps -----------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_part(path: Path) -> None:
    os.truncate(path, 3)


def replace(path: Path) -> None:
    """By a copy, as from a backup."""
    copy = path.with_name(".STORE.json.copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xfe\xff\xff\xff\xff\xff\xff\xff")


def test_a_copy_of_the_file_while_holes_are_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is put in the place of the one that is locked, with the stamp that was there before."""
    with opened(root) as (_, reader, _calls):
        path = root / "EVICT.lock"

        def put_back() -> None:
            copy = path.with_name(".STORE.json.copy")
            copy.write_bytes(before)
            copy.replace(path)

        statuses: list[np.ndarray] = []
        with open_store(root, syscalls=(faulty := FaultySyscalls())) as other:
            other.evictor.remove(
                NAMESPACE, other._catalog.index.entries_of(IDS[9:10].view(np.uint64)), soon()
            )
            load(reader, IDS, LENGTH)
            before = path.read_bytes()
            monkeypatch.setattr(eviction_stamp, "LOOK_SECONDS", 0.0)
            faulty.faults = [
                Fault(
                    kinds=["fallocate"], suffix=".seg", before=put_back,
                    after=lambda: statuses.extend(load(reader, IDS, LENGTH) for _ in range(3)),
                )
            ]  # fmt: skip
            other.evictor.remove(NAMESPACE, other._catalog.index.entries_of(IDS[:6].view(np.uint64)), soon())
        assert len(statuses) == 3 and all((each[:6] != Reason.OK).all() for each in statuses)


@pytest.mark.parametrize("harm", [cut, cut_in_part, Path.unlink, replace, overwrite])
def test_harm_to_the_file(root: Path, harm: Callable[[Path], None]) -> None:
    """Cut, deleted, replaced or overwritten: what is evicted after that is never read, and it gets well."""
    with opened(root) as (store, reader, calls):
        harm(root / "EVICT.lock")
        assert not load(reader, IDS, LENGTH).any()
        with open_store(root) as other:
            evict(other, 8)
        look(store)
        gone = ~store.lookup(IDS)
        assert gone.sum() >= 8
        assert (load(reader, IDS, LENGTH)[gone] != Reason.OK).all()
        assert not load(reader, IDS[~gone], LENGTH).any()
        assert kinds_of_a_load(reader, calls, IDS[~gone]) == CHEAP


def test_a_file_that_was_moved_away_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root) as (_, reader, _calls):
        (root / "EVICT.lock").rename(root / ".STORE.json.aside")
        monkeypatch.setattr(eviction_stamp, "LOOK_SECONDS", 0.0)
        with open_store(root) as other:
            evict(other, 8)
            gone = ~other.lookup(IDS)
        assert (load(reader, IDS, LENGTH)[gone] != Reason.OK).all()


def test_stamps_do_not_repeat(root: Path) -> None:
    with open_store(root) as store:
        dump(store, IDS, LENGTH)
        seen = []
        for each in range(10):
            entries = store._catalog.index.entries_of(IDS[each : each + 1].view(np.uint64))
            store.evictor.remove(NAMESPACE, entries, soon())
            seen.append(stamp_of(root))
    assert len(set(seen)) == 10 and all(stamp[0] % 2 == 0 for stamp in seen)


def test_the_stamp_of_a_dead_evictor_is_put_right(root: Path) -> None:
    """Whoever looks for garbage next, twice a minute, does that, although there is nothing to evict."""
    with opened(root) as (store, reader, calls):
        (root / "EVICT.lock").write_bytes(b"\x01" * 8)
        assert "seek_hole" in kinds_of_a_load(reader, calls)
        store.evictor.tidy(soon())
        assert stamp_of(root)[0] % 2 == 0
        load(reader, IDS, LENGTH)
        assert kinds_of_a_load(reader, calls) == CHEAP


def test_without_a_stamp_nothing_is_punched(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for it, or the disk returns an error: blocks leave, their space only with whole segments."""
    calls = FaultySyscalls()
    with open_store(root, segment_bytes=4 << 20, syscalls=calls) as store:
        dump(store, IDS, LENGTH)
        (segment,) = root.glob("*/*.seg")
        with open_store(root, verify=False) as reader:
            load(reader, IDS, LENGTH)
            for faults in (
                [Fault(kinds=["pwrite"], suffix="EVICT.lock", error=errno.ENOSPC, times=FOREVER)],
                [Fault(2, kinds=["fstat"], suffix="EVICT.lock", error=errno.EIO, times=FOREVER)],
                [Fault(kinds=["pread"], suffix="EVICT.lock", error=errno.EIO, times=FOREVER)],
            ):
                calls.faults = faults
                before = segment.stat().st_blocks
                some = IDS[store.lookup(IDS)][:3]
                entries = store._catalog.index.entries_of(some.view(np.uint64))
                assert store.evictor.remove(NAMESPACE, entries, soon()).blocks == 3
                assert segment.stat().st_blocks == before and faults[0].fired
                load(reader, IDS, LENGTH)
            calls.faults = []
            monkeypatch.setattr(EvictionStamp, "_begin_file", _no_room)
            cut(root / "EVICT.lock")
            evict(store, 3)
            assert segment.stat().st_blocks == before
        monkeypatch.undo()
        evict(store, 1 << 20)
        assert not segment.exists() or segment.stat().st_blocks < before


def _no_room(*_: object) -> None:
    raise NoSpace(Reason.FULL, "test")


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["peek", "peek_links", "pread", "seek_hole", "open", "stat", "fstat", "listdir"]
)
@pytest.mark.parametrize("error", [errno.EIO, errno.EAGAIN, errno.EOPNOTSUPP])
def test_faults_of_a_reader(root: Path, kind: str, error: int) -> None:
    """Whatever fails, no wrong byte is returned, and nothing is raised; afterwards all is as before."""
    with opened(root) as (store, reader, calls):
        calls.faults = [Fault(kinds=[kind], error=error, times=FOREVER)]
        first = load(reader, IDS, LENGTH)
        assert kind in ("listdir", "stat", "open") or not first.any()
        entries = store._catalog.index.entries_of(IDS[:6].view(np.uint64))
        store.evictor.remove(NAMESPACE, entries, soon())
        status = load(reader, IDS, LENGTH)
        assert (status[:6] != Reason.OK).all()
        load(reader, IDS, LENGTH)
        calls.faults = []
        look(reader)
        for _ in range(2):
            found = reader.lookup(IDS)
            assert not load(reader, IDS[found], LENGTH).any()
        assert not found[:6].any()
        assert kinds_of_a_load(reader, calls, IDS[found]) == CHEAP


@pytest.mark.parametrize("nth", range(1, 12))
def test_evictions_before_each_call_of_a_load(root: Path, nth: int) -> None:
    """Also between two of them, and while a segment is gone through."""
    with opened(root) as (store, reader, calls):
        others = [IDS[:5], IDS[10:15]]

        def come_in() -> None:
            if others:
                entries = store._catalog.index.entries_of(others.pop().view(np.uint64))
                store.evictor.remove(NAMESPACE, entries, soon())

        come_in()  # so that it begins with a look at everything
        calls.faults = [Fault(nth, before=come_in), Fault(nth + 1, before=come_in)]
        load(reader, IDS, LENGTH)
        load(reader, IDS, LENGTH)
        calls.faults = []
        status = load(reader, IDS, LENGTH)
        assert (status[10:15] != Reason.OK).all() and (status[15:] == Reason.OK).all()


# -- processes --------------------------------------------------------------------------------------------


def evict_for_ever(connection: Connection, root: str, point: Point | None) -> None:
    """Store more than there is room for; die at `point`, or when killed."""
    calls = FaultySyscalls()
    options: dict[str, Any] = {} if point is None else {"syscalls": calls}
    store = open_store(root, capacity=256 << 10, segment_bytes=64 << 10, **options)
    for batch in range(100_000):
        dump(store, batch_ids(7, batch, 6), LENGTH)
        connection.send(batch)
        if batch == 20 and point is not None:
            calls.faults = [point.fault()]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_beside_a_process_that_evicts_all_the_time(root: Path, engine: str) -> None:
    seen = np.zeros(max(Reason) + 1, np.int64)
    with (
        open_store(root, capacity=256 << 10, verify=False, engine=engine) as reader,
        Worker(evict_for_ever, str(root), None) as worker,
    ):
        newest = 0
        while newest < 250:
            newest = worker.receive()
            while worker.connection.poll():
                newest = worker.receive()
            for back in (0, 1, 3, 6):
                ids = batch_ids(7, max(0, newest - back), 6)
                look(reader)
                for _ in range(2):
                    seen += np.bincount(load(reader, ids, LENGTH), minlength=len(seen))
    assert (
        seen[Reason.OK] > 100 and seen[Reason.OK] + seen[Reason.ABSENT] + seen[Reason.EVICTED] == seen.sum()
    )


POINTS = [
    Point(nth, (kind,), suffix, after)
    for kind, suffix, most in (("pwrite", "EVICT.lock", 2), ("fallocate", ".seg", 5), ("pwrite", ".idx", 2))
    for nth in range(1, most + 1)
    for after in (False, True)
]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.kinds[0]}{p.suffix}-{p.nth}-{p.after}")
def test_an_evictor_that_is_killed(root: Path, point: Point) -> None:
    """Between records, stamp, holes and the next stamp: nothing wrong is read, and the next one goes on."""
    calls = FaultySyscalls()
    with open_store(root, capacity=256 << 10, verify=False, syscalls=calls) as reader:
        every = np.concatenate([batch_ids(7, batch, 6) for batch in range(60)])
        with Worker(evict_for_ever, str(root), point) as worker:
            for batch in worker.reports():
                if batch > 10:
                    load(reader, every[: 6 * batch + 6], LENGTH)
            assert worker.process.exitcode == -signal.SIGKILL
        for _ in range(2):
            load(reader, every, LENGTH)
        with open_store(root, capacity=256 << 10, segment_bytes=64 << 10) as next_one:
            dump(next_one, ids_of(2, 12), LENGTH)
            next_one.evictor.tidy(soon())
            assert stamp_of(root)[0] % 2 == 0
            look(reader)
            there = every[reader.lookup(every)]
            assert len(there)
            for _ in range(4):
                assert not load(reader, there, LENGTH).any()
            assert kinds_of_a_load(reader, calls, there) <= CHEAP
