"""Slow or failing metadata calls, as on a loaded network file system: I11, I3, must hold 4.

Journals of killed writers are never sealed by them, so they are what look-ups pay for.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from faults import Fault, FaultySyscalls
from storekit import NAMESPACE, dump, ids_of, load, memory_directory, open_store, payloads

from posix_store import PosixStore, Reason
from posix_store.capacity import COUNT_SECONDS, RECLAIM_SECONDS
from posix_store.catalog import LOOK_SECONDS, Catalog
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD,
    SEAL,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    encode_header,
    evict_records,
    new_writer_name,
    seal_records,
)

LENGTH = 100
FOREVER = float("inf")
UNKNOWN = ids_of(10**6, 4)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        open_store(path / "store").close()
        (path / "store" / NAMESPACE).mkdir()
        yield path / "store"


def killed_writers(root: Path, count: int, seed: int = 0) -> np.ndarray:
    """What writers leave that are killed after one block each: no SEAL, no lock. Their ids, (count, 16)."""
    ids = ids_of(seed, count)
    for block, payload in zip(ids, payloads(ids, LENGTH), strict=True):
        stem = str(root / NAMESPACE / f"{new_writer_name()}-000000")
        uid, digest = secrets.token_bytes(16), bytes.fromhex(NAMESPACE)
        record = np.zeros(1, RECORD)
        record["kind"], record["offset"], record["length"] = PUT, SEGMENT_HEADER_BYTES, LENGTH
        record["id"], record["payload_crc"] = np.void(block.tobytes()), crc32c(payload.tobytes())
        header = encode_header(SEGMENT_MAGIC, uid, digest, 1).ljust(SEGMENT_HEADER_BYTES, b"\0")
        Path(stem + ".seg").write_bytes(header + payload.tobytes())
        header = encode_header(JOURNAL_MAGIC, uid, digest, 1)
        Path(stem + ".idx").write_bytes(header + seal_records(record))
    return ids


def pass_the_throttle() -> None:
    """Let the last look at the directory get too old for blocks that are not known."""
    time.sleep(0.021)


@pytest.mark.parametrize("kind", ["stat", "open"])
def test_lookups_and_loads_are_bounded(root: Path, kind: str) -> None:
    """I11: hundreds of unsealed journals, 30 ms for each call: a miss costs a bounded time, not 9 seconds."""
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as store:
        known = killed_writers(root, 1)
        pass_the_throttle()
        assert store.lookup(known).all()
        killed_writers(root, 300, seed=1)
        for ask in (lambda: store.lookup(UNKNOWN).any(), lambda: load(store, UNKNOWN, LENGTH).min() == 0):
            calls.faults = [Fault(kinds=[kind], times=FOREVER, delay=0.03)]
            pass_the_throttle()
            started = time.monotonic()
            assert not ask()
            assert time.monotonic() - started < LOOK_SECONDS + 0.5
        calls.faults = []
        assert (load(store, known, LENGTH) == Reason.OK).all()


def test_dumps_are_bounded(root: Path) -> None:
    """I11: so is a dump, which asks what the files of the root allocate and, the first time, tidies up."""
    killed_writers(root, 25)
    calls = FaultySyscalls()
    with open_store(root, timeout=0.3, syscalls=calls) as store:
        calls.faults = [Fault(kinds=["stat", "open"], times=FOREVER, delay=0.02)]
        started = time.monotonic()
        status = dump(store, UNKNOWN, LENGTH)
        # What it may do besides its own work: tidy up for a while, and add up what is allocated.
        assert time.monotonic() - started < 0.3 + RECLAIM_SECONDS + COUNT_SECONDS + 0.3
        assert set(status) <= {Reason.OK, Reason.TIMEOUT}
        calls.faults = []
        assert (dump(store, UNKNOWN, LENGTH) == Reason.OK).all()


def test_looks_that_run_out_of_time_see_everything_in_the_end(root: Path) -> None:
    """I11, must hold 6: each look goes on where the last one stopped, so no journal is left out for ever."""
    calls = FaultySyscalls()
    catalog = Catalog(StoreRoot(str(root), syscalls=calls), NAMESPACE)
    ids = killed_writers(root, 40)
    calls.faults = [Fault(kinds=["stat", "open"], times=FOREVER, delay=0.002)]
    seen = [0]
    while seen[-1] < len(ids) and len(seen) < 40:
        started = time.monotonic()
        assert catalog.refresh(max_age=0, budget=0.03)
        assert time.monotonic() - started < 0.5
        seen.append(int(catalog.index.contains(ids.view(np.uint64)).sum()))
        assert seen[-1] > seen[-2], f"a look brought nothing new: {seen}"
    assert seen[-1] == len(ids)
    assert len(seen) > 3, "the budget was never spent, so nothing was tested"


def test_a_look_whose_listing_takes_all_the_time(root: Path) -> None:
    """I11, must hold 6: a directory that is slow to list may delay a block, and must not hide it for ever."""
    calls = FaultySyscalls()
    catalog = Catalog(StoreRoot(str(root), syscalls=calls), NAMESPACE)
    ids = killed_writers(root, 3)
    calls.faults = [Fault(kinds=["listdir"], times=FOREVER, delay=0.02)]
    for _ in range(6):
        catalog.refresh(max_age=0, budget=0.01)
    assert catalog.index.contains(ids.view(np.uint64)).all()


def test_dead_journals_are_sealed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: the first dump seals the journals of killed writers, so that a miss asks only after live ones."""
    monkeypatch.setattr("posix_store.capacity.RECLAIM_SECONDS", 60.0)
    ids = killed_writers(root, 200)
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as reader, open_store(root) as writer:
        dump(writer, ids_of(1, 1), LENGTH)
        for _ in range(2):  # the first look reads the seals
            pass_the_throttle()
            calls.counts.clear()
            assert not reader.lookup(UNKNOWN).any()
        assert calls.counts["stat"] <= 2 and calls.counts["open"] == 0
        assert (load(reader, ids, LENGTH) == Reason.OK).all()
        dump(writer, UNKNOWN, LENGTH)
        pass_the_throttle()
        assert reader.lookup(UNKNOWN).all(), "the journal of the writer that lives must be followed"
    with open_store(root) as fresh:
        assert (load(fresh, ids, LENGTH) == Reason.OK).all()


