"""Stands in for SGLang's compiled kernel package, which has no build for CPUs on the package index.

SGLang imports a few names from here as soon as it runs on a CPU. Any name can be imported; calling one
raises, because nothing on the paths this project exercises calls one. A path that does is then found at
once instead of computing something made up. Submodules other than ``kvcacheio`` do not exist, so SGLang's
own fallbacks for a missing submodule apply.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not available in the CPU engine shim")

    unavailable.__name__ = name
    return unavailable
