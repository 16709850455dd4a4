"""One turn of one store: fresh blocks in, the same blocks out, only the store's calls timed."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from store_bench.hog import Hog, hogged
from store_bench.stores.base import StoreUnderTest

INTERLEAVED_BATCHES = 8
_PAUSE_SECONDS = 0.05
_WORK = bytes(64 << 10)
_MOST_SECONDS = 2.0


class WrongBytes(Exception):
    """What was loaded is not what was dumped."""


@dataclass
class Clock:
    """Seconds of every call by operation, and the hog's loops while calls ran."""

    hog: Hog | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    loops: dict[str, list[float]] = field(default_factory=dict)

    def time(self, operation: str, call: Callable[[Any], Any], argument: Any) -> Any:
        hog = self.hog
        before = hog.count if hog else 0
        started = time.perf_counter()
        result = call(argument)
        seconds = time.perf_counter() - started
        self.samples.setdefault(operation, []).append(seconds)
        if hog:
            total = self.loops.setdefault(operation, [0.0, 0.0])
            total[0] += hog.count - before
            total[1] += seconds
        return result

    def has_enough(self, operation: str) -> bool:
        """Two calls or more that took long together: beside the hog some stores need seconds for one."""
        times = self.samples[operation]
        return len(times) >= 2 and sum(times) > _MOST_SECONDS

    def result(self) -> dict[str, Any]:
        rates = {name: loops / seconds for name, (loops, seconds) in self.loops.items()}
        return {"samples": self.samples, "hog_rates": rates}


def new_ids(source: random.Random, count: int) -> list[bytes]:
    return [source.randbytes(16) for _ in range(count)]


def run_turn(store: StoreUnderTest, plan: dict[str, Any]) -> dict[str, Any]:
    """Run a turn as the plan says, in each of the store's ways; its `kind` is one of `KINDS`.

    Raises `WrongBytes`, or whatever the store raises.
    """
    results = {}
    for way in store.ways:
        store.use(way)
        if plan.get("check", False):
            # Loads in another order left the memory permuted.
            store.blocks.fill()
        gc.collect()
        gc.disable()
        try:
            store.begin()
            with hogged(plan.get("hog", False)) as hog:
                clock = Clock(hog)
                KINDS[plan["kind"]](store, plan, random.Random(plan["seed"]), clock)
            results[way] = clock.result()
        finally:
            gc.enable()
            store.end()
    return {"ways": results}


def _warm(store: StoreUnderTest, source: random.Random) -> None:
    """A batch that is not timed, and a pause: what a store does once in its life is not a batch's cost."""
    started = time.perf_counter()
    store.dump(store.prepare_dump(new_ids(source, store.blocks.count)))
    _pause(time.perf_counter() - started)


def _pause(seconds: float) -> None:
    """After work that took `seconds`: a server computes between two batches, and stores may use that time.

    It computes here too, without the GIL: a processor of a virtual machine that sleeps is slow at first.
    """
    until = time.perf_counter() + max(_PAUSE_SECONDS, 2 * min(seconds, _MOST_SECONDS))
    while time.perf_counter() < until:
        hashlib.sha256(_WORK)


