"""Chains of blocks to dump, stores below and at their capacity, and medians of paired pieces."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from posix_store import PosixStore, Reason

NAMESPACE = b"bench".hex().ljust(32, "0")
BATCHES_IN_A_CHAIN = 4
NEVER_FULL = 1 << 40


@dataclass(frozen=True)
class Workload:
    block_bytes: int
    batch: int
    """Blocks in a dump."""
    capacity: int
    """Bytes of a store that is to be full."""

    @property
    def batch_bytes(self) -> int:
        return self.block_bytes * self.batch


class Chains:
    """Batches of new blocks, one behind the other: a chain is `BATCHES_IN_A_CHAIN` batches long."""

    def __init__(self, seed: int, work: Workload) -> None:
        self.work = work
        self.memory = np.random.default_rng(seed).integers(0, 256, work.batch_bytes, np.uint8)
        self._random = np.random.default_rng([seed, 1])
        self._made = 0
        self._last = np.zeros(16, np.uint8)
        self.addresses = (
            self.memory.ctypes.data + np.arange(work.batch, dtype=np.int64)[:, None] * work.block_bytes
        )

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and parents, uint8 (batch, 16)."""
        ids = self._random.integers(1, 256, (self.work.batch, 16), np.uint8)
        head = np.zeros(16, np.uint8) if self._made % BATCHES_IN_A_CHAIN == 0 else self._last
        self._made += 1
        self._last = ids[-1]
        return ids, np.concatenate([head[None], ids[:-1]])


@dataclass(frozen=True)
class Piece:
    """What one stretch of dumps took."""

    seconds: float
    cpu: float
    """Seconds of processor time of the whole process, with its background thread."""
    bytes: int
    """Stored."""
    unstored: int
    """Blocks."""
    on_disk: float
    """Seconds until the kernel had written it all to the disk."""

    @property
    def rate(self) -> float:
        """Bytes stored in a second."""
        return self.bytes / self.seconds


class Arm:
    """A store under one condition. Dumps in the thread that calls, as engines' I/O threads do.

    Args:
        directory: where to make the store, which is deleted on `close`.
        full: the store has the capacity of the workload, and is filled until it evicts; else it has no end.
    """

    def __init__(
        self, directory: str, seed: int, work: Workload, full: bool, maintenance: bool = True
    ) -> None:
        self.root = tempfile.mkdtemp(prefix="bench-eviction-", dir=directory)
        self._mine = True
        self._open(seed, work, full, maintenance)

    @classmethod
    def beside(cls, other: str, seed: int, work: Workload, full: bool) -> Arm:
        """Another writer in the store at the root `other`."""
        arm = cls.__new__(cls)
        arm.root, arm._mine = other, False
        arm._open(seed, work, full)
        return arm

    def _open(self, seed: int, work: Workload, full: bool, maintenance: bool = True) -> None:
        self.full, self.seed = full, seed
        capacity = work.capacity if full else NEVER_FULL
        self.chains = Chains(seed, work)
        self.store = PosixStore(
            self.root, NAMESPACE, capacity=capacity, min_free=0, timeout=30.0, maintenance=maintenance
        )

    def dump(self, chains: Chains | None = None) -> np.ndarray:
        """Dump a batch; its ids, as far as it was stored."""
        chains = chains or self.chains
        ids, parents = chains.batch()
        task = self.store.dump_data(
            ids, None, chains.addresses, chains.work.block_bytes, parents=parents, background=False
        )
        return ids[task.status() == Reason.OK]

    def fill(self) -> None:
        """Dump until eviction has replaced half of what the store holds; in large batches, to save time."""
        if self.full:
            large = Chains(self.seed + 1000, replace(self.chains.work, batch=128))
            for _ in range(-(-large.work.capacity * 3 // 2 // large.work.batch_bytes)):
                self.dump(large)

    def piece(self, batches: int) -> Piece:
        started, spent = time.perf_counter(), time.process_time()
        stored = sum(len(self.dump()) for _ in range(batches))
        seconds, cpu = time.perf_counter() - started, time.process_time() - spent
        self._flush()
        on_disk = time.perf_counter() - started
        work = self.chains.work
        return Piece(seconds, cpu, stored * work.block_bytes, batches * work.batch - stored, on_disk)

    def prepare(self) -> None:
        """Before a piece: an empty store where it is not to be full, and nothing left for the disk to do."""
        if not self.full:
            self.store.clear()
        self.dump()
        self._flush()

    def _flush(self) -> None:
        for path in Path(self.root).glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        self.store.close()
        if self._mine:
            shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Spread:
    """Median, least and most of several measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        low, middle, high = (f"{x * scale:.{digits}f}" for x in (self.least, self.median, self.most))
        return f"{middle} ({low} to {high})"
