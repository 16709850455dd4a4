"""`ucm-sglang verify`: read every block and compare its checksum; with --repair, let go of what is bad."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.progress import MofNCompleteColumn, Progress

from posix_store import PosixStore, Reason, VerifyReport
from ucm_sglang.cli.repair import Removal, repair_segments
from ucm_sglang.cli.support import (
    Place,
    add_json,
    add_namespace,
    add_path,
    count_text,
    matching_namespaces,
    print_lines,
    progress,
    report_on,
    size_text,
)

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

_GONE = Reason.EVICTED.name.lower()
_FOREIGN = Reason.NAMESPACE.name.lower()
"""The header of the segment is damaged: it is deleted whole."""
_RECORDED = (Reason.CHECKSUM.name.lower(), Reason.LENGTH.name.lower())
"""What the store records as gone in a repair."""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="read and check every block of a store",
        description="Read every block of a store and compare its checksum. Writes nothing without --repair; "
        "servers may be running. Exit status: 0 clean, or with --repair nothing bad is left; 1 damage found; "
        "2 not a store.",
    )
    add_path(parser)
    add_namespace(parser, "only namespaces whose name begins with these hex digits")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="record damaged blocks as gone, so that they are stored again and their space is freed; delete "
        "segments that cannot be read at all, unless their writer lives",
    )
    add_json(parser)
    parser.set_defaults(run=run)


_ADVICE = (
    "Servers treat damaged blocks as misses and compute them again; `--repair` frees their space. Look at "
    "the disk's health."
)
_ADVICE_AFTER_REPAIR = (
    "What is left cannot be read because of errors of the disk, or is being written, or others were "
    "evicting; try again, and look at the disk's health."
)


@dataclass(frozen=True)
class Outcome:
    """What verifying one namespace found."""

    namespace: str
    report: VerifyReport
    damaged_journals: int
    """Journals that cannot be read at all: none of their blocks is found any more."""
    truncated_blocks: int
    """Blocks that a journal names and that lie beyond the end of their segment."""
    removal: Removal = field(default_factory=Removal)
    """What --repair did with segments as a whole."""

    @property
    def damaged_blocks(self) -> dict[str, int]:
        """By reason. Blocks that a server or `clear` deleted in the meantime are not damaged."""
        return {reason: count for reason, count in self.report.bad.items() if reason != _GONE}

    @property
    def ok(self) -> bool:
        return not (
            self.damaged_blocks
            or self.report.damaged_records
            or self.damaged_journals
            or self.truncated_blocks
        )

    @property
    def unrepaired(self) -> int:
        """What --repair has left: blocks that an error of the disk keeps from being read (they may be good),
        damaged ones that could not be recorded, and segments that a process may be writing."""
        bad = self.damaged_blocks
        recordable = sum(bad.get(reason, 0) for reason in _RECORDED)
        kept = sum(bad.values()) - recordable - bad.get(_FOREIGN, 0)
        return kept + (0 if self.report.repaired else recordable) + self.removal.left

    def to_dict(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "ok": self.ok,
            "blocks": self.report.blocks,
            "bytes": self.report.bytes,
            "damaged_blocks": self.damaged_blocks,
            "deleted_meanwhile": self.report.bad.get(_GONE, 0),
            "damaged_records": self.report.damaged_records,
            "damaged_journals": self.damaged_journals,
            "truncated_blocks": self.truncated_blocks,
            "repaired_blocks": self.report.repaired,
            "deleted_segments": self.removal.deleted,
            "rewritten_journals": self.removal.rewritten,
            "freed_segment_bytes": self.removal.freed_bytes,
            "unrepaired": self.unrepaired,
            "examples": self.report.examples,
        }


def run(args: argparse.Namespace) -> int:
    with progress(MofNCompleteColumn()) as bar:
        return report_on(
            args,
            lambda place: _collect(place, args, bar),
            _show,
            _is_fine,
        )


def _is_fine(reports: list[dict[str, Any]]) -> bool:
    return all(report["repaired"] if report["repair"] else report["ok"] for report in reports)


def _collect(place: Place, args: argparse.Namespace, bars: Progress) -> dict[str, Any]:
    started = time.monotonic()
    names = matching_namespaces(place.root, args.namespace)
    check = _repair if args.repair else _verify
    outcomes = [check(place, name, bars) for name in names]
    return {
        "path": place.root.path,
        "ok": all(outcome.ok for outcome in outcomes),
        "repair": args.repair,
        "repaired": args.repair and not any(outcome.unrepaired for outcome in outcomes),
        "seconds": round(time.monotonic() - started, 3),
        "namespaces": [outcome.to_dict() for outcome in outcomes],
    }


def _verify(place: Place, name: str, bars: Progress) -> Outcome:
    with PosixStore(place.root.path, name, writable=False, maintenance=False) as store:
        return _outcome(store, name, bars, repair=False)


def _repair(place: Place, name: str, bars: Progress) -> Outcome:
    root = place.writable()
    identity = root.read_identity(name)
    with PosixStore(root.path, name, identity=identity, min_free=place.min_free, maintenance=False) as store:
        outcome = _outcome(store, name, bars, repair=True)
    return replace(outcome, removal=repair_segments(root, name, place.min_free))


def _outcome(store: PosixStore, name: str, bars: Progress, repair: bool) -> Outcome:
    bar = bars.add_task(f"verify {name[:12]}", total=None)
    report = store.verify(lambda done, total: bars.update(bar, completed=done, total=total), repair=repair)
    catalog = store.stats().catalog
    bars.update(bar, completed=report.blocks, total=report.blocks)
    return Outcome(name, report, catalog["damaged_journals"], catalog["truncated_blocks"])


def _show(report: Mapping[str, Any]) -> None:
    outcomes = report["namespaces"]
    lines = [line for outcome in outcomes for line in _lines(outcome, report["repair"])]
    size = size_text(sum(outcome["bytes"] for outcome in outcomes))
    blocks = count_text(sum(outcome["blocks"] for outcome in outcomes), "block")
    checked = f"{blocks}, {size} in {report['seconds']:.1f} s"
    if report["ok"]:
        lines.append(f"clean: {checked}")
    elif report["repaired"]:
        lines.append(
            f"REPAIRED: {checked}. What was bad is gone and is stored again when it is computed again."
        )
    else:
        lines.append(f"DAMAGED: {checked}. {_ADVICE_AFTER_REPAIR if report['repair'] else _ADVICE}")
    print_lines(lines)


def _lines(outcome: Mapping[str, Any], repair: bool) -> list[str]:
    verdict = "ok" if outcome["ok"] else "DAMAGED"
    size = f"{count_text(outcome['blocks'], 'block')}, {size_text(outcome['bytes'])}"
    counts = {f"blocks: {reason}": count for reason, count in outcome["damaged_blocks"].items()}
    counts["journal records: checksum"] = outcome["damaged_records"]
    counts["journals that cannot be read"] = outcome["damaged_journals"]
    counts["blocks beyond the end of their segment"] = outcome["truncated_blocks"]
    counts["blocks deleted meanwhile (no damage)"] = outcome["deleted_meanwhile"]
    lines = [f"{outcome['namespace']}  {size}  {verdict}"]
    counts["damaged blocks recorded as gone"] = outcome["repaired_blocks"]
    counts["journals rewritten without them"] = outcome["rewritten_journals"]
    counts["segments deleted"] = outcome["deleted_segments"]
    counts["of all this could NOT be repaired now"] = outcome["unrepaired"] if repair else 0
    lines += [f"  {count:,} {what}" for what, count in counts.items() if count]
    return lines + [f"  {example}" for example in outcome["examples"] if not example.endswith(_GONE)]
