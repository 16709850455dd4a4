"""The time of uses and stores: it never goes back, so that what is used later counts as used later."""

from __future__ import annotations

import threading
import time

_STEP = 1e-6
_MAX_LEAD = 86400.0
"""Seconds that it follows a clock ahead of this machine's: what is farther ahead was a mistake."""


class Clock:
    """Unix seconds, strictly increasing over calls, and ahead of all that was `seen`. Thread-safe.

    After the clock of the machine was set back it goes on at its speed from where it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead = float("-inf")
        """Of the monotonic clock."""
        self._last = 0.0

    def now(self) -> float:
        with self._lock:
            self._follow(time.time())
            self._last = max(time.monotonic() + self._ahead, self._last + _STEP)
            return self._last

    def seen(self, when: float) -> None:
        """Another process has noted this time: this one's uses from now on come after it."""
        with self._lock:
            self._follow(min(when, time.time() + _MAX_LEAD))

    def _follow(self, when: float) -> None:
        self._ahead = max(self._ahead, when - time.monotonic())
