"""From what was measured to the records of results.json."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from store_bench.cases import Case
from store_bench.geometries import block_sizes
from store_bench.runner import Measured
from store_bench.statistics import paired_ratios, summarise

FIELDS = (
    "store", "operation", "block_bytes", "batch", "medium", "io_mode", "verify", "hog", "gbytes_per_s",
    "seconds_median", "seconds_spread", "runs",
)  # fmt: skip
"""What every record has. For what moves no blocks, `gbytes_per_s` is null and there is `keys_per_s`."""

_MOVES = ("dump", "dump-sustained", "load", "load-shuffled", "load-interleaved", "dump-evicting")


def records(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One record for each store, setting of `verify`, case and operation."""
    by_case: dict[Case, list[Measured]] = defaultdict(list)
    for one in measured:
        by_case[one.case].append(one)
    made = []
    for case, group in by_case.items():
        for operation in dict.fromkeys(name for one in group for name in one.rounds):
            made += _operation(case, operation, _best_ways(group, operation))
    return made


def _best_ways(group: Sequence[Measured], operation: str) -> list[Measured]:
    """Of several ways to run a store, the one with the least median."""
    best: dict[tuple[str, bool], Measured] = {}
    for one in group:
        if operation not in one.rounds:
            continue
        key = (one.participant.entry.store, one.participant.verify)
        before = best.get(key)
        if before is None or _median(one, operation) < _median(before, operation):
            best[key] = one
    return list(best.values())


def _median(one: Measured, operation: str) -> float:
    return statistics.median(one.rounds[operation])


def _operation(case: Case, operation: str, group: Sequence[Measured]) -> list[dict[str, Any]]:
    raw = {one.participant.entry.store: one for one in group}.get("raw")
    made = []
    for one in group:
        seconds = summarise(one.rounds[operation])
        moves = operation in _MOVES
        record: dict[str, Any] = {
            "store": one.participant.entry.store,
            "operation": operation,
            "block_bytes": case.block_bytes,
            "batch": case.batch,
            "medium": case.medium.removesuffix("-direct"),
            "io_mode": case.io_mode,
            "verify": one.participant.verify,
            "hog": case.hog,
            "gbytes_per_s": case.block_bytes * case.batch / seconds.median / 1e9 if moves else None,
            "seconds_median": seconds.median,
            "seconds_spread": seconds.spread,
            "runs": seconds.count,
            "seconds_of_rounds": one.rounds[operation],
            "calls": one.calls[operation],
            "geometries": block_sizes().get(case.block_bytes, []),
            "preallocated": one.preallocated,
            "facts": one.facts,
        }
        if not moves:
            record |= {"keys": case.keys, "keys_per_s": case.keys / seconds.median}
        record |= _against_raw(one, raw, operation)
        made.append(record)
    return made


def _against_raw(one: Measured, raw: Measured | None, operation: str) -> dict[str, Any]:
    if raw is None:
        return {}
    found: dict[str, Any] = {}
    if len(raw.rounds[operation]) == len(one.rounds[operation]):
        ratio = summarise(paired_ratios(one.rounds[operation], raw.rounds[operation]))
        found |= {"ratio_to_raw": ratio.median, "ratio_to_raw_spread": ratio.spread}
    if one.case.hog and len(raw.hog_rates[operation]) == len(one.hog_rates[operation]):
        pairs = zip(one.hog_rates[operation], raw.hog_rates[operation], strict=True)
        rates = summarise([mine / raws for mine, raws in pairs if raws] or [0.0])
        found |= {
            "hog_loops_per_s": statistics.median(one.hog_rates[operation]) * 50,
            "hog_rate_ratio": rates.median,
            "hog_rate_ratio_spread": rates.spread,
        }
    return found
