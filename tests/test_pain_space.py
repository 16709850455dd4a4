"""Space: what users of other disk tiers for KV cache reported, and what happens here (issue 3).

Each test is named after a public report and shows its scenario in small; most is tested in depth elsewhere.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from patient import KNOWN
from storekit import NAMESPACE, allocated, dump, ids_of, load, memory_directory, open_store
from workers import Point, Worker, obedient, one_dump

import posix_store
from posix_store import Reason
from posix_store.segment import SEGMENT_HEADER_BYTES
from ucm_sglang.config import StoreConfig

LENGTH = 4096
MIB = 1 << 20
SMALL: dict[str, Any] = {"capacity": MIB, "segment_bytes": MIB // 8}
"""A store of some 250 blocks."""


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


def fill(store: posix_store.PosixStore, batches: int, first_seed: int = 100, count: int = 32) -> np.ndarray:
    """Store batches of new blocks, every one of which is taken; the ids of the last."""
    for seed in range(first_seed, first_seed + batches):
        ids = ids_of(seed, count)
        assert (dump(store, ids, LENGTH) == Reason.OK).all()
    return ids


def test_b1_sglang_28653_few_files(root: Path) -> None:
    """7.5 million pages in one directory of ext4: "no space left" with 24 TB free.

    Here the number of files grows with the bytes in steps of a segment, and not with the pages.
    """
    with open_store(root, capacity=1 << 30, segment_bytes=1 << 30) as store:
        fill(store, 4, count=500)
        assert store.stats().blocks == 2000
        kinds = {path.suffix for path in root.rglob("*.*")}
        assert kinds == {".json", ".lock", ".seg", ".idx"}
        assert len(list(root.rglob("*"))) <= 9


def test_b2_lmcache_4725_one_capacity_for_all_processes(root: Path) -> None:
    """Each process counted for itself: 14 TB were used of a cap of 4 TB.

    Here the file system is the only ledger: two processes that store at once share one capacity. (I4)
    """
    with Worker(obedient, str(root), SMALL, LENGTH) as one, Worker(obedient, str(root), SMALL, LENGTH) as two:
        workers = (one, two)
        sizes = []
        for worker in workers:
            worker.receive()
        for turn in range(6):
            for number, worker in enumerate(workers):
                worker.send(("dump", ids_of(10 * turn + number, 64)))
            assert all((worker.receive() == Reason.OK).all() for worker in workers)
            sizes.append(allocated(root))
    assert 6 * 2 * 64 * LENGTH == 3 * MIB, "three times the capacity was stored"
    assert MIB // 2 < max(sizes) <= MIB


def test_b3_lmcache_4564_what_is_used_survives_a_restart(root: Path) -> None:
    """What was used was counted in memory, so a restart began at zero and the disk ran full.

    Here a new process sees all that is on the disk, also that of namespaces that it does not know. (I4)
    """
    for generation in range(3):
        with open_store(root, namespace=f"{generation:032x}", **SMALL) as store:
            fill(store, 3, first_seed=100 * generation, count=60)
            assert allocated(root) <= MIB
            assert store.stats().allocated_bytes == allocated(root)


def test_b4_lmcache_4664_1454_bounded_when_nothing_is_configured(tmp_path: Path) -> None:
    """An unbounded tier filled the node's disk, and pods were evicted.

    Here the default is half of the free space, and a 20th of the file system stays free in any case. (I4)
    """
    disk = os.statvfs(tmp_path)
    with open_store(tmp_path / "store", capacity=None, min_free=None) as store:
        assert 0 < store.stats().capacity <= disk.f_bavail * disk.f_frsize * 0.55
        assert store.root.current_capacity() == store.stats().capacity
    config = StoreConfig.from_extra({"path": str(tmp_path)}, source="test")
    assert (config.capacities, config.min_free) == ((None,), "5%")
    with open_store(tmp_path / "full", capacity=MIB, min_free=disk.f_blocks * disk.f_frsize) as store:
        assert (dump(store, KNOWN, LENGTH) == Reason.FULL).all()


def test_b5_vllm_52784_54327_54779_43725_it_evicts_by_itself(root: Path) -> None:
    """The tier never evicted; users deleted files by cron jobs.

    Here three times the capacity is stored, every block is taken, and the last are there. (I4)
    """
    with open_store(root, **SMALL) as store:
        last = fill(store, 12, count=64)
        assert (load(store, last, LENGTH) == Reason.OK).all()
        assert allocated(root) <= MIB
        assert store.stats().evicted["blocks"] > 12 * 64 - MIB // LENGTH


def test_b6_mooncake_2475_3101_eviction_is_the_default(root: Path, tmp_path: Path) -> None:
    """Eviction was off by default: the disk ran full.

    Here there is no setting that turns it off, and a configuration that says nothing of it evicts.
    """
    config = StoreConfig.from_extra({"path": str(tmp_path)}, source="test")
    with pytest.raises(ValueError, match="policy"):
        StoreConfig.from_extra({"path": str(tmp_path), "policy": "none"}, source="test")
    with open_store(root, policy=config.policy, admission=config.admission, ttl=config.ttl, **SMALL) as store:
        fill(store, 6, count=64)


def test_b7_lmcache_1981_the_first_eviction_meets_missing_files(root: Path) -> None:
    """The first eviction raised FileNotFoundError and took the engine down.

    Here somebody deletes files behind the store's back, before and while it evicts: misses, no more. (I3)
    """

    def steal() -> None:
        for path in sorted(root.glob("*/*.seg"))[:2]:
            path.unlink()

    calls = FaultySyscalls(Fault(kinds=["unlink", "fallocate"], nth=20, times=5, before=steal))
    with open_store(root, syscalls=calls, **SMALL) as store:
        fill(store, 6)
        for path in root.glob("*/*"):
            path.unlink()
        last = fill(store, 20, first_seed=200)
        assert calls.faults[0].fired
        assert set(load(store, last, LENGTH).tolist()) <= {Reason.OK, Reason.ABSENT, Reason.EVICTED}
    with open_store(root, **SMALL) as store:
        assert (load(store, fill(store, 1, first_seed=300), LENGTH) == Reason.OK).all()
        assert allocated(root) <= MIB


def test_b9_dingocache_82_what_a_killed_writer_left_is_given_back(root: Path) -> None:
    """A crash between write and rename left .tmp files for ever.

    Here a writer is killed before its batch exists. The next one that writes gives its space back. (I2)
    """
    with open_store(root, segment_bytes=7 * LENGTH) as store:
        dump(store, KNOWN, LENGTH)
    before = {path.name for path in root.glob("*/*.seg")}
    with Worker(one_dump, str(root), 7, LENGTH, Point(kinds=("pwrite",), suffix=".idx")) as writer:
        promised = len(list(writer.reports()))
    assert promised == 1
    (left,) = (path for path in root.glob("*/*.seg") if path.name not in before)
    assert left.stat().st_blocks * 512 > SEGMENT_HEADER_BYTES + 2 * LENGTH
    with open_store(root) as store:
        for seed in range(2, 6):
            dump(store, ids_of(seed, 1), LENGTH)
        assert store.stats().blocks == len(KNOWN) + 2 + 4
    assert left.stat().st_size == left.stat().st_blocks * 512 == SEGMENT_HEADER_BYTES + 2 * LENGTH


def test_b10_file_backend_and_ucm_old_temporary_files_are_collected(root: Path) -> None:
    """Temporary files were skipped by the start-up scan and by the garbage collection.

    Here those of this store go after an hour; younger ones, which somebody may be writing, stay.
    """
    with open_store(root) as store:
        dump(store, KNOWN, LENGTH)
    old, young = (root / NAMESPACE / f".NAMESPACE.json.{name}" for name in ("0123abcd", "4567abcd"))
    for path in (old, young):
        path.write_bytes(b"{")
    os.utime(old, (time.time() - 7200,) * 2)
    with open_store(root) as store:
        dump(store, ids_of(2, 4), LENGTH)
        assert not old.exists() and young.exists()


@pytest.mark.parametrize("pages", [2, 9])
def test_b30_ucm_gc_a_capacity_of_any_size(root: Path, pages: int) -> None:
    """A capacity below some 60,000 blocks (540 GiB of large pages) was refused.

    Here a few pages are enough. (I4)
    """
    length = 256 << 10
    capacity = pages * length + (128 << 10)
    with open_store(root, capacity=capacity) as store:
        stored = [(dump(store, ids_of(seed, 1), length) == Reason.OK).all() for seed in range(3 * pages)]
        assert all(stored) and allocated(root) <= capacity
        assert (load(store, ids_of(3 * pages - 1, 1), length) == Reason.OK).all()
