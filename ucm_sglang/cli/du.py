"""`ucm-sglang du`: what a store takes up on disk, and how much of that is payload. Reads only."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posix_store.root import StoreRoot
from posix_store.segment import SEGMENT_HEADER_BYTES
from ucm_sglang.cli.holdings import Holdings, segment_files, segment_names
from ucm_sglang.cli.stats import identity_cells
from ucm_sglang.cli.support import (
    add_json,
    add_path,
    count_text,
    free_bytes,
    print_lines,
    print_table,
    report_on,
    size_text,
)

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

LIVE, SEALED, DEAD, EMPTY, UNREADABLE = "live writer", "sealed", "dead writer", "empty", "unreadable"
_NUMBERS = ("segments", "blocks", "allocated", "payload", "headers", "journals", "garbage", "holes")


@dataclass
class Usage:
    """What segments and their journals take up on disk: bytes that the file system has allocated."""

    segments: int = 0
    blocks: int = 0
    allocated_bytes: int = 0
    """Everything: payload, headers, journals and garbage."""
    payload_bytes: int = 0
    """What can be loaded."""
    header_bytes: int = 0
    journal_bytes: int = 0
    garbage_bytes: int = 0
    """Space of blocks that are gone, between extents, and reserved for blocks to come."""
    hole_bytes: int = 0
    """Of the files' sizes, what has been given back to the file system: it takes up nothing."""

    def __iadd__(self, other: Usage) -> Usage:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def overhead_bytes(self) -> int:
        return self.header_bytes + self.journal_bytes + self.garbage_bytes

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "overhead_bytes": self.overhead_bytes}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "du",
        help="show what a store takes up on disk",
        description="Show what a store takes up on disk, by namespace and by the state of its segments, the "
        "largest first. Garbage is space that no block uses: of blocks that are gone, between extents, and "
        "reserved for blocks to come. Holes have been given back to the file system. Writes nothing; servers "
        "may be running.",
    )
    add_path(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return report_on(args, lambda place: collect(place.root), _show)


def collect(root: StoreRoot) -> dict[str, Any]:
    """Sizes in bytes of a store, of its namespaces, and of their segments by state. Raises `OSError`."""
    namespaces = [_namespace(root, name) for name in root.namespaces()]
    namespaces.sort(key=lambda entry: -entry["allocated_bytes"])
    total = Usage()
    for entry in namespaces:
        for usage in entry["states"].values():
            total += usage
        entry["states"] = {state: usage.to_dict() for state, usage in entry["states"].items()}
    allocated = root.allocated_bytes()
    return {
        "path": root.path,
        "capacity_bytes": root.capacity,
        "free_bytes": free_bytes(root.path),
        "allocated_bytes": allocated,
        "payload_bytes": total.payload_bytes,
        "header_bytes": total.header_bytes,
        "journal_bytes": total.journal_bytes,
        "garbage_bytes": total.garbage_bytes,
        "other_bytes": max(0, allocated - total.allocated_bytes),
        "namespaces": namespaces,
    }


def _namespace(root: StoreRoot, name: str) -> dict[str, Any]:
    states: dict[str, Usage] = {}
    for state, usage in _segments(Holdings(root, name)):
        states.setdefault(state, Usage())
        states[state] += usage
    by_size = sorted(states.items(), key=lambda item: -item[1].allocated_bytes)
    return {
        "namespace": name,
        "identity": root.read_identity(name),
        "allocated_bytes": sum(usage.allocated_bytes for _, usage in by_size),
        "payload_bytes": sum(usage.payload_bytes for _, usage in by_size),
        "states": dict(by_size),
    }


def _segments(holdings: Holdings) -> Iterator[tuple[str, Usage]]:
    """State and sizes of every segment, and of every segment or journal that lacks the other."""
    known = {segment.name: segment for segment in holdings.catalog.segments}
    live = holdings.live_segments()
    numbers = 1 + max((segment.number for segment in known.values()), default=-1)
    blocks = np.bincount(holdings.segment_of, minlength=numbers)
    _, payload = holdings.catalog.index.count_by_segment(numbers)
    for name in segment_names(holdings.root, holdings.namespace):
        (size, allocated), (_, journal) = segment_files(holdings.root, holdings.namespace, name)
        usage = Usage(segments=1, journal_bytes=journal)
        usage.header_bytes = min(allocated, SEGMENT_HEADER_BYTES)
        usage.allocated_bytes = allocated + usage.journal_bytes
        usage.hole_bytes = max(0, size - allocated)
        segment = known.get(name)
        if segment is not None:
            usage.blocks = int(blocks[segment.number])
            usage.payload_bytes = int(payload[segment.number])
        # A file system that compresses may allocate less than the payload.
        usage.garbage_bytes = max(0, allocated - usage.header_bytes - usage.payload_bytes)
        if segment is None:
            yield UNREADABLE, usage
        elif segment.number in live:
            yield LIVE, usage
        elif not usage.payload_bytes:
            yield EMPTY, usage
        else:
            yield SEALED if segment.sealed else DEAD, usage


def _show(report: Mapping[str, Any]) -> None:
    capacity, allocated = report["capacity_bytes"], report["allocated_bytes"]
    overhead = ", ".join(
        f"{what} {size_text(report[f'{key}_bytes'])}"
        for what, key in (
            ("headers", "header"), ("journals", "journal"), ("garbage", "garbage"), ("other files", "other"),
        )
    )  # fmt: skip
    print_lines(
        [
            f"store      {report['path']}",
            f"capacity   {size_text(capacity)}; the file system has {size_text(report['free_bytes'])} free",
            f"allocated  {size_text(allocated)} ({allocated / capacity:.1%} of the capacity)",
            f"payload    {size_text(report['payload_bytes'])}",
            f"overhead   {overhead}",
        ]
    )
    rows = []
    for entry in report["namespaces"]:
        model = identity_cells(entry["identity"])[0]
        for state, usage in entry["states"].items():
            numbers = [f"{usage['segments']:,}", f"{usage['blocks']:,}"]
            numbers += [size_text(usage[f"{key.rstrip('s')}_bytes"]) for key in _NUMBERS[2:]]
            rows.append([entry["namespace"][:12], model, state, *numbers])
        if not entry["states"]:
            rows.append([entry["namespace"][:12], model, "no segments", "0", "0", *["0B"] * 6])
    if rows:
        print()
        print_table(["namespace", "model", "state"], list(_NUMBERS), rows)
    else:
        print_lines(["", f"{count_text(0, 'namespace')}: no server has stored anything."])
