"""`ucm-sglang doctor`: can servers store and load here, and what does the file system do to them?

Each check is a function from a `Place` to findings; a new one is added to `CHECKS`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from posix_store import PosixStore, Reason, StoreError
from posix_store.abilities import probe
from posix_store.capacity import SpaceKeeper
from posix_store.root import LOCK_FILE, STORE_FILE, StoreRoot, decode_settings, is_namespace_file
from ucm_sglang.cli.support import Place, add_json, add_path, free_bytes, print_lines, report_on, size_text

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

GOOD, NOTE, BAD = "ok", "note", "BAD"
"""How a finding is judged. With a BAD one, pages are not stored or not found as they should be."""
_FEW_INODES = 1000
_TEST_BLOCKS, _TEST_BLOCK_BYTES = 16, 64 << 10


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)
    """For JSON."""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out whether servers can store and load here",
        description="Look at permissions, space and the file system, and store, load and delete a few "
        "blocks. What it writes is small and deleted again; servers may be running. Exit status: 0; 1 "
        "something is BAD; 2 not a store.",
    )
    add_path(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return report_on(
        args, examine, _show, lambda reports: not any(_bad(report["findings"]) for report in reports)
    )


def examine(place: Place) -> dict[str, Any]:
    """What all checks find."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(place)
        except (OSError, StoreError) as error:
            where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            why = (isinstance(error, OSError) and error.strerror) or error
            findings.append(Finding(check.__name__.replace("_", " "), BAD, f"cannot look: {where}{why}"))
    return {"path": place.root.path, "findings": [asdict(finding) for finding in findings]}


def _bad(findings: list[dict[str, Any]]) -> bool:
    return any(finding["level"] == BAD for finding in findings)


def _show(report: dict[str, Any]) -> None:
    findings = report["findings"]
    lines = [f"store        {report['path']}"]
    lines += [f"{entry['check']:<12} {entry['level']:<5} {entry['text']}" for entry in findings]
    bad = sum(entry["level"] == BAD for entry in findings)
    lines.append(f"{bad} BAD" if bad else "nothing is wrong here")
    print_lines(lines)


# -- checks ---------------------------------------------------------------------------------------------


def settings(place: Place) -> Iterator[Finding]:
    """STORE.json."""
    if _settings_are_good(place.root):
        yield Finding("settings", GOOD, f"{STORE_FILE} is good; capacity {size_text(place.root.capacity)}")
    else:
        yield Finding(
            "settings", BAD,
            f"{STORE_FILE} is missing or damaged: servers make it again with their own or the default "
            f"capacity; set it with `ucm-sglang init {place.root.path} --capacity ...`",
        )  # fmt: skip


def permissions(place: Place) -> Iterator[Finding]:
    """Can this user do what a server does? Run it as the server's user."""
    who = f"user {os.geteuid()}:{os.getegid()}"
    root, refused = place.root, []
    for path in _places_to_write(root):
        if not os.access(
            path, os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0), effective_ids=True
        ):
            refused.append(path)
    if not refused:
        yield Finding("permissions", GOOD, f"{who} can read and write everything", {"refused": []})
        return
    status = os.stat(refused[0])
    first = f"{refused[0]} (owner {status.st_uid}:{status.st_gid}, mode {stat.S_IMODE(status.st_mode):o})" + (
        f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    )
    yield Finding(
        "permissions",
        BAD,
        f"{who} may not read and write {first}; give this user access",
        {"refused": refused},
    )


def _places_to_write(root: StoreRoot) -> Iterator[str]:
    yield root.path
    lock = os.path.join(root.path, LOCK_FILE)
    if os.path.exists(lock):
        yield lock
    for name in root.namespaces():
        directory = root.namespace_path(name)
        yield directory
        with contextlib.suppress(OSError):
            yield from (os.path.join(directory, entry) for entry in os.listdir(directory))


