"""The bound on what waits to be written: issue 3 (newest pages are dropped first), I4."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posix_store.write_queue import Place, WriteQueue


def test_leading_blocks_are_admitted() -> None:
    """Issue 3: what comes last is dropped, from its tail, and counted; what is given back can be used."""
    queue = WriteQueue(1000)
    first = queue.admit(100, 7)
    second = queue.admit(100, 7)
    third = queue.admit(100, 7)
    assert (first.blocks, second.blocks, third.blocks) == (7, 3, 0)
    assert (queue.bytes, queue.admitted_blocks, queue.dropped_blocks) == (1000, 10, 11)
    first.release()
    assert queue.bytes == 300 and queue.admit(350, 9).blocks == 2
    assert queue.most_bytes == 1000


def test_an_empty_queue_takes_a_block_of_any_size() -> None:
    """Issue 3: or a block larger than the limit would never be stored. Nothing goes in beside it."""
    queue = WriteQueue(1000)
    assert queue.admit(5000, 0).blocks == 0 and queue.bytes == 0
    with queue.admit(5000, 3) as place:
        assert place.blocks == 1
        assert queue.admit(1, 1).blocks == 0
    assert queue.admit(1, 1).blocks == 1
    assert queue.admit(5000, 1).blocks == 0, "it is not empty"


def test_bytes_come_back_once() -> None:
    """I4: in parts, twice, or after an error: never more than was taken."""
    queue = WriteQueue(1000)
    other = queue.admit(10, 1)
    with queue.admit(100, 5) as place:
        place.release(150)
        assert (queue.bytes, place.nbytes, place.blocks) == (360, 350, 5)
        place.release(10_000)
        assert queue.bytes == 10
    place.release()
    assert queue.bytes == 10
    with pytest.raises(OSError), queue.admit(100, 5):
        raise OSError
    assert queue.bytes == 10
    other.release()
    assert queue.bytes == 0


@given(
    st.integers(1, 2000),
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 9), st.integers(0, 3)), max_size=30),
)
def test_the_bound_holds(limit: int, batches: list[tuple[int, int, int]]) -> None:
    """Issue 3: never more than the limit, except for one block alone; as many leading blocks as fit."""
    queue, held = WriteQueue(limit), []
    for each, count, released in batches:
        before = queue.bytes
        place = queue.admit(each, count)
        held.append(place)
        assert queue.bytes == before + place.blocks * each == sum(one.nbytes for one in held)
        assert queue.bytes <= limit or (before == 0 and place.blocks == 1) or place.blocks == 0
        if place.blocks < count:
            assert queue.bytes + each > limit, "another would have fitted"
        for one in held[:released]:
            one.release()
        del held[:released]
    assert queue.admitted_blocks + queue.dropped_blocks == sum(count for _, count, _ in batches)
    assert queue.most_bytes >= queue.bytes


def test_many_threads() -> None:
    """Issue 3: the bound and the counts hold under contention, also when others give back the places."""
    queue = WriteQueue(100_000)
    left: list[Place] = []
    asked, over = [0] * 12, []
    barrier = threading.Barrier(12)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        barrier.wait()
        for _ in range(300):
            count = int(rng.integers(0, 20))
            asked[number] += count
            left.append(queue.admit(int(rng.integers(1, 5000)), count))
            if queue.bytes > queue.limit_bytes:
                over.append(queue.bytes)
            if rng.random() < 0.9:
                left.pop().release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over and queue.dropped_blocks > 0
    assert queue.bytes == sum(place.nbytes for place in left)
    for place in left:
        place.release()
    assert queue.bytes == 0
    assert queue.admitted_blocks + queue.dropped_blocks == sum(asked)
