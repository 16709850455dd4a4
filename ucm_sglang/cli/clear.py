"""`ucm-sglang clear`: delete the blocks of namespaces. Safe while servers run: they get misses."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from rich.progress import MofNCompleteColumn

from posix_store import PosixStore
from posix_store.pins import read_pin_list
from posix_store.root import StoreRoot
from ucm_sglang.cli.holdings import Holdings, segment_files, segment_names
from ucm_sglang.cli.stats import identity_cells
from ucm_sglang.cli.support import (
    Place,
    add_json,
    add_path,
    count_text,
    one_namespace,
    print_lines,
    progress,
    report_on,
    size_text,
)
from ucm_sglang.config import ConfigError

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "clear",
        help="delete the blocks of namespaces",
        description="Delete the blocks of one namespace or of all, pinned ones too; the pins stay, for when "
        "the blocks are stored again. Servers may be running: what is deleted is a miss, and what they store "
        "from then on stays. Exit status: 0; 1 some files could not be deleted; 2 not done.",
    )
    add_path(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace", metavar="HEX", help="the namespace whose name begins with these hex digits"
    )
    which.add_argument("--all", action="store_true", help="all namespaces")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return report_on(args, lambda place: _collect(place, args), _show, _is_fine)


def _collect(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    root = place.root
    names = root.namespaces() if args.all else [one_namespace(root, args.namespace)]
    if not args.yes:
        _ask(root, names)
    with progress(MofNCompleteColumn()) as bar:
        cleared = [_clear(root, name) for name in bar.track(names, description="clear")]
    return {"path": root.path, "namespaces": cleared}


def _is_fine(reports: list[dict[str, Any]]) -> bool:
    return not any(entry["left_segments"] for report in reports for entry in report["namespaces"])


def _show(report: dict[str, Any]) -> None:
    print_lines([_line(entry) for entry in report["namespaces"]] or ["nothing to clear: no namespaces"])


def _ask(root: StoreRoot, names: list[str]) -> None:
    """Have a person confirm. Raises `ConfigError` when nobody does."""
    if not sys.stdin.isatty():
        raise ConfigError("clear: asks before it deletes, and there is no terminal to ask on; give --yes")
    for name in names:
        holdings = Holdings(root, name)
        size = size_text(holdings.catalog.index.bytes)
        served = ", open in a process now" if root.is_served(name) else ""
        what = f"{name[:12]}  {identity_cells(root.read_identity(name))[0]}"
        print(f"{what}: {count_text(len(holdings.blocks), 'block')}, {size}{served}", file=sys.stderr)
    print(
        f"Delete the blocks of {count_text(len(names), 'namespace')}? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("clear: nothing was deleted")


def _clear(root: StoreRoot, name: str) -> dict[str, Any]:
    before = segment_names(root, name)
    allocated = sum(used for each in before for _, used in segment_files(root, name, each))
    with PosixStore(root.path, name, maintenance=False) as store:
        blocks = store.clear()
    left = before & segment_names(root, name)
    kept = sum(used for each in left for _, used in segment_files(root, name, each))
    return {
        "namespace": name,
        "blocks": blocks,
        "freed_bytes": max(0, allocated - kept),
        "left_segments": len(left),
        "pins": len(read_pin_list(root, name)),
    }


def _line(entry: dict[str, Any]) -> str:
    what = f"{count_text(entry['blocks'], 'block')} deleted, {size_text(entry['freed_bytes'])} freed"
    if entry["left_segments"]:
        what += f"; {count_text(entry['left_segments'], 'segment')} could NOT be deleted"
    if entry["pins"]:
        what += f"; {count_text(entry['pins'], 'pin')} kept"
    return f"{entry['namespace']}  {what}"
