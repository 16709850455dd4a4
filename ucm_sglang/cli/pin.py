"""`ucm-sglang pin` and `unpin`: chains that eviction leaves alone. Safe while servers run."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from posix_store.pins import Pin, update_pins
from posix_store.root import StoreRoot
from posix_store.segment import ID_BYTES
from ucm_sglang.cli.holdings import Holdings
from ucm_sglang.cli.prompt import Prompt, add_arguments, read_prompt
from ucm_sglang.cli.support import (
    Place,
    add_json,
    add_path,
    block_id,
    count_text,
    one_namespace,
    print_lines,
    report_on,
    size_text,
)
from ucm_sglang.config import ConfigError
from ucm_sglang.identity import KV_POOL, BlockIds, same_but_rank

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands


def add_parser(commands: Commands) -> None:
    pin = commands.add_parser(
        "pin",
        help="keep chains of blocks from eviction",
        description="Keep blocks, and all blocks before them in their chains, from eviction. With a key or a "
        "prompt this is done for all ranks of the server. What is not stored yet is kept once it is. Exit "
        "status: 0; 1 nothing of it is stored now; 2 not done.",
    )
    _add_target(pin, everything=False)
    pin.add_argument(
        "--note", metavar="TEXT", help="said by `ucm-sglang pins`; default: what the file is called"
    )
    pin.set_defaults(run=run_pin)
    unpin = commands.add_parser(
        "unpin",
        help="give chains of blocks free for eviction",
        description="Undo `ucm-sglang pin`, given the same key, id or prompt. Exit status: 0; 1 there is no "
        "such pin; 2 not done.",
    )
    _add_target(unpin, everything=True)
    unpin.set_defaults(run=run_unpin)


def _add_target(parser: argparse.ArgumentParser, everything: bool) -> None:
    add_path(parser)
    parser.add_argument(
        "--namespace",
        metavar="HEX",
        help="the namespace whose name begins with these hex digits; not needed for a store of one server",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", nargs="+", help="the engine's key of the last page of a chain")
    what.add_argument("--id", metavar="HEX", nargs="+", help="id of the last block of a chain")
    what.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a prompt: a text, or .json with a list of token ids or of chat messages",
    )
    if everything:
        what.add_argument("--all", action="store_true", help="all pins")
    parser.add_argument(
        "--pool", metavar="NAME", default=KV_POOL, help="pool of the keys; default: %(default)s"
    )
    add_arguments(parser)
    add_json(parser)


# -- pin ------------------------------------------------------------------------------------------------


def run_pin(args: argparse.Namespace) -> int:
    prompt = read_prompt(args) if args.prompt_file else None

    def collect(place: Place) -> dict[str, Any]:
        root = place.writable()
        entries = [_pin(root, name, args, prompt) for name in _namespaces(root, args)]
        return {"path": root.path, "capacity_bytes": root.capacity, "namespaces": entries}

    return report_on(args, collect, _show_pinned, _some_stored)


def _some_stored(reports: list[dict[str, Any]]) -> bool:
    return any(entry["stored_blocks"] for report in reports for entry in report["namespaces"])


def _pin(root: StoreRoot, name: str, args: argparse.Namespace, prompt: Prompt | None) -> dict[str, Any]:
    holdings = Holdings(root, name)
    now = int(time.time())
    if prompt is not None:
        ids = _prompt_ids(root, name, args, prompt)
        note = args.note or f"{prompt.name}, {len(prompt.tokens):,} tokens"
        pins = [Pin(ids[-ID_BYTES:], _loose_ends(holdings, ids), note, now)]
    else:
        ids = _named_ids(name, args)
        pins = [Pin(each, (), args.note or "", now) for each in _split(ids)]
    change = update_pins(root, name, add=pins)
    kept = holdings.protected_by(pins)
    stored = holdings.rows_of(ids) >= 0
    return {
        "namespace": name,
        "new_pins": change.added,
        "pins": change.left,
        "blocks": len(stored),
        "stored_blocks": int(stored.sum()),
        "leading_stored_blocks": int(len(stored) if stored.all() else stored.argmin()),
        "kept_blocks": int(kept.sum()),
        "kept_bytes": int(holdings.blocks.length[kept].sum()),
        "of_prompt": prompt is not None,
    }


def _loose_ends(holdings: Holdings, ids: bytes) -> tuple[bytes, ...]:
    """Stored pages of a prompt, but for its last, that are not the recorded parent of the next one stored.

    Eviction knows a chain by its recorded parents. Where one is missing, since the engine did not tell it or
    what lies behind is not stored yet, the page before must be named as well.
    """
    rows = holdings.rows_of(ids)
    stored = np.flatnonzero(rows >= 0)
    loose = np.ones(len(stored), bool)
    loose[:-1] = holdings.parent_rows[rows[stored[1:]]] != rows[stored[:-1]]
    pages = _split(ids)
    return tuple(pages[place] for place in stored[loose].tolist() if place < len(pages) - 1)


def _show_pinned(report: dict[str, Any]) -> None:
    print_lines(
        [line for entry in report["namespaces"] for line in _pinned_lines(entry, report["capacity_bytes"])]
    )


def _pinned_lines(entry: dict[str, Any], capacity: int) -> list[str]:
    kept = f"{count_text(entry['kept_blocks'], 'block')}, {size_text(entry['kept_bytes'])}"
    what = "new" if entry["new_pins"] else "pinned before"
    share = f"{entry['kept_bytes'] / capacity:.1%} of the capacity"
    lines = [
        f"{entry['namespace']}  pinned ({what}): keeps {kept}, {share}",
        f"  {entry['stored_blocks']:,} of {count_text(entry['blocks'], 'page')} stored now",
    ]
    if not entry["stored_blocks"] and entry["of_prompt"]:
        lines.append(
            "  nothing of this prompt is stored: is it the text that the server saw (chat template, special "
            "tokens), and the server's tokenizer, page size and salt?"
        )
    elif entry["leading_stored_blocks"] < entry["blocks"]:
        lines.append("  the rest is kept once it is stored; pin again then, to be sure of all of it")
    return lines


# -- unpin ----------------------------------------------------------------------------------------------


def run_unpin(args: argparse.Namespace) -> int:
    prompt = read_prompt(args) if args.prompt_file else None

    def collect(place: Place) -> dict[str, Any]:
        root = place.writable()
        return {
            "path": root.path,
            "namespaces": [_unpin(root, name, args, prompt) for name in _to_unpin(root, args)],
        }

    return report_on(args, collect, _show_unpinned, lambda reports: args.all or _some_removed(reports))


def _some_removed(reports: list[dict[str, Any]]) -> bool:
    return any(entry["removed_pins"] for report in reports for entry in report["namespaces"])


def _to_unpin(root: StoreRoot, args: argparse.Namespace) -> list[str]:
    if not args.all:
        return _namespaces(root, args)
    return root.namespaces() if args.namespace is None else [one_namespace(root, args.namespace)]


def _unpin(root: StoreRoot, name: str, args: argparse.Namespace, prompt: Prompt | None) -> dict[str, Any]:
    change = update_pins(root, name, remove=_to_remove(root, name, args, prompt))
    return {"namespace": name, "removed_pins": len(change.removed), "pins": change.left}


def _show_unpinned(report: dict[str, Any]) -> None:
    lines = [
        f"{entry['namespace']}  {count_text(entry['removed_pins'], 'pin')} removed, {entry['pins']:,} left"
        for entry in report["namespaces"]
    ]
    if not _some_removed([report]):
        lines.append("no such pin; `ucm-sglang pins` lists them")
    print_lines(lines)


def _to_remove(
    root: StoreRoot, name: str, args: argparse.Namespace, prompt: Prompt | None
) -> list[bytes] | None:
    if args.all:
        return None
    if prompt is not None:
        return [_prompt_ids(root, name, args, prompt)[-ID_BYTES:]]
    return _split(_named_ids(name, args))


# -- both -----------------------------------------------------------------------------------------------


def _namespaces(root: StoreRoot, args: argparse.Namespace) -> list[str]:
    """The namespaces that the arguments mean: all ranks of one server, or with --id the one that is named."""
    names = root.namespaces()
    if not names:
        raise ConfigError(f"path = {root.path}: has no namespaces yet; start a server with it first")
    first = names[0] if args.namespace is None else one_namespace(root, args.namespace)
    ranks = _ranks(root, first)
    if args.namespace is None and len(ranks) < len(names):
        raise ConfigError(
            f"--namespace: is missing, and {root.path} holds pages of several servers or models; "
            "`ucm-sglang inspect` shows them"
        )
    if args.id is None:
        return ranks
    if args.namespace is None and len(ranks) > 1:
        raise ConfigError("--namespace: is missing; a block id belongs to one namespace only")
    return [first]


def _ranks(root: StoreRoot, first: str) -> list[str]:
    identity = root.read_identity(first)
    if not identity:
        return [first]
    return [
        name
        for name in root.namespaces()
        if name == first or same_but_rank(identity, root.read_identity(name) or {})
    ]


def _named_ids(name: str, args: argparse.Namespace) -> bytes:
    if args.key is not None:
        return BlockIds(bytes.fromhex(name)).of(args.pool, args.key)
    return b"".join(block_id("--id", text) for text in args.id)


def _prompt_ids(root: StoreRoot, name: str, args: argparse.Namespace, prompt: Prompt) -> bytes:
    page_size = args.page_size
    if page_size is None:
        page_size = (root.read_identity(name) or {}).get("page_size")
        if type(page_size) is not int or page_size < 1:
            raise ConfigError(f"--page-size: is missing, and the namespace {name} does not say it either")
    if page_size < 1:
        raise ConfigError(f"--page-size = {page_size}: must be 1 or more tokens")
    return BlockIds(bytes.fromhex(name)).of(args.pool, prompt.keys(page_size))


def _split(ids: bytes) -> list[bytes]:
    return [ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)]
