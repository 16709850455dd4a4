"""One store over several roots (issue 3): the contract of every store, and what a sick root may cost."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from mini_reader import RECORD
from store_contract import StoreContract
from storekit import (
    NAMESPACE,
    allocated,
    assert_counters_add_up,
    assert_no_lock_is_held,
    dump,
    ids_of,
    load,
    memory_directory,
    payloads,
)
from stripedkit import ALWAYS, CAPACITIES, broken, homes, opened, opened_on, striped_process
from workers import Worker

from posix_store import PosixStore, Reason, StoreError
from posix_store.opening import make_roots, open_store
from posix_store.striped import StripedStore

LENGTH = 3000


@pytest.fixture
def top() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def roots(top: Path) -> list[str]:
    return [str(top / name) for name in "abc"]


class TestStripedStore(StoreContract):
    """The contract on three roots; whoever opens them again may name them in another order."""

    @pytest.fixture
    def store(self, roots: list[str]) -> Iterator[StripedStore]:
        self._opened: list[StripedStore] = []
        self._capacities = dict(zip(roots, [1 << 30, 2 << 30, 3 << 29], strict=True))
        yield self._open(roots)
        for store in self._opened:
            store.close()

    def reopen(self, store: StripedStore) -> StripedStore:
        store.close()
        return self._open([each.root.path for each in reversed(store.stores)])

    def _open(self, roots: list[str]) -> StripedStore:
        capacities = [self._capacities[root] for root in roots]
        self._opened.append(opened(roots, capacities, segment_bytes=4 << 20, timeout=60))
        return self._opened[-1]


def test_every_verb_of_a_store_on_one_root_is_there() -> None:
    """Whoever uses a `PosixStore` can use this one: the same methods with the same parameters."""
    for name, method in inspect.getmembers(PosixStore, inspect.isfunction):
        if name == "__init__" or (name.startswith("_") and not name.startswith("__")):
            continue
        wanted = inspect.signature(method).parameters
        found = inspect.signature(getattr(StripedStore, name)).parameters
        assert {key: (p.kind, p.default) for key, p in wanted.items()}.items() <= {
            key: (p.kind, p.default) for key, p in found.items()
        }.items(), name
        extra = [found[key] for key in found.keys() - wanted.keys()]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra), name


# -- where blocks are ---------------------------------------------------------------------------------


def test_blocks_are_spread_in_proportion_to_the_capacities(roots: list[str]) -> None:
    """On disk, not only on paper: each root has exactly the blocks that the placement says, whole."""
    ids = ids_of(1, 900)
    with opened(roots) as store:
        assert (dump(store, ids, 200) == Reason.OK).all()
        counts = [stats.blocks for stats in store.stats().roots]
    assert counts == np.bincount(homes(roots, ids)).tolist()
    expected = np.array(CAPACITIES) / sum(CAPACITIES) * 900
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    for number, root in enumerate(roots):
        with PosixStore(root, NAMESPACE, writable=False) as alone:
            assert (alone.lookup(ids) == (homes(roots, ids) == number)).all()


def test_all_shards_of_a_block_are_on_one_root(roots: list[str]) -> None:
    """They come in different calls, and the block counts once, on its home."""
    ids = ids_of(2, 60)
    with opened(roots) as store:
        for shard in (2, 0, 1):
            assert not store.lookup(ids).any()
            assert (dump(store, ids, LENGTH, shard, 3) == Reason.OK).all()
        assert store.lookup(ids).all()
        assert [stats.blocks for stats in store.stats().roots] == np.bincount(homes(roots, ids)).tolist()
        for shard in range(3):
            assert (load(store, ids, LENGTH, shard) == Reason.OK).all()


def test_adding_a_root_keeps_most_blocks(roots: list[str]) -> None:
    """Must hold: what did not move to the new root is served as before; the rest are misses, then stored."""
    ids = ids_of(3, 300)
    with opened(roots[:2]) as store:
        dump(store, ids, LENGTH)
    moved = homes(roots, ids) == 2
    assert 0.2 < moved.mean() < 0.5
    with opened(roots) as store:
        assert (store.lookup(ids) == ~moved).all()
        assert (load(store, ids, LENGTH) == np.where(moved, Reason.ABSENT, Reason.OK)).all()
        dump(store, ids, LENGTH)
        assert store.stats().counters["written_blocks"] == moved.sum()
        assert (load(store, ids, LENGTH) == Reason.OK).all()


def test_a_capacity_that_changes_moves_blocks_when_the_store_is_opened_again(roots: list[str]) -> None:
    """The weight is what STORE.json says at the time of opening, also when the configuration is silent."""
    ids = ids_of(4, 300)
    with opened(roots) as store:
        dump(store, ids, 500)
    make_roots(roots[:1], [256 << 20])
    now = [256 << 20, *CAPACITIES[1:]]
    stayed = homes(roots, ids) == homes(roots, ids, now)
    with open_store(roots, NAMESPACE) as store:
        assert [stats.capacity for stats in store.stats().roots] == now
        assert (store.lookup(ids) == stayed).all() and stayed.any() and not stayed.all()


def test_results_are_in_the_order_of_the_call(roots: list[str]) -> None:
    """Half the blocks of a shuffled batch are absent: every outcome stands at its own block."""
    stored, absent = ids_of(5, 80), ids_of(6, 80)
    both = np.concatenate([stored, absent])
    with opened(roots) as store:
        dump(store, stored, LENGTH)
        for seed in range(5):
            rows = np.random.default_rng(seed).permutation(160)[:100]
            assert (load(store, both[rows], LENGTH) == np.where(rows < 80, Reason.OK, Reason.ABSENT)).all()
            assert (store.lookup(both[rows]) == (rows < 80)).all()
            assert store.lookup_on_prefix(both[rows]) == np.argmax(rows >= 80) - 1


def test_chains_are_recorded_as_each_root_sees_them(roots: list[str]) -> None:
    """Issue 3, must hold 4: the recorded parent of a block is on the same root, or its root would evict it
    as an orphan."""
    chain = ids_of(7, 80)
    with opened(roots) as store:
        for start, end in ((0, 30), (30, 80)):
            parents = np.concatenate([np.zeros((1, 16), np.uint8), chain])[start:end]
            rows = list(payloads(chain[start:end], 100))
            task = store.dump(chain[start:end], None, rows, parents=parents, ancestors=chain[:start])
            assert task.results(30).all()
    for number, root in enumerate(roots):
        here = [block.tobytes() for block in chain[homes(roots, chain) == number]]
        journal = next(Path(root).glob("*/*.idx")).read_bytes()[64:]
        records = [RECORD.unpack_from(journal, at)[:2] for at in range(0, len(here) * 64, 64)]
        assert records == list(zip(here, [bytes(16), *here], strict=False))


# -- at the same time ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "kind"), [(load, "preadv"), (dump, "pwritev")])
def test_a_batch_goes_to_all_roots_at_the_same_time(
    roots: list[str], verb: Callable[..., np.ndarray], kind: str
) -> None:
    """Three devices serve a batch in the time of one: none is read or written before all three are."""
    together = threading.Barrier(3, timeout=20)
    calls = [FaultySyscalls() for _ in roots]
    ids = ids_of(8, 90)
    with opened_on(roots, calls, io_threads=1) as store:
        if verb is load:
            dump(store, ids, LENGTH)
        for own in calls:
            own.faults = [Fault(kinds=[kind], before=together.wait)]
        assert (verb(store, ids, LENGTH) == Reason.OK).all()


def test_two_slow_roots_cost_the_time_of_one(roots: list[str]) -> None:
    """I11: SGLang gives up after 10 s, so the roots' time limits must not add up."""
    calls = [FaultySyscalls() for _ in roots]
    ids = ids_of(9, 60)
    with opened_on(roots, calls, io_threads=1, timeout=0.6) as store:
        for part in np.array_split(ids, 10):
            dump(store, part, LENGTH)
            dump(store, ids_of(int(part[0, 0]) + 1000, 6), LENGTH)  # so that the parts are no neighbours
        for own in calls[:2]:
            own.faults = [Fault(kinds=["preadv"], times=ALWAYS, delay=0.35)]
        started = time.monotonic()
        status = load(store, ids, LENGTH)
        assert time.monotonic() - started < 1.2
    slow = homes(roots, ids) < 2
    assert set(status[slow]) == {Reason.OK, Reason.TIMEOUT} and (status[~slow] == Reason.OK).all()


