"""The index against a dict, with ids that an adversary would choose, and its size and speed."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from posix_store.index import Entries, Index, Locations

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


Shards = tuple[Place, ...]
"""Where the shards of a block are."""

families = st.sampled_from(FAMILIES)
numbers = st.integers(0, 25)
sizes = st.sampled_from([3, 700, 1100])


class IndexMachine(RuleBasedStateMachine):
    """Every operation on the index and on a dict from id to the places of its shards.

    A block is put whole and has the same number of shards each time, as the catalog does it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[tuple[int, int], Shards] = {}
        self.shards: dict[tuple[int, int], int] = {}
        self.next_offset = 4096

    @initialize(sharded=st.sampled_from([1, 2, 5]))
    def begin(self, sharded: int) -> None:
        self.sharded = sharded

    def _place(self, segment: int, last_shard: int) -> Place:
        """A place in a segment where nothing has been before, as in a file that is only appended to."""
        self.next_offset += 64
        crc = self.next_offset * 2654435761 % 2**32
        return Place(segment, self.next_offset, self.next_offset % 997 + 1, crc, last_shard)

    def _put(self, ids: list[tuple[int, int]], segment: int, order: np.random.Generator) -> None:
        rows = []
        for block in ids:
            count = self.shards.setdefault(block, 1 if block[0] % 2 else self.sharded)
            where = tuple(self._place(segment, count - 1) for _ in range(count))
            self.model[block] = where
            rows += [(block, shard, place) for shard, place in enumerate(where)]
        # Shards of a block may stand in any order; of two puts of one key the later one wins.
        if len(set(ids)) == len(ids):
            order.shuffle(rows)
        self.index.put(
            Entries(
                matrix([row[0] for row in rows]),
                np.array([row[1] for row in rows], np.uint16),
                locations([row[2] for row in rows]),
            )
        )

    @rule(
        family=families,
        blocks=st.lists(numbers, max_size=12),
        segment=st.integers(0, 4),
        seed=st.integers(0, 99),
    )
    def put(self, family: str, blocks: list[int], segment: int, seed: int) -> None:
        """New blocks, known blocks elsewhere, and duplicates in one call."""
        self._put([id_of(family, number) for number in blocks], segment, np.random.default_rng(seed))

    @rule(family=families, count=sizes, segment=st.integers(0, 4))
    def put_many(self, family: str, count: int, segment: int) -> None:
        """Enough to make the columns and the table grow."""
        self._put([id_of(family, number) for number in range(count)], segment, np.random.default_rng(0))

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
    )
    def drop_at(self, family: str, blocks: list[int], shard: int, segment: int) -> None:
        """By place, as an EVICT record names it; it says which places held something."""
        where = [self._place_of(id_of(family, number), shard) for number in blocks]
        offsets = [place.offset if place else 1 for place in where]
        held = {p.offset: b for b, parts in self.model.items() for p in parts if p.segment == segment}
        known = self.index.drop_at(segment, np.array(offsets, np.int64))
        assert known.tolist() == [offset in held for offset in offsets]
        self._forget({held[offset] for offset in offsets if offset in held})

    @rule(segment=st.integers(0, 5))
    def drop_segment(self, segment: int) -> None:
        """A block goes when any of its shards was there."""
        gone = {b for b, parts in self.model.items() if any(p.segment == segment for p in parts)}
        assert self.index.drop_segment(segment) == len(gone)
        self._forget(gone)

    def _place_of(self, block: tuple[int, int], shard: int) -> Place | None:
        parts = self.model.get(block, ())
        return parts[shard] if shard < len(parts) else None

    def _forget(self, blocks: set[tuple[int, int]]) -> None:
        for block in blocks:
            del self.model[block]

    @invariant()
    def is_the_dict(self) -> None:
        assert len(self.index) == len(self.model)
        assert self.index.bytes == sum(p.length for parts in self.model.values() for p in parts)

    @rule(shard=st.integers(0, 5))
    def finds_what_the_dict_has(self, shard: int) -> None:
        """Present, absent, dropped and neighbouring ids of every family, in one batch each."""
        ids = [id_of(family, number) for family in FAMILIES for number in range(40)]
        ids += list(self.model)
        assert self.index.contains(matrix(ids)).tolist() == [block in self.model for block in ids]
        found = places(self.index.locate(matrix(ids), np.full(len(ids), shard, np.uint16)))
        assert found == [self._place_of(block, shard) for block in ids]

    def teardown(self) -> None:
        self.finds_what_the_dict_has(0)
        entries = self.index.entries()
        rows = zip(entries.ids.tolist(), entries.shard.tolist(), places(entries.at), strict=True)
        assert {((a, b), shard): place for (a, b), shard, place in rows} == {
            (block, shard): place for block, parts in self.model.items() for shard, place in enumerate(parts)
        }
        order = [(p.segment, p.offset) for p in places(entries.at) if p]
        assert order == sorted(order)


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
    began = time.perf_counter()
    index.put(entries_of(ids, segment=0))
    assert index.contains(ids).all()
    assert not index.contains(ids + np.uint64(1 << 40)).any()
    assert time.perf_counter() - began < 2.0


def entries_of(ids: np.ndarray, segment: int, shards: int = 1) -> Entries:
    count = len(ids) * shards
    at = Locations(
        np.full(count, segment, np.int32),
        np.arange(count, dtype=np.int64) * 4096,
        np.full(count, 65_536, np.int64),
        np.arange(count, dtype=np.uint32),
        np.full(count, shards - 1, np.uint16),
    )
    return Entries(np.repeat(ids, shards, axis=0), np.tile(np.arange(shards, dtype=np.uint16), len(ids)), at)


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
    assert index.memory_bytes <= 200 * count and held <= 200 * count
    assert abs(held - index.memory_bytes) < count, "memory_bytes tells the truth"

    present = ids[random.permutation(count)[:2000]]
    absent = random.integers(0, 1 << 64, (2000, 2), np.uint64, endpoint=False)
    for keys, expected in ((present, True), (absent, False)):
        best = min(timed(index, keys, expected) for _ in range(5))
        assert best < 0.02, f"2,000 look-ups took {best * 1000:.1f} ms"


def timed(index: Index, keys: np.ndarray, expected: bool) -> float:
    began = time.perf_counter()
    found = index.contains(keys)
    elapsed = time.perf_counter() - began
    assert (found == expected).all()
    return elapsed


def test_memory_of_dropped_blocks_is_used_again() -> None:
    """A store at its capacity replaces blocks for ever: memory follows what is there, not what ever was."""
    index, random = Index(), np.random.default_rng(8)
    for turn in range(12):
        ids = random.integers(0, 1 << 64, (20_000, 2), np.uint64, endpoint=False)
        index.put(entries_of(ids, segment=turn))
        index.drop_segment(turn - 2)
    assert len(index) == 40_000
    assert index.memory_bytes <= 200 * 40_000


def test_dropping_a_segment_of_sharded_blocks_holds_up_nobody() -> None:
    """Invariant I11: look-ups wait for the lock that this takes; a 1 GiB segment may hold 65,536 shards."""
    index = Index()
    ids = np.random.default_rng(9).integers(0, 1 << 64, (3_200, 2), np.uint64, endpoint=False)
    index.put(entries_of(ids, segment=0, shards=20))
    began = time.perf_counter()
    assert index.drop_segment(0) == 3_200
    assert time.perf_counter() - began < 0.5
    assert len(index) == 0 and index.bytes == 0
