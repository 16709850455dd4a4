"""`ucm-sglang inspect`: the namespaces of a store one by one, or one block. Reads only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posix_store.root import StoreRoot
from ucm_sglang.cli import block
from ucm_sglang.cli.holdings import Holdings
from ucm_sglang.cli.stats import identity_cells
from ucm_sglang.cli.support import (
    add_json,
    add_namespace,
    add_path,
    age_text,
    count_text,
    matching_namespaces,
    print_lines,
    report_on,
    size_text,
)
from ucm_sglang.identity import KV_POOL

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what is known of namespaces, or of one block",
        description="Show what is known of every namespace, or with --id or --key of one block: where it "
        "lies, its chain, and whether its bytes are right, which is found out by reading them. A store "
        "records when blocks were last used, not how often: each process counts its hits for itself. Writes "
        "nothing; servers may be running. Exit status: 0; 1 the block is not stored, is damaged, or its "
        "chain is cut; 2 not a store.",
    )
    add_path(parser)
    add_namespace(parser, "only namespaces whose name begins with these hex digits")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--id", metavar="HEX", help="one block by its id, 32 hex digits")
    what.add_argument("--key", metavar="KEY", help="one block by the engine's key of the page")
    parser.add_argument(
        "--pool", metavar="NAME", default=KV_POOL, help="pool of the key; default: %(default)s"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.id is not None or args.key is not None:
        return block.run(args)
    return report_on(args, lambda place: collect(place.root, args.namespace), _show)


def collect(root: StoreRoot, prefix: str | None = None) -> dict[str, Any]:
    """What is known of the namespaces that begin with `prefix`. Raises `OSError`, `ConfigError`."""
    names = matching_namespaces(root, prefix)
    return {"path": root.path, "namespaces": [describe(root, name) for name in names]}


def describe(root: StoreRoot, name: str) -> dict[str, Any]:
    """What is known of one namespace: sizes in bytes, times in Unix seconds. Raises `OSError`."""
    served = root.is_served(name)
    holdings = Holdings(root, name)
    blocks = holdings.blocks
    pinned = holdings.protected_by(holdings.pins)
    found = len(blocks) > 0
    return {
        "namespace": name,
        "identity": root.read_identity(name),
        "blocks": len(blocks),
        "incomplete_blocks": holdings.catalog.incomplete_blocks,
        "payload_bytes": holdings.catalog.index.bytes,
        "oldest_stored": float(blocks.stored.min()) if found else None,
        "newest_stored": float(blocks.stored.max()) if found else None,
        "last_used": float(blocks.used.max()) if found else None,
        "used_again_blocks": int((blocks.used > blocks.stored).sum()),
        "pins": len(holdings.pins),
        "pinned_blocks": int(pinned.sum()),
        "pinned_bytes": int(blocks.length[pinned].sum()),
        "segments": len(holdings.catalog.segments),
        "live_writers": len(holdings.live_segments()),
        "served": served,
    }


def _show(report: Mapping[str, Any]) -> None:
    lines = [f"store      {report['path']}"]
    if not report["namespaces"]:
        lines += ["", "No namespaces yet: no server has stored anything."]
    for entry in report["namespaces"]:
        lines += ["", *_lines(entry)]
    print_lines(lines)


def _lines(entry: Mapping[str, Any]) -> list[str]:
    now = time.time()
    summary = " · ".join(cell for cell in identity_cells(entry["identity"]) if cell)
    lines = [f"{entry['namespace']}  {summary}"]
    identity = entry["identity"] or {}
    shown = [f"{name}={value}" for name, value in sorted(identity.items()) if value not in (None, "")]
    lines.append(f"  identity  {' '.join(shown) or '-'}")
    blocks = f"{count_text(entry['blocks'], 'block')}, {size_text(entry['payload_bytes'])}"
    if entry["incomplete_blocks"]:
        blocks += f"; {entry['incomplete_blocks']:,} more without all their shards"
    lines.append(f"  holds     {blocks} in {count_text(entry['segments'], 'segment')}")
    if entry["blocks"]:
        ages = {name: age_text(now - entry[name]) for name in ("oldest_stored", "newest_stored", "last_used")}
        lines.append(
            f"  stored    the oldest {ages['oldest_stored']} ago, the newest {ages['newest_stored']} ago"
        )
        again = count_text(entry["used_again_blocks"], "block")
        lines.append(f"  used      last {ages['last_used']} ago; {again} used after being stored")
    if entry["pins"]:
        kept = f"{count_text(entry['pinned_blocks'], 'block')}, {size_text(entry['pinned_bytes'])}"
        lines.append(f"  pinned    {kept} by {count_text(entry['pins'], 'pin')}")
    served = "open in a process now" if entry["served"] else "no process has it open"
    lines.append(f"  served    {served}; {count_text(entry['live_writers'], 'segment')} being written")
    return lines
