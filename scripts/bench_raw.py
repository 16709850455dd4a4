#!/usr/bin/env python3
"""The store beside the raw loop in one process: the same memory, the same thread, one after the other.

    python scripts/bench_raw.py [--sizes 65536 1048576] [--rounds 9] [--hog] [--dir /dev/shm]

Batches of 128 blocks in the page cache. The raw loop (`store_bench/raw.c`) moves them to and from one file,
whose space was preallocated before, as the store's is by its background thread while this waits between two
dumps. It has two ways, one thread and two; the better one counts. Each turn moves other parts of the files.
Ratios are of neighbours in time: raw, store, raw; the mean of both raw ones counts. With --hog a thread
spins in Python meanwhile, and its loops beside the store are set against those beside the raw loop. Prints
a Markdown table; medians, in brackets least and most.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from store_bench.memory import anonymous
from store_bench.raw import RawLoop

from posix_store import PosixStore

BATCH = 128
NAMESPACE = "0" * 32
PIECE = 256 << 10


class Hog:
    """A thread that counts in Python."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop:
            self.count += 1

    def __enter__(self) -> Hog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


class Bench:
    """One block size in one folder."""

    def __init__(self, folder: Path, length: int, rounds: int, hog: Hog | None) -> None:
        self.length, self.rounds, self.hog = length, rounds, hog
        self.memory = anonymous(BATCH * length)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, len(self.memory), np.uint8)
        self.addresses = self.memory.ctypes.data + np.arange(BATCH, dtype=np.int64) * length
        self.loop, self.sums = RawLoop(), np.zeros(BATCH, np.uint32)
        self.files = max(2, min(rounds, (1 << 30) // (BATCH * length)))
        self.fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
        capacity = max(8 << 30, 32 * 3 * BATCH * length)
        self.store, self.unverified = (
            PosixStore(
                str(folder / "store"), NAMESPACE, capacity=capacity, min_free=0, timeout=600.0,
                segment_bytes=4 << 30, verify=verify,
            )
            for verify in (True, False)
        )  # fmt: skip
        self.ratios: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {}
        self.hog_ratios: dict[str, list[float]] = {}

    def raw(self, number: int, writes: bool, threads: int) -> None:
        offsets = np.arange(BATCH, dtype=np.int64) * self.length + number * BATCH * self.length
        self.loop.move(
            self.fd, self.length, offsets, self.addresses.astype(np.uint64), self.sums,
            writes=writes, checks=False, threads=threads, piece=PIECE if writes else 1 << 31,
        )  # fmt: skip

    def timed(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds, and loops of the hog a second."""
        before, started = self.hog.count if self.hog else 0, time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return seconds, ((self.hog.count - before) / seconds if self.hog else 1.0)

    def best(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
        return min(self.timed(call) for call in calls)

    def pair(self, name: str, writes: bool, number: int, ours: Callable[[], object]) -> None:
        """Raw, ours, raw; raw has two ways, and a part of its file for each."""
        ways = [functools.partial(self.raw, 4 * number + i, writes, 1 + i % 2) for i in range(4)]
        before, after = ways[:2], ways[2:]
        first, mine, second = self.best(before), self.timed(ours), self.best(after)
        self.ratios.setdefault(name, []).append((first[0] + second[0]) / 2 / mine[0])
        self.rates.setdefault(name, []).append(BATCH * self.length / mine[0] / 1e9)
        self.hog_ratios.setdefault(name, []).append(mine[1] / max(1e-9, (first[1] + second[1]) / 2))

    def run(self) -> None:
        batch = BATCH * self.length
        os.ftruncate(self.fd, 0)
        os.posix_fallocate(self.fd, 0, 4 * self.files * batch)
        stored: list[bytes] = []

        def dump() -> None:
            ids = os.urandom(16 * BATCH)
            stored.append(ids)
            status = self.store.dump_data(ids, None, self.addresses, self.length, background=False).status()
            assert not status.any(), status

        dump()
        self.wait()
        for number in range(self.files):
            self.pair("dump", True, number, dump)
            self.wait()
        for store, name in ((self.store, "load, verified"), (self.unverified, "load, unverified")):
            for number in range(self.rounds):
                load = functools.partial(self.load, store, stored[number % len(stored)])
                self.pair(name, False, number % self.files, load)

    def load(self, store: PosixStore, ids: bytes) -> None:
        status = store.load_data(ids, None, self.addresses, self.length, background=False).status()
        assert not status.any(), status

    @staticmethod
    def wait() -> None:
        """Time for the background thread, in which the processor does not sleep."""
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until:
            hashlib.sha256(bytes(64 << 10))

    def close(self) -> None:
        self.store.close()
        self.unverified.close()
        os.close(self.fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hog", action="store_true")
    parser.add_argument("--dir", default="/dev/shm")
    args = parser.parse_args()
    print("| blocks | operation | GB/s | ratio to raw |" + (" hog, to raw |" if args.hog else ""))
    print("|---|---|---|---|" + ("---|" if args.hog else ""))
    for length in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            hog = Hog() if args.hog else None
            bench = Bench(Path(folder), length, args.rounds, hog)
            if hog:
                with hog:
                    bench.run()
            else:
                bench.run()
            for name, ratios in bench.ratios.items():
                line = f"| {length >> 10} KiB | {name} | {statistics.median(bench.rates[name]):.2f} | "
                line += f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
                if hog:
                    line += f" {statistics.median(bench.hog_ratios[name]):.2f} |"
                print(line, flush=True)
            bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
