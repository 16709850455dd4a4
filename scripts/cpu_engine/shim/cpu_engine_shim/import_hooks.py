"""Run a function just before or just after a named module is executed for the first time."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Before = Callable[[], None]
After = Callable[[ModuleType], None]


class ImportHooks(importlib.abc.MetaPathFinder):
    """Finder that finds nothing itself: it wraps what the other finders return.

    Args:
        before: module name -> function called when the module is about to be looked up. What it raises
            is raised by the import statement.
        after: module name -> function called with the module once its code has run.
    """

    def __init__(self, before: Mapping[str, Before], after: Mapping[str, After]) -> None:
        self._before = dict(before)
        self._after = dict(after)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._before:
            self._before[fullname]()
        if fullname not in self._after:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._after[fullname])
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _PatchingLoader(importlib.abc.Loader):
    """Delegates to the module's own loader and patches the module after its code has run."""

    def __init__(self, inner: importlib.abc.Loader, after: After) -> None:
        self._inner = inner
        self._after = after

    def __getattr__(self, name: str) -> object:
        # inspect, linecache and importlib.resources ask the loader for more than the Loader interface.
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)
