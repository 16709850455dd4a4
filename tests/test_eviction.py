"""Issue 3: what eviction promises about who leaves, in what order, and who stays.

That nobody reads what has left is the subject of test_eviction_records.py.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from diskkit import dump_chain, lock_holder, look, records_on_disk, soon
from faults import Fault, FaultySyscalls
from storekit import (
    NAMESPACE,
    allocated,
    assert_counters_add_up,
    dump,
    ids_of,
    load,
    memory_directory,
    open_store,
    tree,
)
from workers import Worker

from posix_store import PosixStore, Reason, evictor
from posix_store.pins import write_pins
from posix_store.segment import PUT, TOUCH

LENGTH = 4096
OTHER = "f" * 32


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


def order_of_leaving(store: PosixStore, ids: np.ndarray) -> list[int]:
    """Evict blocks one by one until none is left; their numbers, in the order in which they left."""
    order: list[int] = []
    there = store.lookup(ids)
    while there.any():
        assert store.evictor.evict(1, soon(), namespaces=[store.namespace]).blocks == 1
        left = store.lookup(ids)
        order += np.flatnonzero(there & ~left).tolist()
        there = left
    return order


# -- who leaves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", [1, 3, 4, 5, 0, 2]), ("fifo", [0, 1, 2, 3, 4, 5])], ids=["lru", "fifo"]
)
def test_the_order_of_leaving(root: Path, policy: str, order: list[int]) -> None:
    """Issue 3: LRU spares what is loaded; FIFO goes by when a block was stored."""
    ids = ids_of(1, 6)
    with open_store(root, policy=policy) as store:
        for block in ids:
            dump(store, block[None], LENGTH)
        assert (load(store, ids[[0]], LENGTH) == Reason.OK).all()
        assert (load(store, ids[[2]], LENGTH) == Reason.OK).all()
        assert order_of_leaving(store, ids) == order


def test_a_dump_of_what_is_stored_is_a_use(root: Path) -> None:
    """Issue 3: engines dump again what they have used; LRU spares it."""
    ids = ids_of(1, 3)
    with open_store(root) as store:
        for block in (*ids, ids[0]):
            dump(store, block[None], LENGTH)
        assert order_of_leaving(store, ids) == [1, 2, 0]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_tails_leave_before_heads(root: Path, policy: str) -> None:
    """Issue 3: a prefix without its head is of no use, so a chain goes from its end."""
    ids = ids_of(1, 8)
    with open_store(root, policy=policy) as store, open_store(root, policy=policy) as other:
        dump_chain(store, ids[:3])
        dump_chain(other, ids[3:5], behind=ids[2])
        look(store)
        dump_chain(store, ids[5:], behind=ids[4])
        assert order_of_leaving(store, ids) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_use_of_the_last_block_is_one_of_all_before_it(root: Path) -> None:
    """Issue 3: an engine that has the head in memory loads only the rest; the head must not go before it."""
    chain, others = ids_of(1, 6), ids_of(2, 6)
    with open_store(root) as store:
        dump_chain(store, chain)
        for block in others:
            dump(store, block[None], LENGTH)
        load(store, chain[4:], LENGTH)
        order = order_of_leaving(store, np.concatenate([others, chain]))
        assert order == [0, 1, 2, 3, 4, 5, 11, 10, 9, 8, 7, 6]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_leaves_while_something_hangs_on_it(root: Path, seed: int) -> None:
    """Issue 3: a forest that two processes grow, use and evict at random: no block ever lacks its parent."""
    random = np.random.default_rng(seed)
    ids = ids_of(seed, 260)
    parent_of = {i: int(random.integers(max(0, i - 9), i)) for i in range(1, len(ids)) if i % 13}
    with open_store(root, segment_bytes=24 << 10) as one, open_store(root, segment_bytes=24 << 10) as two:
        for i in range(len(ids)):
            store, other = (one, two)[:: random.choice([1, -1])]
            look(store)
            if i not in parent_of or store.lookup(ids[[parent_of[i]]])[0]:
                behind = ids[parent_of[i]] if i in parent_of else None
                assert (dump_chain(store, ids[[i]], behind) == Reason.OK).all()
            if random.random() < 0.3:
                load(other, ids[random.integers(0, i + 1, 2)], LENGTH)
            if random.random() < 0.5 and i > 60:
                other.evictor.evict(int(random.integers(1, 4)) * LENGTH, soon())
                look(store)
                look(other)
                there = store.lookup(ids)
                assert (there == other.lookup(ids)).all()
                assert not [k for k, p in parent_of.items() if there[k] and not there[p]], f"step {i}"
    assert one.evictor.total.blocks + two.evictor.total.blocks > 80


def test_a_plan_knows_what_others_have_stored_since(root: Path) -> None:
    """Issue 3: blocks are chosen some time before they go; what got a successor meanwhile stays."""
    ids, new = ids_of(1, 64), ids_of(2, 4)
    with open_store(root) as store, open_store(root) as other:
        for block in ids:
            dump(store, block[None], LENGTH)
        look(other)
        assert store.evictor.evict(1, soon()).blocks == 1  # the plan holds some more
        assert dump_chain(other, new[:1], behind=ids[1]).tolist() == [Reason.OK]
        look(store)
        store.evictor.evict(1, soon())
        assert store.lookup(ids[:4]).tolist() == [False, True, False, True]


def test_uses_survive_a_restart(root: Path) -> None:
    """Issue 3: who evicts may not be who has used; uses stand in the journals."""
    ids = ids_of(1, 6)
    with open_store(root) as store:
        for block in ids:
            dump(store, block[None], LENGTH)
        killed = open_store(root)  # never closed
        dump(killed, ids_of(9, 1), LENGTH)  # so that it has a journal
        for user, number in ((store, 0), (killed, 2), (store, 1)):
            time.sleep(0.01)  # journals tell 1/256 of a second apart
            load(user, ids[[number]], LENGTH)
    touches = records_on_disk(root)["kind"] == TOUCH
    assert touches.sum() == 3
    with open_store(root) as fresh:
        assert order_of_leaving(fresh, ids) == [3, 4, 5, 0, 2, 1]
    killed.close()


def test_uses_are_written_down_once_a_minute(root: Path) -> None:
    """I11: hot blocks do not fill journals: of a chain only the end is noted, and not each time."""
    ids = ids_of(1, 50)
    with open_store(root) as store:
        dump_chain(store, ids)
        for _ in range(20):
            load(store, ids, LENGTH)
        assert (records_on_disk(root)["kind"] == TOUCH).sum() == 1


# -- who stays --------------------------------------------------------------------------------------


def test_pins_stay_with_all_before_them(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Issue 3: pinned chains outlive any pressure, also pins that another process makes meanwhile."""
    chain, loose = ids_of(1, 5), ids_of(2, 20)
    with open_store(root, capacity=60 * 4096, segment_bytes=32 << 10) as store:
        dump_chain(store, chain)
        dump(store, loose, LENGTH)
        write_pins(store.root, NAMESPACE, chain[3:4])
        for seed in range(10, 30):
            assert (dump(store, ids_of(seed, 6), LENGTH) == Reason.OK).all()
        assert store.lookup(chain).tolist() == [True] * 4 + [False]
        assert not store.lookup(loose).any()
        late = ids_of(29, 6)
        write_pins(store.root, NAMESPACE, np.concatenate([chain[3:4], late]))
        for seed in range(30, 40):
            assert (dump(store, ids_of(seed, 6), LENGTH) == Reason.OK).all()
        assert store.lookup(late).all() and store.lookup(chain[:4]).all()
        assert not caplog.records
        assert store.evictor.evict(1 << 40, soon()).blocks > 0
        assert store.stats().blocks == 10, "nothing but what is pinned is left"
        assert (load(store, np.concatenate([chain[:4], late]), LENGTH) == Reason.OK).all()
        assert (dump(store, ids_of(50, 60), LENGTH)[-1]) == Reason.FULL


