"""Chains and policies against slow and obvious models: who may leave, and in what order (issue 3).

"Chain-aware: parents never colder than their children": no prefix of the leaving order may cut a chain, for
any forest and any worth, because an eviction may stop after any block.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from posix_store import StoreError
from posix_store.chains import ORPHAN, ROOT, in_chains, leaving_order, parent_rows
from posix_store.policies import FIFO, LRU, POLICIES, Residents, policy_named

Id = tuple[int, int]
UNKNOWN: Id = (0, 0)


def matrix(ids: list[Id]) -> np.ndarray:
    return np.array(ids, np.uint64).reshape(-1, 2)


# -- models: one block at a time, from the words of the docstrings -----------------------------------------


def model_parent_rows(ids: list[Id], parents: list[Id]) -> list[int]:
    row_of = {block: row for row, block in enumerate(ids)}
    return [
        ROOT if parent in (UNKNOWN, block) else row_of.get(parent, ORPHAN)
        for block, parent in zip(ids, parents, strict=True)
    ]


def ancestors(row: int, parent_row: list[int]) -> list[int]:
    """Rows from the parent upwards, then the `ROOT` or `ORPHAN` where the chain ends. Forests only."""
    line = []
    while row >= 0:
        row = parent_row[row]
        line.append(row)
    return line


def model_in_chains(worth: list[float], parent_row: list[int]) -> tuple[list[float], list[int]]:
    effective, depth = list(worth), [0] * len(worth)
    for row in range(len(worth)):
        *above, end = ancestors(row, parent_row)
        depth[row] = len(above)
        for ancestor in above:
            effective[ancestor] = max(effective[ancestor], worth[row])
        if end == ORPHAN:
            effective[row] = float("-inf")
    for row in range(len(worth)):
        if ancestors(row, parent_row)[-1] == ORPHAN:
            effective[row] = float("-inf")
    return effective, depth


def first_cut(order: list[int], parent_row: list[int]) -> tuple[int, int] | None:
    """(parent, child) where a parent leaves before its child; None when no prefix of `order` cuts a chain."""
    turn = {row: place for place, row in enumerate(order)}
    for child, parent in enumerate(parent_row):
        if parent >= 0 and turn[parent] < turn[child]:
            return parent, child
    return None


# -- examples ----------------------------------------------------------------------------------------------

halves = st.sampled_from([0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
"""So few that ids share a half all the time, and at both ends of what a search may run over."""


@st.composite
def families(draw: st.DrawFn) -> tuple[list[Id], list[Id]]:
    """Distinct ids, and parents: unknown, gone, the block itself, or any other (also in circles)."""
    ids = draw(st.lists(st.tuples(halves, halves), max_size=24, unique=True))
    anybody = st.one_of(st.just(UNKNOWN), st.tuples(halves, halves), *([st.sampled_from(ids)] if ids else []))
    return ids, draw(st.lists(anybody, min_size=len(ids), max_size=len(ids)))


@dataclass(frozen=True)
class Forest:
    worth: list[float]
    parent_row: list[int]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.worth, np.float64), np.array(self.parent_row, np.int64)


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Any forest, its rows in any order; deep ones are as likely as bushy ones, and worths often tie."""
    size = draw(st.integers(0, 40))
    mostly = draw(st.sampled_from(["chain", "bush", "heads", "orphans"]))
    parents = []
    for row in range(size):
        last, any_before = max(row - 1, ROOT), st.integers(0, row - 1) if row else st.just(ROOT)
        usual = {
            "chain": st.just(last),
            "bush": any_before,
            "heads": st.just(ROOT),
            "orphans": st.just(ORPHAN),
        }[mostly]
        parents.append(draw(st.one_of(usual, usual, st.sampled_from([ROOT, ORPHAN]), any_before)))
    places = draw(st.permutations(range(size)))
    parent_row = [ROOT] * size
    for row, parent in enumerate(parents):
        parent_row[places[row]] = parent if parent < 0 else places[parent]
    worths = st.one_of(st.integers(0, 4).map(float), st.floats(allow_nan=False, allow_infinity=False))
    return Forest(draw(st.lists(worths, min_size=size, max_size=size)), parent_row)


def big_forest(seed: int, size: int, reach: int, ends: float) -> Forest:
    """Deep chains: each parent is one of the `reach` rows before, but for a share `ends`; then shuffled."""
    random = np.random.default_rng(seed)
    parents = np.maximum(np.arange(size) - random.integers(1, reach + 1, size), ROOT)
    last = random.random(size) < ends
    parents[last] = random.choice([ROOT, ORPHAN], int(last.sum()))
    places = random.permutation(size)
    parent_row = np.empty(size, np.int64)
    parent_row[places] = np.where(parents < 0, parents, places[np.maximum(parents, 0)])
    return Forest(random.integers(0, 50, size).astype(float).tolist(), parent_row.tolist())


# -- parents -----------------------------------------------------------------------------------------------


