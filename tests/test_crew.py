"""Threads that help a caller: it never waits for those who help others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from posix_store.crew import Crew


def test_a_caller_does_what_no_helper_has_begun() -> None:
    """One helper, and it hangs for somebody else: the work gets done all the same, by its caller."""
    crew, released = Crew(1, "test"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(crew.run, lambda part: part and released.wait(30), [0, 1])
        try:
            time.sleep(0.05)
            here = threading.get_ident()
            assert crew.run(lambda part: (part, threading.get_ident()), range(3)) == [
                (i, here) for i in range(3)
            ]
        finally:
            released.set()
        assert stuck.result(30) == [0, True]


def test_what_parts_raise_is_handed_over_in_their_place() -> None:
    crew = Crew(3, "test")
    first, second, third = crew.run(lambda part: 6 // part, [2, 0, 3])
    assert (first, third) == (3, 2) and isinstance(second, ZeroDivisionError)
    crew.close()
    crew.close()
    assert crew.run(lambda part: -part, [1, 2]) == [-1, -2]
    assert crew.run(lambda part: -part, []) == []


def test_an_interrupt_waits_for_the_helpers() -> None:
    """Ctrl-C in the calling thread must not return its memory while a helper still writes to it."""
    crew, began, ended = Crew(1, "test"), threading.Event(), threading.Event()

    def work(part: int) -> None:
        if part == 0:
            assert began.wait(30)
            raise KeyboardInterrupt
        began.set()
        time.sleep(0.05)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        crew.run(work, [0, 1])
    assert ended.is_set()