def test_an_abandoned_namespace_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3: after an update of the model nobody asks for the old blocks, however young they are.

    A namespace that is served is not abandoned, though nobody has used it for a while.
    """
    monkeypatch.setattr(evictor, "ABANDONED_SECONDS", -5.0)  # a use is long ago at once
    ids = ids_of(1, 6)
    with open_store(root) as store:
        dump(store, ids, LENGTH)
        time.sleep(0.01)
        with open_store(root, namespace=OTHER) as other:
            dump(other, ids, LENGTH)
            assert store.evictor.evict(2 * LENGTH, soon()).blocks == 2
            assert (int(store.lookup(ids).sum()), other.stats().blocks) == (4, 6), "served: the older go"
        store.evictor.evict(3 * LENGTH, soon())
        with open_store(root, namespace=OTHER, writable=False) as other:
            left = other.stats().blocks
        assert int(store.lookup(ids).sum()) == 4 and left <= 3, "abandoned: its blocks go"


def test_what_is_evicted_leaves_no_empty_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7, issue 3: segments without blocks, then an abandoned directory, vanish; what is not ours stays."""
    monkeypatch.setattr(evictor, "ABANDONED_SECONDS", -5.0)
    third = "e" * 32
    for namespace in (OTHER, third):
        with open_store(root, namespace=namespace, segment_bytes=1) as old:
            for seed in range(5):
                dump(old, ids_of(seed, 4), LENGTH)
    strangers = [root / third / "notes.txt", root / "notes.txt"]
    for path in strangers:
        path.write_bytes(b"precious")
    with open_store(root) as store, open_store(root, namespace="d" * 32) as served:
        dump(served, ids_of(1, 2), LENGTH)
        dump(store, ids_of(1, 4), LENGTH)
        deadline = soon()
        while store.evictor.evict(1 << 40, soon()).blocks and time.monotonic() < deadline:
            pass
        for _ in range(2):
            store.evictor.tidy(soon())
        left = list((root / OTHER).iterdir()) if (root / OTHER).exists() else []
        assert left == [] and not (root / OTHER).exists()
        assert sorted(path.name for path in (root / third).iterdir() if path.suffix != ".lock") == [
            "NAMESPACE.json", "notes.txt",
        ]  # fmt: skip
        assert (root / ("d" * 32)).is_dir(), "it is served"
        time.sleep(1.05)  # what others evict is noticed within a second
        assert (dump(served, ids_of(1, 2), LENGTH) == Reason.OK).all()
        assert (load(served, ids_of(1, 2), LENGTH) == Reason.OK).all()
    assert [path.read_bytes() for path in strangers] == [b"precious"] * 2


