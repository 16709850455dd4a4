"""Counts of what a store was asked for and what came of it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from posix_store.errors import Reason


@dataclass
class Counters:
    """Counts since the store was opened, in blocks (shards count as blocks) unless they say bytes."""

    lookups: int = 0
    """Blocks asked for by `lookup` and `lookup_on_prefix`."""
    lookup_hits: int = 0
    load_blocks: int = 0
    """Blocks asked for by `load`; equals `loaded_blocks` plus the sum of `misses`."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    dump_blocks: int = 0
    """Blocks given to `dump`; equals written plus already stored plus the sum of `unstored`."""
    written_blocks: int = 0
    written_bytes: int = 0
    already_stored_blocks: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    """Blocks that `load` did not load, by reason."""
    unstored: dict[str, int] = field(default_factory=dict)
    """Blocks that `dump` did not store, by reason."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def looked_up(self, asked: int, found: int) -> None:
        with self._lock:
            self.lookups += asked
            self.lookup_hits += found

    def loaded(self, status: np.ndarray, bytes_each: int) -> None:
        """Account for a load: uint8 (n,) of `Reason`."""
        good = len(status) - int(np.count_nonzero(status))
        with self._lock:
            self.load_blocks += len(status)
            self.loaded_blocks += good
            self.loaded_bytes += good * bytes_each
            _add(self.misses, status)

    def dumped(self, status: np.ndarray, written: int, bytes_each: int) -> None:
        """Account for a dump of which `written` blocks were new."""
        with self._lock:
            self.dump_blocks += len(status)
            self.written_blocks += written
            self.written_bytes += written * bytes_each
            self.already_stored_blocks += len(status) - int(np.count_nonzero(status)) - written
            _add(self.unstored, status)

    def snapshot(self) -> dict[str, Any]:
        """A consistent copy."""
        with self._lock:
            return asdict(self)


def _add(counts: dict[str, int], status: np.ndarray) -> None:
    if not np.count_nonzero(status):
        return
    for reason, number in zip(*np.unique(status[status != Reason.OK], return_counts=True), strict=True):
        name = Reason(int(reason)).name.lower()
        counts[name] = counts.get(name, 0) + int(number)