def test_a_hung_root_does_not_stop_other_batches(roots: list[str]) -> None:
    """A read that the kernel does not end holds up its own batches, however many, and nobody else's."""
    calls = [FaultySyscalls() for _ in roots]
    ids = ids_of(10, 60)
    healthy = ids[homes(roots, ids) != 0]
    released = threading.Event()
    with opened_on(roots, calls, timeout=60) as store, ThreadPoolExecutor(20) as pool:
        dump(store, ids, LENGTH)
        calls[0].faults = [Fault(kinds=["preadv"], times=ALWAYS, before=lambda: released.wait(60))]
        hung = [pool.submit(load, store, ids, LENGTH) for _ in range(20)]
        try:
            time.sleep(0.05)
            assert (load(store, healthy, LENGTH) == Reason.OK).all()
            assert (dump(store, healthy, LENGTH) == Reason.OK).all()
            assert not any(each.done() for each in hung)
        finally:
            released.set()
        assert all((each.result(30) == Reason.OK).all() for each in hung)


def test_a_task_waits_for_the_slowest_root(roots: list[str]) -> None:
    """`status` with a time limit raises TimeoutError while one root is at work, and later has it all."""
    calls = [FaultySyscalls() for _ in roots]
    ids = ids_of(11, 60)
    released = threading.Event()
    with opened_on(roots, calls) as store:
        dump(store, ids, LENGTH)
        calls[1].faults = [Fault(kinds=["preadv"], before=lambda: released.wait(30))]
        rows = np.zeros((60, LENGTH), np.uint8)
        task = store.load(ids, None, list(rows))
        try:
            with pytest.raises(TimeoutError):
                task.status(0.05)
            assert not task.done() and not store.check(task)
        finally:
            released.set()
        assert store.wait(task, 30).all() and store.check(task)
        assert (rows == payloads(ids, LENGTH)).all()


