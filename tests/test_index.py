"""The index against a dict, with ids that an adversary would choose, and its size and speed."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from posix_store.index import Entries, Index, Locations
from posix_store.segment import PUT, RECORD, as_void
from posix_store.shards import ShardAssembler

FAMILIES = ("sequential", "low half only", "high half only", "equal halves", "top bits", "negated", "random")


def id_of(family: str, number: int) -> tuple[int, int]:
    """The two 64-bit halves of an id. All families but the last are far from uniform."""
    mask = (1 << 64) - 1
    return {
        "sequential": (number, number + 1),
        "low half only": (number, 0),
        "high half only": (0, number),
        "equal halves": (number, number),
        "top bits": (number << 48 & mask, number << 56 & mask),
        "negated": (number, -number & mask),
        "random": (number * 0x9E3779B97F4A7C15 & mask, number * 0xD6E8FEB86659FD93 & mask),
    }[family]


def matrix(ids: list[tuple[int, int]]) -> np.ndarray:
    return np.array(ids, np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class Place:
    segment: int
    offset: int
    length: int
    crc: int
    last_shard: int = 0


def locations(places: list[Place]) -> Locations:
    return Locations(
        np.array([p.segment for p in places], np.int32),
        np.array([p.offset for p in places], np.int64),
        np.array([p.length for p in places], np.int64),
        np.array([p.crc for p in places], np.uint32),
        np.array([p.last_shard for p in places], np.uint16),
    )


def places(at: Locations) -> list[Place | None]:
    """Locations back as values; None where absent."""
    columns = [column.tolist() for column in (at.segment, at.offset, at.length, at.crc, at.last_shard)]
    return [Place(*row) if row[0] >= 0 else None for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Block:
    """What the dict knows of a block. Times are Unix seconds."""

    shards: tuple[Place, ...]
    parent: tuple[int, int]
    stored: float
    used: float


families = st.sampled_from(FAMILIES)
numbers = st.integers(0, 25)
sizes = st.sampled_from([3, 700, 1100])
times = st.integers(0, 50)


class IndexMachine(RuleBasedStateMachine):
    """Every operation on the index and on a dict from id to the places of its shards.

    A block is put whole and has the same number of shards each time, as the catalog does it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[tuple[int, int], Block] = {}
        self.shards: dict[tuple[int, int], int] = {}
        self.next_offset = 4096
        self.expired_before = float("-inf")

    @initialize(sharded=st.sampled_from([1, 2, 5]), compiled=st.booleans())
    def begin(self, sharded: int, compiled: bool) -> None:
        self.sharded = sharded
        self.index = Index(compiled)

    def _place(self, segment: int, length: int, last_shard: int) -> Place:
        """A place in a segment where nothing has been before, as in a file that is only appended to."""
        self.next_offset += 64
        crc = self.next_offset * 2654435761 % 2**32
        return Place(segment, self.next_offset, length, crc, last_shard)

    def _put(self, ids: list[tuple[int, int]], segment: int, now: float, order: np.random.Generator) -> None:
        """Put blocks that are `now` to `now + 0.9` seconds old; half of them hang on another."""
        rows = []
        used_before = {block: known.used for block, known in self.model.items()}
        for i, block in enumerate(ids):
            count = self.shards.setdefault(block, 1 if block[0] % 2 else self.sharded)
            length = self.next_offset % 997 + 1  # the shards of a block are of one length
            where = tuple(self._place(segment, length, count - 1) for _ in range(count))
            parent = (block[0] ^ 1, block[1] ^ i) if block[1] % 2 else (0, 0)
            stored = now + i / 1000
            used = max(stored, used_before.get(block, stored))
            self.model[block] = Block(where, parent, stored, used)
            rows += [(block, shard, place, parent, stored) for shard, place in enumerate(where)]
        # Shards of a block may stand in any order; of two puts of one key the later one wins.
        if len(set(ids)) == len(ids):
            order.shuffle(rows)
        self.index.put(
            Entries(
                matrix([row[0] for row in rows]),
                np.array([row[1] for row in rows], np.uint16),
                locations([row[2] for row in rows]),
                matrix([row[3] for row in rows]),
                np.array([row[4] for row in rows], np.float64),
                np.array([row[4] for row in rows], np.float64),
            )
        )

    @rule(
        family=families,
        blocks=st.lists(numbers, max_size=12),
        segment=st.integers(0, 4),
        now=times,
        seed=st.integers(0, 99),
    )
    def put(self, family: str, blocks: list[int], segment: int, now: int, seed: int) -> None:
        """New blocks, known blocks elsewhere, and duplicates in one call."""
        self._put([id_of(family, number) for number in blocks], segment, now, np.random.default_rng(seed))

    @rule(family=families, count=sizes, segment=st.integers(0, 4), now=times)
    def put_many(self, family: str, count: int, segment: int, now: int) -> None:
        """Enough to make the columns and the table grow."""
        self._put([id_of(family, number) for number in range(count)], segment, now, np.random.default_rng(0))

    @rule(family=families, blocks=st.lists(numbers, max_size=12, unique=True), now=times, each=st.booleans())
    def touch(self, family: str, blocks: list[int], now: int, each: bool) -> None:
        """A use makes a block younger, never older, and says what it hangs on."""
        ids = [id_of(family, number) for number in blocks]
        when = [float(now + (i if each else 0)) for i in range(len(ids))]
        parents = self.index.touch(matrix(ids), np.array(when) if each else float(now))
        none = Block((), (0, 0), 0.0, 0.0)
        assert list(map(tuple, parents.tolist())) == [self.model.get(block, none).parent for block in ids]
        for block, used in zip(ids, when, strict=True):
            if block in self.model:
                known = self.model[block]
                self.model[block] = replace(known, used=max(known.used, used))

    @rule(before=st.one_of(st.just(float("-inf")), times.map(float)))
    def expire(self, before: float) -> None:
        """What was stored before this is not found, and is still there."""
        self.index.expired_before = self.expired_before = before

    @rule(family=families, blocks=st.lists(numbers, max_size=8), shard=st.integers(0, 4), stale=st.booleans())
    def drop(self, family: str, blocks: list[int], shard: int, stale: bool) -> None:
        """What has moved since it was located stays; one bad shard takes its whole block."""
        ids = [id_of(family, number) for number in blocks]
        current = [self._place_of(block, shard) for block in ids]
        at = [place or Place(0, 1, 1, 1) for place in current]
        if stale:
            at = [Place(p.segment, p.offset + 1, p.length, p.crc) for p in at]
        gone = {b for b, place in zip(ids, current, strict=True) if place and not stale}
        forgotten = self.index.drop(matrix(ids), np.full(len(ids), shard, np.uint16), locations(at))
        assert forgotten == len(gone)
        self._forget(gone)

    @rule(
        family=families,
        blocks=st.lists(numbers, max_size=8),
        shard=st.integers(0, 4),
        segment=st.integers(0, 4),
        wrong_ids=st.booleans(),
    )
    def drop_at(self, family: str, blocks: list[int], shard: int, segment: int, wrong_ids: bool) -> None:
        """By place, whatever ids a damaged EVICT record gives; it says which places held something."""
        ids = [id_of(family, number) for number in blocks]
        offsets = [place.offset if (place := self._place_of(block, shard)) else 1 for block in ids]
        if wrong_ids:  # a damaged record
            ids = [id_of("random", 1000 + number) for number in blocks]
        held = {p.offset: b for b, known in self.model.items() for p in known.shards if p.segment == segment}
        known = self.index.drop_at(segment, matrix(ids), np.array(offsets, np.int64))
        assert known.tolist() == [offset in held for offset in offsets]
        self._forget({held[offset] for offset in offsets if offset in held})

    @rule(segment=st.integers(0, 5))
    def drop_segment(self, segment: int) -> None:
        """A block goes when any of its shards was there."""
        gone = {b for b, known in self.model.items() if any(p.segment == segment for p in known.shards)}
        assert self.index.drop_segment(segment) == len(gone)
        self._forget(gone)

    def _place_of(self, block: tuple[int, int], shard: int) -> Place | None:
        shards = self.model[block].shards if block in self.model else ()
        return shards[shard] if shard < len(shards) else None

    def _is_found(self, block: tuple[int, int]) -> bool:
        return block in self.model and self.model[block].stored >= self.expired_before

    def _forget(self, blocks: set[tuple[int, int]]) -> None:
        for block in blocks:
            del self.model[block]

    @invariant()
    def is_the_dict(self) -> None:
        assert len(self.index) == len(self.model)
        assert self.index.bytes == sum(p.length for known in self.model.values() for p in known.shards)
        assert self.index.last_use == max((known.used for known in self.model.values()), default=-np.inf)

    @rule(shard=st.integers(0, 5))
    def finds_what_the_dict_has(self, shard: int) -> None:
        """Present, absent, dropped and neighbouring ids of every family, in one batch each."""
        ids = [id_of(family, number) for family in FAMILIES for number in range(40)]
        ids += list(self.model)
        assert self.index.contains(matrix(ids)).tolist() == [self._is_found(block) for block in ids]
        found = places(self.index.locate(matrix(ids), np.full(len(ids), shard, np.uint16)))
        assert found == [self._place_of(block, shard) if self._is_found(block) else None for block in ids]

    @rule()
    def residents_are_the_blocks(self) -> None:
        """Eviction sees every block once, with all shards together, the expired ones too."""
        residents, segment = self.index.residents()
        columns = (residents.parents, residents.stored, residents.used, residents.length, segment)
        rows = zip(map(tuple, residents.ids.tolist()), *(column.tolist() for column in columns), strict=True)
        assert {row[0]: (tuple(row[1]), *row[2:]) for row in rows} == {
            block: (
                known.parent, known.stored, known.used, sum(p.length for p in known.shards),
                known.shards[0].segment,
            )
            for block, known in self.model.items()
        }  # fmt: skip
        assert len(residents) == len(self.model)

    @rule(now=times)
    def used_since(self, now: int) -> None:
        ids = [id_of(family, number) for family in FAMILIES for number in range(30)]
        used = self.index.used_since(matrix(ids), np.full(len(ids), float(now)))
        assert used.tolist() == [block in self.model and self.model[block].used > now for block in ids]

    @rule(segments=st.sets(st.integers(0, 5)))
    def ranges_and_counts(self, segments: set[int]) -> None:
        """What punching keeps: every entry in some segments, in their order."""
        parts = [p for known in self.model.values() for p in known.shards]
        ranges = self.index.ranges_in(np.array(sorted(segments), np.int64))
        assert list(zip(*(column.tolist() for column in ranges), strict=True)) == sorted(
            (p.segment, p.offset, p.length) for p in parts if p.segment in segments
        )
        count, held = self.index.count_by_segment(5)
        assert count.tolist() == [sum(p.segment == number for p in parts) for number in range(5)]
        assert held.tolist() == [sum(p.length for p in parts if p.segment == n) for n in range(5)]

    @rule(family=families, blocks=st.lists(numbers, max_size=8, unique=True))
    def entries_of_some(self, family: str, blocks: list[int]) -> None:
        """All shards of each block that is there; the rest is left out."""
        ids = [id_of(family, number) for number in blocks]
        assert entries_by_key(self.index.entries_of(matrix(ids))) == self._expected(ids)

    def _expected(self, ids: list[tuple[int, int]]) -> dict[tuple[tuple[int, int], int], tuple[Any, ...]]:
        return {
            (block, shard): (place, known.parent, known.stored)
            for block in ids
            if (known := self.model.get(block))
            for shard, place in enumerate(known.shards)
        }

    def teardown(self) -> None:
        self.finds_what_the_dict_has(0)
        self.residents_are_the_blocks()
        entries = self.index.entries()
        assert entries_by_key(entries) == self._expected(list(self.model))
        order = [(p.segment, p.offset) for p in places(entries.at) if p]
        assert order == sorted(order)


