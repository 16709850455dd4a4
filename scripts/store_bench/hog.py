"""A thread that runs pure Python as fast as it can: what SGLang's scheduler thread does to the GIL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOPS_PER_COUNT = 50


class Hog:
    """Counts its loops while it spins; `count` may be read from any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._spin, daemon=True, name="gil-hog")

    def _spin(self) -> None:
        while not self._stop:
            for _ in range(_LOOPS_PER_COUNT):
                pass
            self.count += 1

    def start(self) -> None:
        self._thread.start()
        while not self.count:
            time.sleep(0.001)

    def stop(self) -> None:
        self._stop = True
        self._thread.join()


@contextmanager
def hogged(on: bool) -> Iterator[Hog | None]:
    """With a hog at work in this process, or without one."""
    if not on:
        yield None
        return
    hog = Hog()
    hog.start()
    try:
        yield hog
    finally:
        hog.stop()
