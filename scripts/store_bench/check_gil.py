"""Must hold 6: how long one call of SGLang's I/O thread into the adapter keeps the GIL.

Two ways. The first decides:

* Processor time of the calling thread in the call, less what it spends in the engine's native function and in
  system calls, which run without the GIL. What else the machine does hardly changes it.
* A second thread, on a core of its own, reads the clock as fast as Python can. It stops when it does not have
  the GIL, so gaps between its readings that overlap the call are the time for which the call kept the GIL.
  What the kernel let it wait for its core (its schedstat) is taken off. True only while the machine does
  nothing else.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from store_bench.checks import row
from store_bench.geometries import GIB, size_text
from store_bench.rigs import PAGES, keys, rig

_MOST_MS = 0.4
_MOST_CALLS, _MOST_BYTES = 60, GIB
_GAP_NS = 3_000
_VERBS = ("batch_set_v1", "batch_get_v1")

# Pages of 256 bytes, 64 KiB, 1 MiB with 2 components each, and of 256 KiB with 32.
_POOLS: list[dict[str, Any]] = [
    {"page_size": 1, "layers": 1, "heads": 1, "head_dim": 64, "layout": "page_first_direct"},
    {"page_size": 16, "layers": 4, "heads": 2, "head_dim": 128, "layout": "page_first_direct"},
    {"page_size": 16, "layers": 16, "heads": 8, "head_dim": 128, "layout": "page_first_direct"},
    {"page_size": 16, "layers": 16, "heads": 2, "head_dim": 128, "layout": "layer_first"},
]


class GapMeter:
    """A thread that notes gaps between its readings of the clock, while the context lasts."""

    def __init__(self, core: int) -> None:
        self._core = core
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._stop = False
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def delay(self) -> int:
        """Nanoseconds for which the thread was ready to run and did not, so far."""
        text = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text()
        return int(text.split()[1])

    def _spin(self) -> None:
        os.sched_setaffinity(0, {self._core})
        now, starts, ends = time.perf_counter_ns, self._starts, self._ends
        last = now()
        while not self._stop:
            reading = now()
            if reading - last > _GAP_NS:
                starts.append(last)
                ends.append(reading)
            last = reading

    def __enter__(self) -> GapMeter:
        self._thread.start()
        time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def held(self, start: int, end: int) -> int:
        """Nanoseconds of gaps within [start, end]. For after the context, when all gaps are known."""
        total = 0
        for place in range(bisect_left(self._ends, start), len(self._starts)):
            if self._starts[place] >= end:
                break
            total += max(0, min(end, self._ends[place]) - max(start, self._starts[place]))
        return total


def run(directory: Path) -> list[dict[str, Any]]:
    cores = os.sched_getaffinity(0)
    # Threads made from now on inherit this: the engine's as well. The last core is for the meter.
    os.sched_setaffinity(0, cores - {max(cores)} or cores)
    rows = []
    for number, pool in enumerate(_POOLS):
        with rig(directory / f"gil-{number}", **pool) as made:
            rows += _of_pool(made, max(cores))
    return rows


def _of_pool(made: Any, core: int) -> list[dict[str, Any]]:
    storage, pool = made.storage, made.host_pool
    page_bytes = pool.size_per_token * made.page_size
    count = min(_MOST_CALLS, _MOST_BYTES // (page_bytes * PAGES))
    indices = pool.free_slots[: PAGES * made.page_size].clone()
    name = f"{PAGES} pages of {size_text(page_bytes)}, {pool.layout}"
    _calls(storage, "warm", 3, indices, lambda: 0)

    with _time_without_gil(storage._store) as inside:
        python = _calls(storage, "alone", count, indices, lambda: time.thread_time_ns() - inside[0])
    method = f"processor time outside the native function and system calls, median of {count} calls"
    rows = [
        row(6, f"{verb}, {name}", statistics.median(end - start for start, end in times) / 1e6, "ms", method,
            most=_MOST_MS)
        for verb, times in python.items()
    ]  # fmt: skip

    spans: dict[str, list[tuple[int, int]]] = {}
    with GapMeter(core) as meter:
        delays = _calls(storage, "beside", count, indices, meter.delay, spans)
    method = f"gaps of a second thread, median of {count} calls; only on a machine that does nothing else"
    for verb, times in delays.items():
        held = [
            max(0, meter.held(*span) - (after - before))
            for span, (before, after) in zip(spans[verb], times, strict=True)
        ]
        rows.append(row(6, f"{verb}, {name}", statistics.median(held) / 1e6, "ms", method, most=None))
    return rows


def _calls(
    storage: Any,
    salt: str,
    count: int,
    indices: Any,
    reading: Any,
    spans: dict[str, list[tuple[int, int]]] | None = None,
) -> dict[str, list[tuple[int, int]]]:
    """`reading()` before and after each of `count` calls of each verb; the clock, too, in `spans`."""
    readings: dict[str, list[tuple[int, int]]] = {verb: [] for verb in _VERBS}
    for number in range(count):
        batch = keys(PAGES, f"{salt}-{number}")
        for verb in _VERBS:
            call = getattr(storage, verb)
            before = reading()
            start = time.perf_counter_ns()
            good = call(batch, indices)
            end = time.perf_counter_ns()
            readings[verb].append((before, reading()))
            if spans is not None:
                spans.setdefault(verb, []).append((start, end))
            assert all(good), verb
    return readings


@contextmanager
def _time_without_gil(store: Any) -> Iterator[list[int]]:
    """A list of one number: nanoseconds of processor time of this thread in what runs without the GIL.

    That is the engine's native function, and the system calls of the store.
    """
    me, total = threading.get_ident(), [0]

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != me:
                return call(*arguments, **named)
            start = time.thread_time_ns()
            try:
                return call(*arguments, **named)
            finally:
                total[0] += time.thread_time_ns() - start

        return run

    calls = store._calls
    places = [(calls, name) for name in dir(calls) if not name.startswith("_")]
    if hasattr(store.engine, "_move"):
        places.append((store.engine, "_move"))
    before = [vars(place).get(name) for place, name in places]
    for place, name in places:
        setattr(place, name, timed(getattr(place, name)))
    try:
        yield total
    finally:
        for (place, name), value in zip(places, before, strict=True):
            delattr(place, name)
            if value is not None:
                setattr(place, name, value)
