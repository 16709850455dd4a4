"""One block for `ucm-sglang inspect`: where it lies, its chain, and whether its bytes are right."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from posix_store.root import StoreRoot
from ucm_sglang.cli.holdings import Holdings
from ucm_sglang.cli.support import (
    age_text,
    block_id,
    count_text,
    matching_namespaces,
    print_lines,
    report_on,
    size_text,
)
from ucm_sglang.identity import BlockIds

_GUESS = "Nobody stored it, it was evicted, or it was stored in a namespace that is not among them."


def run(args: argparse.Namespace) -> int:
    """Find the block that the arguments name and print what is known of it; the exit status."""
    return report_on(args, lambda place: collect(place.root, args), _show, _is_fine)


def collect(root: StoreRoot, args: argparse.Namespace) -> dict[str, Any]:
    """The block, once for each namespace that holds it. Raises `OSError`, `ConfigError`."""
    names, found = matching_namespaces(root, args.namespace), []
    for name in names:
        wanted = (
            ids_of_keys(name, args.pool, [args.key]) if args.key is not None else block_id("--id", args.id)
        )
        holdings = Holdings(root, name)
        (row,) = holdings.rows_of(wanted).tolist()
        if row >= 0:
            found.append(_describe(holdings, row))
    wanted_text = f"key {args.key}" if args.key is not None else f"id {args.id}"
    return {"path": root.path, "wanted": wanted_text, "searched_namespaces": len(names), "blocks": found}


def _is_fine(reports: list[dict[str, Any]]) -> bool:
    found = [entry for report in reports for entry in report["blocks"]]
    return bool(found) and all(entry["checksum"] == "ok" and entry["chain_whole"] for entry in found)


def _show(report: Mapping[str, Any]) -> None:
    if report["blocks"]:
        print_lines([line for entry in report["blocks"] for line in _lines(entry)])
        return
    among = count_text(report["searched_namespaces"], "namespace")
    print_lines([f"{report['wanted']}: not stored in {among}.", _GUESS])


def ids_of_keys(namespace: str, pool: str, keys: list[str]) -> bytes:
    """Packed block ids of page keys in a namespace."""
    return BlockIds(bytes.fromhex(namespace)).of(pool, keys)


def _describe(holdings: Holdings, row: int) -> dict[str, Any]:
    blocks, entries = holdings.blocks, holdings.entries_of(row)
    chain = holdings.chain(row)
    checked = holdings.read(entries)
    parent = blocks.parents[row]
    pinned = bool(holdings.protected_by(holdings.pins)[row])
    shards = [
        {
            "shard": shard,
            "segment": holdings.catalog.segment(number).name.data,
            "offset": offset,
            "length": length,
            "crc32c": f"{crc:08x}",
        }
        for shard, number, offset, length, crc in zip(
            entries.shard.tolist(), entries.at.segment.tolist(), entries.at.offset.tolist(),
            entries.at.length.tolist(), entries.at.crc.tolist(), strict=True,
        )
    ]  # fmt: skip
    return {
        "namespace": holdings.namespace,
        "id": blocks.ids[row].tobytes().hex(),
        "bytes": sum(shard["length"] for shard in shards),
        "shards": shards,
        "parent": parent.tobytes().hex() if parent.any() else None,
        "chain_blocks": len(chain.rows),
        "chain_bytes": int(blocks.length[chain.rows].sum()),
        "chain_whole": chain.missing is None,
        "chain_cut_at": chain.missing.hex() if chain.missing else None,
        "stored": float(blocks.stored[row]),
        "used": float(blocks.used[row]),
        "pinned": pinned,
        "checksum": checked.name.lower(),
    }


def _lines(entry: Mapping[str, Any]) -> list[str]:
    now = time.time()
    lines = [f"block      {entry['id']}", f"namespace  {entry['namespace']}"]
    label = "lies"
    for shard in entry["shards"]:
        number = f"shard {shard['shard']} " if len(entry["shards"]) > 1 else ""
        lines.append(
            f"{label:<9}  {number}in {shard['segment']} at {shard['offset']}, {shard['length']} bytes "
            f"({size_text(shard['length'])}), crc {shard['crc32c']}"
        )
        label = ""
    verdict = "right, all bytes were read" if entry["checksum"] == "ok" else f"WRONG: {entry['checksum']}"
    lines.append(f"checksum   {verdict}")
    lines.append(
        f"parent     {entry['parent'] or 'none recorded: the head of its chain, as far as is known'}"
    )
    length = f"{count_text(entry['chain_blocks'], 'block')}, {size_text(entry['chain_bytes'])}"
    if entry["chain_whole"]:
        lines.append(f"chain      whole: {length} from the head to this one")
    else:
        cut = f"{length}; the block before them, {entry['chain_cut_at']}, is not stored"
        lines.append(f"chain      CUT: {cut}, so that no request can use this one")
    lines.append(f"stored     {age_text(now - entry['stored'])} ago")
    again = "" if entry["used"] > entry["stored"] else ", not since it was stored"
    lines.append(f"used       {age_text(now - entry['used'])} ago{again}")
    lines.append(f"pinned     {'yes' if entry['pinned'] else 'no'}")
    return lines
