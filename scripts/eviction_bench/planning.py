"""What a store of many blocks costs: planning an eviction, memory, and opening."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eviction_bench.workload import NAMESPACE, NEVER_FULL
from posix_store import PosixStore
from posix_store.catalog import Catalog
from posix_store.policies import policy_named
from posix_store.root import StoreRoot
from posix_store.victims import candidates, plan

BLOCK_BYTES = 64
CHAIN_BLOCKS = 200
DUMP_BLOCKS = 20_000


def measure(directory: str, blocks: int, runs: int) -> dict[str, Any]:
    """A store of `blocks` blocks of 64 bytes in chains of 200, opened and planned for `runs` times."""
    with tempfile.TemporaryDirectory(prefix="bench-eviction-", dir=directory) as folder:
        root = str(Path(folder) / "store")
        _fill(root, blocks)
        opening = [_open(root) for _ in range(runs)]
        catalog = Catalog(StoreRoot(root, create=False), NAMESPACE)
        catalog.refresh(max_age=0, budget=float("inf"))
        assert len(catalog.index) == blocks
        planning = [_plan(catalog, blocks) for _ in range(runs)]
        return {
            "blocks": blocks,
            "open_seconds": statistics.median(opening),
            "plan_seconds": statistics.median(planning),
            "index_bytes": catalog.index.memory_bytes / blocks,
            "resident_bytes": _in_a_process(root) / blocks,
        }


def _fill(root: str, blocks: int) -> None:
    random = np.random.default_rng(3)
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    with PosixStore(root, NAMESPACE, capacity=NEVER_FULL, min_free=0, maintenance=False) as store:
        for start in range(0, blocks, DUMP_BLOCKS):
            count = min(DUMP_BLOCKS, blocks - start)
            ids = random.integers(1, 256, (count, 16), np.uint8)
            parents = np.concatenate([ids[:1], ids[:-1]])
            parents[::CHAIN_BLOCKS] = 0
            addresses = np.full((count, 1), memory.ctypes.data)
            task = store.dump_data(ids, None, addresses, BLOCK_BYTES, parents=parents, background=False)
            assert task.results().all()


def _open(root: str) -> float:
    """Seconds until a new store of this process answers for the last block there is."""
    started = time.perf_counter()
    with PosixStore(root, NAMESPACE, writable=False, maintenance=False):
        return time.perf_counter() - started


def _plan(catalog: Catalog, blocks: int) -> float:
    """Seconds to choose a sixteenth of the blocks, which is what one plan is made for."""
    started = time.perf_counter()
    among = candidates(NAMESPACE, catalog, 0, policy_named("lru"), np.empty((0, 2), np.uint64), None)
    chosen = plan([among], blocks * BLOCK_BYTES // 16, whole_segments=False)
    seconds = time.perf_counter() - started
    assert len(chosen.which) >= blocks // 16
    return seconds


def _in_a_process(root: str) -> int:
    """Bytes by which the resident memory of a process grows when it opens the store."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_memory, args=(theirs, root), daemon=True)
    process.start()
    grown = ours.recv()
    process.join(20)
    return int(grown)


def _memory(pipe: Connection, root: str) -> None:
    with tempfile.TemporaryDirectory(dir=Path(root).parent) as empty:
        # What the modules and threads of any store take is not counted.
        PosixStore(empty, NAMESPACE, capacity=1 << 20, min_free=0, maintenance=False).close()
    before = _resident()
    with PosixStore(root, NAMESPACE, writable=False, maintenance=False):
        pipe.send(_resident() - before)


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")