def entries_by_key(entries: Entries) -> dict[tuple[tuple[int, int], int], tuple[Any, ...]]:
    rows = zip(
        entries.ids.tolist(), entries.shard.tolist(), places(entries.at), entries.parents.tolist(),
        entries.stored.tolist(), strict=True,
    )  # fmt: skip
    found = {((a, b), shard): (at, tuple(parent), stored) for (a, b), shard, at, parent, stored in rows}
    assert len(found) == len(entries)
    return found


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=25)


@settings(max_examples=20)
@given(family=families, shards=st.sampled_from([1, 3]))
def test_tombstones_do_not_pile_up(family: str, shards: int) -> None:
    """Blocks that come and go for ever: no growth, nothing lost, and every look-up ends."""
    index = Index()
    for turn in range(60):
        ids = matrix([id_of(family, turn * 100 + i) for i in range(100)])
        index.put(entries_of(ids, segment=turn, shards=shards))
        assert index.contains(ids).all()
        if turn:
            assert index.drop_segment(turn - 1) == 100
        assert len(index) == 100
    assert index.memory_bytes <= Index().memory_bytes * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_adversarial_ids_do_not_cluster(family: str) -> None:
    """50,000 ids that differ in few bits cost about what random ones do: no chain of collisions."""
    ids = matrix([id_of(family, number) for number in range(50_000)])
    index = Index()
    began = time.thread_time()
    index.put(entries_of(ids, segment=0))
    assert index.contains(ids).all()
    assert not index.contains(ids + np.uint64(1 << 40)).any()
    assert time.thread_time() - began < 2.0


