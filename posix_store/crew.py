"""Threads that help a caller with the parts of one job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Crew:
    """Runs parts of a job at the same time, the calling thread among those that work. Thread-safe.

    A caller waits for nobody but those who work for it: what no thread has begun it does itself.

    Args:
        threads: helpers at most, for all callers together. They are made when they are needed.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix=name)
        self._pid = os.getpid()

    def run(self, work: Callable[[T], R], parts: Sequence[T]) -> list[R | Exception]:
        """What `work` returned for each part, or the exception that it raised, in the order of the parts.

        When this returns, or is left by a `KeyboardInterrupt`, no part runs any more.
        """
        results: list[R | Exception] = [RuntimeError("not run")] * len(parts)

        def attempt(number: int) -> None:
            try:
                results[number] = work(parts[number])
            except Exception as error:
                results[number] = error

        helpers: list[Future[None]] = []
        # Closed meanwhile, or a forked child, which has no threads: this one does it all.
        with suppress(RuntimeError):
            while os.getpid() == self._pid and len(helpers) < len(parts) - 1:
                helpers.append(self._pool.submit(attempt, len(helpers) + 1))
        try:
            for number in range(len(parts)):
                if not 0 < number <= len(helpers) or helpers[number - 1].cancel():
                    attempt(number)
        finally:
            wait([helper for helper in helpers if not helper.cancel()])
        return results

    def close(self) -> None:
        """Let go of the threads; jobs under way end. Idempotent."""
        if os.getpid() == self._pid:
            self._pool.shutdown(wait=False)
