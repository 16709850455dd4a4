#!/usr/bin/env python3
"""What eviction costs: throughput of dumps, latency of loads, planning, memory, opening.

    python scripts/bench_eviction.py [--quick] [--json FILE] [--parts dumps loads planning]
        [--memory /dev/shm] [--disk DIRECTORY] [--rounds 7]

Everything is compared within one run: the store below its capacity and the store at it take turns, several
times, and a ratio is of neighbours. Medians, with the least and the most in brackets. Writes a Markdown table
for each part to the standard output, and what they were made of to the JSON file.

dumps     bytes stored in a second, as fast as one thread can, of a store that must evict as much as it stores
          against one that is not full; batches of 128 blocks and single blocks, one writer and two processes.
          "without maintenance": without the background thread that makes room ahead. "CPU" is the ratio of
          processor time for a byte, which other users of the machine change less than they do the rate.
          A dump ends when its bytes are in the page cache; "written to disk" goes on until they are on disk.
loads     latency of 32 blocks while another thread dumps at a fixed rate, for which the store evicts or not.
planning  time to choose who leaves, memory for a block, and opening, by the number of blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eviction_bench import dumps, loads, planning
from eviction_bench.workload import Workload

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BATCH = 128


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    for row in (head, ["---"] * len(list(head)), *rows):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def workload(block: int, options: argparse.Namespace, batch: int = BATCH) -> Workload:
    """A store of 32 batches at least, so that a batch is a small part of it, and as many as memory allows."""
    most = 512 * MIB if options.quick else 2 * GIB
    return Workload(block, batch, max(32 * BATCH * block, min(256 * BATCH * block, most)))


def measure_dumps(places: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    works = [("batches of 128", workload(block, options), 1) for block in options.sizes]
    works.append(("single blocks", workload(64 * KIB, options, batch=1), 1))
    works.append(("two writers", workload(options.sizes[-1] if options.quick else 256 * KIB, options), 2))
    found = []
    for place, directory in places.items():
        for kind, work, writers in works:
            say(f"dumps: {place}, {kind}, {size(work.block_bytes)}")
            batches = max(4, options.piece // work.batch_bytes // writers)
            if work.batch == 1:
                batches = min(batches, 1000)
            make = dumps.two_writers if writers == 2 else dumps.arms
            with make(directory, work) as made:
                result = dumps.rounds(made, batches, options.rounds)
            found.append({"place": place, "kind": kind, "block_bytes": work.block_bytes, **result})
    head = ["", "blocks", "below, MB/s", "at capacity, MB/s", "ratio", "ratio, written to disk", "CPU"]
    table([*head, "ratio without maintenance", "CPU"], [_dump_row(each) for each in found])
    return found


def _dump_row(found: dict[str, Any]) -> list[str]:
    unstored = sum(arm["unstored"] for arm in found.values() if isinstance(arm, dict))
    full, without = found["full"], found.get("full, no maintenance")
    return [
        f"{found['place']}, {found['kind']}",
        size(found["block_bytes"]) + (f"; {unstored} unstored" if unstored else ""),
        found["below"]["rate"].text(0, 1e-6),
        full["rate"].text(0, 1e-6),
        full["ratio"].text(),
        full["ratio on disk"].text() if found["place"] == "disk" else "",
        full["cpu ratio"].text(),
        without["ratio"].text() if without else "",
        without["cpu ratio"].text() if without else "",
    ]


def measure_loads(places: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for place, directory in places.items():
        for block, rate in options.loads:
            work = workload(block, options)
            say(f"loads: {place}, {size(block)}, dumps of {rate // MIB} MiB/s")
            result = loads.measure(directory, work, rate, options.seconds, options.rounds)
            found.append({"place": place, "block_bytes": block, **result})
    head = [
        "",
        "loads of 32 blocks",
        "dumps beside",
        "achieved, MB/s",
        "p50, ms",
        "p99, ms",
        "p99 to below capacity",
    ]
    table(head, [row for each in found for row in _load_rows(each)])
    return found


def _load_rows(found: dict[str, Any]) -> list[list[str]]:
    what = {"idle": "none", "below": "below capacity", "full": "at capacity"}
    return [
        [
            found["place"],
            size(found["block_bytes"]) + (f"; {arm['missed']} missed" if arm["missed"] else ""),
            what[name],
            f"{arm['dumped a second'] / 1e6:.0f}",
            arm["p50"].text(2, 1e3),
            arm["p99"].text(2, 1e3),
            arm["p99 to below"].text(),
        ]
        for name, arm in ((name, found[name]) for name in loads.ARMS)
    ]


def measure_planning(directory: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for blocks in options.blocks:
        say(f"planning: {blocks} blocks")
        found.append(planning.measure(directory, blocks, options.runs))
    head = [
        "blocks",
        "open, s",
        "plan an eviction, s",
        "index, bytes a block",
        "resident memory, bytes a block",
    ]
    table(
        head,
        [
            [
                f"{each['blocks']:,}",
                f"{each['open_seconds']:.3f}",
                f"{each['plan_seconds']:.3f}",
                f"{each['index_bytes']:.0f}",
                f"{each['resident_bytes']:.0f}",
            ]
            for each in found
        ],
    )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["dumps", "loads", "planning"]
    parser.add_argument("--quick", action="store_true", help="under a minute: in memory only, and few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory; '' for none")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a directory on a disk; '' for none")
    parser.add_argument("--rounds", type=int, help="7, or 3 with --quick")
    options = parser.parse_args()
    quick = options.quick
    options.rounds = options.rounds or (3 if quick else 7)
    options.sizes = [64 * KIB] if quick else [16 * KIB, 64 * KIB, 256 * KIB, MIB]
    options.piece = (64 if quick else 256) * MIB
    options.loads = [(64 * KIB, 200 * MIB)] if quick else [(64 * KIB, 200 * MIB), (256 * KIB, 400 * MIB)]
    options.seconds = 1.5 if quick else 5.0
    options.blocks = [10_000, 100_000] if quick else [10_000, 100_000, 1_000_000]
    options.runs = 3 if quick else 5
    return options


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value))


def main() -> None:
    options = parse()
    places = {"memory": options.memory, "disk": "" if options.quick else options.disk}
    places = {place: directory for place, directory in places.items() if directory}
    found: dict[str, Any] = {}
    if "dumps" in options.parts:
        found["dumps"] = measure_dumps(places, options)
    if "loads" in options.parts:
        found["loads"] = measure_loads(places, options)
    if "planning" in options.parts:
        found["planning"] = measure_planning(options.memory or options.disk, options)
    if options.json:
        options.json.write_text(json.dumps(found, default=plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
