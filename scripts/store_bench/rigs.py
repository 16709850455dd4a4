"""UcmHiCacheStorage on SGLang's real pools, as its controller attaches it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from store_bench.stores.base import CannotRun

PAGES = 128


def rig(directory: Path, pages: int = PAGES, **geometry: Any) -> Any:
    """A `ControllerRig` (see cpu_engine) whose storage is ours, in `directory`. Raises `CannotRun`."""
    try:
        import cpu_engine

        cpu_engine.install()
        from cpu_engine.controller import ControllerRig
    except Exception as error:
        raise CannotRun(f"import of sglang failed: {error}") from error
    config = {
        "backend_name": "ucm", "module_path": "ucm_sglang.hicache", "class_name": "UcmHiCacheStorage",
        "interface_v1": 1, "path": str(directory), "capacity": "4GiB", "min_free": 0,
        "weights_fingerprint": "bench",
    }  # fmt: skip
    return ControllerRig(backend="dynamic", extra_config=config, pages=pages, **geometry)


def keys(count: int, salt: str) -> list[str]:
    """64 hex digits each, as SGLang's page hashes."""
    return [hashlib.sha256(f"{salt}/{number}".encode()).hexdigest() for number in range(count)]
