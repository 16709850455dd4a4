"""Issue 3: nobody ever reads what eviction has taken away, and journals remember it.

Invariants I1 (a hole is never taken for a block), I2 (nothing partial is visible), I4 (within the capacity).
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mini_reader
import numpy as np
import pytest
from diskkit import look, soon
from faults import WRITES, Fault, FaultySyscalls
from storekit import (
    NAMESPACE,
    allocated,
    assert_counters_add_up,
    contents,
    dump,
    ids_of,
    load,
    memory_directory,
    open_store,
)

from posix_store import Reason, compaction
from posix_store.pins import write_pins
from posix_store.segment import EVICT, PUT, decode_records
from posix_store.syscalls import FALLOC_PUNCH_HOLE

LENGTH = 4096
FOREVER = float("inf")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


# -- nobody reads what has left ---------------------------------------------------------------------


class Witness(FaultySyscalls):
    """Remembers which blocks have an EVICT record, and what is freed of blocks that have none."""

    def __init__(self, root: Path, *faults: Fault) -> None:
        super().__init__(*faults)
        self.root = root
        self.evicted: set[tuple[bytes, int]] = set()
        self.wrong: list[str] = []
        self.freed = 0

    def _real(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        if kind == "fallocate" and arguments[1] & FALLOC_PUNCH_HOLE:
            path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            self._frees(path, arguments[2], arguments[2] + arguments[3])
        if kind == "unlink" and arguments[0].endswith(".seg"):
            self._frees(Path(arguments[0]), 0, 1 << 60)
        result = super()._real(kind, arguments)
        if kind == "pwrite" and len(arguments[1]) % 64 == 0:
            records, _, _ = decode_records(arguments[1])
            for record in records[records["kind"] == EVICT]:
                self.evicted.add((record["parent"].tobytes(), int(record["offset"])))
        return result

    def _frees(self, path: Path, start: int, end: int) -> None:
        uid = path.read_bytes()[12:28]
        for record in mini_reader.records(path.with_suffix(".idx").read_bytes()):
            if record.kind == PUT and start < record.offset + record.length and record.offset < end:
                self.freed += 1
                if (uid, record.offset) not in self.evicted:
                    self.wrong.append(f"{path.name}: {start} to {end}")


@pytest.mark.parametrize("length", [1000, 4096, 5000])
def test_an_eviction_is_recorded_before_the_space_is_freed(root: Path, length: int) -> None:
    """I1: at no moment is there a block that is found and a hole; watched at each system call."""
    calls = Witness(root)
    with open_store(root, capacity=100 * 4096, segment_bytes=48 << 10, io_threads=1, syscalls=calls) as store:
        for seed in range(40):
            ids = ids_of(seed, 6)
            for shard in range(1 + seed % 2):
                assert (dump(store, ids, length, shard, 1 + seed % 2) == Reason.OK).all()
            if seed % 5 == 0:
                load(store, ids, length)
        assert store.evictor.total.blocks > 30 and calls.freed > 30
        store.evictor.evict(1 << 40, soon())
        store.evictor.tidy(soon())
    assert calls.wrong == []


def test_what_cannot_be_recorded_is_not_evicted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I1, I2: when the journal cannot be written, no space is freed and every block is still there."""
    calls = FaultySyscalls()
    ids = ids_of(1, 20)
    with open_store(root, syscalls=calls) as store:
        dump(store, ids, LENGTH)
        before = contents(root)
        calls.faults = [Fault(kinds=["pwrite"], suffix=".idx", times=FOREVER, error=errno.EIO)]
        assert store.evictor.evict(5 * LENGTH, soon()).blocks == 0
        assert store.lookup(ids).all()
        segments = {path: data for path, data in contents(root).items() if path in before}
        assert segments == before
        calls.faults = []
        assert (load(store, ids, LENGTH) == Reason.OK).all()
        assert store.evictor.evict(5 * LENGTH, soon()).blocks == 5
    with open_store(root) as fresh:
        assert fresh.stats().blocks == 15 and fresh.verify().ok


