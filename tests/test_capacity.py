"""Invariant I4: what the file system has allocated to a store stays within the capacity, whoever writes."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diskkit import Disk, Watch, at_least, disk_in_memory
from faults import Fault, FaultySyscalls
from storekit import (
    allocated,
    assert_counters_add_up,
    contents,
    dump,
    ids_of,
    load,
    memory_directory,
    open_store,
)
from workers import Worker, batch_ids, greedy_dumper, obedient

from posix_store import Reason
from posix_store.pins import write_pins

LENGTH = 4096


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


def no_fallocate(error: int = errno.EOPNOTSUPP) -> FaultySyscalls:
    """A file system that can neither preallocate nor punch."""
    return FaultySyscalls(Fault(kinds=["fallocate"], times=float("inf"), error=error))


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("pages", [7, 12, 60, 300])
def test_three_writers_stay_within_the_capacity(tmp_path: Path, place: str, pages: int) -> None:
    """I4: three processes dump and evict all they can; the tree never has more bytes than the capacity.

    None of it gets stuck: as long as there is a block that can go, the next dump is stored.
    """
    capacity = pages * 4096
    options = {"capacity": capacity, "segment_bytes": 64 << 10}
    on_disk = contextlib.nullcontext(Disk(tmp_path, lambda: at_least(tmp_path / "store")))
    with disk_in_memory() if place == "memory" else on_disk as disk:
        root = disk.path / "store"
        open_store(root, capacity=capacity).close()
        with Watch(disk.used) as watch:
            arguments = [(str(root), seed, 8, LENGTH, 0.6, options) for seed in range(3)]
            workers = [Worker(greedy_dumper, *each) for each in arguments]
            reports = [worker.receive() for worker in workers]
            for worker in workers:
                worker.process.join(30)
        assert watch.most <= capacity, f"{watch.most} of {capacity} bytes"
        assert watch.samples > 20
        # On a busy machine another process may have the store lock for longer than a dump waits for it.
        assert {reason for _, _, counts in reports for reason in counts["unstored"]} <= {"full", "timeout"}
        with open_store(root, capacity=capacity, segment_bytes=64 << 10) as store:
            batches = [(seed, b) for seed, report in enumerate(reports) for b in range(report[1])]
            found = [ids for seed, b in batches for ids in batch_ids(seed, b, 8) if store.lookup([ids])[0]]
            stored = sum(report[0] for report in reports)
            assert len(found) == store.stats().blocks <= stored
            # Three writers, each with a header page, a journal page and something reserved, take no unbounded
            # share.
            assert len(found) * LENGTH >= min(stored * LENGTH, capacity // 2 - 12 * 4096)
            assert store.verify().ok
            if pages > 12:
                assert (dump(store, ids_of(77, 8), LENGTH) == Reason.OK).all(), "it is stuck"
                assert disk.used() <= capacity


@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_capacities_of_a_few_pages(root: Path, tmp_path: Path, place: str, pages: int) -> None:
    """I4: from a capacity too small for anything on, in memory and on a disk where directories take some."""
    root = root if place == "memory" else tmp_path / "store"
    root.mkdir()
    # The root directory and STORE.json are there before any block: they are the store's smallest size.
    least = allocated(root) + 4096
    with open_store(root, capacity=pages * 4096, segment_bytes=16 << 10) as store:
        for seed in range(6):
            dump(store, ids_of(seed, 4), 1000)
            assert allocated(root) <= max(least, pages * 4096)
            assert store.verify().ok
        assert_counters_add_up(store)
    assert allocated(root) <= max(least, pages * 4096)


@pytest.mark.parametrize("pages", [7, 8, 12, 20, 40, 64, 100, 200])
def test_a_small_store_goes_on_for_ever(root: Path, pages: int) -> None:
    """I4, issue 3: recording an eviction takes space itself; that is kept back, or made by whole segments."""
    with open_store(root, capacity=pages * 4096, segment_bytes=64 << 10) as store:
        for seed in range(60):
            assert (dump(store, ids_of(seed, 1), LENGTH) == Reason.OK).all(), f"stuck after {seed} dumps"
            assert (load(store, ids_of(seed, 1), LENGTH) == Reason.OK).all()
            assert allocated(root) <= pages * 4096
        assert store.verify().ok


@pytest.mark.parametrize("same", [True, False], ids=["same namespace", "another namespace"])
@pytest.mark.parametrize("pages", [20, 40, 64, 100, 200])
def test_a_small_store_goes_on_beside_an_idle_process(root: Path, pages: int, same: bool) -> None:
    """I4, issue 3: what an idle process holds is cold and goes; it must not end all dumps for good."""
    other = {} if same else {"namespace": "f" * 32}
    with (
        open_store(root, capacity=pages * 4096, segment_bytes=64 << 10) as idle,
        open_store(root, capacity=None, segment_bytes=64 << 10, **other) as busy,
    ):
        assert (dump(idle, ids_of(999, 3), LENGTH) == Reason.OK).all()
        for seed in range(100):
            assert (dump(busy, ids_of(seed, 2), LENGTH) == Reason.OK).all(), f"stuck after {seed} dumps"
            assert allocated(root) <= pages * 4096
        assert busy.verify().ok and idle.verify().ok
        assert (dump(idle, ids_of(998, 3), LENGTH) == Reason.OK).all()


def test_seals_and_damage_records_are_within_the_capacity(root: Path) -> None:
    """I4: journals grow by more than the blocks' records; not past the capacity either."""
    capacity = 40 * 4096
    with open_store(root, capacity=capacity, segment_bytes=1 << 20, io_threads=1) as store:
        # 63 records and the header fill the journal's first page; a seal or an eviction begins the second.
        blocks = ids_of(1, 63)
        assert (dump(store, blocks, 1000) == Reason.OK).all()
        segment = next(root.glob("*/*.seg"))
        data = bytearray(segment.read_bytes())
        data[5000] ^= 1
        with segment.open("r+b") as file:
            file.write(data)
        write_pins(store.root, store.namespace, blocks)
        for seed in range(2, 22):
            assert (dump(store, ids_of(seed, 8), 2000) == Reason.OK).all()
            assert allocated(root) <= capacity
        assert store.evictor.total.blocks > 0
        status = load(store, blocks, 1000)
        assert (status == Reason.CHECKSUM).sum() == 1 and (status == Reason.OK).sum() == len(blocks) - 1
        assert allocated(root) <= capacity
        for seed in range(22, 42):
            assert (dump(store, ids_of(seed, 8), 2000) == Reason.OK).all()
            assert allocated(root) <= capacity
    assert allocated(root) <= capacity


