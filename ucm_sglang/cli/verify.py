"""`ucm-sglang verify`: read every block of a store and compare its checksum. Changes nothing."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from posix_store import PosixStore, Reason, VerifyReport
from posix_store.root import StoreRoot
from ucm_sglang.cli.support import PATH_HELP, open_root, progress_console, size_text
from ucm_sglang.config import ConfigError

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

CLEAN, DAMAGED = 0, 1
_GONE = Reason.EVICTED.name.lower()


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="read and check every block of a store",
        description="Read every block of a store and compare its checksum. Writes nothing; servers may be "
        "running. Exit status: 0 clean, 1 damage found, 2 not a store.",
    )
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)
    parser.add_argument(
        "--namespace",
        metavar="HEX",
        default="",
        help="only namespaces whose name begins with these hex digits",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Outcome:
    """What verifying one namespace found."""

    namespace: str
    report: VerifyReport
    damaged_journals: int
    """Journals that cannot be read at all: none of their blocks is found any more."""
    truncated_blocks: int
    """Blocks that a journal names and that lie beyond the end of their segment."""

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
            "examples": self.report.examples,
        }


def run(args: argparse.Namespace) -> int:
    root = open_root(args.path)
    started = time.monotonic()
    outcomes = _verify_all(root, _selected(root, args.namespace))
    ok = all(outcome.ok for outcome in outcomes)
    if args.json:
        report = {"path": root.path, "ok": ok, "namespaces": [outcome.to_dict() for outcome in outcomes]}
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(outcomes, time.monotonic() - started)))
    return CLEAN if ok else DAMAGED


def _selected(root: StoreRoot, prefix: str) -> list[str]:
    names = root.namespaces()
    if not re.fullmatch("[0-9a-f]{0,32}", prefix.lower()):
        raise ConfigError(
            f"--namespace = {prefix!r}: must be the first of 32 hex digits; `ucm-sglang stats` shows them"
        )
    chosen = [name for name in names if name.startswith(prefix.lower())]
    if prefix and not chosen:
        known = ", ".join(name[:12] for name in names) or "none"
        raise ConfigError(f"--namespace = {prefix!r}: no such namespace in {root.path}; there are: {known}")
    return chosen


def _verify_all(root: StoreRoot, names: list[str]) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A log file gets no bar: it would only fill with control characters.
    with Progress(*columns, console=progress_console(), disable=not sys.stderr.isatty()) as progress:
        return [_verify(root, name, progress) for name in names]


def _verify(root: StoreRoot, name: str, progress: Progress) -> Outcome:
    bar = progress.add_task(f"verify {name[:12]}", total=None)
    with PosixStore(root.path, name, writable=False) as store:
        report = store.verify(lambda done, total: progress.update(bar, completed=done, total=total))
        catalog = store.stats().catalog
    progress.update(bar, completed=report.blocks, total=report.blocks)
    return Outcome(name, report, catalog["damaged_journals"], catalog["truncated_blocks"])


def _lines(outcomes: list[Outcome], seconds: float) -> list[str]:
    lines: list[str] = []
    for outcome in outcomes:
        lines += _namespace_lines(outcome)
    blocks = sum(outcome.report.blocks for outcome in outcomes)
    size = size_text(sum(outcome.report.bytes for outcome in outcomes))
    checked = f"{blocks:,} blocks, {size} in {seconds:.1f} s"
    if all(outcome.ok for outcome in outcomes):
        return [*lines, f"clean: {checked}"]
    return [
        *lines,
        f"DAMAGED: {checked}. Servers treat damaged blocks as misses and compute them again; "
        "look at the disk's health.",
    ]


def _namespace_lines(outcome: Outcome) -> list[str]:
    report = outcome.report
    verdict = "ok" if outcome.ok else "DAMAGED"
    lines = [f"{outcome.namespace}  {report.blocks:,} blocks, {size_text(report.bytes)}  {verdict}"]
    counts = {f"blocks: {reason}": count for reason, count in outcome.damaged_blocks.items()}
    counts["journal records: checksum"] = report.damaged_records
    counts["journals that cannot be read"] = outcome.damaged_journals
    counts["blocks beyond the end of their segment"] = outcome.truncated_blocks
    counts["blocks deleted meanwhile (no damage)"] = report.bad.get(_GONE, 0)
    lines += [f"  {count:,} {what}" for what, count in counts.items() if count]
    lines += [f"  {example}" for example in report.examples if not example.endswith(_GONE)]
    return lines