class NoPunching(FaultySyscalls):
    """A file system that cannot free a part of a file."""

    def _real(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        if kind == "fallocate" and arguments[1] & FALLOC_PUNCH_HOLE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return super()._real(kind, arguments)


EVICTORS: dict[str, Callable[[], FaultySyscalls]] = {"holes": FaultySyscalls, "whole segments": NoPunching}


@pytest.mark.parametrize("make", EVICTORS.values(), ids=EVICTORS)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("verify", [True, False], ids=["checksums", "no checksums"])
def test_a_block_is_evicted_while_it_is_read(
    root: Path, verify: bool, moment: str, make: Callable[[], FaultySyscalls]
) -> None:
    """I1: a reader in another process gets the bytes or a miss that says why, never a part of a hole."""
    ids = ids_of(1, 30)
    calls = FaultySyscalls()
    with (
        open_store(root, segment_bytes=40 << 10, syscalls=make()) as store,
        open_store(root, verify=verify, io_threads=1, syscalls=calls) as reader,
    ):
        for part in np.array_split(ids, 5):
            dump(store, part, LENGTH)
        look(reader)
        assert (load(reader, ids[20:], LENGTH) == Reason.OK).all()  # opens a segment

        def evict() -> None:
            calls.faults = []
            store.evictor.evict(17 * LENGTH, soon())

        calls.faults = [Fault(kinds=["preadv"], **{moment: evict})]
        status = load(reader, ids, LENGTH)
        assert set(status) <= {Reason.OK, Reason.EVICTED}
        gone = ~store.lookup(ids)
        assert 17 <= gone.sum() < 30
        assert (status[~gone] == Reason.OK).all()
        if moment == "before":
            assert (status[gone] == Reason.EVICTED).all()
        assert_counters_add_up(reader)
        assert (load(reader, ids, LENGTH) == np.where(gone, Reason.ABSENT, Reason.OK)).all()
        assert reader.counters.snapshot()["misses"].keys() <= {"evicted", "absent"}


@pytest.mark.parametrize("make", EVICTORS.values(), ids=EVICTORS)
def test_readers_without_checksums_beside_an_evictor(root: Path, make: Callable[[], FaultySyscalls]) -> None:
    """I1: threads of another store object load all the time, while blocks come and go under them."""
    options = {"capacity": 80 * 4096, "segment_bytes": 40 << 10}
    seen = np.zeros(max(Reason) + 1, np.int64)
    newest = [0]
    with (
        open_store(root, syscalls=make(), **options) as store,
        open_store(root, verify=False, **options) as reader,
        ThreadPoolExecutor(3) as pool,
    ):

        def read(seed: int) -> np.ndarray:
            random = np.random.default_rng(seed)
            counted = np.zeros(max(Reason) + 1, np.int64)
            while newest[0] >= 0:
                ids = ids_of(max(0, newest[0] - int(random.integers(0, 12))), 8)
                counted += np.bincount(load(reader, ids, LENGTH), minlength=len(counted))
            return counted

        readers = [pool.submit(read, seed) for seed in range(2)]
        end = time.monotonic() + 0.8
        while time.monotonic() < end or newest[0] < 25:
            newest[0] += 1
            status = dump(store, ids_of(newest[0], 8), LENGTH)
            assert (status == Reason.OK).all()
        newest[0] = -1
        for done in readers:
            seen += done.result()
    assert store.evictor.total.blocks > 60 and seen[Reason.OK] > 100
    assert seen.sum() == seen[[Reason.OK, Reason.ABSENT, Reason.EVICTED, Reason.TIMEOUT]].sum(), seen


def test_where_nothing_can_be_punched_whole_segments_leave(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 3, I4: no file system is too old: a segment goes with all its blocks, unless one is pinned."""
    capacity = 100 * 4096
    with open_store(root, capacity=capacity, segment_bytes=40 << 10, syscalls=NoPunching()) as store:
        pinned = ids_of(0, 4)
        dump(store, pinned, LENGTH)
        write_pins(store.root, NAMESPACE, pinned[:1])
        for seed in range(1, 50):
            assert (dump(store, ids_of(seed, 4), LENGTH) == Reason.OK).all()
            assert allocated(root) <= capacity
            for path in root.glob("*/*.seg"):
                size = path.stat().st_size
                assert path.stat().st_blocks * 512 >= size // 4096 * 4096, f"a hole in {path}"
        assert store.evictor.total.segments > 5 and store.evictor.total.blocks > 60
        assert store.lookup(pinned).all(), "with what is pinned stays what shares its segment"
        assert store.verify().ok
        last = [seed for seed in range(1, 50) if store.lookup(ids_of(seed, 4)).all()]
        assert last == list(range(last[0], 50)) or last[1:] == list(range(last[1], 50))
    assert len([r for r in caplog.records if "whole segments are evicted" in r.getMessage()]) == 1


def test_with_a_keeper_a_load_writes_nothing(root: Path) -> None:
    """I11: damage is noted by the load and recorded by the next round of upkeep."""
    ids = ids_of(1, 8)
    writers: list[str] = []
    watch = Fault(
        kinds=[*WRITES, "fallocate"],
        times=FOREVER,
        before=lambda: writers.append(threading.current_thread().name),
    )
    with open_store(root) as writer:
        dump(writer, ids, LENGTH)
    (segment,) = root.glob("*/*.seg")
    with segment.open("r+b") as file:
        file.seek(LENGTH)
        file.write(b"damage")
    calls = FaultySyscalls()
    with open_store(root, maintenance=True, syscalls=calls) as store, open_store(root) as other:
        dump(store, ids_of(2, 1), LENGTH)  # so that it has a journal
        calls.faults = [watch]
        assert load(store, ids, LENGTH).tolist() == [Reason.CHECKSUM] + [Reason.OK] * 7
        assert threading.current_thread().name not in writers
        store.upkeep.round()
        assert not store.lookup(ids[:1])[0]
        assert load(other, ids, LENGTH)[0] in (Reason.ABSENT, Reason.EVICTED)


# -- what journals remember -------------------------------------------------------------------------


def test_evictions_outlive_the_segment_they_were_recorded_in(root: Path) -> None:
    """I1: five processes one after another evict what the first has stored, and their journals go."""
    ids = ids_of(1, 40)
    with open_store(root) as first:
        dump(first, ids, LENGTH)
    evicted = 0
    for seed in range(2, 7):
        with open_store(root) as store:
            dump(store, ids_of(seed, 2), LENGTH)
            load(store, ids_of(seed, 2), LENGTH)
            evicted += store.evictor.evict(4 * LENGTH, soon(), namespaces=[NAMESPACE]).blocks
        with open_store(root, verify=False) as fresh:
            found = fresh.lookup(ids)
            assert int((~found).sum()) == evicted == 4 * (seed - 1)
            assert (load(fresh, ids, LENGTH) == np.where(found, Reason.OK, Reason.ABSENT)).all()
        # What that process has stored goes, so its segment holds nothing but evictions.
        with open_store(root) as store:
            entries = store._catalog.index.entries_of(ids_of(seed, 2).view(np.uint64))
            assert store.evictor.remove(NAMESPACE, entries, soon()).blocks == 2
            store.evictor.tidy(soon())
    assert len(list(root.glob("*/*.seg"))) <= 4, "journals of the past pile up"
    with open_store(root, verify=False) as fresh:
        assert (fresh.lookup(ids) == found).all() and fresh.verify().ok
    assert mini_reader.read_store(root, NAMESPACE).keys() == {block.tobytes() for block in ids[found]}


def test_a_journal_is_rewritten_under_its_readers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3, I1: whoever has read it before, in part or not at all sees the same blocks afterwards."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 0)
    ids = ids_of(1, 60)
    with open_store(root, segment_bytes=1 << 20) as store, open_store(root) as half, open_store(root) as none:
        dump(store, ids[:20], LENGTH)
        look(half)
        assert half.lookup(ids[:20]).all()
        dump(store, ids[20:], LENGTH)
        store._writer.retire()
        with open_store(root) as before:
            store.evictor.evict(45 * LENGTH, soon(), namespaces=[NAMESPACE])
            left = store.lookup(ids)
            store.evictor.tidy(soon())
            journals = {path: path.read_bytes() for path in root.glob("*/*.idx")}
            assert sorted(data[52] for data in journals.values()) == [0, 1], "none was rewritten"
            with open_store(root) as after:
                for reader in (before, half, none, after):
                    look(reader)
                    assert (reader.lookup(ids) == left).all()
                    assert (load(reader, ids, LENGTH) == np.where(left, Reason.OK, Reason.ABSENT)).all()
                    assert reader.verify().ok
                    assert reader.stats().catalog["damaged_journals"] == 0
    with open_store(root, verify=False) as fresh:
        assert (load(fresh, ids, LENGTH) == np.where(left, Reason.OK, Reason.ABSENT)).all()


def test_a_rewritten_journal_of_the_old_size(root: Path) -> None:
    """Issue 3, I1: that a journal is as long as when it was read last does not mean that it is the same."""
    ids = ids_of(1, 40)
    with open_store(root, segment_bytes=1 << 20) as store, open_store(root) as reader:
        dump(store, ids[:9], LENGTH)
        look(reader)
        (journal,) = root.glob("*/*.idx")
        size = journal.stat().st_size
        dump(store, ids[9:], LENGTH)
        store._writer.retire()
        other = ids_of(2, 1)
        dump(store, other, LENGTH)  # a journal for the evictions
        gone = store._catalog.index.entries_of(ids[:32].view(np.uint64))
        assert store.evictor.remove(NAMESPACE, gone, soon()).blocks == 32
        catalog = store._catalog
        (segment,) = [each for each in catalog.segments if each.name.journal == journal.name]
        assert compaction.compact(store.root, catalog, segment)
        assert journal.stat().st_size == size, "eight blocks and the seal; the test is void otherwise"
        look(reader)
        assert reader.lookup(ids).tolist() == [False] * 32 + [True] * 8
        assert (load(reader, ids[32:], LENGTH) == Reason.OK).all()


def test_a_rewrite_of_a_journal_stays_within_the_capacity(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: for a moment there are two of a journal; where there is no room for that, it waits."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 0)
    used: list[int] = []
    calls = FaultySyscalls()
    with open_store(root, segment_bytes=1 << 20, syscalls=calls) as store:
        dump(store, ids_of(1, 300), LENGTH)
        store._writer.retire()
        store.evictor.evict(250 * LENGTH, soon(), namespaces=[NAMESPACE])
        capacity = allocated(root)
        open_store(root, capacity=capacity).close()
        calls.faults = [
            Fault(kinds=["fsync", "rename"], times=FOREVER, before=lambda: used.append(allocated(root)))
        ]
        store.evictor.tidy(soon())
        assert all(each <= capacity for each in used), f"{max(used) - capacity} bytes too many"
        open_store(root, capacity=2 * capacity).close()
        used.clear()
        store.evictor.tidy(soon())
        assert used and allocated(root) < capacity
        assert store.verify().ok and store.stats().blocks == 50


def test_copies_do_not_come_back(root: Path) -> None:
    """I1, issue 3: of a block that two processes have stored all the same, both copies go."""
    ids = ids_of(1, 8)
    with open_store(root) as store, open_store(root) as other:
        dump(store, ids, LENGTH)
        # It has not looked: as two machines, or two that wrote at the same moment.
        other._catalog.refresh = lambda *_, **__: False  # type: ignore[method-assign]
        other._catalog.follow = lambda: None  # type: ignore[method-assign]
        dump(other, ids, LENGTH)
        assert other.counters.snapshot()["written_blocks"] == 8
        look(store)
        store.evictor.evict(1 << 40, soon())
        look(store)
        assert not store.lookup(ids).any()
    with open_store(root, verify=False) as fresh:
        assert not fresh.lookup(ids).any(), "a second copy has come back"
        assert fresh.verify().ok
    assert mini_reader.read_store(root, NAMESPACE) == {}
