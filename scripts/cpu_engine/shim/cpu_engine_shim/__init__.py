"""Makes SGLang run its HiCache code on a machine without an accelerator. For tests and the demo only.

``install()`` registers import hooks and does nothing else: it imports neither torch nor SGLang. A process
that never imports SGLang is not changed, except that a torchvision built for another torch, which SGLang
imports and which could not be imported at all, then can be.

The first ``import sglang`` checks SGLang's version, because the patches reach into its internals, and raises
`UnsupportedSglangError` for any version but `SUPPORTED_SGLANG`.

What is patched, and why, is in ``patches.py``; the stand-ins for the copy kernels are in ``transfer_ops.py``.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from cpu_engine_shim import patches
from cpu_engine_shim.import_hooks import ImportHooks

__all__ = ["SUPPORTED_SGLANG", "UnsupportedSglangError", "check_sglang_version", "install", "installed"]

SUPPORTED_SGLANG = "0.5.23"


class UnsupportedSglangError(RuntimeError):
    """SGLang's version is not the one whose internals this shim knows.

    Not an ImportError: callers that tolerate a missing SGLang must not swallow it.
    """


def installed_sglang_version() -> str:
    """Version of the SGLang distribution in this environment, or "unknown" if it carries no metadata."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_sglang_version(found: str) -> None:
    """Raise `UnsupportedSglangError` unless `found` is the supported version."""
    if found != SUPPORTED_SGLANG:
        raise UnsupportedSglangError(
            f"the CPU engine shim supports SGLang {SUPPORTED_SGLANG} only, but SGLang {found} is installed. "
            f"Install sglang=={SUPPORTED_SGLANG}, or take {os.path.dirname(os.path.dirname(__file__))} off "
            "PYTHONPATH to run without the shim."
        )


def _before_sglang() -> None:
    check_sglang_version(installed_sglang_version())
    # SGLang picks its platform while it is imported; this choice is what makes it take the CPU.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # SGLang compiles its hash extension on first use with the ninja it finds on PATH. The one that came with
    # its environment is not there unless that environment is activated.
    scripts, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + path


def install() -> None:
    """Register the hooks, once. Must come before the first import of SGLang in the process.

    Raises RuntimeError if SGLang is imported already: its modules have chosen their platform by then.
    """
    if installed():
        return
    if "sglang" in sys.modules:
        raise RuntimeError(
            "the CPU engine shim must be installed before SGLang is imported. Put cpu_engine.install() "
            "at the top of the first module that needs SGLang (for pytest: in conftest.py)."
        )
    sys.meta_path.insert(0, ImportHooks(before={"sglang": _before_sglang}, after=patches.AFTER_IMPORT))


def installed() -> bool:
    """True if `install()` has run in this process."""
    return any(isinstance(finder, ImportHooks) for finder in sys.meta_path)
