"""What several commands need: the parser's types, a store from a PATH argument, consoles, numbers as text."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from pydantic import ByteSize
from rich.console import Console

from posix_store.root import STORE_FILE, StoreRoot
from ucm_sglang.config import ConfigError, StoreConfig, load_config_file

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PATH_HELP = "directory of the store, or a config file as `ucm-sglang init` writes it"
_PIPE_WIDTH = 200


def open_root(path: str) -> StoreRoot:
    """The store that a PATH argument names: its directory, or a config file that says where it is.

    Nothing is written. Raises `ConfigError` or `StoreError` when there is no store.
    """
    if os.path.isfile(path):
        path = StoreConfig.from_extra(load_config_file(path), source=path).path
    root = StoreRoot(path, create=False)
    if not os.path.exists(os.path.join(root.path, STORE_FILE)) and not root.namespaces():
        raise ConfigError(f"path = {root.path}: no store here; make one with `ucm-sglang init`")
    return root


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def free_bytes(path: str) -> int:
    """What the file system has left for this user."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def size_text(size: int) -> str:
    """Bytes for people, such as "1.5GiB"."""
    return ByteSize(size).human_readable()


def output_console() -> Console:
    """Standard output. Tables are not squeezed into 80 columns when it is no terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_PIPE_WIDTH if piped else None)


def progress_console() -> Console:
    """Standard error, for progress: output stays clean for scripts."""
    return Console(stderr=True)
