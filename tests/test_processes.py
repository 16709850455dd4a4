"""Issue 2, must hold 6 and 7: several processes and threads on one directory."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import FaultySyscalls
from storekit import (
    NAMESPACE,
    assert_counters_add_up,
    dump,
    held_open,
    ids_of,
    load,
    memory_directory,
    open_descriptors,
    open_store,
    tree,
)
from workers import Worker, eager_dumper, forking_writer, obedient, steady_reader

from posix_store import PosixStore, Reason
from posix_store.reclaim import reclaim

LENGTH = 3000


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


@contextlib.contextmanager
def other_process(root: Path, **options: object) -> Iterator[Worker]:
    """Another process with the store open."""
    with Worker(obedient, str(root), options, LENGTH) as worker:
        assert worker.receive() != os.getpid()
        yield worker


def ask(worker: Worker, verb: str, ids: np.ndarray) -> np.ndarray:
    worker.send((verb, ids))
    answer = worker.receive()
    assert isinstance(answer, np.ndarray)
    return answer


def test_processes_see_each_others_blocks_within_100_ms_of_a_miss(root: Path) -> None:
    """Must hold 6: in both directions, without a restart, from the first segment on."""
    with open_store(root) as here, other_process(root) as there:
        for seed in range(5):
            mine, theirs = ids_of(2 * seed, 4), ids_of(2 * seed + 1, 4)
            assert not here.lookup(theirs).any()
            assert not ask(there, "lookup", mine).any()
            assert (ask(there, "dump", theirs) == Reason.OK).all()
            assert (dump(here, mine, LENGTH) == Reason.OK).all()
            time.sleep(0.1)
            assert here.lookup(theirs).all()
            assert ask(there, "lookup", mine).all()
            assert (load(here, theirs, LENGTH) == Reason.OK).all()
            assert (ask(there, "load", mine) == Reason.OK).all()


def test_a_load_finds_what_no_lookup_has_seen(root: Path) -> None:
    """Must hold 6: loads and dumps look at other writers' journals too."""
    with open_store(root) as here, other_process(root) as there:
        blocks, more = ids_of(1, 4), ids_of(2, 4)
        ask(there, "dump", blocks)
        time.sleep(0.1)
        assert (load(here, blocks, LENGTH) == Reason.OK).all()
        ask(there, "dump", more)
        time.sleep(0.1)
        assert (dump(here, more, LENGTH) == Reason.OK).all()
        assert here.counters.snapshot()["written_blocks"] == 0, "stored twice"


def test_a_store_that_only_looks_up_and_loads_writes_nothing(root: Path) -> None:
    """Must hold 6: a scheduler's store, opened like any other, makes no file and changes none."""
    blocks, damaged, absent = ids_of(1, 20), ids_of(2, 4), ids_of(3, 5)
    with open_store(root) as writer:
        dump(writer, blocks, LENGTH)
        dump(writer, damaged, LENGTH)
        segment = next(root.glob("*/*.seg"))
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size - 10)
            file.write(b"damage")
        before = tree(root)
        calls = FaultySyscalls()
        with open_store(root, capacity=None, syscalls=calls) as reader:
            for _ in range(3):
                assert reader.lookup(blocks).all() and not reader.lookup(absent).any()
                assert reader.lookup_on_prefix(blocks) == 19
                reader.prefetch(blocks)
                assert (load(reader, blocks, LENGTH) == Reason.OK).all()
                load(reader, absent, LENGTH)
                time.sleep(0.021)
            assert Reason.CHECKSUM in load(reader, damaged, LENGTH)
            reader.stats()
            assert not reader.verify().bad
        assert calls.changes == {}
        assert tree(root) == before


def test_a_reader_of_an_empty_root_writes_only_what_makes_it_a_store(root: Path) -> None:
    """Must hold 6: no namespace, no segment, before something is stored."""
    with open_store(root) as store:
        assert not store.lookup(ids_of(1, 3)).any()
        assert (load(store, ids_of(1, 3), LENGTH) == Reason.ABSENT).all()
    assert [path.name for path in root.iterdir()] == ["STORE.json"]


