"""The compiled part of the store, where it was built. Everything has an equal in Python."""

from __future__ import annotations

from types import ModuleType

native: ModuleType | None
why_not = ""
"""Why `native` is None."""
try:
    from posix_store import _native as native  # type: ignore[attr-defined,no-redef]
except ImportError as _error:
    native, why_not = None, str(_error)
