"""Tests with a real SGLang: make it run on a CPU in this process before anything imports it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pass  # the tests are skipped; tests/conftest.py says why
else:
    import cpu_engine

    cpu_engine.install()
