"""What an operator sees and does of a store on several roots (issue 3)."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from storekit import NAMESPACE, dump, ids_of, load, memory_directory
from stripedkit import ALWAYS, CAPACITIES, broken, homes, opened, opened_on

from posix_store import Reason
from posix_store.striped import StripedStore

LENGTH = 3000


@pytest.fixture
def top() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def roots(top: Path) -> list[str]:
    return [str(top / name) for name in "abc"]


def test_stats_are_sums_with_the_numbers_of_each_root(roots: list[str]) -> None:
    """What hicache logs at start and what an operator reads: one store, and its parts."""
    ids = ids_of(21, 60)
    with opened(roots) as store:
        dump(store, ids, LENGTH)
        dump(store, ids_of(22, 5), LENGTH, 0, 2)
        load(store, ids[:20], LENGTH)
        stats = store.stats()
        parts = stats.roots
        assert [part.root for part in parts] == roots and stats.root == ", ".join(roots)
        assert (stats.namespace, stats.read_only_because, stats.failed) == (NAMESPACE, None, {})
        assert (stats.blocks, stats.incomplete_blocks, stats.payload_bytes) == (60, 5, 60 * LENGTH)
        assert stats.capacity == sum(CAPACITIES)
        for name in ("blocks", "allocated_bytes", "segments", "live_writers", "index_memory_bytes"):
            assert getattr(stats, name) == sum(getattr(part, name) for part in parts) > 0, name
        assert stats.counters == store.counters.snapshot()
        assert json.loads(json.dumps(stats.to_dict()))["roots"][1]["root"] == roots[1]
        assert store.engine.name == store.stores[0].engine.name and store.namespace == NAMESPACE


def test_counters_add_up(roots: list[str]) -> None:
    """As on one root: everything asked for is accounted for once, in whatever parts it was asked for."""
    ids, absent = ids_of(23, 60), ids_of(24, 20)
    with opened(roots) as store:
        dump(store, ids, LENGTH)
        dump(store, ids[:10], LENGTH)
        load(store, np.concatenate([ids[:30], absent]), LENGTH)
        store.lookup(np.concatenate([ids, absent]))
        store.lookup_on_prefix(np.concatenate([ids[:25], absent, ids[25:]]))
        counts = store.counters.snapshot()
    names = ("dump_blocks", "written_blocks", "written_bytes", "already_stored_blocks")
    assert [counts[name] for name in names] == [70, 60, 60 * LENGTH, 10]
    names = ("load_blocks", "loaded_blocks", "loaded_bytes", "lookups", "lookup_hits")
    assert [counts[name] for name in names] == [50, 30, 30 * LENGTH, 160, 85]
    assert (counts["misses"], counts["unstored"]) == ({"absent": 20}, {})


def test_stats_of_a_store_with_a_broken_root(roots: list[str]) -> None:
    """The operator sees which root it is and the others' numbers; an error only when all are broken."""
    calls = [FaultySyscalls() for _ in roots]
    with opened_on(roots, calls) as store:
        dump(store, ids_of(25, 60), LENGTH)
        calls[2].faults = [broken(errno.EIO)]
        stats = store.stats()
        assert list(stats.failed) == [roots[2]] and "Input/output error" in stats.failed[roots[2]]
        assert [part.root for part in stats.roots] == roots[:2]
        assert stats.capacity == sum(CAPACITIES[:2])
        for own in calls[:2]:
            own.faults = [broken(errno.EIO)]
        with pytest.raises(OSError, match="Input/output error"):
            store.stats()


def test_a_read_only_root_is_named(roots: list[str]) -> None:
    opened(roots).close()
    with opened(roots, writable=False) as store:
        assert store.stats().read_only_because == "; ".join(f"{root}: opened read-only" for root in roots)
        assert set(dump(store, ids_of(26, 30), LENGTH)) == {Reason.READ_ONLY}


def test_verify_reads_all_roots(roots: list[str]) -> None:
    """One report, one progress; a damaged block is named with its file on its root."""
    ids = ids_of(27, 60)
    with opened(roots) as store:
        dump(store, ids, LENGTH)
        steps: list[tuple[int, int]] = []
        report = store.verify(lambda done, total: steps.append((done, total)))
        assert report.ok and (report.blocks, report.bytes) == (60, 60 * LENGTH)
        assert steps == sorted(steps) and steps[-1] == (60, 60)
        segment = next(Path(roots[1]).glob("*/*.seg"))
        data = bytearray(segment.read_bytes())
        data[4096 + 10] ^= 1
        with segment.open("r+b") as file:
            file.write(data)
        report = store.verify()
        assert not report.ok and report.bad == {"checksum": 1} and report.blocks == 60
        assert segment.name in report.examples[0]
        assert store.verify(repair=True).repaired == 1
        report = store.verify()
        assert report.ok and (report.blocks, report.repaired) == (59, 0)


def test_clear_empties_all_roots_also_when_one_fails(roots: list[str]) -> None:
    """I7; the count is that of all. What one root raises is raised after the others are done."""
    calls = [FaultySyscalls() for _ in roots]
    ids = ids_of(28, 60)
    with opened_on(roots, calls) as store:
        dump(store, ids, LENGTH)
        assert store.clear() == 60 and not store.lookup(ids).any()
        dump(store, ids, LENGTH)
        calls[0].faults = [Fault(kinds=["listdir"], times=ALWAYS, error=errno.EIO)]
        with pytest.raises(OSError, match="Input/output error"):
            store.clear()
        calls[0].faults = []
        assert (store.lookup(ids) <= (homes(roots, ids) == 0)).all()


def test_closed_while_in_use(roots: list[str]) -> None:
    """I3, I9: `close` from one thread while others load is no exception for them."""
    ids = ids_of(29, 60)
    for _ in range(5):
        with opened(roots, io_threads=1) as store, ThreadPoolExecutor(3) as pool:
            dump(store, ids, LENGTH)
            stop = threading.Event()

            def work(store: StripedStore = store, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    load(store, ids, LENGTH)

            loads = [pool.submit(work) for _ in range(3)]
            time.sleep(0.005)
            store.close()
            time.sleep(0.005)
            stop.set()
            assert [each.result(30) for each in loads] == [None] * 3