def test_one_time_prompts_evict_nothing(root: Path) -> None:
    """Issue 3: `second_touch` stores what comes again, so a flood of prompts seen once costs no hit."""
    hot = ids_of(1, 12)
    with open_store(root, capacity=40 * 4096, admission="second_touch") as store:
        assert (dump_chain(store, hot) == Reason.NOT_ADMITTED).all()
        assert not store.lookup(hot).any()
        assert (dump_chain(store, hot) == Reason.OK).all()
        for seed in range(10, 40):
            assert (dump(store, ids_of(seed, 20), LENGTH) == Reason.NOT_ADMITTED).all()
        assert (load(store, hot, LENGTH) == Reason.OK).all()
        assert store.evictor.total.blocks == 0
        assert store.counters.snapshot()["unstored"] == {"not_admitted": 12 + 600}
        assert_counters_add_up(store)


def test_a_time_to_live(root: Path) -> None:
    """Issue 3: after it a block is not found, after the next upkeep not on the disk; it is stored again."""
    ids, young = ids_of(1, 8), ids_of(2, 4)
    with open_store(root, ttl=0.4) as store:
        dump_chain(store, ids)
        assert store.lookup(ids).all()
        time.sleep(0.25)
        dump_chain(store, young, behind=ids[3])  # hangs on what expires before it
        lone = ids_of(3, 2)
        dump(store, lone, LENGTH)
        time.sleep(0.2)
        assert not store.lookup(ids).any() and store.lookup(young).all()
        assert (load(store, ids, LENGTH) == Reason.ABSENT).all()
        with open_store(root) as other:
            assert other.lookup(ids).all(), "it is still there for who does not mind"
        before = allocated(root)
        store.upkeep.expire()
        assert allocated(root) <= before - 8 * LENGTH
        with open_store(root) as other:
            assert not other.lookup(ids).any() and other.lookup(lone).all()
        assert (dump_chain(store, ids) == Reason.OK).all()
        assert store.counters.snapshot()["written_blocks"] == 8 + 4 + 2 + 8
        assert (load(store, ids, LENGTH) == Reason.OK).all()


@pytest.mark.parametrize("pages", [11, 16, 60])
def test_blocks_in_shards_come_and_go_whole(root: Path, pages: int) -> None:
    """I2, I4: layers of a block are stored one after another in a full store; nobody finds a part of one."""
    capacity = pages * 4096
    with (
        open_store(root, capacity=capacity, segment_bytes=32 << 10) as store,
        open_store(root, capacity=None, verify=False) as reader,
    ):
        for seed in range(60):
            ids = ids_of(seed, 2)
            whole = np.ones(2, bool)
            for shard in (1, 0):
                whole &= dump(store, ids, 3000, shard, n_shards=2) == Reason.OK
                assert allocated(root) <= capacity
            # In a store of a few pages the second shard may have taken the place of the first.
            assert whole.all() and (pages < 16 or store.lookup(ids).all())
            if seed % 4 == 0:
                recent = np.concatenate([ids_of(k, 2) for k in range(max(0, seed - 40), seed + 1)])
                look(reader)
                found = reader.lookup(recent)
                assert (found == store.lookup(recent)).all()
                for shard in (0, 1):
                    wanted = np.where(found, Reason.OK, Reason.ABSENT)
                    assert (load(reader, recent, 3000, shard) == wanted).all()
        assert store.verify().ok
        assert pages < 16 or store.evictor.total.blocks > 60 - pages // 2


