"""`ucm-sglang evict`: make room now, as a full store does by itself. Safe while servers run."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from rich.progress import DownloadColumn

from posix_store.capacity import SpaceKeeper
from posix_store.evictor import EvictionReport, Evictor
from posix_store.policies import LRU, POLICIES, policy_named
from posix_store.root import StoreRoot
from ucm_sglang.cli.support import (
    Place,
    add_json,
    add_namespace,
    add_path,
    count_text,
    duration_argument,
    one_namespace,
    print_lines,
    progress,
    report_on,
    size_argument,
    size_text,
)

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

_STEP_SECONDS = 2.0
"""Time of one step, after which progress is shown and other processes may evict."""
_TIDY_SECONDS = 30.0
_IDLE_STEPS = 3
"""Steps that free nothing, after which there is nothing more to evict."""
_NO_LIMIT = 1 << 62


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "evict",
        help="evict the coldest blocks now",
        description="Evict blocks now, the coldest first and the ends of chains before their heads; pinned "
        "blocks stay. Servers may be running. With a config file for PATH its `policy` says what is cold. "
        "Exit status: 0; 1 less was evicted than asked for; 2 not done.",
    )
    add_path(parser)
    add_namespace(parser, "only from the namespace whose name begins with these hex digits")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="SIZE", help="until the whole store takes up no more than this on disk")
    what.add_argument("--bytes", metavar="SIZE", help="about so much, on disk")
    what.add_argument(
        "--older-than", metavar="DURATION", help="what was stored longer ago than this, such as 12h or 7d"
    )
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), help=f"default: what the config file says, else {LRU.name}"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Wrong arguments are refused before the first root is touched.
    size = args.to or args.bytes
    wanted = size_argument("--to" if args.to else "--bytes", size) if size else None
    older_than = time.time() - duration_argument("--older-than", args.older_than) if args.older_than else None
    return report_on(
        args,
        lambda place: _collect(place, args, wanted, older_than),
        _show,
        lambda reports: all(report["reached"] for report in reports),
    )


def _collect(
    place: Place, args: argparse.Namespace, wanted: int | None, older_than: float | None
) -> dict[str, Any]:
    names = [one_namespace(place.root, args.namespace)] if args.namespace is not None else None
    root = place.writable()
    policy = policy_named(args.policy or (place.config.policy if place.config else LRU.name))
    before = root.allocated_bytes()
    evictor = Evictor(root, SpaceKeeper(root, place.min_free, chunk=0), policy)
    try:
        # What nobody can use goes before anything that somebody can.
        garbage = evictor.tidy(time.monotonic() + _TIDY_SECONDS)
        if wanted is None:
            target = _NO_LIMIT
        else:
            target = root.allocated_bytes() - wanted if args.to else wanted - garbage
        total = _evict(root, evictor, target, names, older_than)
    finally:
        evictor.close()
    after = root.allocated_bytes()
    return {
        "path": root.path,
        "policy": policy.name,
        "evicted_blocks": total.blocks,
        "freed_bytes": total.bytes + garbage,
        "garbage_bytes": garbage,
        "deleted_segments": total.segments,
        "allocated_bytes_before": before,
        "allocated_bytes": after,
        "capacity_bytes": root.capacity,
        "reached": wanted is None or (after <= wanted if args.to else total.bytes >= target),
    }


def _evict(
    root: StoreRoot, evictor: Evictor, target: int, names: list[str] | None, older_than: float | None
) -> EvictionReport:
    """Evict in steps until about `target` bytes are free, or nothing can be evicted any more."""
    total, idle = EvictionReport(), 0
    with progress(DownloadColumn(binary_units=True)) as bar:
        task = bar.add_task(f"evict {root.path}", total=None if target == _NO_LIMIT else max(0, target))
        while total.bytes < target and idle < _IDLE_STEPS:
            part = evictor.evict(
                target - total.bytes,
                time.monotonic() + _STEP_SECONDS,
                namespaces=names,
                older_than=older_than,
            )
            # A step that frees nothing may only have waited for another process that evicts.
            idle = 0 if part.blocks or part.bytes else idle + 1
            total.blocks += part.blocks
            total.bytes += part.bytes
            total.segments += part.segments
            bar.update(task, completed=total.bytes)
    return total


def _show(report: dict[str, Any]) -> None:
    blocks = count_text(report["evicted_blocks"], "block")
    segments = count_text(report["deleted_segments"], "whole segment")
    garbage = size_text(report["garbage_bytes"])
    lines = [
        f"evicted    {blocks} ({report['policy']}), {segments}",
        f"freed      {size_text(report['freed_bytes'])}, of which {garbage} was garbage",
        f"allocated  {size_text(report['allocated_bytes'])} of {size_text(report['capacity_bytes'])}, "
        f"{size_text(report['allocated_bytes_before'])} before",
    ]
    if not report["reached"]:
        lines.append(
            "less than asked for: what is left is pinned, younger, in other namespaces, no payload, or was "
            "stored in the meantime; `ucm-sglang du` and `pins` show it"
        )
    print_lines(lines)