def transfers(store: StoreUnderTest, plan: dict[str, Any], source: random.Random, clock: Clock) -> None:
    """Up to `depth` dumps of new batches, then loads of them in each of the orders `loads`.

    There is a pause behind each dump of the first half; those of the second half follow each other at once.
    """
    batch = store.blocks.count
    _warm(store, source)
    batches: list[list[bytes]] = []
    for operation, count in (("dump", -(-plan["depth"] // 2)), ("dump-sustained", plan["depth"] // 2)):
        for _ in range(count):
            ids = new_ids(source, batch)
            store.blocks.stamp(ids)
            clock.time(operation, store.dump, store.prepare_dump(ids))
            batches.append(ids)
            if operation == "dump":
                _pause(clock.samples["dump"][-1])
            if clock.has_enough(operation):
                break
    check = plan.get("check", False)
    for operation in plan["loads"]:
        for number, (rows, ids) in enumerate(_orders(operation, store, batches, source, check)):
            whole = check and number == 0
            store.blocks.wipe() if whole else store.blocks.clear_stamps()
            clock.time(operation, store.load, store.prepare_load(ids))
            if not store.blocks.stamps_are(ids) or (whole and not store.blocks.hold_pattern_of(rows)):
                raise WrongBytes(f"{operation}: the loaded bytes are not the dumped bytes")
            if clock.has_enough(operation):
                break


def _orders(
    operation: str, store: StoreUnderTest, batches: list[list[bytes]], source: random.Random, check: bool
) -> list[tuple[list[int], list[bytes]]]:
    """(rows, ids) of each load of an operation: the ids in their order, and the row each was dumped from."""
    batch = store.blocks.count
    in_order = list(range(batch))
    if operation == "load":
        return [(in_order, ids) for ids in batches]
    if operation == "load-shuffled":
        shuffled = [source.sample(in_order, batch) for _ in batches]
        return [(rows, [ids[row] for row in rows]) for rows, ids in zip(shuffled, batches, strict=True)]
    if operation == "load-interleaved":
        return _interleaved(store, batches, source, check)
    raise ValueError(operation)


def _interleaved(
    store: StoreUnderTest, batches: list[list[bytes]], source: random.Random, check: bool
) -> list[tuple[list[int], list[bytes]]]:
    """Loads that take each next block from another of 8 batches; of smaller ones where 8 are too many."""
    batch, share = store.blocks.count, store.blocks.count // INTERLEAVED_BATCHES
    if len(batches) >= INTERLEAVED_BATCHES:
        loads = []
        for turn in range(min(INTERLEAVED_BATCHES, len(batches))):
            rows = [turn * share + row // INTERLEAVED_BATCHES for row in range(batch)]
            loads.append((rows, [batches[i % INTERLEAVED_BATCHES][row] for i, row in enumerate(rows)]))
        return loads
    parts = [new_ids(source, share) for _ in range(INTERLEAVED_BATCHES)]
    if check:
        store.blocks.fill()
    for number, ids in enumerate(parts):
        store.blocks.stamp(ids, number * share)
        store.dump(store.prepare_dump(ids, number * share))
    places = [(i % INTERLEAVED_BATCHES, i // INTERLEAVED_BATCHES) for i in range(batch)]
    load = [part * share + row for part, row in places], [parts[part][row] for part, row in places]
    return [load] * 2


def lookups(store: StoreUnderTest, plan: dict[str, Any], source: random.Random, clock: Clock) -> None:
    """Lookups of `keys` ids that are all stored."""
    ids = _dump_many(store, plan["keys"], source)
    prepared = store.prepare_lookup(ids)
    for _ in range(plan["repeats"]):
        if clock.time("lookup", store.lookup, prepared) != len(ids):
            raise WrongBytes("lookup: a block that was dumped is not found")


def opens(store: StoreUnderTest, plan: dict[str, Any], source: random.Random, clock: Clock) -> None:
    """Opening what holds `keys` blocks, as a new process would, up to the first lookup that finds them."""
    prepared = store.prepare_lookup(_dump_many(store, plan["keys"], source)[:1])

    def reopen(_: None) -> int:
        store.reopen()
        return store.lookup(prepared)

    for _ in range(plan["repeats"]):
        found = clock.time("open", reopen, None)
        store.after_reopen()
        if not found:
            raise WrongBytes("open: a block that was dumped is not found")


def evictions(store: StoreUnderTest, plan: dict[str, Any], source: random.Random, clock: Clock) -> None:
    """Dumps into a store that is full already, so that each has to make as much room as it takes."""
    batch = store.blocks.count
    for number in range(plan["fill"] + plan["depth"]):
        ids = new_ids(source, batch)
        prepared = store.prepare_dump(ids)
        if number < plan["fill"]:
            store.dump(prepared)
        else:
            clock.time("dump-evicting", store.dump, prepared)
    used = sum(path.lstat().st_blocks * 512 for path in store.directory.rglob("*"))
    if used > 1.25 * store.spec.capacity:
        raise RuntimeError(f"does not evict: {used} bytes on disk, capacity {store.spec.capacity}")


def _dump_many(store: StoreUnderTest, count: int, source: random.Random) -> list[bytes]:
    ids = new_ids(source, count)
    batch = store.blocks.count
    for start in range(0, count, batch):
        store.dump(store.prepare_dump(ids[start : start + batch]))
    return ids


KINDS: dict[str, Callable[[StoreUnderTest, dict[str, Any], random.Random, Clock], None]] = {
    "transfers": transfers,
    "lookup": lookups,
    "open": opens,
    "evict": evictions,
}