def test_a_round_of_upkeep_makes_room_ahead(root: Path) -> None:
    """Issue 3, I11: a dump need not wait for evictions that the background has done before."""
    with open_store(root, capacity=2 << 20, segment_bytes=64 << 10) as store:
        for seed in range(8):
            dump(store, ids_of(seed, 8), LENGTH)
        store.upkeep.round()
        assert store.evictor.total.blocks == 0, "there is room"
        for seed in range(8, 80):
            dump(store, ids_of(seed, 8), LENGTH)
        store.evictor.evict(1, soon())
        while store._space.available() >= (2 << 20) // 32:
            dump(store, ids_of(int(time.monotonic() * 1e6), 1), LENGTH)
        evicted = store.evictor.total.blocks
        store.upkeep.round()
        assert store.evictor.total.blocks > evicted
        assert store._space.available() >= (2 << 20) // 24


def test_who_only_reads_evicts_nothing(root: Path) -> None:
    """Must hold 6: a full store, opened read-only or never dumped to, is not changed by who looks."""
    with open_store(root, capacity=40 * 4096) as store:
        for seed in range(20):
            dump(store, ids_of(seed, 4), LENGTH)
        open_store(root, capacity=20 * 4096).close()
        before = tree(root)
        for writable in (True, False):
            calls = FaultySyscalls()
            with open_store(root, capacity=None, writable=writable, ttl=0.001, syscalls=calls) as reader:
                load(reader, ids_of(19, 4), LENGTH)
                reader.upkeep.make_room()
                if not writable:
                    reader.upkeep.round()
            assert calls.changes == {}
        assert tree(root) == before


# -- several processes ------------------------------------------------------------------------------


def test_the_eviction_lock_of_a_stopped_and_of_a_killed_process(root: Path) -> None:
    """I11: a process that was stopped while evicting delays dumps up to their deadline; a dead one none."""
    with open_store(root, capacity=40 * 4096, segment_bytes=32 << 10, timeout=0.7) as store:
        for seed in range(20):
            assert (dump(store, ids_of(seed, 4), LENGTH) == Reason.OK).all()
        with Worker(lock_holder, str(root / "EVICT.lock")) as worker:
            assert worker.receive() == "held"
            os.kill(worker.pid, signal.SIGSTOP)
            started = time.monotonic()
            status = dump(store, ids_of(50, 20), LENGTH)
            assert time.monotonic() - started < 0.7 + 1.0, "a dump waited for the stopped process"
            assert set(status) <= {Reason.OK, Reason.FULL, Reason.TIMEOUT} and status[-1] != Reason.OK
            started = time.monotonic()
            assert (load(store, ids_of(19, 4), LENGTH) == Reason.OK).all()
            assert store.evictor.evict(LENGTH, time.monotonic() + 0.1).blocks == 0
            assert time.monotonic() - started < 0.5
            worker.kill()
            worker.process.join(30)
        assert (dump(store, ids_of(50, 20), LENGTH) == Reason.OK).all()
        assert store.verify().ok


def test_blocks_that_two_processes_dump_at_once_are_stored_once(root: Path) -> None:
    """Issue 3: tensor-parallel ranks dump the same blocks at the same moment: one copy is enough.

    The other one's space is given back, and it says that the blocks are stored.
    """
    ids = ids_of(1, 16)
    calls = FaultySyscalls()
    with open_store(root, io_threads=1, syscalls=calls) as store, open_store(root) as other:
        for number, each in enumerate((store, other)):
            dump(each, ids_of(100 + number, 1), LENGTH)
        look(store)
        before = allocated(root)
        calls.faults = [Fault(kinds=["pwritev"], before=lambda: dump(other, ids[:12], LENGTH))]
        assert (dump(store, ids[:12], LENGTH) == Reason.OK).all()
        assert store.counters.snapshot()["written_blocks"] == 1
        assert other.counters.snapshot()["written_blocks"] == 13
        assert allocated(root) <= before + 13 * LENGTH
        calls.faults = [Fault(kinds=["pwritev"], before=lambda: dump(other, ids[12:14], LENGTH))]
        assert (dump(store, ids[12:], LENGTH) == Reason.OK).all()
        assert store.counters.snapshot()["written_blocks"] == 3
        puts = records_on_disk(root)
        puts = puts[puts["kind"] == PUT]
        assert len(np.unique(puts["id"])) == len(puts) == 18
        for each in (store, other):
            look(each)
            assert (load(each, ids, LENGTH) == Reason.OK).all()
            assert_counters_add_up(each)
