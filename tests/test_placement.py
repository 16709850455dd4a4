"""Placement of blocks on roots (issue 3, several roots): in proportion, the same everywhere, moved little."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storekit import ids_of

from posix_store.ids import as_ids
from posix_store.placement import MOST_STEPS, Placement

NAMES = ["/mnt/nvme0/kv", "/mnt/nvme1/kv", "/mnt/nvme2/kv"]
WEIGHTS = [1 << 40, 2 << 40, 5 << 40]
NOBODY = np.zeros((0, 2), np.uint64)


def uniform(count: int) -> np.ndarray:
    return as_ids(ids_of(1, count))


def counting(count: int) -> np.ndarray:
    """Ids that are no hashes: the store does not know where its ids come from."""
    return np.stack([np.arange(count), np.zeros(count)], axis=1).astype(np.uint64)


def counting_in_the_other_half(count: int) -> np.ndarray:
    return counting(count)[:, ::-1].copy() << np.uint64(40)


def assert_shares(counts: np.ndarray, weights: list[int]) -> None:
    """Counts as of independent draws in proportion to the weights, within 5 standard deviations."""
    total, shares = counts.sum(), np.array(weights) / sum(weights)
    deviation = np.sqrt(total * shares * (1 - shares))
    assert (np.abs(counts - total * shares) < 5 * deviation).all(), f"{counts} for {weights}"


@pytest.mark.parametrize("weights", [WEIGHTS, [1, 1, 1], [1, 1, 1000]], ids=str)
@pytest.mark.parametrize("make", [uniform, counting, counting_in_the_other_half])
def test_blocks_are_spread_in_proportion_to_the_capacities(make, weights):
    homes = Placement(NAMES, weights).homes(make(100_000))
    assert_shares(np.bincount(homes, minlength=3), weights)


def test_roots_are_independent_of_each_other():
    """Among the blocks that one root did not get, the others have their shares."""
    ids = uniform(100_000)
    third = Placement(NAMES, WEIGHTS).homes(ids)
    first_two = Placement(NAMES[:2], WEIGHTS[:2]).homes(ids)
    assert_shares(np.bincount(first_two[third == 2], minlength=2), WEIGHTS[:2])


GOLDEN = "112221211202221112220020122212121211022121212112"


def test_the_homes_of_existing_stores_do_not_change():
    """Another answer in another version would make every block of every striped store a miss."""
    ids = np.concatenate([counting(24), counting_in_the_other_half(24)])
    homes = "".join(map(str, Placement(NAMES, WEIGHTS).homes(ids)))
    assert homes == GOLDEN


def test_adding_a_root_moves_only_its_share():
    ids = uniform(100_000)
    before = Placement(NAMES, WEIGHTS).homes(ids)
    after = Placement([*NAMES, "/mnt/new/kv"], [*WEIGHTS, 2 << 40]).homes(ids)
    moved = before != after
    assert set(after[moved]) == {3}
    assert_shares(np.array([(~moved).sum(), moved.sum()]), [8, 2])


def test_taking_a_root_away_moves_only_what_it_had():
    ids = uniform(20_000)
    before = Placement(NAMES, WEIGHTS).homes(ids)
    after = Placement(NAMES[:2], WEIGHTS[:2]).homes(ids)
    assert (before == after)[before != 2].all()


def test_a_root_that_grows_takes_from_all_and_nothing_else_moves():
    ids = uniform(20_000)
    before = Placement(NAMES, WEIGHTS).homes(ids)
    after = Placement(NAMES, [2 << 40, *WEIGHTS[1:]]).homes(ids)
    assert set(after[before != after]) == {0}


def test_neither_the_order_of_the_roots_nor_the_unit_of_the_capacities_matters():
    ids = uniform(20_000)
    before = Placement(NAMES, WEIGHTS).homes(ids)
    after = Placement(NAMES[::-1], [weight >> 40 for weight in WEIGHTS[::-1]]).homes(ids)
    assert (before == 2 - after).all()


# -- chains -------------------------------------------------------------------------------------------

placement = Placement(NAMES, [1, 1, 1])


def linked_by_hand(ids: np.ndarray, parents: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
    """What `parents` must give, block by block."""
    above = {child.tobytes(): parent for parent, child in itertools.pairwise(ancestors)}
    above |= {child.tobytes(): parent for child, parent in zip(ids[::-1], parents[::-1], strict=True)}
    homes = {block.tobytes(): placement.homes(block[None])[0] for block in (*ids, *ancestors, *parents)}
    result = np.zeros_like(ids)
    for row, (block, parent) in enumerate(zip(ids, parents, strict=True)):
        nearest = parent
        while nearest.any() and homes[nearest.tobytes()] != homes[block.tobytes()]:
            nearest = above.get(nearest.tobytes(), np.zeros(2, np.uint64))
        result[row] = nearest
    return result


def test_a_root_sees_its_blocks_of_a_chain_as_a_chain():
    """Issue 3, must hold 4: a block whose parent is on another root is no orphan on its own."""
    chain = uniform(60)
    ids, parents = chain[20:], chain[19:-1]
    local = placement.parents(ids, parents, chain[:20])
    homes = placement.homes(chain)
    for root in range(3):
        here = chain[homes == root]
        behind = local[homes[20:] == root]
        assert (behind == here[len(here) - len(behind) - 1 : -1]).all()


def test_without_ancestors_a_batch_begins_a_chain_on_each_root_but_one():
    chain = uniform(40)
    local = placement.parents(chain[1:], chain[:-1], NOBODY)
    homes = placement.homes(chain)
    for root in range(3):
        first = np.flatnonzero(homes[1:] == root)[0]
        assert local[first].any() == (root == homes[0])


@given(
    links=st.lists(st.integers(-3, 11), min_size=1, max_size=12),
    repeats=st.lists(st.integers(0, 11), max_size=4),
    before=st.integers(0, 6),
)
def test_chains_of_any_shape(links, repeats, before):
    """Trees, several chains at once, unknown parents, and blocks that come twice (as shards do)."""
    blocks, ancestors = uniform(40)[:12], uniform(40)[20 : 20 + before]
    parents = np.zeros_like(blocks[: len(links)])
    for row, link in enumerate(links):
        if 0 <= link < row:
            parents[row] = blocks[link]
        elif link == -2:
            parents[row] = uniform(40)[30]
        elif link == -3 and before:
            parents[row] = ancestors[-1]
    rows = [*range(len(links)), *(repeat for repeat in repeats if repeat < len(links))]
    ids, parents = blocks[rows], parents[rows]
    assert (placement.parents(ids, parents, ancestors) == linked_by_hand(ids, parents, ancestors)).all()


def test_a_chain_that_is_a_circle_ends():
    """What callers say of parents is not to be trusted: a dump may not hang on it."""
    ids = uniform(40)
    here = ids[placement.homes(ids) == 0]
    elsewhere = ids[placement.homes(ids) == 1]
    circle = np.stack([here[0], elsewhere[0], elsewhere[1]])
    parents = np.stack([elsewhere[0], elsewhere[1], elsewhere[0]])
    assert placement.parents(circle, parents, NOBODY).tolist() == [
        [0, 0],
        elsewhere[1].tolist(),
        elsewhere[0].tolist(),
    ]


def test_a_root_of_a_thousandth_is_looked_for_far_back():
    """Root 2 has few blocks of a long chain; the walk to its last one is long, and bounded."""
    rare = Placement(NAMES, [500, 500, 2])
    chain = uniform(3000)
    homes = rare.homes(chain)
    local = rare.parents(chain[1:], chain[:-1], NOBODY)
    here = np.flatnonzero(homes == 2)
    gaps = np.diff(here)
    for row, gap in zip(here[1:], gaps, strict=True):
        expected = chain[row - gap] if gap <= MOST_STEPS else np.zeros(2, np.uint64)
        assert (local[row - 1] == expected).all()
