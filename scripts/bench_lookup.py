#!/usr/bin/env python3
"""Time of opening a store and of looking up 2,000 keys, by the number of blocks in it.

    python scripts/bench_lookup.py [--blocks 10000 1000000] [--dir /dev/shm] [--runs 5]

Blocks have 64 bytes, so that journals and index are measured and not the disk. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from posix_store import PosixStore
from ucm_sglang.identity import BlockIds

NAMESPACE = bytes(16)
BLOCK_BYTES = 64
KEYS = 2000
DUMP_BLOCKS = 20_000


def median_seconds(function: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def fill(root: str, keys: list[str]) -> None:
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    ids = BlockIds(NAMESPACE)
    with PosixStore(root, NAMESPACE.hex(), capacity=16 << 30, min_free=0) as store:
        for start in range(0, len(keys), DUMP_BLOCKS):
            batch = keys[start : start + DUMP_BLOCKS]
            addresses = np.full((len(batch), 1), memory.ctypes.data)
            task = store.dump_data(ids.of("kv", batch), None, addresses, BLOCK_BYTES, background=False)
            assert task.results().all()


def measure(directory: str, blocks: int, runs: int) -> dict[str, float]:
    keys = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(blocks)]
    asked = keys[:KEYS]
    ids = BlockIds(NAMESPACE)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        root = str(Path(folder) / "store")
        fill(root, keys)
        opening = median_seconds(lambda: PosixStore(root, NAMESPACE.hex(), writable=False).close(), runs)
        with PosixStore(root, NAMESPACE.hex(), writable=False) as store:
            packed = ids.of("kv", asked)
            assert store.lookup_on_prefix(packed) == len(asked) - 1
            return {
                "blocks": blocks,
                "open_seconds": round(opening, 3),
                "ids_of_2000_keys_ms": round(median_seconds(lambda: ids.of("kv", asked), runs * 20) * 1e3, 3),
                "lookup_2000_ids_ms": round(
                    median_seconds(lambda: store.lookup_on_prefix(packed), runs * 20) * 1e3, 3
                ),
                "index_bytes_per_block": round(store.stats().index_memory_bytes / blocks, 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--dir", default="/dev/shm", help="where to make the store; it is deleted afterwards")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    for blocks in arguments.blocks:
        print(json.dumps(measure(arguments.dir, blocks, arguments.runs)), flush=True)


if __name__ == "__main__":
    main()
