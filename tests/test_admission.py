"""Admission: issue 3 (`always`, `second_touch`). Prompts seen once cost no disk, and no chain is cut."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storekit import ids_of

from posix_store.admission import ADMISSIONS, Always, SecondTouch, admission_named
from posix_store.errors import StoreError


def blocks(seed: int, count: int) -> np.ndarray:
    """uint64 (count, 2)."""
    return ids_of(seed, count).view(np.uint64)


def alone(ids: np.ndarray) -> np.ndarray:
    """Parents of blocks that stand in no chain."""
    return np.zeros_like(ids)


def chained(ids: np.ndarray) -> np.ndarray:
    """Parents of one chain, whose first block is its head."""
    return np.concatenate([np.zeros((1, 2), np.uint64), ids[:-1]])


def ask(admission: SecondTouch | Always, ids: np.ndarray) -> np.ndarray:
    return admission.admit(ids, alone(ids))


def test_names() -> None:
    """I3: an unknown name says the key, the value and the fix."""
    assert {name: admission_named(name).name for name in ADMISSIONS} == {
        "always": "always",
        "second_touch": "second_touch",
    }
    with pytest.raises(StoreError, match=r"admission = 'lru': .*always, second_touch"):
        admission_named("lru")
    with pytest.raises(StoreError, match="capacity_blocks = 0: must be 1 or more"):
        SecondTouch(0)


def test_always() -> None:
    assert ask(Always(), blocks(1, 5)).tolist() == [True] * 5
    assert ask(Always(), blocks(1, 0)).shape == (0,)


def test_the_second_touch_admits() -> None:
    """Issue 3: first refused, then admitted, and admitted again after that."""
    admission, ids = SecondTouch(1000), blocks(1, 100)
    assert not ask(admission, ids).any()
    assert ask(admission, ids[:40]).all()
    assert ask(admission, ids).all()
    assert not ask(admission, blocks(2, 100)).any()
    assert ask(admission, blocks(1, 0)).shape == (0,)


def test_repeats_in_a_batch_are_one_touch() -> None:
    """Issue 3: a batch that names a block twice has not shown that anybody comes back."""
    admission, ids = SecondTouch(1000), blocks(1, 4)
    twice = np.concatenate([ids, ids[::-1]])
    assert not ask(admission, twice).any()
    assert ask(admission, twice).tolist() == [True] * 8


def test_a_chain_is_not_cut() -> None:
    """Issue 3: behind a refused block nothing is stored; a chain beside it is not affected."""
    admission = SecondTouch(1000)
    ids, other = blocks(1, 6), blocks(2, 3)
    ask(admission, np.concatenate([ids[[0, 1, 3, 5]], other]))
    both = np.concatenate([ids, other])
    parents = np.concatenate([chained(ids), chained(other)])
    shuffled = np.random.default_rng(0).permutation(len(both))
    admitted = np.zeros(len(both), bool)
    admitted[shuffled] = admission.admit(both[shuffled], parents[shuffled])
    assert admitted.tolist() == [True, True, False, False, False, False] + [True] * 3
    assert admission.admit(both, parents).all(), "what was refused for its chain was touched all the same"


def test_parents_that_are_not_in_the_batch() -> None:
    """Issue 3: what stands before the batch is stored already, or not known."""
    admission, ids = SecondTouch(1000), blocks(1, 5)
    ask(admission, ids)
    assert admission.admit(ids[2:], chained(ids)[2:]).all()


def test_damaged_parents_end() -> None:
    """I3: blocks that are their own parents, or each other's, are answered like all others."""
    admission, ids = SecondTouch(1000), blocks(1, 6)
    ask(admission, ids[:5])
    parents = ids[[0, 2, 1, 4, 5, 3]]  # itself; a circle of two; a circle of three with a new block
    assert admission.admit(ids, parents).tolist() == [True, True, True, False, False, False]


def test_a_long_chain_is_quick() -> None:
    """I11: a chain of 100 000 blocks with its head refused; rounds go with the logarithm."""
    admission, ids = SecondTouch(), blocks(1, 100_000)
    ask(admission, ids[1:])
    assert not admission.admit(ids, chained(ids)).any()
    assert admission.admit(ids, chained(ids)).all()


@given(st.data())
def test_against_a_plain_model(data: st.DataObject) -> None:
    """Issue 3: a set of ids and a walk up each chain give the same answers."""
    universe = blocks(1, 12)
    parent_of = [data.draw(st.integers(-1, i - 1)) if i else -1 for i in range(12)]
    parents = np.array([universe[p] if p >= 0 else (0, 0) for p in parent_of], np.uint64)
    admission, seen = SecondTouch(1000), set()
    for _ in range(data.draw(st.integers(1, 5))):
        batch = data.draw(st.lists(st.integers(0, 11), max_size=15))

        def is_admitted(block: int, batch: tuple[int, ...] = tuple(batch)) -> bool:
            while block in batch:
                if block not in seen:
                    return False
                block = parent_of[block]
            return True

        rows = np.array(batch, np.int64)
        expected = [is_admitted(block) for block in batch]
        assert admission.admit(universe[rows], parents[rows]).tolist() == expected
        seen.update(batch)


@pytest.mark.parametrize("batch", [1, 7, 64, 5000], ids=lambda n: f"batches of {n}")
def test_the_newest_are_remembered(batch: int) -> None:
    """Issue 3: the last `capacity_blocks` for certain, and those from long ago not."""
    capacity = 500
    admission, ids = SecondTouch(capacity), blocks(1, 5 * capacity)
    for start in range(0, len(ids), batch):
        ask(admission, ids[start : start + batch])
    assert ask(admission, ids[-capacity:]).all()
    assert ask(admission, ids[: 2 * capacity]).mean() < 0.02


def test_what_is_touched_stays() -> None:
    """Issue 3: a block that keeps coming is not forgotten, however much else comes."""
    admission, ids = SecondTouch(500), blocks(1, 10)
    ask(admission, ids)
    for seed in range(2, 12):
        ask(admission, blocks(seed, 400))
        assert ask(admission, ids).all()


@pytest.mark.parametrize("kind", ["digests", "low numbers", "high numbers"])
def test_few_are_taken_for_others(kind: str) -> None:
    """Issue 3: with a full memory, far less than one new block in a thousand is admitted."""
    capacity = 1 << 14
    ids = blocks(1, 8 * capacity)
    if kind != "digests":
        ids[:, 0] = 0
        ids[:, 1] = np.arange(len(ids), dtype=np.uint64) << np.uint64(0 if kind == "low numbers" else 47)
    admission = SecondTouch(capacity)
    admitted = [ask(admission, part).sum() for part in np.split(ids, 64)]
    assert sum(admitted) < len(ids) / 1000
    assert admission.memory_bytes <= 16 * capacity


def test_memory_is_bounded() -> None:
    """Issue 3: 16 bytes for each block to be remembered, whatever comes."""
    admission = SecondTouch(1 << 12)
    for seed in range(20):
        ask(admission, blocks(seed, 3000))
        assert admission.memory_bytes <= 16 << 12
    assert SecondTouch(1).memory_bytes < 2048


def test_many_threads() -> None:
    """Issue 3: of threads that bring the same blocks at once, exactly one was the first."""
    admission, ids = SecondTouch(1 << 16), blocks(1, 2000)
    refused = [np.zeros(len(ids), bool) for _ in range(8)]
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(ids))
        barrier.wait()
        for rows in np.split(order, 40):
            refused[number][rows] = ~ask(admission, ids[rows])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (np.sum(refused, axis=0) == 1).all()
