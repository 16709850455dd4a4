"""`ucm-sglang pins`: what is pinned, and how much of it is stored. Reads only."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from posix_store.pins import Pin
from posix_store.root import StoreRoot
from ucm_sglang.cli.holdings import Holdings
from ucm_sglang.cli.support import (
    add_json,
    add_namespace,
    add_path,
    age_text,
    count_text,
    matching_namespaces,
    print_lines,
    print_table,
    report_on,
    size_text,
)

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

STORED, PARTLY, ABSENT = "stored", "in part", "not stored"
"""State of a pinned chain: whole; some of it; none of it."""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "pins",
        help="list what is pinned",
        description="List what is pinned, and how much of it is stored now. Writes nothing.",
    )
    add_path(parser)
    add_namespace(parser, "only namespaces whose name begins with these hex digits")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return report_on(args, lambda place: collect(place.root, args.namespace), _show)


def collect(root: StoreRoot, prefix: str | None = None) -> dict[str, Any]:
    """The pins of the namespaces that begin with `prefix`. Raises `OSError`, `ConfigError`."""
    namespaces = [_namespace(root, name) for name in matching_namespaces(root, prefix)]
    return {
        "path": root.path,
        "capacity_bytes": root.capacity,
        "kept_bytes": sum(entry["kept_bytes"] for entry in namespaces),
        "namespaces": namespaces,
    }


def _show(report: dict[str, Any]) -> None:
    rows = [[entry["namespace"][:12], *_row(pin)] for entry in report["namespaces"] for pin in entry["pins"]]
    if rows:
        print_table(["namespace", "id", "state", "pinned", "note"], ["blocks", "kept"], rows)
    share = f"{report['kept_bytes'] / report['capacity_bytes']:.1%} of the capacity"
    print_lines([f"{count_text(len(rows), 'pin')}: {size_text(report['kept_bytes'])} kept, {share}"])


def _namespace(root: StoreRoot, name: str) -> dict[str, Any]:
    holdings = Holdings(root, name)
    kept = holdings.protected_by(holdings.pins)
    return {
        "namespace": name,
        "kept_blocks": int(kept.sum()),
        "kept_bytes": int(holdings.blocks.length[kept].sum()),
        "pins": [_pin(holdings, pin) for pin in holdings.pins],
    }


def _pin(holdings: Holdings, pin: Pin) -> dict[str, Any]:
    found = holdings.rows_of(b"".join((pin.id, *pin.others))).tolist()
    chains = [holdings.chain(row) for row in found if row >= 0]
    rows = sorted({row for chain in chains if chain.missing is None for row in chain.rows.tolist()})
    whole = found[0] >= 0 and all(chain.missing is None for chain in chains)
    state = (STORED if whole else PARTLY) if chains else ABSENT
    return {
        "id": pin.id.hex(),
        "note": pin.note,
        "pinned": pin.time,
        "state": state,
        "kept_blocks": len(rows),
        "kept_bytes": int(holdings.blocks.length[rows].sum()),
    }


def _row(pin: dict[str, Any]) -> list[str]:
    return [
        pin["id"],
        pin["state"],
        f"{age_text(time.time() - pin['pinned'])} ago",
        pin["note"],
        f"{pin['kept_blocks']:,}",
        size_text(pin["kept_bytes"]),
    ]