def entries_of(ids: np.ndarray, segment: int, shards: int = 1) -> Entries:
    count = len(ids) * shards
    at = Locations(
        np.full(count, segment, np.int32),
        np.arange(count, dtype=np.int64) * 4096,
        np.full(count, 65_536, np.int64),
        np.arange(count, dtype=np.uint32),
        np.full(count, shards - 1, np.uint16),
    )
    return Entries(
        np.repeat(ids, shards, axis=0),
        np.tile(np.arange(shards, dtype=np.uint16), len(ids)),
        at,
        np.zeros((count, 2), np.uint64),
        np.full(count, 1000.0 + segment),
        np.full(count, 1000.0 + segment),
    )


MOST_BYTES = 200
"""Memory for each block that is not sharded, with all that eviction wants to know of it."""


def test_a_million_blocks_fit_in_memory_and_are_found_at_once() -> None:
    """At most 200 bytes a block, as it says itself and as Python counts; 2,000 keys in a few milliseconds.

    `batch_exists` runs on an engine thread, so a look-up is one vectorised pass (must hold 7, invariant I11).
    """
    count, batch = 1_000_000, 50_000
    random = np.random.default_rng(7)
    ids = random.integers(0, 1 << 64, (count, 2), np.uint64, endpoint=False)
    tracemalloc.start()
    try:
        index = Index()
        for start in range(0, count, batch):
            index.put(entries_of(ids[start : start + batch], segment=start // batch))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count
    assert index.memory_bytes <= MOST_BYTES * count and held <= MOST_BYTES * count
    assert abs(held - index.memory_bytes) < count, "memory_bytes tells the truth"

    present = ids[random.permutation(count)[:2000]]
    absent = random.integers(0, 1 << 64, (2000, 2), np.uint64, endpoint=False)
    for keys, expected in ((present, True), (absent, False)):
        best = min(timed(index, keys, expected) for _ in range(5))
        assert best < 0.02, f"2,000 look-ups took {best * 1000:.1f} ms"


def timed(index: Index, keys: np.ndarray, expected: bool) -> float:
    began = time.thread_time()
    found = index.contains(keys)
    elapsed = time.thread_time() - began
    assert (found == expected).all()
    return elapsed


def test_memory_of_dropped_blocks_is_used_again() -> None:
    """A store at its capacity replaces blocks for ever: memory follows what is there, not what ever was.

    At most 200 bytes a block here too, as Python counts, with the list of rows that are free.
    """
    random = np.random.default_rng(8)
    tracemalloc.start()
    try:
        index = Index()
        for turn in range(12):
            ids = random.integers(0, 1 << 64, (20_000, 2), np.uint64, endpoint=False)
            index.put(entries_of(ids, segment=turn))
            if turn % 2:
                index.drop_segment(turn - 2)
            else:
                gone = index.entries_of(index.residents()[0].ids[index.residents()[1] == turn - 2])
                index.drop(gone.ids, gone.shard, gone.at)
        del ids, gone
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 40_000
    assert index.memory_bytes <= MOST_BYTES * 40_000 and held <= MOST_BYTES * 40_000


def test_dropping_a_segment_of_sharded_blocks_holds_up_nobody() -> None:
    """Invariant I11: look-ups wait for the lock that this takes; a 1 GiB segment may hold 65,536 shards."""
    index = Index()
    ids = np.random.default_rng(9).integers(0, 1 << 64, (3_200, 2), np.uint64, endpoint=False)
    index.put(entries_of(ids, segment=0, shards=20))
    began = time.thread_time()
    assert index.drop_segment(0) == 3_200
    assert time.thread_time() - began < 0.5
    assert len(index) == 0 and index.bytes == 0


def records_of(ids: np.ndarray, parents: np.ndarray, offset: int) -> np.ndarray:
    """PUT records of blocks behind each other."""
    records = np.zeros(len(ids), RECORD)
    records["id"], records["parent"] = as_void(ids), as_void(parents)
    records["offset"] = offset + 100 * np.arange(len(ids))
    records["length"], records["kind"] = 100, PUT
    records["payload_crc"] = np.arange(len(ids)) + 7
    return records


@pytest.mark.parametrize("chained", [True, False])
def test_blocks_just_stored_are_put_as_all_others(chained: bool) -> None:
    """Issue 4: the short way of a dump leaves the same index as the general one, in rows used again too."""
    rng = np.random.default_rng(3)
    short, general = Index(), Index(compiled=False)
    if not short.compiled:
        pytest.skip("the native engine was not built")
    for round_ in range(6):
        ids = rng.integers(1, 2**63, (40, 2), np.uint64)
        parents = np.zeros_like(ids)
        if chained:
            parents[1:], parents[0] = ids[:-1], rng.integers(1, 2**63, 2, np.uint64)
        records = records_of(ids, parents, 4096 + 10_000 * round_)
        assert short.put_new(records, round_, 50.0 + round_)
        whole = ShardAssembler().complete("w", round_, records, np.full(len(ids), 50.0 + round_))
        for entries in whole:
            general.put(entries)
        if round_ % 2:
            assert short.drop_segment(round_ - 1) == general.drop_segment(round_ - 1)
        assert not short.put_new(records, round_, 99.0), "known already"
    assert (len(short), short.bytes) == (len(general), general.bytes)
    for one, other in zip(flat(short.entries()), flat(general.entries()), strict=True):
        assert np.array_equal(one, other)
    wanted = np.concatenate([ids, rng.integers(1, 2**63, (9, 2), np.uint64)])
    shards = np.zeros(len(wanted), np.uint16)
    assert places(short.locate(wanted, shards)) == places(general.locate(wanted, shards))


def test_what_is_no_chain_is_put_the_general_way() -> None:
    index, ids = Index(), np.arange(1, 9, dtype=np.uint64).reshape(4, 2)
    sharded = records_of(ids, np.zeros_like(ids), 4096)
    sharded["last_shard"] = 1
    assert not index.put_new(sharded, 0, 1.0)
    assert not index.put_new(records_of(ids, ids[::-1].copy(), 4096), 0, 1.0)
    assert not len(index)


def flat(entries: Entries) -> list[np.ndarray]:
    at = entries.at
    return [
        entries.ids, entries.shard, entries.parents, entries.stored, entries.used,
        at.segment, at.offset, at.length, at.crc, at.last_shard,
    ]  # fmt: skip
