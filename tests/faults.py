"""A `Syscalls` that fails, shortens, delays or watches calls of one's choice, and counts all of them."""

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posix_store import Syscalls

KINDS = tuple(name for name in vars(Syscalls) if not name.startswith("_"))
"""Every kind of call the store makes, by the name of its method."""
READS = ("preadv", "pread")
WRITES = ("pwritev", "pwrite")
CHANGES = (*WRITES, "fallocate", "ftruncate", "fsync", "mkdir", "makedirs", "rmdir", "rename", "unlink")
"""Calls that change a file system. Opening for writing is counted as `open for writing` as well."""
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Fault:
    """What happens to calls `nth`, `nth + 1`, ... (`times` of them, from 1) among those that match."""

    nth: int = 1
    kinds: Collection[str] = KINDS
    """Names of methods, or `open for writing`."""
    suffix: str = ""
    """Only calls on files whose name ends like this, given by path or by descriptor."""
    times: float = 1
    error: int | None = None
    """Raise `OSError` with this errno. A failed `close` still closes, as on Linux."""
    short: int | None = None
    """Transfer at most so many bytes; 0 looks like the end of the file."""
    delay: float = 0.0
    """Seconds to sleep before the call."""
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    """Called before and after the call itself."""
    seen: int = field(default=0, init=False)
    """Matching calls so far."""

    @property
    def fired(self) -> bool:
        return self.seen >= self.nth

    def strikes(self, kind: str, writing: bool, target: int | str) -> bool:
        named = kind in self.kinds or (writing and "open for writing" in self.kinds)
        if not named or not (not self.suffix or name_of(target).endswith(self.suffix)):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


class FaultySyscalls(Syscalls):
    """The operating system with faults. Thread-safe.

    Args:
        faults: applied to every call that they match.

    Attributes:
        counts: calls so far by kind.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """How many calls were made."""
        return sum(self.counts[kind] for kind in KINDS)

    @property
    def changes(self) -> dict[str, int]:
        """Calls that could have changed the file system, by kind."""
        return {kind: self.counts[kind] for kind in (*CHANGES, "open for writing") if self.counts[kind]}

    def _run(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.counts[kind] += 1
            writing = kind == "open" and bool(arguments[1] & WRITING_FLAGS)
            self.counts["open for writing"] += writing
            struck = [fault for fault in self.faults if fault.strikes(kind, writing, arguments[0])]
        for fault in struck:
            time.sleep(fault.delay)
            if fault.before:
                fault.before()
        for fault in struck:
            if fault.error is not None:
                if kind == "close":
                    super().close(*arguments)
                raise OSError(fault.error, os.strerror(fault.error))
        limits = [fault.short for fault in struck if fault.short is not None]
        result = self._cut(kind, arguments, min(limits)) if limits else self._real(kind, arguments)
        for fault in struck:
            if fault.after:
                fault.after()
        return result

    def _real(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(super(), kind)(*arguments)

    def _cut(self, kind: str, arguments: tuple[Any, ...], limit: int) -> Any:
        """The call with at most `limit` bytes to transfer."""
        fd, what, *rest = arguments
        if kind == "pread":
            return self._real(kind, (fd, min(what, limit), *rest))
        if kind == "pwrite":
            return self._real(kind, (fd, what[:limit], *rest))
        if kind not in ("preadv", "pwritev"):
            return self._real(kind, arguments)
        if limit == 0:
            return 0
        count, offset = rest
        memory = (ctypes.c_int64 * (2 * count)).from_address(what)
        iov = np.ctypeslib.as_array(memory).reshape(count, 2).copy()
        begins = np.cumsum(iov[:, 1]) - iov[:, 1]
        iov[:, 1] = np.clip(limit - begins, 0, iov[:, 1])
        return self._real(kind, (fd, iov.ctypes.data, int((iov[:, 1] > 0).sum()), offset))


def _method(kind: str) -> Callable[..., Any]:
    def call(self: FaultySyscalls, *arguments: Any) -> Any:
        return self._run(kind, arguments)

    call.__name__ = kind
    return call


for _kind in KINDS:
    setattr(FaultySyscalls, _kind, _method(_kind))


def name_of(target: int | str) -> str:
    """The path of a call's first argument, which is a path or an open descriptor."""
    if isinstance(target, str):
        return target
    try:
        return os.readlink(f"/proc/self/fd/{target}").removesuffix(" (deleted)")
    except OSError:
        return ""