# -- a sick root --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOENT, errno.ESTALE, errno.EROFS], ids=errno.errorcode.get
)
@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_a_root_that_fails_costs_its_own_blocks(roots: list[str], error: int, background: bool) -> None:
    """Issue 3: every system call on one root fails; no verb raises, and the others serve all they have."""
    calls = [FaultySyscalls() for _ in roots]
    old, new = ids_of(12, 60), ids_of(13, 60)
    sick_old, sick_new = homes(roots, old) == 1, homes(roots, new) == 1
    with opened_on(roots, calls) as store:
        dump(store, old, LENGTH)
        calls[1].faults = [broken(error)]
        rows = np.zeros((60, LENGTH), np.uint8)
        status = store.load(old, None, list(rows), background=background).status(30)
        assert ((status == Reason.OK) == ~sick_old).all()
        assert (rows[~sick_old] == payloads(old, LENGTH)[~sick_old]).all()
        status = store.dump(new, None, list(payloads(new, LENGTH)), background=background).status(30)
        assert ((status == Reason.OK) == ~sick_new).all()
        found = store.lookup(np.concatenate([old, new]))
        assert found[np.concatenate([~sick_old, ~sick_new])].all() and not found[60:][sick_new].any()
        assert store.lookup_on_prefix(new) == np.argmax(sick_new) - 1
        assert store.lookup_on_prefix(new[~sick_new]) == (~sick_new).sum() - 1
        store.prefetch(old)
        assert_counters_add_up(store)  # type: ignore[arg-type]
    for own in calls:
        own.faults = []
    with opened_on(roots, calls) as store:
        assert (load(store, old, LENGTH) == Reason.OK).all()
        assert (dump(store, new, LENGTH) == Reason.OK).all()
        assert (load(store, new, LENGTH) == Reason.OK).all()
    assert all(assert_no_lock_is_held(Path(root)) is None for root in roots)


def test_a_prefix_ends_where_a_root_has_lost_a_block(roots: list[str]) -> None:
    """The leading run is that of the call, whichever roots its blocks are on, and wherever it ends."""
    chain = ids_of(14, 30)
    with opened(roots) as store:
        for missing in range(29, -1, -1):
            lone = ids_of(1000 + missing, 30)
            lone[:missing] = chain[:missing]
            dump(store, lone[:missing], 100)
            dump(store, lone[missing + 1 :], 100)
            assert store.lookup_on_prefix(lone) == missing - 1