def test_what_is_larger_than_the_store_keeps_a_prefix_and_says_so_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """I4: the head of the chain is stored, the rest counted as `full`, the remedy logged once."""
    capacity = 64 * 4096
    blocks = ids_of(1, 100)
    with caplog.at_level(logging.WARNING), open_store(root, capacity=capacity) as store:
        status = dump(store, blocks, LENGTH)
        stored = int((status == Reason.OK).sum())
        assert 45 <= stored < 64
        assert (status[:stored] == Reason.OK).all() and (status[stored:] == Reason.FULL).all()
        assert (load(store, blocks[:stored], LENGTH) == Reason.OK).all()
        for seed in range(2, 5):
            others = ids_of(seed, 100)
            kept = dump(store, others, LENGTH) == Reason.OK
            assert kept.sum() >= 40 and not kept[kept.sum() :].any(), (
                "a prefix, in the place of what was there"
            )
            assert (load(store, others[kept], LENGTH) == Reason.OK).all()
        assert not store.lookup(blocks).any()
        counts = store.counters.snapshot()
        assert counts["unstored"]["full"] == counts["dump_blocks"] - counts["written_blocks"]
        assert_counters_add_up(store)
        assert store.stats().allocated_bytes <= capacity
    said = [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]
    assert len(said) == 1, said
    assert all(word in said[0] for word in (str(root), str(capacity), "capacity", "min_free", "clear"))


