"""What a store does for itself between the calls of its users."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from posix_store.capacity import LOW_SHARE, NoSpace, SpaceKeeper
from posix_store.catalog import HIT_MAX_AGE, Catalog
from posix_store.evictor import EvictionReport, Evictor
from posix_store.recency import Recency
from posix_store.root import StoreRoot
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 60.0
HIGH_SHARE = 16
"""Room is made until one part in so many of what the store may hold is free."""
ROUND_EVERY = 1.0
"""Seconds between two rounds while there is enough space."""
ROUND_SECONDS = 1.0
"""Time for making room in one round."""
FLUSH_SECONDS = 1.0
TIDY_SECONDS = 30.0
EXPIRE_SECONDS = 10.0


class Upkeep:
    """One round after the other. Used by one thread at a time.

    Args:
        ttl: seconds after which blocks go, by when they were stored; None: never.
        writes: False: nothing is written or deleted, only journals are followed.
    """

    def __init__(
        self,
        root: StoreRoot,
        space: SpaceKeeper,
        catalog: Catalog,
        writer: SegmentWriter,
        evictor: Evictor,
        recency: Recency,
        namespace: str,
        ttl: float | None,
        writes: bool,
    ) -> None:
        self._root = root
        self._space = space
        self._catalog = catalog
        self._writer = writer
        self._evictor = evictor
        self._recency = recency
        self._namespace = namespace
        self._ttl = ttl
        self._writes = writes
        self._pid = os.getpid()
        self._said_at = float("-inf")
        self._due = dict.fromkeys(("round", "flush", "tidy", "expire"), 0.0)
        # A short-lived process leaves the collection of garbage to the others.
        self._due["tidy"] = time.monotonic() + TIDY_SECONDS

    def tick(self) -> None:
        """What the background thread does when it wakes up: dumps may wake it up many times a second."""
        if os.getpid() != self._pid:
            return
        if self._writes:
            self._try(self._writer.reserve_ahead)
        # Whoever comes out of a system call waits for the interpreter, and takes it from those who move
        # pages: so there are as few calls as will do.
        self._catalog.refresh(HIT_MAX_AGE / 2)  # sooner than loads and dumps would, so that they need not
        if self._space.is_low or self._is_due("round", ROUND_EVERY):
            self.round()

    def round(self) -> None:
        """Do what is due. Never raises for what a file system does: it is tried again in the next round."""
        if os.getpid() != self._pid:
            return
        self._catalog.refresh(HIT_MAX_AGE / 2)
        if not self._writes:
            return
        self._evictor.let_go_of_deleted()
        chores: list[Callable[[], object]] = [self.make_room]
        if self._writer.noted_records or self._is_due("flush", FLUSH_SECONDS):
            chores += [self._recency.settle, self._writer.flush]
        if self._ttl is not None and self._is_due("expire", EXPIRE_SECONDS):
            chores.append(self.expire)
        if self._is_due("tidy", TIDY_SECONDS):
            chores.append(lambda: self._evictor.tidy(time.monotonic() + ROUND_SECONDS))
        for chore in chores:
            self._try(chore)

    def _try(self, chore: Callable[[], object]) -> None:
        try:
            chore()
        except (OSError, NoSpace) as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        if time.monotonic() - self._said_at > _LOG_EVERY_SECONDS:
            self._said_at = time.monotonic()
            logger.warning("posix_store %s: upkeep is held up: %s", self._root.path, error)

    def make_room(self) -> EvictionReport:
        """Evict down to the lower mark of what is allocated, if it is above the upper one."""
        if self._writer.current is None:
            return EvictionReport()  # this process stores nothing; those that do make room
        available = self._space.available()
        # Not the capacity: others may have filled the disk, and the floor of free space be the limit.
        size = max(0, available) + self._evictor.held_bytes
        if available >= size // LOW_SHARE:
            return EvictionReport()
        return self._evictor.evict(size // HIGH_SHARE - available, time.monotonic() + ROUND_SECONDS)

    def expire(self) -> EvictionReport:
        """Evict this namespace's blocks that are older than the time to live."""
        if self._ttl is None:
            return EvictionReport()
        older_than = self._catalog.clock.now() - self._ttl
        return self._evictor.evict(
            1 << 62, time.monotonic() + ROUND_SECONDS, namespaces=[self._namespace], older_than=older_than
        )

    def _is_due(self, what: str, period: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + period
        return True