@pytest.mark.parametrize("what_is_left", ["nothing", "an empty directory", "a file"])
def test_a_root_whose_directory_goes_away(roots: list[str], what_is_left: str) -> None:
    """Issue 3: unmounted or deleted while the store is open. Nothing raises, no byte is wrong, the others
    serve; and a restart makes a new root there, or says which path is wrong."""
    ids, new = ids_of(15, 60), ids_of(16, 60)
    gone, gone_new = homes(roots, ids) == 2, homes(roots, new) == 2
    with opened(roots) as store:
        dump(store, ids, LENGTH)
        shutil.move(roots[2], roots[2] + ".moved")
        if what_is_left == "an empty directory":
            os.mkdir(roots[2])
        elif what_is_left == "a file":
            Path(roots[2]).touch()
        for _ in range(3):
            assert (load(store, ids, LENGTH)[~gone] == Reason.OK).all()
            stored = dump(store, new, LENGTH) == Reason.OK
            assert stored[~gone_new].all()
            assert what_is_left != "nothing" or not stored[gone_new].any()
            found = store.lookup(np.concatenate([ids, new]))
            assert found[:60][~gone].all() and found[60:][~gone_new].all()
            assert store.lookup_on_prefix(ids) >= np.argmax(gone) - 1
            store.prefetch(ids)
    if what_is_left == "a file":
        with pytest.raises(StoreError, match=f"path = {roots[2]}: is not a directory"):
            opened(roots)
        return
    with opened(roots) as store:
        assert (store.lookup(ids) == ~gone).all()
        assert (dump(store, ids, LENGTH) == Reason.OK).all()
        assert (load(store, ids, LENGTH) == Reason.OK).all()


def test_what_one_root_raises_is_not_raised(
    roots: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug that shows on one root costs its blocks, and is logged once with its place in the code."""
    ids = ids_of(17, 60)
    sick = homes(roots, ids) == 0
    with opened(roots) as store:
        dump(store, ids, LENGTH)
        for name in ("load_data", "dump_data", "lookup", "lookup_on_prefix", "prefetch"):
            monkeypatch.setattr(store.stores[0], name, lambda *_, **__: 1 // 0)
        with caplog.at_level(logging.ERROR):
            for background in (False, True):
                rows = np.zeros((60, LENGTH), np.uint8)
                status = store.load(ids, None, list(rows), background=background).status(30)
                assert (status == np.where(sick, Reason.IO_ERROR, Reason.OK)).all()
                task = store.dump(ids, None, list(payloads(ids, LENGTH)), background=background)
                assert (task.results(30) == ~sick).all()
            assert (store.lookup(ids) == ~sick).all()
            assert store.lookup_on_prefix(ids) == np.argmax(sick) - 1
            store.prefetch(ids)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info and roots[0] in caplog.text and "ZeroDivisionError" in caplog.text


# -- capacity, restart, other processes ---------------------------------------------------------------


def test_each_root_keeps_within_its_capacity(roots: list[str]) -> None:
    """I4 on each root, while far more is dumped than they hold."""
    capacities = [60 * 4096, 240 * 4096, 120 * 4096]
    with opened(roots, capacities, segment_bytes=64 << 10) as store:
        for seed in range(30):
            ids = ids_of(100 + seed, 40)
            dump(store, ids, 4096)
            assert all(allocated(root) <= most for root, most in zip(roots, capacities, strict=True))
        stats = store.stats()
        assert [each.capacity for each in stats.roots] == capacities
        assert all(each.blocks * 4096 > each.capacity // 3 for each in stats.roots)
        assert_counters_add_up(store)  # type: ignore[arg-type]


def test_restart(roots: list[str]) -> None:
    """Everything is found again, whatever the order of the roots and however their paths are written."""
    ids = ids_of(18, 60)
    with opened(roots) as store:
        dump(store, ids, LENGTH)
    again = [roots[2] + "/", os.path.join(roots[0], "..", "b"), roots[0]]
    with open_store(again, NAMESPACE) as store:
        assert (load(store, ids, LENGTH) == Reason.OK).all()
        assert store.stats().blocks == 60 and store.stats().capacity == sum(CAPACITIES)


def test_two_processes_share_all_roots(roots: list[str]) -> None:
    """What one stores is seen by the other, both ways; and a forked child, which has no threads, can load."""
    theirs, ours = ids_of(19, 60), ids_of(20, 60)
    with opened(roots) as store, Worker(striped_process, roots[::-1], LENGTH) as other:
        other.receive()
        other.send(("dump", theirs))
        assert (other.receive() == Reason.OK).all()
        assert (dump(store, ours, LENGTH) == Reason.OK).all()
        time.sleep(0.021)
        assert store.lookup(theirs).all() and store.lookup_on_prefix(theirs) == 59
        assert (load(store, theirs, LENGTH) == Reason.OK).all()
        other.send(("lookup", ours))
        assert other.receive().all()
        other.send(("load", ours))
        assert (other.receive() == Reason.OK).all()
        other.send(("fork", ours))
        assert other.receive() == 0
