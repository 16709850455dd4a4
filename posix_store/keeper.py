"""The background thread of a store: what nobody should wait for.

Space is made before dumps need it, journals of others are followed so that look-ups need no system call,
uses are written down, garbage is collected. Nothing depends on it: a store without it does the same when it
must, only later.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two rounds while the store is in use; there are none while nobody uses it."""
_IDLE_ROUNDS = 40
_LOG_EVERY_SECONDS = 60.0


class Keeper:
    """Calls a method again and again in a thread of its own, while `used` is called now and then.

    The thread starts with the first use. It keeps neither the process nor the method's object alive.

    Args:
        work: a bound method; what it raises is logged, and it is called again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = weakref.WeakMethod(work)
        self._used = threading.Event()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def used(self) -> None:
        """The store is in use. Cheap: it is called for each look-up."""
        if not self._used.is_set():
            self._used.set()
            if self._thread is None:
                self._start()

    def nudge(self) -> None:
        """There is something to do now: do not wait for the next round."""
        self._used.set()
        self._wake.set()

    def close(self, timeout: float) -> None:
        """End the thread; waits for a round under way, for `timeout` seconds at most. Idempotent."""
        self._stop.set()
        self._used.set()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                arguments = (self._work, self._used, self._wake, self._stop)
                self._thread = threading.Thread(
                    target=_run, args=arguments, name="posix-store-keeper", daemon=True
                )
                self._thread.start()


def _run(
    work: weakref.WeakMethod[Callable[[], None]],
    used: threading.Event,
    wake: threading.Event,
    stop: threading.Event,
) -> None:
    logged_at = float("-inf")
    idle = 0
    while not (wake.wait(PERIOD) and stop.is_set()):
        wake.clear()
        idle = 0 if used.is_set() else idle + 1
        used.clear()
        if idle > _IDLE_ROUNDS:
            # The object may go meanwhile, and nobody would wake this thread up then.
            while not used.wait(60.0):
                if work() is None:
                    return
            continue
        call = work()
        if call is None:
            return
        try:
            call()
        except Exception:
            if time.monotonic() - logged_at > _LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                logger.exception("posix_store: background work failed; it goes on")
        del call