def space(place: Place) -> Iterator[Finding]:
    """Capacity, what is taken, what is free, and the floor."""
    root = place.root
    disk = os.statvfs(root.path)
    allocated, free, capacity = root.allocated_bytes(), free_bytes(root.path), root.capacity
    floor = SpaceKeeper(root, place.min_free, chunk=0).min_free
    numbers = {
        "capacity_bytes": capacity, "allocated_bytes": allocated, "free_bytes": free, "min_free_bytes": floor,
        "free_files": disk.f_favail,
    }  # fmt: skip
    text = (
        f"{size_text(allocated)} of {size_text(capacity)} taken ({allocated / capacity:.1%}); the file "
        f"system has {size_text(free)} free, {size_text(floor)} of which stay free (min_free)"
    )
    yield Finding("space", GOOD, text, numbers)
    if allocated > capacity:
        yield Finding(
            "space", BAD, "more is taken than the capacity: servers evict when they next store; "
            "`ucm-sglang evict --to` does it now",
        )  # fmt: skip
    if free < floor:
        yield Finding(
            "space", BAD, "less is free than min_free: servers evict blocks, or store none, until "
            "others make room or min_free is lower",
        )  # fmt: skip
    elif capacity - allocated > free - floor:
        yield Finding("space", NOTE, "the file system is full, but for min_free, before the store is")
    if disk.f_files and disk.f_favail < _FEW_INODES:
        yield Finding("space", BAD, f"the file system has only {disk.f_favail} inodes left: no new files")


def file_system(place: Place) -> Iterator[Finding]:
    """What it can do, found out by trying."""
    abilities = probe(_writable(place) or place.root)
    yield Finding("file system", GOOD, abilities.describe(), abilities.to_dict())
    for consequence in abilities.consequences():
        yield Finding("file system", NOTE, consequence)


def self_test(place: Place) -> Iterator[Finding]:
    """Store, load and delete blocks in a namespace of its own."""
    root = _writable(place)
    if root is None:
        yield Finding("self-test", NOTE, "left out, because this user cannot write here")
        return
    needed = 2 * _TEST_BLOCKS * _TEST_BLOCK_BYTES
    if SpaceKeeper(root, place.min_free, chunk=0).available(urgent=False) < needed:
        yield Finding(
            "self-test", NOTE, "left out, because the store is full and blocks would be evicted for it"
        )
        return
    namespace = secrets.token_hex(16)
    try:
        began = time.perf_counter()
        wrong = _store_and_load(place, namespace)
        seconds = time.perf_counter() - began
    finally:
        _remove(root, namespace)
    size = size_text(_TEST_BLOCKS * _TEST_BLOCK_BYTES)
    if wrong:
        yield Finding("self-test", BAD, f"of {_TEST_BLOCKS} blocks, {wrong}", {"wrong": wrong})
    else:
        yield Finding("self-test", GOOD, f"stored, loaded and deleted {size} in {1000 * seconds:.0f} ms")


def _store_and_load(place: Place, namespace: str) -> str:
    """Dump in one store, load in another; what went wrong, in words."""
    data = np.frombuffer(secrets.token_bytes(_TEST_BLOCKS * _TEST_BLOCK_BYTES), np.uint8)
    pages = list(data.reshape(_TEST_BLOCKS, _TEST_BLOCK_BYTES))
    ids = [secrets.token_bytes(16) for _ in pages]
    options: dict[str, Any] = {"min_free": place.min_free, "maintenance": False}
    with PosixStore(place.root.path, namespace, **options) as writer:
        status = writer.dump(ids, None, pages, background=False).status()
        if (status != Reason.OK).any():
            return f"not stored: {_reasons(status)}"
        with PosixStore(place.root.path, namespace, writable=False, **options) as reader:
            copy = np.zeros_like(data)
            targets = list(copy.reshape(_TEST_BLOCKS, _TEST_BLOCK_BYTES))
            status = reader.load(ids, None, targets, background=False).status()
        if (status != Reason.OK).any():
            return f"not loaded: {_reasons(status)}"
        if not (copy == data).all():
            return "loaded with wrong bytes"
        writer.clear()
    return ""


def _reasons(status: np.ndarray) -> str:
    reasons, counts = np.unique(status[status != Reason.OK], return_counts=True)
    return ", ".join(
        f"{count} {Reason(reason).name.lower()}"
        for reason, count in zip(reasons.tolist(), counts.tolist(), strict=True)
    )


def _remove(root: StoreRoot, namespace: str) -> None:
    """Remove the namespace of the self-test."""
    directory = root.namespace_path(namespace)
    with contextlib.suppress(OSError):
        for name in filter(is_namespace_file, os.listdir(directory)):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def _writable(place: Place) -> StoreRoot | None:
    """The root opened for writing; None where that fails, or would make STORE.json anew."""
    if not _settings_are_good(place.root):
        return None
    root = StoreRoot(place.root.path)
    return None if root.read_only_because else root


def _settings_are_good(root: StoreRoot) -> bool:
    try:
        with open(os.path.join(root.path, STORE_FILE), "rb") as file:
            return decode_settings(file.read(1 << 20)) is not None
    except OSError:
        return False


CHECKS: tuple[Callable[[Place], Iterator[Finding]], ...] = (
    settings, permissions, space, file_system, self_test,
)  # fmt: skip
