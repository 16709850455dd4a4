"""Must hold 7: what a block costs when there are 10 thousand, 100 thousand and a million of them.

Three stores take turns. Blocks have 1 KiB, so that index and journals are measured and not the memory; what
is loaded was just dumped, because a larger store has its old blocks in memory that is further away. What that
costs by itself is measured beside it.
"""

from __future__ import annotations

import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from store_bench.checks import row
from store_bench.memory import anonymous
from store_bench.stores.base import CannotRun
from store_bench.stores.ours import open_store

COUNTS = (10_000, 100_000, 1_000_000)
_BLOCK, _BATCH, _KEYS, _ROUNDS = 1024, 128, 2000, 15
_FILL = 10_000
_MOST_GROWTH, _MOST_BYTES = 1.2, 200
_FLOOR = "no store: 2,000 random lines of 64 bytes from an array with one for each block"
_METHOD = f"median of {_ROUNDS} rounds in which the three stores take turns"


class _Store:
    """A store with so many blocks, and the ids of all of them."""

    def __init__(self, directory: Path, engine: str, count: int, memory: np.ndarray) -> None:
        self.directory, self.count = directory, count
        self._random = np.random.default_rng(count)
        self._addresses = memory.ctypes.data + np.arange(_BATCH, dtype=np.int64)[:, None] * _BLOCK
        self.store = open_store(str(directory), engine, "buffered", capacity=16 << 30)
        self._ids = self._random.integers(0, 1 << 63, (count, 2), np.uint64)
        fill = np.full((_FILL, 1), memory.ctypes.data, np.int64)
        for start in range(0, count, _FILL):
            part = self._ids[start : start + _FILL]
            assert (
                self.store.dump_data(part, None, fill[: len(part)], _BLOCK, background=False).results().all()
            )
        self._memory = np.ones((count, 8), np.uint64)
        self.seconds: dict[str, list[float]] = {}

    def round(self) -> None:
        """One lookup of random ids, one of ids in a row, a dump and a load of what was dumped."""
        scattered = self._ids[self._random.integers(0, self.count, _KEYS)].tobytes()
        first = int(self._random.integers(0, self.count - _KEYS))
        in_a_row = self._ids[first : first + _KEYS].tobytes()
        new = self._random.integers(0, 1 << 63, (_BATCH, 2), np.uint64).tobytes()
        lines = self._random.integers(0, self.count, _KEYS)
        store, addresses = self.store, self._addresses
        self._time(_FLOOR, _KEYS, partial(self._read, lines))
        self._time("lookup of 2,000 random keys", _KEYS, lambda: store.lookup_on_prefix(scattered))
        self._time("lookup of 2,000 keys of one chain", _KEYS, lambda: store.lookup_on_prefix(in_a_row))
        for operation, call in (("dump", store.dump_data), ("load", store.load_data)):
            self._time(
                f"{operation} of {_BATCH} blocks of 1 KiB", _BATCH,
                lambda call=call: call(new, None, addresses, _BLOCK, background=False).results(),
            )  # fmt: skip

    def _read(self, lines: np.ndarray) -> int:
        return int(self._memory[lines, 0].sum())

    def _time(self, operation: str, blocks: int, call: Any) -> None:
        started = time.perf_counter()
        call()
        self.seconds.setdefault(operation, []).append((time.perf_counter() - started) / blocks)

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def run(directory: Path, counts: tuple[int, ...] = COUNTS) -> list[dict[str, Any]]:
    memory = anonymous(_BATCH * _BLOCK)
    try:
        engine = "native"
        open_store(str(directory / "probe"), engine, "buffered").close()
    except CannotRun:
        engine = "python"
    stores = [_Store(directory / f"growth-{count}", engine, count, memory) for count in counts]
    try:
        for number in range(_ROUNDS + 2):
            if number == 2:
                for store in stores:
                    store.seconds.clear()
            for store in stores[number % len(stores) :] + stores[: number % len(stores)]:
                store.round()
        return _rows(stores, engine)
    finally:
        for store in stores:
            store.close()


def _rows(stores: list[_Store], engine: str) -> list[dict[str, Any]]:
    rows = []
    for operation in stores[0].seconds:
        medians = [statistics.median(store.seconds[operation]) for store in stores]
        for store, median in zip(stores, medians, strict=True):
            what = f"{operation}, {store.count:,} stored, a block"
            rows.append(row(7, what, median * 1e6, "us", f"{_METHOD}; engine {engine}", most=None))
        growth = medians[-1] / medians[0]
        what = f"{operation}: {stores[-1].count:,} / {stores[0].count:,} stored"
        most = None if operation == _FLOOR else _MOST_GROWTH
        rows.append(row(7, what, growth, "x", "of the medians", most=most))
    for store in stores:
        stats = store.store.stats()
        value = stats.index_memory_bytes / stats.blocks
        what = f"index, {store.count:,} stored, a block"
        most = _MOST_BYTES if store is stores[-1] else None
        rows.append(row(7, what, value, "bytes", "stats().index_memory_bytes", most=most))
    return rows