def test_many_processes_dump_the_same_blocks_at_once(root: Path) -> None:
    """Must hold 6, I1: five processes race over overlapping batches: all stored, right, at most once each."""
    open_store(root).close()
    seeds = list(range(12))
    orders = [seeds, seeds[::-1], seeds[3:] + seeds[:3], seeds[::2], seeds[1::2]]
    workers = [Worker(eager_dumper, str(root), order, 8, LENGTH) for order in orders]
    for worker in workers:
        assert worker.receive() == "ready"
    for worker in workers:
        worker.send("go")
    for worker in workers:
        assert all((status == Reason.OK).all() for status in worker.receive())
        worker.process.join(30)
        assert worker.process.exitcode == 0
    with open_store(root) as store:
        for seed in seeds:
            assert (load(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
        report = store.verify()
        assert report.ok and store.stats().blocks == 96
    assert len(list(root.glob("*/*.seg"))) <= 5, "each process writes its own segment and no other"


def test_threads_share_one_store(root: Path) -> None:
    """I1: eight threads dump, load and look up overlapping batches through one store."""
    with open_store(root, segment_bytes=200_000) as store:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for step in range(12):
                    ids = ids_of((number + step) % 10, 8)
                    assert (dump(store, ids, LENGTH) == Reason.OK).all()
                    assert store.lookup(ids).all()
                    assert (load(store, ids, LENGTH) == Reason.OK).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures[0]
        assert_counters_add_up(store)
        assert store.verify().ok


class Spinner(threading.Thread):
    """A thread that runs pure Python and holds the GIL whenever it can."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._running = True

    def run(self) -> None:
        number = 0
        while self._running:
            number = (number * 31 + 7) % 1_000_003

    def __enter__(self) -> "Spinner":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self.join()


def filled(root: Path, count: int, calls: FaultySyscalls | None = None) -> tuple[PosixStore, np.ndarray]:
    """A store opened over `count` blocks that another instance has stored, and their ids."""
    ids = ids_of(1, count)
    with open_store(root) as writer:
        assert (dump(writer, ids, 64) == Reason.OK).all()
    return open_store(root, syscalls=calls), ids


def test_lookup_of_present_keys_makes_no_system_call(root: Path) -> None:
    """Must hold 7: 2,000 keys, while another thread runs pure Python."""
    calls = FaultySyscalls()
    store, ids = filled(root, 2000, calls)
    before = calls.counts.copy()
    with store, Spinner():
        started = time.perf_counter()
        for _ in range(20):
            assert store.lookup(ids).all()
            assert store.lookup_on_prefix(ids) == 1999
        each = (time.perf_counter() - started) / 40
        assert calls.counts == before
    # One system call per key would wait 5 ms for the GIL each time: 10 s in all.
    assert each < 0.5


def test_lookup_with_misses_looks_at_the_directory_once(root: Path) -> None:
    """Must hold 7: absent keys cost a few calls a batch, not some a key, and none again for a while."""
    calls = FaultySyscalls()
    store, ids = filled(root, 1000, calls)
    mixed = np.concatenate([ids, ids_of(2, 1000)])
    with store:
        time.sleep(0.021)
        before = calls.calls
        assert int(store.lookup(mixed).sum()) == 1000
        assert calls.calls - before <= 5
        before = calls.calls
        for _ in range(50):
            store.lookup_on_prefix(mixed)
        assert calls.calls - before <= 25


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_lookup_makes_no_system_call_that_strace_sees(root: Path) -> None:
    """Must hold 7: the same from outside, where nothing can go around the shim."""
    store, _ = filled(root, 2000)
    store.close()
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import numpy as np
from storekit import ids_of, open_store
store, ids = open_store({str(root)!r}), ids_of(1, 2000)
store.lookup(ids)
os.path.exists("/begin-here")
for _ in range(100):
    store.lookup(ids)
os.path.exists("/end-here")
"""
    trace = root.parent / "trace"
    done = subprocess.run(
        ["strace", "-f", "-o", str(trace), sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "/begin-here" in line)
    end = next(i for i, line in enumerate(lines) if "/end-here" in line)
    # Memory that numpy or Python asks for now and then is no call of the look-up.
    memory = ("mmap(", "munmap(", "brk(", "madvise(", "mremap(")
    calls = [line for line in lines[begin + 1 : end] if not any(name in line for name in memory)]
    assert calls == []


def test_clear_in_one_process_while_another_serves(root: Path) -> None:
    """I1, I7: the other's loads are right or misses at every moment; what is stored again is found again."""
    blocks = ids_of(1, 24)
    with open_store(root) as store, Worker(steady_reader, str(root), blocks, LENGTH) as reader:
        assert reader.receive() == "ready"
        for _ in range(12):
            assert (dump(store, blocks, LENGTH) == Reason.OK).all()
            time.sleep(0.02)
            assert store.clear() == len(blocks)
            assert not store.lookup(blocks).any()
        time.sleep(1.1)  # the reader, whose look-ups all hit, notices deletion within a second
        dump(store, blocks, LENGTH)
        time.sleep(0.05)
        reader.send("stop")
        seen = reader.receive()
        reader.process.join(30)
        assert reader.process.exitcode == 0
    assert seen[Reason.OK] > 0 and seen[Reason.ABSENT] > 0
    assert seen.sum() == seen[[Reason.OK, Reason.ABSENT, Reason.EVICTED]].sum(), seen


def test_a_writer_goes_on_after_another_process_cleared_its_segments(root: Path) -> None:
    """I7: what it stores from then on is found; it writes into no deleted file."""
    with open_store(root) as store, other_process(root) as there:
        for seed in range(4):
            ask(there, "dump", ids_of(seed, 6))
            store.clear()
            assert not any(root.glob("*/*.seg"))
            assert (ask(there, "dump", ids_of(100 + seed, 6)) == Reason.OK).all()
            time.sleep(0.05)
            assert (load(store, ids_of(100 + seed, 6), LENGTH) == Reason.OK).all()
            assert not store.lookup(ids_of(seed, 6)).any()


def test_a_forked_child_leaves_its_parents_files_alone(root: Path) -> None:
    """I2, I9: a child that finds damage, and closes its copy of the store, changes no file of its parent."""
    with open_store(root) as store, Worker(forking_writer, str(root), LENGTH) as worker:
        first = worker.receive().ids
        segment = next(root.glob("*/*.seg"))
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size - 10)
            file.write(b"damage")
        before = {path: path.read_bytes() for path in root.glob("*/*")}
        worker.send("fork")
        assert worker.receive() == "forked"
        assert {path: path.read_bytes() for path in root.glob("*/*")} == before
        assert store.lookup(first).all()
        worker.send("go on")
        second = worker.receive().ids
        time.sleep(0.03)
        assert (load(store, second, LENGTH) == Reason.OK).all()


def test_what_another_process_evicts_is_a_miss(root: Path) -> None:
    """Issue 3, I1: who has found blocks without a system call loads none that others evicted meanwhile."""
    capacity = 60 * 4096
    with open_store(root, capacity=capacity) as here, other_process(root, capacity=None) as there:
        old, last = ids_of(1, 6), ids_of(24, 6)
        assert (ask(there, "dump", old) == Reason.OK).all()
        assert ask(there, "lookup", old).all()
        for seed in range(5, 25):
            assert (dump(here, ids_of(seed, 6), LENGTH) == Reason.OK).all()
        assert here.evictor.total.blocks > 0
        assert set(ask(there, "load", old).tolist()) <= {Reason.EVICTED, Reason.ABSENT}
        assert not ask(there, "lookup", old).any()
        assert (ask(there, "load", last) == Reason.OK).all()
        assert (ask(there, "dump", old) == Reason.OK).all()
        time.sleep(0.021)
        assert (load(here, old, LENGTH) == Reason.OK).all()
        assert here.verify().ok


def test_what_another_process_deleted_is_let_go(root: Path) -> None:
    """I4: a process that serves hits soon holds no deleted file open, whose space nobody could use."""
    with open_store(root) as store, other_process(root) as there:
        ask(there, "dump", ids_of(1, 6))
        time.sleep(0.1)
        assert (load(store, ids_of(1, 6), LENGTH) == Reason.OK).all()
        with open_store(root) as operator:
            operator.clear()
        time.sleep(1.05)
        assert (load(store, ids_of(1, 6), LENGTH) == Reason.ABSENT).all()
        assert held_open(root) == []


def test_clear_spares_other_namespaces(root: Path) -> None:
    """I7: only its own."""
    with open_store(root) as store, open_store(root, namespace="f" * 32) as other:
        dump(store, ids_of(1, 5), LENGTH)
        dump(other, ids_of(1, 5), LENGTH)
        before = tree(root / ("f" * 32))
        assert store.clear() == 5
        assert tree(root / ("f" * 32)) == before
        assert (load(other, ids_of(1, 5), LENGTH) == Reason.OK).all()


def test_namespaces_never_share_blocks(root: Path) -> None:
    """I1: the same ids in another namespace are misses, also in a process that knows both."""
    with open_store(root) as store, open_store(root, namespace="f" * 32) as other:
        dump(store, ids_of(1, 5), LENGTH)
        time.sleep(0.021)
        assert not other.lookup(ids_of(1, 5)).any()
        assert (load(other, ids_of(1, 5), LENGTH) == Reason.ABSENT).all()


def test_three_hundred_segments(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Must hold 6: many small segments: descriptors, memory and the time to open stay bounded."""
    monkeypatch.setattr("posix_store.capacity.COUNT_SECONDS", 30.0)  # on a busy machine
    limit = 128
    count = 300
    blocks = np.concatenate([ids_of(seed, 2) for seed in range(count)])
    with open_store(root, segment_bytes=1) as writer:
        for seed in range(count):
            assert (dump(writer, ids_of(seed, 2), LENGTH) == Reason.OK).all()
        assert len(list(root.glob("*/*.seg"))) == count
        assert len(held_open(root)) <= 4, "a writer keeps old segments open"
        calls = FaultySyscalls()
        started = time.monotonic()
        with open_store(root, syscalls=calls) as reader:
            assert time.monotonic() - started < 2
            assert calls.calls <= 8 * count + 50
            for _ in range(2):
                for part in np.array_split(blocks, 20):
                    assert (load(reader, part, LENGTH) == Reason.OK).all()
                    assert len(held_open(root)) <= limit + 8
            assert (load(reader, blocks, LENGTH) == Reason.OK).all()
            assert len(held_open(root)) <= limit + 8
            assert reader.verify().ok
            assert reader.stats().index_memory_bytes < 1 << 20
    assert held_open(root) == []


def test_running_out_of_descriptors_forgets_no_block(root: Path) -> None:
    """Must hold 4: when the process has no descriptor left, blocks are misses for now, not for ever."""
    count = 60
    blocks = np.concatenate([ids_of(seed, 2) for seed in range(count)])
    with open_store(root, segment_bytes=1) as writer:
        for seed in range(count):
            dump(writer, ids_of(seed, 2), LENGTH)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_store(root) as store:
        taken = open_descriptors()
        free = [number for number in range(4096) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))  # twenty more descriptors
        try:
            status = load(store, blocks, LENGTH)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(status.tolist()) == {Reason.OK, Reason.IO_ERROR}
        assert (load(store, blocks, LENGTH) == Reason.OK).all()


def test_reclaiming_spares_the_living(root: Path) -> None:
    """I7: what a living process has open is not trimmed or deleted, be it ever so new or idle."""
    with other_process(root) as there, open_store(root) as store:
        ask(there, "dump", ids_of(1, 2))
        before = tree(root / NAMESPACE)
        reclaim(store.root)
        assert tree(root / NAMESPACE) == before
        assert (ask(there, "dump", ids_of(2, 2)) == Reason.OK).all()
        time.sleep(0.03)
        assert (load(store, np.concatenate([ids_of(1, 2), ids_of(2, 2)]), LENGTH) == Reason.OK).all()
