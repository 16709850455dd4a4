"""What every block store must do, as tests that any store can be put through.

Subclass `StoreContract`, give it a `store` fixture and `reopen`, and collect it:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): ...
        def reopen(self, store): ...
"""

from __future__ import annotations

import gc
import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bad_calls import BAD_CALLS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posix_store import Reason

GUARD = 0xA5
_fresh = itertools.count(1 << 32)


def make_id(name: object) -> bytes:
    """The 16-byte id of a block."""
    return hashlib.blake2b(repr(name).encode(), digest_size=16).digest()


def make_ids(*names: object) -> list[bytes]:
    return [make_id(name) for name in names]


def new_ids(count: int) -> list[bytes]:
    """Ids that no other call has returned."""
    return make_ids(*itertools.islice(_fresh, count))


def payload(name: object, length: int, shard: int = 0) -> bytes:
    """Bytes of one shard of a block: equal for equal arguments, different otherwise."""
    return hashlib.shake_128(repr((name, shard)).encode()).digest(length)


class Arena:
    """n blocks of k components strewn over memory: any alignment, any order, guard bytes in between."""

    def __init__(self, count: int, sizes: Sequence[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.sizes = np.array(sizes, np.int64)
        places = [(block, part) for block in range(count) for part in range(len(sizes))]
        random.shuffle(places)
        gaps = random.integers(1, 40, len(places))
        self._offsets = np.zeros((count, len(sizes)), np.int64)
        end = 0
        for (block, part), gap in zip(places, gaps.tolist(), strict=True):
            self._offsets[block, part] = end + gap
            end += gap + sizes[part]
        self.memory = np.full(end + 40, GUARD, np.uint8)
        self.addresses = self._offsets + self.memory.ctypes.data

    def _parts(self, block: int) -> list[np.ndarray]:
        return [
            self.memory[at : at + size]
            for at, size in zip(self._offsets[block].tolist(), self.sizes.tolist(), strict=True)
        ]

    def write(self, block: int, data: bytes) -> None:
        for part in self._parts(block):
            part[:], data = np.frombuffer(data[: part.size], np.uint8), data[part.size :]

    def read(self, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self._parts(block))

    def guards_intact(self) -> bool:
        """Was nothing written outside the components?"""
        outside = np.ones(self.memory.size, bool)
        for block in range(len(self._offsets)):
            for at, size in zip(self._offsets[block].tolist(), self.sizes.tolist(), strict=True):
                outside[at : at + size] = False
        return bool((self.memory[outside] == GUARD).all())


def load_bytes(
    store: Any, ids: Sequence[bytes], length: int, shards: Any = None, background: bool = False
) -> tuple[list[Reason], list[bytes]]:
    """Outcome and bytes of each block."""
    buffers = [bytearray(length) for _ in ids]
    status = store.load(ids, shards, buffers, background=background).status(30)
    return [Reason(int(code)) for code in status], [bytes(buffer) for buffer in buffers]


def dump_bytes(store: Any, ids: Sequence[bytes], data: Sequence[bytes], **options: Any) -> list[bool]:
    """Which blocks are stored after a dump in this thread."""
    return list(store.dump(ids, options.pop("shards", None), data, background=False, **options).results(30))


any_geometry = given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 64, 4095, 4096, 4097, 9000]), min_size=1, max_size=5),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 32),
    data=st.data(),
)
short = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class StoreContract:
    """Tests of the verbs. `store` is empty and writable, and nobody else uses it."""

    @pytest.fixture
    def store(self) -> Any:
        raise NotImplementedError("a fixture that gives an empty store")

    def reopen(self, store: Any) -> Any:
        """Close a store and give another over what it left behind."""
        raise NotImplementedError

    # -- bytes --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [1, 63, 4095, 4096, 4097, 100_000])
    def test_what_was_dumped_is_loaded(self, store: Any, length: int) -> None:
        """I1, at lengths on and off the alignment of the disk."""
        ids, data = make_ids(*range(5)), [payload(i, length) for i in range(5)]
        assert dump_bytes(store, ids, data) == [True] * 5
        assert load_bytes(store, ids, length) == ([Reason.OK] * 5, data)

    @short
    @any_geometry
    def test_any_geometry(
        self, store: Any, sizes: list[int], count: int, seed: int, data: st.DataObject
    ) -> None:
        """I1: unaligned components of any sizes, in any order in memory, and loaded in any order."""
        ids, source = new_ids(count), Arena(count, sizes, seed)
        for i in range(count):
            source.write(i, payload(ids[i], sum(sizes)))
        rows = data.draw(st.permutations(range(count)), label="order of the dump")
        task = store.dump_data(
            [ids[i] for i in rows], None, source.addresses[rows], source.sizes, background=False
        )
        assert task.results().all()
        rows = data.draw(st.permutations(range(count)), label="order of the load")[: max(1, count // 2)]
        target = Arena(len(rows), data.draw(st.permutations(sizes), label="other components"), seed + 1)
        wanted = [ids[i] for i in rows]
        assert store.load_data(wanted, None, target.addresses, target.sizes, background=False).results().all()
        assert [target.read(i) for i in range(len(rows))] == [payload(i, sum(sizes)) for i in wanted]
        assert source.guards_intact() and target.guards_intact()

    def test_one_size_serves_all_components(self, store: Any) -> None:
        """A scalar size, and a vector of addresses for blocks of one component."""
        ids, arena = make_ids(0, 1), Arena(2, [10, 10])
        for i in range(2):
            arena.write(i, payload(i, 20))
        assert store.dump_data(ids, None, arena.addresses, 10).results(30).all()
        flat = np.zeros((2, 20), np.uint8)
        at = flat.ctypes.data + np.array([0, 20], np.int64)
        assert store.load_data(ids, None, at, 20).results(30).all()
        assert [row.tobytes() for row in flat] == [payload(i, 20) for i in range(2)]

    def test_more_iovecs_than_one_system_call_takes(self, store: Any) -> None:
        """40 neighbouring blocks of 100 components are 4,000 iovecs, whose limits fall inside blocks."""
        sizes = [1 + i % 7 for i in range(100)]
        ids, source, target = make_ids(*range(40)), Arena(40, sizes, 1), Arena(40, sizes, 2)
        for i in range(40):
            source.write(i, payload(i, sum(sizes)))
        assert store.dump_data(ids, None, source.addresses, source.sizes).results(30).all()
        assert store.load_data(ids, None, target.addresses, target.sizes).results(30).all()
        assert [target.read(i) for i in range(40)] == [source.read(i) for i in range(40)]
        assert target.guards_intact()

    def test_one_block_of_more_iovecs_than_a_call_takes(self, store: Any) -> None:
        """A block is never cut by a limit of the system: 3,000 components in one block."""
        ids, source, target = make_ids(0), Arena(1, [3] * 3000, 1), Arena(1, [3] * 3000, 2)
        source.write(0, payload(0, 9000))
        assert store.dump_data(ids, None, source.addresses, 3).results(30).all()
        assert store.load_data(ids, None, target.addresses, 3).results(30).all()
        assert target.read(0) == payload(0, 9000) and target.guards_intact()

    def test_more_blocks_than_one_journal_append_takes(self, store: Any) -> None:
        """70,000 blocks of 8 bytes in one batch; the order of the load is another."""
        count = 70_000
        data = np.random.default_rng(1).integers(0, 1 << 63, count)
        ids = np.stack([np.arange(count), np.arange(count) ^ 0x5555], axis=1).astype(np.uint64)
        at = data.ctypes.data + np.arange(count, dtype=np.int64) * 8
        assert store.dump_data(ids, None, at, 8).results(60).all()
        assert store.lookup(ids).all()
        order = np.random.default_rng(2).permutation(count)
        got = np.zeros_like(data)
        at = got.ctypes.data + np.arange(count, dtype=np.int64) * 8
        assert store.load_data(ids[order], None, at, 8).results(60).all()
        np.testing.assert_array_equal(got, data[order])

    def test_duplicates_in_one_batch(self, store: Any) -> None:
        """A batch may name a block twice, when it is dumped and when it is loaded."""
        names = [0, 1, 0, 2, 1, 0]
        ids, data = make_ids(*names), [payload(name, 5000) for name in names]
        assert dump_bytes(store, ids, data) == [True] * 6
        assert load_bytes(store, ids, 5000) == ([Reason.OK] * 6, data)

    def test_some_of_a_batch_absent(self, store: Any) -> None:
        """I1: what is not there is a miss, and costs its neighbours nothing."""
        names = [0, 1, 2, 3, 4]
        dump_bytes(store, make_ids(1, 3), [payload(i, 100) for i in (1, 3)])
        status, got = load_bytes(store, make_ids(*names), 100)
        assert status == [Reason.ABSENT, Reason.OK, Reason.ABSENT, Reason.OK, Reason.ABSENT]
        assert (got[1], got[3]) == (payload(1, 100), payload(3, 100))

    def test_wrong_length_is_a_miss(self, store: Any) -> None:
        """I1: never a part of a block, never more than a block."""
        dump_bytes(store, make_ids(0), [payload(0, 1000)])
        for length in (1, 999, 1001, 4096):
            assert load_bytes(store, make_ids(0), length)[0] == [Reason.LENGTH]
        assert load_bytes(store, make_ids(0), 1000) == ([Reason.OK], [payload(0, 1000)])

    def test_what_is_stored_is_not_written_again(self, store: Any) -> None:
        """A dump is idempotent; an id names its bytes, so the first ones stay."""
        first, second = payload("first", 64), payload("second", 64)
        assert dump_bytes(store, make_ids(0), [first]) == [True]
        assert dump_bytes(store, make_ids(0), [second]) == [True]
        assert load_bytes(store, make_ids(0), 64) == ([Reason.OK], [first])

    def test_zeros_are_bytes_like_any_other(self, store: Any) -> None:
        """A block of zeros, and the id of zeros, are not mistaken for nothing."""
        ids = [bytes(16), b"\xff" * 16]
        assert dump_bytes(store, ids, [bytes(4096)] * 2) == [True, True]
        status, got = load_bytes(store, ids, 4096)
        assert (status, got) == ([Reason.OK] * 2, [bytes(4096)] * 2)
        assert store.lookup([*ids, b"\0" * 15 + b"\1"]).tolist() == [True, True, False]

    # -- look-up ------------------------------------------------------------------------------------

    @short
    @given(present=st.lists(st.booleans(), max_size=12))
    def test_lookups_agree(self, store: Any, present: list[bool]) -> None:
        """`lookup_on_prefix` is the index of the last leading hit, -1 for none; `lookup` has them all."""
        ids = new_ids(len(present))
        stored = [i for i, here in zip(ids, present, strict=True) if here]
        dump_bytes(store, stored, [payload(i, 10) for i in stored])
        assert store.lookup(ids).tolist() == present
        assert store.lookup_on_prefix(ids) == [*present, False].index(False) - 1

    @pytest.mark.parametrize(
        "form",
        [
            lambda ids: ids,
            tuple,
            b"".join,
            lambda ids: bytearray(b"".join(ids)),
            lambda ids: memoryview(b"".join(ids)),
            lambda ids: np.array(ids, "S16"),
            lambda ids: np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16),
            lambda ids: np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 2),
            lambda ids: np.repeat(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), 2, axis=0)[::2],
        ],
        ids=["list", "tuple", "bytes", "bytearray", "memoryview", "S16", "u1", "u8", "strided"],
    )
    def test_ids_in_any_form(self, store: Any, form: Callable[[list[bytes]], Any]) -> None:
        """The same block whatever the container; trailing zero bytes of an id count."""
        names = [make_id(0), make_id(1)[:12] + bytes(4), make_id(2)]
        data = [payload(i, 20) for i in range(3)]
        assert store.dump(form(names), None, data).results(30).all()
        assert store.lookup(form(names)).tolist() == [True] * 3
        assert store.lookup(names).tolist() == [True] * 3
        assert store.lookup_on_prefix(form(names)) == 2
        store.prefetch(form(names))
        buffers = [bytearray(20) for _ in range(3)]
        assert store.load(form(names), None, buffers).results(30).all()
        assert [bytes(b) for b in buffers] == data

    @pytest.mark.parametrize("nothing", [[], b"", np.empty((0, 2), np.uint64)], ids=["list", "bytes", "u8"])
    def test_empty_batch(self, store: Any, nothing: Any) -> None:
        """Nothing asked, nothing done, nothing raised; also when something is stored."""
        dump_bytes(store, make_ids(0), [b"x"])
        assert store.lookup(nothing).tolist() == []
        assert store.lookup_on_prefix(nothing) == -1
        store.prefetch(nothing)
        none = np.empty((0, 3), np.int64)
        for background in (False, True):
            assert len(store.load(nothing, None, [], background=background).status(30)) == 0
            assert len(store.dump(nothing, None, [], background=background).status(30)) == 0
            assert len(store.load_data(nothing, [], none, [1, 2, 3], background=background).status(30)) == 0
            assert len(store.dump_data(nothing, 0, none, 8, background=background).status(30)) == 0

    def test_prefetch_of_anything(self, store: Any) -> None:
        """It is advice: absent blocks, duplicates and incomplete ones do no harm."""
        dump_bytes(store, make_ids(0, 1), [payload(i, 9000) for i in range(2)])
        dump_bytes(store, make_ids(2), [payload(2, 9000)], shards=0, n_shards=2)
        store.prefetch(make_ids(0, 5, 2, 0, 1))
        assert load_bytes(store, make_ids(0, 1), 9000)[0] == [Reason.OK] * 2

    # -- shards -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)], ids=str)
    def test_shards_in_any_order(self, store: Any, order: tuple[int, ...]) -> None:
        """I2: a block is found when all its shards are stored, from separate calls in whatever order."""
        ids = make_ids(*range(4))
        for step, shard in enumerate(order):
            assert not store.lookup(ids).any(), f"visible after {step} of 3 shards"
            assert load_bytes(store, ids, 70, order[0])[0] == [Reason.ABSENT] * 4
            data = [payload(i, 70, shard) for i in range(4)]
            assert dump_bytes(store, ids, data, shards=shard, n_shards=3) == [True] * 4
        assert store.lookup(ids).all()
        for shard in range(3):
            expected = [payload(i, 70, shard) for i in range(4)]
            assert load_bytes(store, ids, 70, shard) == ([Reason.OK] * 4, expected)

    @pytest.mark.parametrize(
        "calls", [([1], [0, 1, 2]), ([1], [0], [1], [2]), ([2, 0], [0], [1]), ([0], [0], [2, 1])]
    )
    def test_a_shard_that_is_stored_again_before_the_block_is_whole(
        self, store: Any, calls: tuple[list[int], ...]
    ) -> None:
        """I2: what an aborted request left behind neither hides the block nor shows old bytes of a shard."""
        block = make_id("stored again")
        last: dict[int, bytes] = {}
        for number, shards in enumerate(calls):
            data = {shard: payload(number, 70, shard) for shard in shards}
            assert dump_bytes(
                store, [block] * len(shards), list(data.values()), shards=shards, n_shards=3
            ) == [True] * len(shards)
            last |= data
        assert store.lookup([block]).all()
        status, got = load_bytes(store, [block] * 3, 70, [0, 1, 2])
        assert status == [Reason.OK] * 3
        assert got == [last[shard] for shard in range(3)]

    def test_shards_of_many_blocks_in_one_call(self, store: Any) -> None:
        """Rows of one batch may be any shards of any blocks, for a dump and for a load."""
        rows = [(name, shard) for name in range(5) for shard in range(4)]
        np.random.default_rng(3).shuffle(rows)
        rows = [(int(name), int(shard)) for name, shard in rows]
        ids, shards = [make_id(name) for name, _ in rows], [shard for _, shard in rows]
        data = [payload(name, 33, shard) for name, shard in rows]
        dump_bytes(store, ids[:13], data[:13], shards=shards[:13], n_shards=4)
        whole = [name for name in range(5) if sum(row[0] == name for row in rows[:13]) == 4]
        assert [name for name in range(5) if store.lookup([make_id(name)])[0]] == whole
        dump_bytes(store, ids, data, shards=np.array(shards), n_shards=4)
        again = np.random.default_rng(4).permutation(len(rows)).tolist()
        status, got = load_bytes(store, [ids[i] for i in again], 33, [shards[i] for i in again])
        assert status == [Reason.OK] * len(rows)
        assert got == [data[i] for i in again]

    def test_only_complete_blocks_of_a_batch_are_visible(self, store: Any) -> None:
        """I2: the block that lacks a shard is hidden, its neighbour in the same batch is not."""
        ids = make_ids("a", "a", "b")
        data = [payload("a", 8, 0), payload("a", 8, 1), payload("b", 8, 0)]
        dump_bytes(store, ids, data, shards=[0, 1, 0], n_shards=2)
        assert store.lookup(make_ids("a", "b")).tolist() == [True, False]
        assert store.lookup_on_prefix(make_ids("a", "b")) == 0

    def test_a_shard_that_does_not_exist_is_a_miss(self, store: Any) -> None:
        """I1: shard 1 of a block in one piece, shard 3 of three."""
        dump_bytes(store, make_ids("one"), [payload("one", 8)])
        dump_bytes(
            store, make_ids(*["three"] * 3), [payload("three", 8, i) for i in range(3)],
            shards=[0, 1, 2], n_shards=3,
        )  # fmt: skip
        assert load_bytes(store, make_ids("one"), 8, 1)[0] == [Reason.ABSENT]
        assert load_bytes(store, make_ids("three"), 8, 3)[0] == [Reason.ABSENT]
        assert load_bytes(store, make_ids("three"), 8, 65_535)[0] == [Reason.ABSENT]

    def test_a_block_of_very_many_shards(self, store: Any) -> None:
        """Shard numbers go to 65,535: 300 shards, the last of them numbered beyond a byte."""
        data = [payload("many", 5, shard) for shard in range(300)]
        ids = make_ids(*["many"] * 300)
        dump_bytes(store, ids[:299], data[:299], shards=range(299), n_shards=300)
        assert not store.lookup(ids[:1])[0]
        dump_bytes(store, ids[:1], data[299:], shards=299, n_shards=300)
        assert load_bytes(store, ids, 5, list(range(300))) == ([Reason.OK] * 300, data)

    # -- arguments and tasks ------------------------------------------------------------------------

    @pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
    def test_senseless_arguments_are_refused(
        self, store: Any, call: Callable[[Any, np.ndarray], object]
    ) -> None:
        """At the call, with ValueError; and the store goes on working."""
        with pytest.raises(ValueError):
            call(store, np.zeros(64, np.uint8))
        assert dump_bytes(store, make_ids("after"), [b"x"]) == [True]

    @pytest.mark.parametrize("background", [False, True])
    def test_tasks(self, store: Any, background: bool) -> None:
        """`check`, `wait`, `done`, `results` and `status` tell the same, as often as they are asked."""
        ids, data = make_ids(0, 1), [payload(i, 3000) for i in range(2)]
        dump = store.dump(ids, None, data, parents=[bytes(16), ids[0]], background=background)
        assert background or store.check(dump)
        assert store.wait(dump, 30).tolist() == [True, True]
        assert store.check(dump) and dump.done()
        buffers = [bytearray(3000) for _ in range(3)]
        load = store.load([*ids, make_id("absent")], None, buffers, background=background)
        for _ in range(2):
            assert store.wait(load, 30).tolist() == [True, True, False]
            assert load.results().tolist() == [True, True, False]
            assert load.status().tolist() == [Reason.OK, Reason.OK, Reason.ABSENT]
        assert load.status().dtype == np.uint8 and load.results().dtype == bool
        assert [bytes(b) for b in buffers[:2]] == data

    def test_a_task_keeps_its_buffers_alive(self, store: Any) -> None:
        """A caller may forget the buffers of a dump at once; their memory is not reused under it."""
        ids = make_ids(*range(64))
        tasks = [store.dump([i], None, [np.frombuffer(payload(i, 50_000), np.uint8).copy()]) for i in ids]
        gc.collect()
        noise = [np.full(50_000, GUARD, np.uint8) for _ in range(64)]
        assert all(task.results(30).all() for task in tasks)
        assert load_bytes(store, ids, 50_000)[1] == [payload(i, 50_000) for i in ids]
        assert noise[0][0] == GUARD

    def test_many_threads_at_once(self, store: Any) -> None:
        """I1, I2: dumps and loads of overlapping blocks from eight threads, whole or in shards."""
        names, lengths = list(range(40)), 3000

        def work(thread: int) -> None:
            random = np.random.default_rng(thread)
            for step in range(12):
                some = random.permutation(names)[:10].tolist()
                n_shards = 2
                ids = [make_id(name) for name in some for _ in range(n_shards)]
                shards = list(range(n_shards)) * len(some)
                data = [payload(name, lengths, shard) for name in some for shard in range(n_shards)]
                background = bool(step % 2)
                task = store.dump(ids, shards, data, n_shards=n_shards, background=background)
                assert store.wait(task, 60).all()
                status, got = load_bytes(store, ids, lengths, shards, background)
                assert status == [Reason.OK] * len(ids) and got == data
                others = [name for name in names if store.lookup([make_id(name)])[0]]
                status, got = load_bytes(store, [make_id(i) for i in others], lengths, 1)
                assert status == [Reason.OK] * len(others)
                assert got == [payload(name, lengths, 1) for name in others]

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, thread) for thread in range(8)]:
                done.result()

    # -- life ---------------------------------------------------------------------------------------

    def test_reopened(self, store: Any) -> None:
        """What was stored is there after a restart, shards too; what lacked a shard is not."""
        whole, sharded = make_ids(*range(3)), make_ids("s", "s")
        dump_bytes(store, whole, [payload(i, 5000) for i in range(3)])
        dump_bytes(store, sharded, [payload("s", 70, i) for i in (1, 0)], shards=[1, 0], n_shards=2)
        dump_bytes(store, make_ids("half"), [payload("half", 70)], shards=0, n_shards=2)
        store = self.reopen(store)
        assert store.lookup([*whole, sharded[0], make_id("half")]).tolist() == [True] * 4 + [False]
        assert load_bytes(store, whole, 5000) == ([Reason.OK] * 3, [payload(i, 5000) for i in range(3)])
        expected = [payload("s", 70, i) for i in range(2)]
        assert load_bytes(store, sharded, 70, [0, 1]) == ([Reason.OK] * 2, expected)
        assert dump_bytes(store, make_ids(9), [payload(9, 10)]) == [True]
        store = self.reopen(store)
        assert store.lookup(make_ids(0, 9)).all()

    def test_shards_of_two_generations_are_not_put_together(self, store: Any) -> None:
        """Shard 0 of one process and shard 1 of the next may have been computed with other rounding."""
        dump_bytes(store, make_ids(0), [payload("old", 70, 0)], shards=0, n_shards=2)
        store = self.reopen(store)
        dump_bytes(store, make_ids(0), [payload("new", 70, 1)], shards=1, n_shards=2)
        assert not store.lookup(make_ids(0))[0]
        dump_bytes(store, make_ids(0), [payload("new", 70, 0)], shards=0, n_shards=2)
        expected = [payload("new", 70, 0), payload("new", 70, 1)]
        assert load_bytes(store, make_ids(0, 0), 70, [0, 1]) == ([Reason.OK] * 2, expected)

    def test_cleared(self, store: Any) -> None:
        """`clear` says how many blocks went; it takes incomplete ones too, and the store goes on."""
        assert store.clear() == 0
        dump_bytes(store, make_ids(0, 1), [payload(i, 100) for i in range(2)])
        dump_bytes(store, make_ids(2), [payload(2, 100)], shards=0, n_shards=2)
        assert store.clear() == 2
        assert not store.lookup(make_ids(0, 1, 2)).any()
        assert load_bytes(store, make_ids(0, 1), 100)[0] == [Reason.ABSENT] * 2
        dump_bytes(store, make_ids(2), [payload(2, 100, 1)], shards=1, n_shards=2)
        assert not store.lookup(make_ids(2))[0]
        assert dump_bytes(store, make_ids(0), [payload("again", 100)]) == [True]
        store = self.reopen(store)
        assert store.lookup(make_ids(0, 1, 2)).tolist() == [True, False, False]
        assert load_bytes(store, make_ids(0), 100)[1] == [payload("again", 100)]

    def test_closed_twice(self, store: Any) -> None:
        """`close` may come early, late and often, and as the end of a `with`."""
        dump_bytes(store, make_ids(0), [b"x" * 10])
        with store as same:
            assert same is store
        store.close()
        store.close()
        assert load_bytes(self.reopen(store), make_ids(0), 10) == ([Reason.OK], [b"x" * 10])
