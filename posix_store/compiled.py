"""The compiled part of the store, where it was built. Everything has an equal in Python."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

native: ModuleType | None
why_not = ""
"""Why `native` is None."""
try:
    native = import_module("posix_store._native")
except ImportError as _error:
    native, why_not = None, str(_error)