@given(families())
@example(([(1, 1), (1, 2), (1, 3)], [(1, 9), (1, 1), (1, 2)]))  # walks past the last of equal halves
@example(([((1 << 64) - 1, 1)], [((1 << 64) - 1, 2)]))  # and past the end of the table
def test_parents_are_found_by_both_halves_of_their_id(family: tuple[list[Id], list[Id]]) -> None:
    """Ids that share a half are different blocks; unknown, gone, and self-naming parents are told apart."""
    ids, parents = family
    assert parent_rows(matrix(ids), matrix(parents)).tolist() == model_parent_rows(ids, parents)


def test_many_ids_that_share_their_first_half() -> None:
    """An id is a digest, but an injector of ids may choose them: still right, and not slow."""
    ids = [(7, number) for number in range(2000)]
    parents = [UNKNOWN, *ids[:-1]]
    started = time.perf_counter()
    assert parent_rows(matrix(ids), matrix(parents)).tolist() == list(range(-1, 1999))
    assert time.perf_counter() - started < 2


@given(families(), st.data())
def test_circles_of_damaged_parents_end(family: tuple[list[Id], list[Id]], data: st.DataObject) -> None:
    """Parents that form a circle cost neither a hang nor a block: every block still leaves exactly once."""
    ids, parents = family
    row = parent_rows(matrix(ids), matrix(parents))
    worth = np.array(data.draw(st.lists(st.floats(0, 9), min_size=len(ids), max_size=len(ids))), np.float64)
    assert sorted(leaving_order(worth, row).tolist()) == list(range(len(ids)))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_a_circle_of_any_size_ends(size: int) -> None:
    """One round of hands too many would go round for ever; one short would not be noticed on chains."""
    parent_row = (np.arange(size) + 1) % size
    worth = np.arange(size, dtype=np.float64)
    effective, _ = in_chains(worth, parent_row)
    assert (effective == size - 1).all(), "in a circle every block is behind every other"
    assert sorted(leaving_order(worth, parent_row).tolist()) == list(range(size))


def test_chains_beside_a_circle_are_not_harmed() -> None:
    """Damage to one chain must not change in what order the others leave."""
    circle, chain = [1, 0], [ROOT, 2, 3]
    worth = np.array([5.0, 5, 1, 9, 2])
    order = [row for row in leaving_order(worth, np.array(circle + chain)).tolist() if row >= 2]
    assert order == [4, 3, 2]


# -- worth and order ---------------------------------------------------------------------------------------


@given(forests())
def test_a_block_is_worth_what_the_blocks_behind_it_are_worth(forest: Forest) -> None:
    effective, depth = in_chains(*forest.arrays())
    assert (effective.tolist(), depth.tolist()) == model_in_chains(forest.worth, forest.parent_row)


@pytest.mark.parametrize("size", [1024, 1025, 1026])
@pytest.mark.parametrize(("reach", "ends"), [(1, 0.0), (1, 0.005), (2, 0.0), (40, 0.0)])
def test_deep_chains(size: int, reach: int, ends: float) -> None:
    """Lengths around a power of two: the last round of pointer doubling is the one that may be missing."""
    forest = big_forest(size + reach, size, reach, ends)
    effective, depth = in_chains(*forest.arrays())
    expected, expected_depth = model_in_chains(forest.worth, forest.parent_row)
    assert max(expected_depth) > 20
    assert (effective.tolist(), depth.tolist()) == (expected, expected_depth)
    assert first_cut(leaving_order(*forest.arrays()).tolist(), forest.parent_row) is None


def test_arguments_are_left_as_they_were() -> None:
    worth, parent_row = np.array([1.0, 2, 3]), np.array([ROOT, 0, ORPHAN])
    leaving_order(worth, parent_row)
    assert worth.tolist() == [1, 2, 3] and parent_row.tolist() == [ROOT, 0, ORPHAN]


@given(forests())
def test_parents_are_never_colder_than_their_children(forest: Forest) -> None:
    """Issue 3, in words: parents never colder than their children."""
    effective, _ = in_chains(*forest.arrays())
    for child, parent in enumerate(forest.parent_row):
        assert parent < 0 or effective[parent] >= effective[child]


@given(forests())
def test_no_prefix_of_the_leaving_order_cuts_a_chain(forest: Forest) -> None:
    """Issue 3, must hold 4: whenever eviction stops, nothing is left whose ancestor was evicted."""
    order = leaving_order(*forest.arrays()).tolist()
    assert sorted(order) == list(range(len(forest.worth))), "each block leaves exactly once"
    assert first_cut(order, forest.parent_row) is None


@given(forests())
def test_orphans_leave_first(forest: Forest) -> None:
    """What no look-up can reach any more goes before everything that one can, however warm it is."""
    order = leaving_order(*forest.arrays()).tolist()
    lost = [ancestors(row, forest.parent_row)[-1] == ORPHAN for row in order]
    assert lost == sorted(lost, reverse=True)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 6)), max_size=8, unique_by=lambda c: c[0]))
