"""`ucm-sglang stats`: what is in a store. Reads only, also while servers use it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Column, Table

from posix_store import PosixStore
from posix_store.root import StoreRoot
from ucm_sglang.cli.support import add_json, add_path, free_bytes, output_console, report_on, size_text

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

_IDENTITY = ("namespace", "model", "cache", "page", "rank")
_NUMBERS = ("blocks", "payload", "segments", "live writers", "damaged")
_TABLE_WIDTH = 120
"""Columns of a terminal below which a namespace is shown line by line."""
_AXES = ("tp", "pp", "cp", "dcp", "dp")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "stats",
        help="show what a store holds",
        description="Show what a store holds, by namespace. Writes nothing; servers may be running.",
    )
    add_path(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return report_on(args, lambda place: collect(place.root), _show)


def collect(root: StoreRoot) -> dict[str, Any]:
    """Numbers of a store and of each of its namespaces, sizes in bytes. Raises `OSError`."""
    namespaces = [_namespace(root, name) for name in root.namespaces()]
    return {
        "path": root.path,
        "capacity_bytes": root.capacity,
        "allocated_bytes": root.allocated_bytes(),
        "free_bytes": free_bytes(root.path),
        "namespaces": namespaces,
    }


def _namespace(root: StoreRoot, name: str) -> dict[str, Any]:
    with PosixStore(root.path, name, writable=False, maintenance=False) as store:
        stats = store.stats()
    return {
        "namespace": name,
        "identity": root.read_identity(name),
        "blocks": stats.blocks,
        "incomplete_blocks": stats.incomplete_blocks,
        "payload_bytes": stats.payload_bytes,
        "segments": stats.segments,
        "live_writers": stats.live_writers,
        "damaged_records": stats.catalog["damaged_records"],
        "damaged_journals": stats.catalog["damaged_journals"],
        "truncated_blocks": stats.catalog["truncated_blocks"],
    }


def _show(report: Mapping[str, Any]) -> None:
    console = output_console()
    # Paths and names are data: never read as markup, and never broken in the middle.
    console.print(f"store      {report['path']}", markup=False, soft_wrap=True)
    for label in ("capacity", "allocated", "free"):
        console.print(f"{label:<9}  {size_text(report[f'{label}_bytes'])}")
    if not report["namespaces"]:
        console.print("\nNo namespaces yet: no server has stored anything.")
        return
    rows = [_row(entry) for entry in report["namespaces"]]
    console.print()
    if console.width < _TABLE_WIDTH:
        for row in rows:
            for heading, cell in zip((*_IDENTITY, *_NUMBERS), row, strict=True):
                console.print(f"{heading:<12} {cell}", soft_wrap=True)
            console.print()
        return
    identity = [Column(heading, overflow="fold", no_wrap=heading == "namespace") for heading in _IDENTITY]
    numbers = [Column(heading, justify="right") for heading in _NUMBERS]
    table = Table(*identity, *numbers)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _row(entry: Mapping[str, Any]) -> list[str]:
    damaged = entry["damaged_records"] + entry["damaged_journals"] + entry["truncated_blocks"]
    cells = [
        *identity_cells(entry["identity"]),
        f"{entry['blocks']:,}",
        size_text(entry["payload_bytes"]),
        f"{entry['segments']:,}",
        f"{entry['live_writers']:,}",
        f"{damaged:,}",
    ]
    return [entry["namespace"][:12], *(escape(cell) for cell in cells)]


def identity_cells(identity: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    """Model, cache, page and rank in a few words; NAMESPACE.json may be missing or of another version."""
    if identity is None:
        return "(NAMESPACE.json is missing or damaged)", "", "", ""

    def words(*names: str) -> str:
        return " ".join(str(identity[name]) for name in names if identity.get(name) not in (None, ""))

    tag = f" (tag {identity['tag']})" if identity.get("tag") else ""
    page_bytes = identity.get("page_bytes")
    size = f", {size_text(page_bytes)}" if isinstance(page_bytes, int) else ""
    return (
        words("model", "quantization") + tag,
        words("kv_dtype", "attention", "layout"),
        f"{identity.get('page_size', '?')} tokens{size}",
        _rank(identity),
    )


def _rank(identity: Mapping[str, Any]) -> str:
    sizes = {axis: identity.get(f"{axis}_size") for axis in _AXES}
    parts = [
        f"{axis} {identity.get(f'{axis}_rank')}/{size}"
        for axis, size in sizes.items()
        if size not in (None, 1)
    ]
    return " ".join(parts) or "-"
