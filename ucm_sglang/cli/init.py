"""`ucm-sglang init`: a store directory, a config file, and the flags that make SGLang use them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posix_store.capacity import SpaceKeeper
from posix_store.root import STORE_FILE, StoreRoot
from ucm_sglang.cli.support import absolute, free_bytes, size_text
from ucm_sglang.config import ConfigError, StoreConfig, config_format, encode_config, load_config_file

if TYPE_CHECKING:
    from ucm_sglang.cli.support import Commands

CONFIG_SUFFIX = ".ucm-sglang.json"
"""Appended to the store's path for the default name of the config file. Beside the store: in it, files of
others are refused; and the place must not depend on where `init` runs, or running it again finds nothing."""

ENGINE_KEYS: Mapping[str, Any] = {
    "backend_name": "ucm",
    "module_path": "ucm_sglang.hicache",
    "class_name": "UcmHiCacheStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}

# page_first_direct with the direct backend: a page is two contiguous pieces of host memory (one for MLA).
# write_through: with write_back the head of a prefix may never reach storage, and the rest is not found then.
# timeout: a slow disk costs a request a bounded time, after which the missing pages are computed.
FLAGS: tuple[tuple[str, ...], ...] = (
    ("--page-size", "64"),
    ("--enable-hierarchical-cache",),
    ("--hicache-mem-layout", "page_first_direct"),
    ("--hicache-io-backend", "direct"),
    ("--hicache-write-policy", "write_through"),
    ("--hicache-storage-backend", "dynamic"),
    ("--hicache-storage-prefetch-policy", "timeout"),
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "init",
        help="make or adopt a store, write a config file, print SGLang's flags",
        description="Make a store directory (or adopt one), write a config file for SGLang, and print the "
        "flags that use it. Running it again is safe: a config file that exists is kept as it is.",
    )
    parser.add_argument("path", metavar="PATH", help="directory of its own for the store")
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="most that the store may take up on disk, such as 500GiB or 1.5TB; default: what an existing "
        "store says, for a new one half of the free space",
    )
    parser.add_argument(
        "--min-free",
        metavar="SIZE",
        help="what stays free on the file system: a size, or a share such as 5%%",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"file to write (.json, .yaml or .toml); default: PATH{CONFIG_SUFFIX}",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing config file, which stays as FILE.bak"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = absolute(args.path)
    file = absolute(args.config) if args.config else path + CONFIG_SUFFIX
    _refuse_inside(file, path)
    kind = config_format(file)
    asked = {"path": path, "capacity": args.capacity, "min_free": args.min_free}
    wanted = {**ENGINE_KEYS, **{key: value for key, value in asked.items() if value is not None}}
    wanted_config = StoreConfig.from_extra(wanted, source="init")
    keep = os.path.lexists(file) and not args.force
    existing = load_config_file(file) if keep else wanted
    config = _of_store(existing, file, path) if keep else wanted_config
    # A config file without a capacity leaves it to the store, so there the argument decides.
    capacity = config.capacities[0] or wanted_config.capacities[0]
    report = _make_store(path, capacity, config.min_free_bytes())
    if keep:
        report.append(f"config    {file} (exists, kept as it is)")
        report += _differences(existing, config, wanted, wanted_config)
    else:
        _require_writable(file)
        _write(file, encode_config(kind, wanted))
        report.append(f"config    {file} (written)")
    print("\n".join(report))
    print(f"\nStart SGLang, with ucm-sglang installed in its environment:\n\n{command(file)}")
    return 0


def command(file: str) -> str:
    """The command that starts SGLang with the store of a config file, one flag on a line."""
    flags = [*FLAGS, ("--hicache-storage-backend-extra-config", f"@{file}")]
    return " \\\n    ".join(["sglang serve --model-path MODEL", *(shlex.join(flag) for flag in flags)])


def _refuse_inside(file: str, path: str) -> None:
    inside = os.path.realpath(path)
    if os.path.commonpath([os.path.realpath(file), inside]) == inside:
        raise ConfigError(
            f"config file {file}: lies in the store, which holds nothing but its own files; "
            f"name a file outside {path} with --config"
        )


def _require_writable(file: str) -> None:
    """Raises `ConfigError` where the config file cannot be made."""
    folder = os.path.dirname(file)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"config file {file}: this user may not write in {folder}; name another file with --config (the "
            "store itself is ready)"
        )


def _of_store(values: Mapping[str, Any], file: str, path: str) -> StoreConfig:
    """The configuration in an existing file, which must be one of this store."""
    config = StoreConfig.from_extra(values, source=file)
    if [os.path.realpath(each) for each in config.paths] != [os.path.realpath(path)]:
        raise ConfigError(
            f"{file}: belongs to the store {', '.join(config.paths)}, not {path}; name another file with "
            "--config, or replace this one with --force"
        )
    return config


def _make_store(path: str, capacity: int | None, min_free: int | None) -> list[str]:
    """Make or adopt the store; what there is to say about it."""
    known = os.path.exists(os.path.join(path, STORE_FILE))
    root = StoreRoot(path, capacity=capacity)
    _probe(root.path)
    found = len(root.namespaces())
    state = f"exists, {found} namespaces" if known or found else "new"
    free = free_bytes(root.path)
    floor = SpaceKeeper(root, min_free, chunk=0).min_free
    allocated = root.allocated_bytes()
    lines = [
        f"store     {root.path} ({state})",
        f"capacity  {size_text(root.capacity)}",
        f"allocated {size_text(allocated)}; the file system has {size_text(free)} free",
    ]
    if root.capacity - allocated > free - floor:
        lines.append(
            f"note      the store stops storing before it is full: {size_text(floor)} stay free (min_free)"
        )
    return lines


def _probe(path: str) -> None:
    """Can this user make files in the store, as a server must? Raises `ConfigError`."""
    try:
        # The name is one that the store knows as its own, should it be left behind.
        with tempfile.NamedTemporaryFile(dir=path, prefix=f".{STORE_FILE}."):
            pass
    except OSError as error:
        status = os.stat(path)
        raise ConfigError(
            f"path = {path}: cannot make files there: {error.strerror} (this process is {os.geteuid()}:"
            f"{os.getegid()}, owner {status.st_uid}:{status.st_gid}, mode {stat.S_IMODE(status.st_mode):o}); "
            "give this user write access or name another directory"
        ) from error


def _differences(
    existing: Mapping[str, Any], config: StoreConfig, wanted: Mapping[str, Any], wanted_config: StoreConfig
) -> list[str]:
    """What the kept file says otherwise than this command would have written."""
    lines = []
    for key, value in wanted.items():
        if key == "path" or (key == "capacity" and config.capacity is None):
            continue
        ours = key in StoreConfig.model_fields
        same = getattr(config, key) == getattr(wanted_config, key) if ours else existing.get(key) == value
        if not same:
            found = repr(existing[key]) if key in existing else "not set"
            lines.append(f"note      {key} is {found} there, not {value!r}; edit the file, or use --force")
    return lines


def _write(file: str, text: str) -> None:
    """Write a file whole or not at all; what was there becomes FILE.bak."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    temporary = f"{file}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as output:
            output.write(text)
        if os.path.lexists(file):
            os.replace(file, file + ".bak")
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
