"""Latency of loads beside a dumper that makes the store evict, and beside one of the same rate that does not.

One process: a thread loads batches of 32 consecutive blocks that were dumped lately, one after the other with
a pause between, and measures each. Another dumps batches of 128 blocks at fixed times. Only what the dumps do
differs between the arms: there are none (idle), they go to a store below its capacity, or to one at it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eviction_bench.dumps import SETTLE_SECONDS
from eviction_bench.workload import Arm, Spread, Workload

LOAD_BLOCKS = 32
PAUSE_SECONDS = 0.001
ARMS = ("idle", "below", "full")


@dataclass
class _Dumper:
    """Dumps at fixed times, whatever the dumps before took; remembers the latest chains."""

    arm: Arm
    batches_a_second: float
    recent: deque[np.ndarray]
    done: int = 0
    late: int = 0
    """Dumps that began more than a period after their time."""
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        period = 1 / self.batches_a_second
        began = time.perf_counter()
        while not self.stop.is_set():
            due = began + self.done * period
            now = time.perf_counter()
            if now < due and self.stop.wait(due - now):
                return
            self.late += now > due + period
            self.recent.append(self.arm.dump())
            self.done += 1


def measure(
    directory: str, work: Workload, bytes_a_second: float, seconds: float, count: int
) -> dict[str, Any]:
    """p50 and p99 of load latency in each arm and round, and the ratio of p99 at capacity to that below.

    Args:
        bytes_a_second: of the dumper.
        seconds: of one piece. count: of rounds.
    """
    made = {name: Arm(directory, 10 + number, work, full=name == "full") for number, name in enumerate(ARMS)}
    with contextlib.ExitStack() as stack:
        for arm in made.values():
            stack.enter_context(arm)
            arm.fill()
        found: dict[str, list[_Loads]] = {name: [] for name in ARMS}
        for number in range(count):
            turn = number % len(ARMS)
            for name in ARMS[turn:] + ARMS[:turn]:
                rate = 0.0 if name == "idle" else bytes_a_second / work.batch_bytes
                found[name].append(_piece(made[name], rate, seconds, number))
    return _summary(found, work, bytes_a_second)


@dataclass(frozen=True)
class _Loads:
    latency: np.ndarray
    missed: int
    dumped: int
    late: int
    seconds: float


def _piece(arm: Arm, batches_a_second: float, seconds: float, seed: int) -> _Loads:
    if not arm.full:
        arm.store.clear()
    # A quarter of what fits: eviction has not reached it.
    work = arm.chains.work
    recent: deque[np.ndarray] = deque(maxlen=max(2, work.capacity // work.batch_bytes // 4))
    for _ in range(recent.maxlen or 0):
        recent.append(arm.dump())
    time.sleep(SETTLE_SECONDS)
    dumper = _Dumper(arm, batches_a_second or 1.0, recent)
    thread = threading.Thread(target=dumper.run)
    started = time.perf_counter()
    if batches_a_second:
        thread.start()
    try:
        latency, missed = _load(arm, recent, started + seconds, seed)
    finally:
        dumper.stop.set()
        if batches_a_second:
            thread.join()
    return _Loads(np.array(latency), missed, dumper.done, dumper.late, time.perf_counter() - started)


def _load(arm: Arm, recent: deque[np.ndarray], until: float, seed: int) -> tuple[list[float], int]:
    random = np.random.default_rng(seed)
    size = arm.chains.work.block_bytes
    memory = np.zeros(LOAD_BLOCKS * size, np.uint8)
    addresses = memory.ctypes.data + np.arange(LOAD_BLOCKS, dtype=np.int64)[:, None] * size
    latency: list[float] = []
    missed = 0
    while time.perf_counter() < until:
        chain = recent[int(random.integers(len(recent)))]
        first = int(random.integers(len(chain) - LOAD_BLOCKS + 1))
        began = time.perf_counter()
        task = arm.store.load_data(
            chain[first : first + LOAD_BLOCKS], None, addresses, size, background=False
        )
        latency.append(time.perf_counter() - began)
        missed += not task.results().all()
        time.sleep(PAUSE_SECONDS)
    return latency, missed


def _summary(found: dict[str, list[_Loads]], work: Workload, bytes_a_second: float) -> dict[str, Any]:
    p99 = {name: [float(np.percentile(each.latency, 99)) for each in of] for name, of in found.items()}
    result: dict[str, Any] = {
        "dump_bytes_a_second": bytes_a_second,
        "load_bytes": LOAD_BLOCKS * work.block_bytes,
    }
    for name, of in found.items():
        result[name] = {
            "p50": Spread.of([float(np.median(each.latency)) for each in of]),
            "p99": Spread.of(p99[name]),
            "p99 to below": Spread.of([a / b for a, b in zip(p99[name], p99["below"], strict=True)]),
            "p99 of all rounds": float(np.percentile(np.concatenate([each.latency for each in of]), 99)),
            "loads": sum(len(each.latency) for each in of),
            "missed": sum(each.missed for each in of),
            "dumped a second": sum(each.dumped for each in of)
            * work.batch_bytes
            / sum(each.seconds for each in of),
            "late dumps": sum(each.late for each in of),
        }
    return result
