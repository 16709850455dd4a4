"""The storage backends that are compared: the same running server, attached to one or another or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_engine.server import CpuServer

from ucm_sglang.cli.init import ENGINE_KEYS

NAMES = ("none", "file", "ours")
CAPACITY = "16GiB"
"""Of our store. Much more than is stored, so that nothing is evicted; as `file`, which has no limit."""

STATED = {
    "none": "hierarchical cache (device, host), no storage: what is not there is computed",
    "file": "SGLang's HiCacheFile with its cache of metadata on, and without a size limit",
    "ours": "as `ucm-sglang init` configures it: zero-copy interface, every page verified when it is loaded",
}


def attachment(name: str, folder: Path) -> tuple[str, dict[str, Any]] | None:
    """(SGLang's name, extra config) of a backend that keeps its data in `folder`; None for no storage."""
    if name == "file":
        return "file", {
            "file_storage_path": str(folder / "file"),
            "enable_metadata_cache": True,
            "metadata_ttl": 3600,
        }
    if name == "ours":
        return "dynamic", {**ENGINE_KEYS, "path": str(folder / "ours"), "capacity": CAPACITY, "min_free": 0}
    return None


@contextmanager
def attached(server: CpuServer, name: str, folder: Path) -> Iterator[None]:
    """An idle server without storage has this backend for a while; its own caches are empty afterwards.

    If the block raises, the server is left as it is.
    """
    what = attachment(name, folder)
    if what is not None:
        server.attach_storage(*what, prefetch_policy="wait_complete", write_policy="write_through")
    yield
    server.flush_cache()
    if what is not None:
        server.detach_storage()