def test_tidying_up_goes_on_where_it_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: where time is short, each reservation seals some of the dead journals, until all are sealed."""
    monkeypatch.setattr("posix_store.capacity.RECLAIM_SECONDS", 0.0)
    ids = killed_writers(root, 8)
    sealed = [0]
    with open_store(root, segment_bytes=8192) as writer:
        while sealed[-1] < len(ids) and len(sealed) < 12:
            dump(writer, ids_of(100 + len(sealed), 2), 4096)  # begins a segment, which takes a reservation
            ends = [path.read_bytes()[-RECORD.itemsize :] for path in (root / NAMESPACE).glob("*.idx")]
            kinds = np.frombuffer(b"".join(ends), RECORD)["kind"]
            sealed.append(int((kinds == SEAL).sum()) - (len(sealed) - 1))  # less the writer's own
        assert sealed[1] < len(ids) == sealed[-1], sealed
        assert (load(writer, ids, LENGTH) == Reason.OK).all()


@pytest.mark.parametrize(("kind", "suffix"), [("open", ".idx"), ("stat", ".idx"), ("listdir", NAMESPACE)])
def test_one_warning_for_each_file_and_error(
    root: Path, kind: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """I3: what cannot be read is said once, not at each of 50 looks a second; another error is said again."""
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as store:
        ids = killed_writers(root, 1)
        for times, error in enumerate((errno.EIO, errno.EACCES), 1):
            calls.faults = [Fault(kinds=[kind], suffix=suffix, times=FOREVER, error=error)]
            for _ in range(5):
                pass_the_throttle()
                assert not store.lookup(ids).any()
            assert len(caplog.messages) == times, caplog.messages
            assert os.strerror(error) in caplog.messages[-1] and suffix in caplog.messages[-1]
        calls.faults = []
        pass_the_throttle()
        assert store.lookup(ids).all()


def remembered_evictions(store: PosixStore) -> int:
    """Evictions that a store keeps in mind for blocks it does not know."""
    return len(store._catalog._early)


def test_evictions_of_a_segment_that_is_gone_are_forgotten(root: Path) -> None:
    """I11: neither processes that have seen the segment nor a later one carry its evictions for ever.

    I1: who comes second to a damaged block sees that it was evicted, because the first has recorded that.
    """
    ids = ids_of(1, 200)
    with open_store(root) as writer:
        dump(writer, ids, LENGTH)
    (segment,) = (root / NAMESPACE).glob("*.seg")
    uid = np.frombuffer(segment.read_bytes()[12:28], "V16").repeat(len(ids))
    with segment.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES)
        file.write(b"\xff" * len(ids) * LENGTH)
    with open_store(root) as first, open_store(root) as second:
        for number, store in enumerate((first, second)):
            dump(store, ids_of(2 + number, 1), LENGTH)  # so that it has a journal to record evictions in
        assert (load(first, ids, LENGTH) == Reason.CHECKSUM).all()
        assert (load(second, ids, LENGTH) == Reason.EVICTED).all()
        assert not first.lookup(ids).any() and not second.lookup(ids).any()
        offsets = SEGMENT_HEADER_BYTES + np.arange(len(ids)) * LENGTH
        for store in (first, second):  # as if both had found the damage at the same moment
            store._writer.record(evict_records(ids.view(np.uint64), uid, offsets, time.time()))
        pass_the_throttle()
        for store in (first, second):
            store.lookup(UNKNOWN)
            assert remembered_evictions(store) == len(ids), "evictions of blocks that are forgotten already"
        segment.unlink()
        segment.with_suffix(".idx").unlink()
        for _ in range(2):
            pass_the_throttle()
            for store in (first, second):
                store.lookup(UNKNOWN)
        assert [remembered_evictions(store) for store in (first, second)] == [0, 0]
    with open_store(root) as fresh:
        assert fresh.stats().blocks == 2
        for _ in range(2):
            pass_the_throttle()
            fresh.lookup(UNKNOWN)
        assert remembered_evictions(fresh) == 0


def test_an_eviction_that_is_read_before_its_block_holds(root: Path) -> None:
    """I1: an EVICT may stand in a journal that is read before the one it is about; the block stays away."""
    late = killed_writers(root, 1, seed=5)
    (journal,) = (root / NAMESPACE).glob("*.idx")
    hidden = journal.rename(root.parent / "hidden.idx")
    record = np.zeros(1, RECORD)
    record["kind"], record["offset"], record["id"] = EVICT, SEGMENT_HEADER_BYTES, np.void(late.tobytes())
    record["parent"] = np.void(hidden.read_bytes()[12:28])
    with open_store(root) as store:
        killed_writers(root, 1)
        (other,) = (root / NAMESPACE).glob("*.idx")
        with other.open("ab") as file:
            file.write(seal_records(record))
        pass_the_throttle()
        assert not store.lookup(late).any()
        hidden.rename(journal)
        pass_the_throttle()
        assert not store.lookup(late).any()
        assert (dump(store, late, LENGTH) == Reason.OK).all()
        assert (load(store, late, LENGTH) == Reason.OK).all(), "a copy that is stored later is another block"


@pytest.mark.parametrize("own", [True, False], ids=["own segment", "another's segment"])
def test_a_stale_descriptor(root: Path, own: bool) -> None:
    """Must hold 4 (NFS): what a stale descriptor cannot read is a miss, is stored again, and served."""
    calls = FaultySyscalls()
    ids = ids_of(1, 8)
    with open_store(root, syscalls=calls) as store, open_store(root) as other:
        dump(store if own else other, ids, LENGTH)
        pass_the_throttle()
        assert (load(store, ids, LENGTH) == Reason.OK).all()
        (segment,) = (root / NAMESPACE).glob("*.seg")
        calls.faults = [Fault(kinds=["preadv"], suffix=segment.name, times=FOREVER, error=errno.ESTALE)]
        assert (load(store, ids, LENGTH) == Reason.EVICTED).all()
        assert not store.lookup(ids).any()
        assert (dump(store, ids, LENGTH) == Reason.OK).all()
        assert store.counters.snapshot()["already_stored_blocks"] == 0
        assert (load(store, ids, LENGTH) == Reason.OK).all()
