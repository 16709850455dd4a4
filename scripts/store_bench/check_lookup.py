"""Must hold 4: what a lookup costs, from SGLang's keys and from ids."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store_bench.checks import row
from store_bench.rigs import keys, rig

_KEYS, _RUNS = 2000, 100


def run(directory: Path) -> list[dict[str, Any]]:
    """`batch_exists` of strings through the adapter, `lookup_on_prefix` of packed ids on its store."""
    with rig(directory / "lookup", page_size=1, layers=1, heads=1, head_dim=64) as made:
        storage = made.storage
        asked = keys(_KEYS, "lookup")
        pages = made.host_pool.size
        indices = made.host_pool.free_slots[:pages].clone()
        for start in range(0, _KEYS, pages):
            part = asked[start : start + pages]
            assert all(storage.batch_set_v1(part, indices[: len(part)]))
        assert storage.batch_exists(asked) == _KEYS
        strings = _median(lambda: storage.batch_exists(asked))
        packed = storage._ids.of("kv", asked)
        ids = _median(lambda: storage._store.lookup_on_prefix(packed))
        engine = storage._store.engine.name
    method = f"median of {_RUNS} calls, all keys stored, engine {engine}"
    return [
        row(4, f"batch_exists of {_KEYS:,} keys", strings * 1e3, "ms", method, most=1.5),
        row(4, "lookup_on_prefix", _KEYS / ids / 1e6, "million keys/s", method, most=None, least=2),
    ]


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
