"""What the benchmark asks of a store."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_bench.memory import Blocks
from store_bench.raw import CannotRun

__all__ = ["CannotRun", "Spec", "StoreUnderTest"]


@dataclass(frozen=True)
class Spec:
    """One configuration in which stores are compared.

    directory: a folder of this store alone, on the medium. capacity: bytes at which it must evict; 0: never.
    reserve: bytes that a turn writes at most.
    """

    directory: str
    block_bytes: int
    batch: int
    io_mode: str = "buffered"
    verify: bool = False
    capacity: int = 0
    reserve: int = 0
    mla: bool = False


class StoreUnderTest:
    """A store in this process, with memory for one batch.

    What is passed to `dump`, `load` and `lookup` is prepared beforehand, so that only the store's own work is
    timed; each of these raises when the store reports that a block was not moved.
    """

    preallocated = "no: a new file for each block"
    """How dumps get their space, for the reader of a table."""

    ways: tuple[str, ...] = ("",)
    """Ways to run it, each of which has a turn; the best counts."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.directory = Path(spec.directory)
        self.blocks = self.make_blocks()
        self.blocks.fill()

    def make_blocks(self) -> Blocks:
        return Blocks.contiguous(self.spec.batch, self.spec.block_bytes)

    def facts(self) -> dict[str, Any]:
        """What a reader must know about how the store was set up."""
        return {}

    def use(self, way: str) -> None:
        """Take this one of `ways` from now on."""

    def begin(self) -> None:
        """Make the store ready and empty."""
        raise NotImplementedError

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        """For blocks `first` and following of the memory, under these ids of 16 bytes."""
        raise NotImplementedError

    def prepare_load(self, ids: list[bytes]) -> Any:
        """For blocks 0 and following of the memory. All ids were dumped in this turn."""
        raise NotImplementedError

    def dump(self, prepared: Any) -> None:
        raise NotImplementedError

    def load(self, prepared: Any) -> None:
        raise NotImplementedError

    def prepare_lookup(self, ids: list[bytes]) -> Any:
        return ids

    def lookup(self, prepared: Any) -> int:
        """How many leading ids are stored."""
        raise NotImplementedError

    def reopen(self) -> None:
        """What a new process does until it can serve the blocks that are on disk."""
        raise NotImplementedError

    def after_reopen(self) -> None:
        """Let go of what was open before. Not timed."""

    def end(self) -> None:
        """Delete what the turn stored."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        self.end()
