"""Which stores there are, what makes each of them, and the interpreter that each needs."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store_bench.stores.base import Spec, StoreUnderTest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Entry:
    """A store that runs in a child process.

    environment: of `scripts/env.sh`; None: this interpreter. verifies: settings of `verify` it can have.
    """

    store: str
    module: str
    cls: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    verifies: tuple[bool, ...] = (False,)


def _raw(store: str, checks: bool, allocate: bool) -> Entry:
    return Entry(store, "raw_file", "RawFile", {"checks": checks, "allocate": allocate}, verifies=(checks,))


REGISTRY: dict[str, Entry] = {
    "raw": _raw("raw", False, True),
    "raw-crc": _raw("raw-crc", True, True),
    "raw-unallocated": _raw("raw-unallocated", False, False),
    "ours-native": Entry("ours-native", "ours", "Ours", {"engine": "native"}, verifies=(True, False)),
    "ours-python": Entry("ours-python", "ours", "Ours", {"engine": "python"}, verifies=(True, False)),
    "hicache-file": Entry("hicache-file", "hicache_file", "HiCacheFileStore", environment="sglang"),
    "ucm-posix": Entry("ucm-posix", "ucm", "Ucm", environment="ucm"),
    "vllm-fs": Entry("vllm-fs", "vllm_fs", "VllmFs", environment="vllm"),
    "nixl-posix": Entry("nixl-posix", "nixl_posix", "NixlPosix", environment="nixl"),
}

STORES = tuple(REGISTRY)
PEERS = tuple(entry.store for entry in REGISTRY.values() if entry.environment)


def make_store(entry: Entry, spec: Spec) -> StoreUnderTest:
    """Raises `CannotRun` where it cannot be had."""
    module = importlib.import_module(f"store_bench.stores.{entry.module}")
    made: StoreUnderTest = getattr(module, entry.cls)(spec, **entry.arguments)
    return made


def environments_dir(given: str | None) -> Path:
    return Path(given or os.environ.get("UCM_ENVS_DIR") or ROOT / ".envs")


def interpreter(entry: Entry, environments: Path) -> str | None:
    """The Python for a store; None when its environment was not made."""
    if entry.environment is None:
        return sys.executable
    python = environments / entry.environment / "bin" / "python"
    return str(python) if python.exists() else None


def how_to_make(entry: Entry) -> str:
    return f"scripts/env.sh {entry.environment}"