def test_a_full_store_takes_what_is_new_without_a_word(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I4, issue 3: to be full is the normal state of a cache: nothing goes unstored, nothing is logged."""
    capacity = 65 * 4096  # one page is for the stamp of evictions
    with caplog.at_level(logging.WARNING), open_store(root, capacity=capacity) as store:
        for seed in range(30):
            assert (dump(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
            assert (load(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
            assert store.stats().allocated_bytes <= capacity
        assert store.counters.snapshot()["unstored"] == {}
        assert store.stats().payload_bytes >= 64 * 4096 * 0.6, "no more than what is needed is evicted"
    assert not caplog.records


def test_stored_blocks_are_still_stored_when_full(root: Path) -> None:
    """I4: dumping again what is there succeeds in a full store: nothing is written, nothing has to go."""
    with open_store(root, capacity=64 * 4096) as store:
        blocks = ids_of(1, 100)
        stored = dump(store, blocks, LENGTH) == Reason.OK
        evicted, before = store.evictor.total.blocks, contents(root)
        assert (dump(store, blocks[stored], LENGTH) == Reason.OK).all()
        assert (load(store, blocks[stored], LENGTH) == Reason.OK).all()
        assert store.evictor.total.blocks == evicted
        assert {k: v for k, v in contents(root).items() if k.endswith(".seg")} == {
            k: v for k, v in before.items() if k.endswith(".seg")
        }


def test_clearing_makes_room(root: Path) -> None:
    """I4: a store full of pinned blocks takes others again once it was cleared, here by another process."""
    big = ids_of(2, 1)
    with open_store(root, capacity=64 * 4096) as store:
        blocks = ids_of(1, 100)
        pinned = blocks[dump(store, blocks, LENGTH) == Reason.OK]
        write_pins(store.root, store.namespace, pinned)
        assert dump(store, big, 40 * 4096).tolist() == [Reason.FULL]
        assert store.lookup(pinned).all()
        with open_store(root, capacity=None) as other:
            assert other.clear() == len(pinned)
        assert dump(store, big, 40 * 4096).tolist() == [Reason.OK]
        assert load(store, big, 40 * 4096).tolist() == [Reason.OK]


def test_the_capacity_counts_all_namespaces(root: Path) -> None:
    """I4: one root, one capacity; blocks of any namespace make room for those of any other."""
    capacity = 64 * 4096
    with (
        open_store(root, capacity=capacity) as one,
        open_store(root, namespace="f" * 32, capacity=None) as two,
    ):
        for seed in range(20):
            assert (dump(one, ids_of(seed, 4), LENGTH) == Reason.OK).all()
            assert (dump(two, ids_of(seed, 4), LENGTH) == Reason.OK).all()
            assert allocated(root) <= capacity
        for seed in range(30):
            assert (dump(one, ids_of(100 + seed, 4), LENGTH) == Reason.OK).all()
            assert allocated(root) <= capacity
        left = [load(two, ids_of(seed, 4), LENGTH) for seed in range(20)]
        assert not any((status == Reason.OK).any() for status in left), "they are older than all others"


@pytest.mark.parametrize("by", ["a dump", "upkeep"])
def test_another_process_changes_the_capacity(root: Path, by: str) -> None:
    """I4: STORE.json is the one place for it: a running writer follows, up and down.

    A smaller one deletes nothing by itself; the next dump or round of maintenance evicts down to it.
    """
    with open_store(root, capacity=30 * 4096, segment_bytes=64 << 10) as store:
        assert Reason.FULL in dump(store, ids_of(1, 40), LENGTH)
        open_store(root, capacity=200 * 4096).close()
        for seed in range(2, 9):
            assert (dump(store, ids_of(seed, 20), LENGTH) == Reason.OK).all()
        assert store.stats().capacity == 200 * 4096
        assert all(store.lookup(ids_of(seed, 20)).all() for seed in range(2, 9))
        blocks = store.stats().blocks
        open_store(root, capacity=60 * 4096).close()
        assert store.stats().blocks == blocks, "a smaller capacity deletes nothing by itself"
        if by == "a dump":
            assert (dump(store, ids_of(20, 20), LENGTH) == Reason.OK).all()
            assert store.lookup(ids_of(20, 20)).all()
        else:
            assert store.upkeep.make_room().blocks > 0
            assert store.lookup(ids_of(8, 20)).all(), "the youngest stay"
        assert allocated(root) <= 60 * 4096
        assert store.stats().payload_bytes >= 20 * LENGTH
        assert json.loads((root / "STORE.json").read_text())["capacity"] == 60 * 4096


def disk_with(free: int, total: int = 1 << 30) -> Any:
    """The answer of `statvfs` for a disk with so many free bytes."""
    return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_blocks=total // 4096)


class FillingDisk(FaultySyscalls):
    """A disk of 1 GiB on which `free` bytes were left before the store came."""

    def __init__(self, root: Path, free: int) -> None:
        super().__init__()
        self._root = root
        self._free = free

    def statvfs(self, path: str) -> Any:
        super().statvfs(path)
        return disk_with(self._free - allocated(self._root))


@pytest.mark.parametrize(("min_free", "floor"), [(10 << 20, 10 << 20), (None, (1 << 30) // 20), (0, 0)])
def test_the_floor_of_free_space(root: Path, min_free: int | None, floor: int) -> None:
    """I4: a store keeps to the floor of free space, by default 5 % of the disk, whatever its capacity."""
    calls = FillingDisk(root, floor + (1 << 20))
    with open_store(root, capacity=1 << 40, min_free=min_free, syscalls=calls) as store:
        for seed in range(40):
            assert (dump(store, ids_of(seed, 16), LENGTH) == Reason.OK).all(), "it evicts at the floor, too"
            assert allocated(root) <= 1 << 20, "the floor was broken"
        assert allocated(root) > 800_000
        assert store.evictor.total.blocks > 0


def test_the_default_capacity_is_bounded(root: Path) -> None:
    """I4: without a capacity a new store takes half of what is free."""
    calls = FillingDisk(root, 100 << 20)
    with open_store(root, capacity=None, syscalls=calls) as store:
        assert 45 << 20 <= store.stats().capacity <= 50 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_small_file_system(root: Path) -> None:
    """I4: a true disk of 2 MiB with a floor of 1 MiB, shared with others, who come first."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    try:
        with open_store(root / "store", capacity=1 << 40, min_free=1 << 20) as store:
            for seed in range(20):
                assert (dump(store, ids_of(seed, 16), LENGTH) == Reason.OK).all()
                assert free_bytes(root) >= 1 << 20
            assert store.stats().payload_bytes > 700_000
            (root / "others").write_bytes(bytes(700_000))
            assert free_bytes(root) < 1 << 20
            assert (dump(store, ids_of(99, 20), LENGTH) == Reason.OK).all()
            assert free_bytes(root) >= 1 << 20, "the store makes room for others, down to the floor"
            assert (load(store, ids_of(99, 20), LENGTH) == Reason.OK).all()
            (root / "others").write_bytes(bytes(1_200_000))
            assert (dump(store, ids_of(100, 20), LENGTH) == Reason.FULL).all(), (
                "nothing can bring the floor back"
            )
            assert store.verify().ok
    finally:
        subprocess.run(["umount", str(root)], check=True)


def free_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_without_fallocate_the_bound_holds_and_the_space_is_used(root: Path, error: int) -> None:
    """I4: file systems that cannot preallocate or punch (NFS before 4.2, some FUSE): same bound and use."""
    capacity = 100 * 4096
    calls = no_fallocate(error)
    with (
        Watch(lambda: at_least(root)) as watch,
        open_store(root, capacity=capacity, segment_bytes=40 << 10, syscalls=calls) as store,
    ):
        for seed in range(16):
            assert (dump(store, ids_of(seed, 4), LENGTH) == Reason.OK).all()
        assert store.evictor.total.blocks == 0, "what is not reserved must not be counted"
        most = 0
        for seed in range(16, 60):
            assert (dump(store, ids_of(seed, 4), LENGTH) == Reason.OK).all()
            most = max(most, store.stats().payload_bytes)
        assert most >= 64 * LENGTH
        assert_counters_add_up(store)
    assert watch.most <= capacity


def test_without_fallocate_threads_do_not_block_each_other(root: Path) -> None:
    """I4, I11: four threads dump at once where nothing can be preallocated; all end, all is stored."""
    with open_store(root, syscalls=no_fallocate()) as store, ThreadPoolExecutor(4) as pool:
        assert (dump(store, ids_of(1000, 4), LENGTH) == Reason.OK).all()
        started = time.monotonic()
        jobs = [pool.submit(dump, store, ids_of(seed, 4), LENGTH) for seed in range(80)]
        assert all((job.result(timeout=30) == Reason.OK).all() for job in jobs)
        assert time.monotonic() - started < 10
        for seed in range(80):
            assert (load(store, ids_of(seed, 4), LENGTH) == Reason.OK).all()


def test_without_fallocate_processes_stay_within_the_capacity(root: Path) -> None:
    """I4: the same with a process that preallocates beside two stores that cannot."""
    capacity = 200 * 4096
    open_store(root, capacity=capacity).close()
    options = {"capacity": None, "segment_bytes": 64 << 10}
    with (
        Watch(lambda: at_least(root)) as watch,
        Worker(greedy_dumper, str(root), 1, 8, LENGTH, 0.5, options) as worker,
    ):
        with open_store(root, syscalls=no_fallocate(), **options) as store:
            end = time.monotonic() + 0.5
            seed = 100
            while time.monotonic() < end:
                dump(store, ids_of(seed, 8), LENGTH)
                seed += 1
        stored, _, _ = worker.receive()
    assert watch.most <= capacity
    assert stored or store.counters.snapshot()["written_blocks"]


def test_what_dead_writers_reserved_is_used_by_the_living(root: Path) -> None:
    """I4, must hold 5: eight writers die with space reserved; the next one has it."""
    capacity = 4 << 20
    options = {"capacity": capacity, "segment_bytes": 1 << 30}
    workers = [Worker(obedient, str(root), options, LENGTH) for _ in range(8)]
    for seed, worker in enumerate(workers):
        worker.receive()
        worker.send(("dump", batch_ids(seed, 0, 2)))
        assert (worker.receive() == Reason.OK).all()
    assert allocated(root) > capacity // 4, "nothing much is reserved: the test is void"
    for worker in workers:
        worker.kill()
        worker.process.join(30)
    with open_store(root, capacity=capacity) as store:
        # The dead hold a header and a journal page each, besides their blocks; journals take a sixtieth.
        for seed in range((capacity - 8 * 4 * 4096) * 9 // 10 // (40 * LENGTH)):
            assert (dump(store, ids_of(seed, 40), LENGTH) == Reason.OK).all()
        assert allocated(root) <= capacity
        assert store.evictor.total.blocks == 0, "what is reserved and never used is no reason to evict"
        assert all(store.lookup(batch_ids(seed, 0, 2)).all() for seed in range(8))


def test_an_idle_process_holds_little_and_closing_gives_it_back(root: Path) -> None:
    """I4: what is reserved ahead is a small share of what is free, and goes back when a writer closes."""
    with open_store(root, capacity=8 << 20, segment_bytes=1 << 30) as store:
        dump(store, ids_of(1, 1), LENGTH)
        assert allocated(root) < 2 << 20
    assert allocated(root) <= 6 * 4096
    assert np.array_equal(reload(root), [Reason.OK])


def reload(root: Path) -> np.ndarray:
    with open_store(root) as store:
        return load(store, ids_of(1, 1), LENGTH)


def test_a_failed_write_gives_its_space_back(root: Path) -> None:
    """I4: blocks that could not be written do not eat the capacity up."""
    calls = FaultySyscalls()
    with open_store(root, capacity=100 * 4096, syscalls=calls, breaker_failures=1000) as store:
        dump(store, ids_of(0, 2), LENGTH)
        calls.faults = [Fault(kinds=["pwritev"], times=float("inf"), error=errno.EIO)]
        for seed in range(1, 30):
            assert (dump(store, ids_of(seed, 20), LENGTH) == Reason.IO_ERROR).all()
        calls.faults = []
        assert (dump(store, ids_of(99, 70), LENGTH) == Reason.OK).all()
        assert allocated(root) <= 100 * 4096
        assert store.evictor.total.blocks == 0 and store.lookup(ids_of(0, 2)).all()


def test_failed_appends_give_their_space_back(root: Path) -> None:
    """I4: the same when the blocks were written and only the journal failed."""
    calls = FaultySyscalls()
    with open_store(root, capacity=100 * 4096, syscalls=calls, breaker_failures=1000) as store:
        for seed in range(1, 30):
            calls.faults = [Fault(nth=3, kinds=["pwrite"], suffix=".idx", error=errno.EIO)]
            calls.faults += [Fault(nth=2, kinds=["pwrite"], suffix=".idx", error=errno.EIO)]
            dump(store, ids_of(seed, 20), LENGTH)
            calls.faults = []
        assert store.stats().blocks == 0
        assert (dump(store, ids_of(99, 40), LENGTH) == Reason.OK).all()
        assert allocated(root) <= 100 * 4096
