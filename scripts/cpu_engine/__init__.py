"""Runs SGLang 0.5.23 on a machine without an accelerator. For tests and the demo only; see README.md.

Importing this package imports neither torch nor SGLang. Submodules:

    tiny_model   writes a tiny random-weight model and its tokenizer
    server       a true SGLang server as a context manager
    controller   SGLang's real cache controller and pools in this process
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["SHIM_DIR", "install"]

SHIM_DIR = Path(__file__).resolve().parent / "shim"


def install() -> None:
    """Arm the CPU shim in this process. Call it before anything imports SGLang; more calls do nothing.

    Raises RuntimeError if SGLang is imported already. The first import of SGLang afterwards raises
    `cpu_engine_shim.UnsupportedSglangError` if its version is not the supported one.
    """
    if str(SHIM_DIR) not in sys.path:
        sys.path.insert(0, str(SHIM_DIR))
    import cpu_engine_shim

    cpu_engine_shim.install()