def test_unrelated_chains_leave_in_order_of_worth(chains: list[tuple[int, int]]) -> None:
    """Each chain used at one time: a whole chain goes, tail first, before a block of a warmer one does."""
    worth: list[float] = []
    parent_row: list[int] = []
    expected: list[tuple[int, int]] = []
    for used, length in chains:
        head = len(worth)
        worth += [float(used)] * length
        parent_row += [ROOT, *range(head, head + length - 1)]
        expected += [(used, -row) for row in range(head, head + length)]
    order = leaving_order(np.array(worth, np.float64), np.array(parent_row, np.int64)).tolist()
    assert order == [-row for _, row in sorted(expected)]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40))
def test_blocks_without_known_parents_leave_as_the_policy_says(worths: list[float]) -> None:
    """Engines that pass no prefix keys get the plain policy; what ties leaves in the order of the rows."""
    order = leaving_order(np.array(worths, np.float64), np.full(len(worths), ROOT)).tolist()
    assert order == sorted(range(len(worths)), key=lambda row: worths[row])


def test_a_branch_in_use_keeps_the_trunk_but_not_its_siblings() -> None:
    """head - trunk - {old branch, warm branch}: the head was loaded long ago and is still the last to go."""
    head, trunk, old, warm = range(4)
    order = leaving_order(np.array([1.0, 2, 3, 9]), np.array([ROOT, head, trunk, trunk]))
    assert order.tolist() == [old, warm, trunk, head]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one chain", "shuffled chain", "bush", "circle"])
def test_a_million_blocks_are_ordered_in_about_a_second(shape: str) -> None:
    """Planning an eviction must not be what a dump waits for, whatever shape the chains have."""
    size = 1_000_000
    random = np.random.default_rng(1)
    parent_row = np.arange(-1, size - 1)
    if shape == "shuffled chain":
        places = random.permutation(size)
        parent_row = np.full(size, ROOT)
        parent_row[places[1:]] = places[:-1]
    elif shape == "bush":
        parent_row = (random.random(size) * np.arange(size)).astype(np.int64)
        parent_row[0] = ROOT
    elif shape == "circle":
        parent_row[0] = size - 1
    ids = random.integers(0, 1 << 63, (size, 2)).astype(np.uint64)
    parents = np.where(parent_row[:, None] < 0, np.uint64(0), ids[parent_row])
    worth = random.random(size)
    started = time.perf_counter()
    rows = parent_rows(ids, parents)
    found = time.perf_counter()
    order = leaving_order(worth, rows)
    ordered = time.perf_counter()
    print(f"{shape}: parents {found - started:.2f} s, order {ordered - found:.2f} s")
    assert (rows == parent_row).all()
    turn = np.empty(size, np.int64)
    turn[order] = np.arange(size)
    children = np.flatnonzero(parent_row >= 0)
    if shape != "circle":
        assert (turn[parent_row[children]] > turn[children]).all()
    # Twice what it takes on a slow, shared machine; a step in Python for each block would take longer.
    assert ordered - started < 6


# -- policies ----------------------------------------------------------------------------------------------


def residents(stored: list[float], used: list[float]) -> Residents:
    count = len(stored)
    return Residents(
        np.arange(2 * count, dtype=np.uint64).reshape(-1, 2),
        np.zeros((count, 2), np.uint64),
        np.array(stored, np.float64),
        np.array(used, np.float64),
        np.full(count, 4096, np.int64),
    )


@pytest.mark.parametrize(("name", "first"), [("lru", 1), ("fifo", 0)])
def test_each_policy_lets_go_of_what_its_name_says(name: str, first: int) -> None:
    """Block 0 was stored first but is in use; block 1 is younger and was not used since."""
    blocks = residents(stored=[10, 20, 30], used=[99, 20, 50])
    worth = policy_named(name).worth(blocks)
    assert worth.dtype == np.float64 and worth.shape == (len(blocks),)
    assert int(np.argmin(worth)) == first


def test_a_policy_can_be_asked_about_nothing() -> None:
    for name in POLICIES:
        assert policy_named(name).worth(residents([], [])).shape == (0,)


def test_policies_say_their_name() -> None:
    """Statistics and configuration speak of a policy by one name."""
    assert {name: policy_named(name).name for name in POLICIES} == {name: name for name in POLICIES}
    assert isinstance(policy_named("lru"), LRU) and isinstance(policy_named("fifo"), FIFO)


def test_each_store_has_a_policy_of_its_own() -> None:
    """A policy may keep state: two stores in one process must not share it."""
    assert policy_named("lru") is not policy_named("lru")


@pytest.mark.parametrize("name", ["", "LRU", "arc", "lru "])
def test_an_unknown_policy_is_refused_with_the_names_that_are_known(name: str) -> None:
    """Invariant I3: the key, the value and the fix."""
    with pytest.raises(StoreError, match=r"policy = .*lru, fifo") as refused:
        policy_named(name)
    assert repr(name) in str(refused.value)
