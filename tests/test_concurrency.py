"""Threads of one store that dump at the same time, and what stands in the way of a dump: I2, I4, I9, I11."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from storekit import (
    allocated,
    assert_counters_add_up,
    dump,
    ids_of,
    load,
    memory_directory,
    open_store,
    payloads,
)

import posix_store.capacity as capacity_module
from posix_store import PosixStore, Reason
from posix_store.pins import write_pins


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


@pytest.fixture
def lone_page(root: Path) -> int:
    """A store that holds one block, which is pinned, and has no open segment; the bytes allocated to it."""
    return make_lone_page(root)


def make_lone_page(root: Path) -> int:
    with open_store(root) as store:
        dump(store, ids_of(99, 1), 4096)
        write_pins(store.root, store.namespace, ids_of(99, 1))
    return allocated(root)


def meet(parties: int) -> Fault:
    """Hold every `pwritev` until `parties` threads are in one. When some never come, nobody waits again."""
    barrier = threading.Barrier(parties)

    def wait() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)

    return Fault(kinds=["pwritev"], times=float("inf"), before=wait)


@pytest.mark.parametrize("headroom", [4 << 10, 64 << 10])
def test_dumps_at_once_near_a_full_store(root: Path, lone_page: int, headroom: int) -> None:
    """I4: each dump that is under way has its own room in the journal, not the same room as all others.

    The capacity holds the pages of all dumps and, `headroom` aside, the records of one.
    """
    dumps, count, length = 8, 1000, 64
    limit = lone_page + (16 << 10) + dumps * (64 << 10) + (64 << 10) + headroom
    with open_store(root, capacity=limit, io_threads=1, syscalls=FaultySyscalls(meet(dumps))) as store:
        batches = [ids_of(seed, count) for seed in range(dumps)]
        with ThreadPoolExecutor(dumps) as pool:
            status = np.array(list(pool.map(lambda ids: dump(store, ids, length), batches)))
        assert allocated(root) <= limit
        assert (status == Reason.OK).any() and set(np.unique(status)) <= {Reason.OK, Reason.FULL}
        found = np.array([store.lookup(ids) for ids in batches])
        assert not found[status != Reason.OK].any()
        lost = int((status == Reason.OK).sum() - found.sum())
        assert lost <= store.evictor.total.blocks, "stored, and gone without having been evicted"
        assert found.sum() >= count and store.verify().ok
        assert store.lookup(ids_of(99, 1)).all(), "it is pinned"
    assert allocated(root) <= limit


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_that_are_dumped_at_once_make_whole_blocks(root: Path, shards: int) -> None:
    """I2, must hold 5: layers dumped by threads in any order are one copy of the block; none is lost.

    All threads finish their payload at the same moment, and journal appends are slow.
    """
    slow_append = Fault(kinds=["pwrite"], suffix=".idx", times=float("inf"), delay=0.01)
    batches = [ids_of(seed, 50) for seed in range(3)]
    calls = FaultySyscalls(slow_append)
    with open_store(root, io_threads=1, syscalls=calls) as store, ThreadPoolExecutor(shards) as pool:
        for ids in batches:
            calls.faults = [slow_append, meet(shards)]
            layers = [pool.submit(dump, store, ids, 100, shard, shards) for shard in range(shards)]
            assert all((layer.result() == Reason.OK).all() for layer in layers)
            assert store.lookup(ids).all(), "every shard was reported stored"
        assert store.stats().incomplete_blocks == 0
    with open_store(root) as fresh:
        for ids in batches:
            assert fresh.lookup(ids).all()
            assert all((load(fresh, ids, 100, shard) == Reason.OK).all() for shard in range(shards))


def test_no_room_for_a_segment(root: Path, lone_page: int) -> None:
    """I11: where not even a segment fits, a batch of many blocks is tried a few times, not once per block.

    And nothing of what is there is lost by trying.
    """
    calls = FaultySyscalls()
    with open_store(root, capacity=lone_page + (16 << 10) - 1, syscalls=calls) as store:
        assert (dump(store, ids_of(1, 5000), 64) == Reason.FULL).all()
        assert calls.counts["statvfs"] <= 20
        assert store.lookup(ids_of(99, 1)).all()
        assert store.counters.snapshot()["unstored"] == {"full": 5000}


@pytest.mark.parametrize("missing", [1, 4095, 40_000])
def test_a_batch_that_is_a_little_too_large(root: Path, lone_page: int, missing: int) -> None:
    """I11, I4: a batch shrinks to what fits in a few tries, also where a block less frees no page.

    Of the blocks, the first ones are stored: a prefix is of use, a suffix is not.
    """
    count, length = 4000, 64
    make_lone_page(root.parent / "roomy")
    with open_store(root.parent / "roomy") as store:
        dump(store, ids_of(1, count), length)
    limit = allocated(root.parent / "roomy") - missing
    calls = FaultySyscalls()
    with open_store(root, capacity=limit, syscalls=calls) as store:
        status = dump(store, ids_of(1, count), length)
        stored = int((status == Reason.OK).sum())
        assert (status[:stored] == Reason.OK).all() and (status[stored:] == Reason.FULL).all()
        # What is missing costs blocks, rounded up to a page each of the segment and of the journal; and some
        # space is kept back, so that evictions can be recorded.
        assert 0 < count - stored <= (missing + store._space.kept_back + 2 * 4096) // length
        assert calls.counts["statvfs"] <= 30
        assert allocated(root) <= limit
        assert store.lookup(ids_of(99, 1)).all() and store.verify().ok


def test_a_batch_that_is_much_too_large(root: Path, lone_page: int) -> None:
    """I4, must hold 4: of 4,000 small blocks those are stored for which there is room, records included."""
    room = 128 << 10
    capacity = lone_page + (16 << 10) + room
    with open_store(root, capacity=capacity) as store:
        stored = int((dump(store, ids_of(1, 4000), 64) == Reason.OK).sum())
        assert allocated(root) <= capacity
    assert stored * (64 + 64) >= 0.8 * room


def test_a_batch_that_shrinks_keeps_to_its_deadline(root: Path, lone_page: int) -> None:
    """I11: on a slow file system a batch that does not fit is not tried again after its time."""
    calls = FaultySyscalls()
    with open_store(root, capacity=lone_page + (512 << 10), timeout=0.05, syscalls=calls) as store:
        dump(store, ids_of(2, 1), 4096)
        calls.faults = [Fault(kinds=["statvfs"], times=float("inf"), delay=0.06)]
        calls.counts.clear()
        status = dump(store, ids_of(1, 200), 4096)
    assert status[0] == Reason.TIMEOUT and set(status) <= {Reason.TIMEOUT, Reason.FULL}
    # One for the batch, and those of one attempt to make room: the time for evictions' records and the count.
    assert calls.counts["statvfs"] <= 4


def test_a_store_lock_that_others_hold(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I11, I3: blocks go unstored as `timeout`, not as `full`, and the log says so once."""
    monkeypatch.setattr(capacity_module, "LOCK_TIMEOUT", 0.05)
    open_store(root).close()
    lock = os.open(root / "STORE.lock", os.O_RDWR | os.O_CREAT)
    try:
        with open_store(root) as store:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for seed in range(3):
                assert (dump(store, ids_of(seed, 4), 4096) == Reason.TIMEOUT).all()
            assert store.counters.snapshot()["unstored"] == {"timeout": 12}
            assert_counters_add_up(store)
            assert len(caplog.messages) == 1 and "store lock" in caplog.messages[0]
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert (dump(store, ids_of(0, 4), 4096) == Reason.OK).all()
    finally:
        os.close(lock)


