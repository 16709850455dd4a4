"""What several commands need: arguments, a store from a PATH argument, consoles, numbers as text."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize
from pydantic_core import PydanticCustomError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from posix_store.root import STORE_FILE, StoreRoot
from ucm_sglang.config import ConfigError, StoreConfig, load_config_file, parse_size

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PATH_HELP = "directory of the store, or a config file as `ucm-sglang init` writes it"
FINE, FINDING, REFUSED = 0, 1, 2
"""Exit status of every command."""
_PIPE_WIDTH = 200
_ANY_WIDTH = 10_000
_HEX_ID = re.compile("[0-9a-f]{32}")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|h|d|w)", re.ASCII | re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


# -- arguments ------------------------------------------------------------------------------------------


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def add_namespace(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--namespace", metavar="HEX", help=help)


@dataclass(frozen=True)
class Place:
    """A root directory that a PATH argument names, and the configuration when that was a config file."""

    root: StoreRoot
    config: StoreConfig | None = None

    @property
    def min_free(self) -> int | None:
        """The floor of free space in bytes; None: the default."""
        return self.config.min_free_bytes(self.root.path) if self.config else None

    def writable(self) -> StoreRoot:
        """The root, opened for changes. Raises `ConfigError` or `StoreError` when there can be none."""
        root = StoreRoot(self.root.path)
        if root.read_only_because:
            raise ConfigError(
                f"path = {root.path}: cannot be changed: {root.read_only_because}; run this as a user who "
                "may write there"
            )
        return root


def open_places(path: str) -> list[Place]:
    """The root that a PATH argument names, or those that a config file names. Nothing is written.

    Raises `ConfigError` or `StoreError` when one of them is no store.
    """
    if not os.path.isfile(path):
        return [Place(open_root(path))]
    config = StoreConfig.from_extra(load_config_file(path), source=path)
    return [Place(open_root(each), config) for each in config.paths]


def open_root(path: str) -> StoreRoot:
    """The store in a directory; nothing is written. `ConfigError` or `StoreError` when there is none."""
    root = StoreRoot(path, create=False)
    if not os.path.exists(os.path.join(root.path, STORE_FILE)) and not root.namespaces():
        raise ConfigError(f"path = {root.path}: no store here; make one with `ucm-sglang init`")
    return root


Report = dict[str, Any]


def report_on(
    args: argparse.Namespace,
    collect: Callable[[Place], Report],
    show: Callable[[Report], None],
    fine: Callable[[list[Report]], bool] = lambda reports: True,
) -> int:
    """Collect a report on every root that the PATH argument names, and print them; the exit status.

    Args:
        show: prints one report for people.
        fine: whether the command found nothing wrong.
    """
    reports = [collect(place) for place in open_places(args.path)]
    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"roots": reports}, indent=2))
    else:
        for number, report in enumerate(reports):
            if len(reports) > 1:
                print_lines([*([""] if number else []), f"== {report['path']}"])
            show(report)
    return FINE if fine(reports) else FINDING


def matching_namespaces(root: StoreRoot, prefix: str | None) -> list[str]:
    """Namespaces whose name begins with `prefix`; all when it is None or empty.

    Raises `ConfigError` when no namespace has that prefix.
    """
    names = root.namespaces()
    prefix = prefix or ""
    if not re.fullmatch("[0-9a-f]{0,32}", prefix.lower()):
        raise ConfigError(
            f"--namespace = {prefix!r}: must be the first of 32 hex digits; `ucm-sglang stats` shows them"
        )
    chosen = [name for name in names if name.startswith(prefix.lower())]
    if prefix and not chosen:
        known = ", ".join(name[:12] for name in names) or "none"
        raise ConfigError(f"--namespace = {prefix!r}: no such namespace in {root.path}; there are: {known}")
    return chosen


def one_namespace(root: StoreRoot, prefix: str) -> str:
    """The only namespace whose name begins with `prefix`. Raises `ConfigError` when there is not just one."""
    if not prefix:
        raise ConfigError(
            "--namespace = '': give the first hex digits of a name; `ucm-sglang stats` shows them"
        )
    chosen = matching_namespaces(root, prefix)
    if len(chosen) > 1:
        several = ", ".join(chosen)
        raise ConfigError(
            f"--namespace = {prefix!r}: {len(chosen)} namespaces begin so, give more: {several}"
        )
    return chosen[0]


def block_id(argument: str, text: str) -> bytes:
    """The 16 bytes of a block id in hex. Raises `ConfigError`."""
    if not _HEX_ID.fullmatch(text.lower()):
        raise ConfigError(
            f"{argument} = {text!r}: is no block id, which is 32 hex digits; for a page key of the "
            "engine use --key"
        )
    return bytes.fromhex(text)


def size_argument(argument: str, text: str) -> int:
    """Bytes. Raises `ConfigError`."""
    try:
        return int(parse_size(text))
    except PydanticCustomError as error:
        raise ConfigError(
            f'{argument} = {text!r}: {error.message()}; give whole bytes or a size such as "500GiB"'
        ) from error


def duration_argument(argument: str, text: str) -> float:
    """Seconds. Raises `ConfigError`."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ConfigError(
            f"{argument} = {text!r}: is no duration; give a number with s, m, h, d or w, such as 12h or 7d"
        )
    return float(match[1]) * _SECONDS[match[2].lower()]


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def free_bytes(path: str) -> int:
    """What the file system has left for this user."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


# -- output ---------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Bytes for people, such as "1.5GiB"."""
    return ByteSize(size).human_readable()


def age_text(seconds: float) -> str:
    """A time span for people, in its largest unit and the next, such as "3d 4h"."""
    left = max(0, int(seconds))
    units = list(reversed(_SECONDS.items()))
    first = next((i for i, (_, length) in enumerate(units) if left >= length), len(units) - 1)
    parts: list[str] = []
    for unit, length in units[first : first + 2]:
        if left >= length or not parts:
            parts.append(f"{left // length}{unit}")
        left %= length
    return " ".join(parts)


def count_text(count: int, what: str) -> str:
    """ "1 block", "2,000 blocks"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def output_console() -> Console:
    """Standard output. Tables are not squeezed into 80 columns when it is no terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_PIPE_WIDTH if piped else None)


def progress_console() -> Console:
    """Standard error, for progress: output stays clean for scripts."""
    return Console(stderr=True)


def progress(*columns: ProgressColumn) -> Progress:
    """A progress bar on a terminal, and nothing elsewhere: a log would only fill with control characters."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*shown, console=progress_console(), disable=not sys.stderr.isatty())


def print_lines(lines: list[str]) -> None:
    """Lines as they are: paths and names are data, never broken in the middle and never read as markup."""
    print("\n".join(lines))


def print_table(words: list[str], numbers: list[str], rows: list[list[str]]) -> None:
    """A table with columns of words, and columns of numbers aligned to the right behind them.

    Where the terminal is too narrow for it, the rows are shown one by one instead.
    """
    console = output_console()
    columns = [Column(heading, no_wrap=True) for heading in words]
    columns += [Column(heading, no_wrap=True, justify="right") for heading in numbers]
    table = Table(*columns, box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*map(escape, row))
    needed = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
    if needed <= console.width:
        console.print(table)
        return
    for row in rows:
        for heading, cell in zip([*words, *numbers], row, strict=True):
            console.print(f"{heading:<12} {cell}", soft_wrap=True, markup=False)
        console.print()