def test_a_closed_store_leaves_no_threads(root: Path) -> None:
    """I9, the docstring of `close`: attaching and detaching again and again costs no threads."""
    before = set(threading.enumerate())
    store = open_store(root, io_threads=4)
    ids = ids_of(1, 64)
    rows = payloads(ids, 1 << 17)  # enough for every thread
    assert store.dump(ids, None, list(rows)).results().all()
    assert store.load(ids, None, list(rows)).results().all()
    started = set(threading.enumerate()) - before
    assert len(started) > 1, "the store did not use its threads"
    store.close()
    assert_ended(started)
    store.close()


def assert_ended(threads: set[threading.Thread]) -> None:
    """Threads that were told to end do so within moments."""
    deadline = time.monotonic() + 5
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert [thread.name for thread in threads if thread.is_alive()] == []


def test_closing_waits_for_what_is_under_way(root: Path) -> None:
    """I2: a dump that was begun before `close` is stored or not, and says which; nothing hangs."""
    calls = FaultySyscalls(Fault(kinds=["pwritev"], times=float("inf"), delay=0.05))
    store: PosixStore = open_store(root, syscalls=calls)
    ids = ids_of(1, 8)
    task = store.dump(ids, None, list(payloads(ids, 4096)))
    store.close()
    assert task.results(5).all()
    with open_store(root) as fresh:
        assert (load(fresh, ids, 4096) == Reason.OK).all()
