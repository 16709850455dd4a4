"""The native engine: a batch is one call without the GIL, with threads of its own.

A Python thread waits for the GIL whenever a system call returns, up to 5 ms each time while another thread
runs Python. Here it waits once a batch.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from typing import Any

import numpy as np

from posix_store.compiled import native, why_not
from posix_store.engine import Engine, Publication
from posix_store.errors import StoreError
from posix_store.journal import Journal
from posix_store.python_engine import PythonEngine
from posix_store.segment import MAX_BATCH_RECORDS
from posix_store.syscalls import Syscalls
from posix_store.transfer import Transfer

logger = logging.getLogger(__name__)

_WRITES, _CHECKS, _FINDS_HOLES = 1, 2, 4
_NOT_TRIED, _GONE = -1, -2
LEAST_PIECE_BYTES = 128 << 10
"""Below this, another thread costs more than it brings."""
CHUNK_BYTES = 256 << 10
"""What is read (or written) before its checksum is taken: it must stay in a core's cache."""
CALL_BYTES = 16 << 20
"""What one system call moves at most, so that deadlines are looked at often even on a slow disk."""
DIRECT_BYTES = 4 << 20
"""The same with direct I/O, where the device wants large requests and nothing is in the cache before."""
_TRUE_CALLS = {
    name: getattr(Syscalls, name) for name in ("preadv", "pwritev", "pwrite", "seek_hole", "fstat")
}

ENGINES = ("auto", "native", "python")


def engine_named(name: str, calls: Syscalls, threads: int) -> Engine:
    """An engine by its name in `ENGINES`; `auto` is `native` where that was built, else `python`.

    Raises:
        StoreError: no such engine, or it was not built.
    """
    if name not in ENGINES:
        raise StoreError(f"engine = {name!r}: unknown; name one of {', '.join(ENGINES)}")
    if name == "python" or (name == "auto" and native is None):
        if name == "auto":
            _warn_once()
        return PythonEngine(calls, threads)
    if native is None:
        raise StoreError(f"engine = 'native': {_advice()}")
    return NativeEngine(calls, threads)


@functools.cache
def _warn_once() -> None:
    logger.warning("posix_store: %s", _advice())


def _advice() -> str:
    return (
        f"the native engine was not built ({why_not}), and the Python engine is slower: install a C "
        "compiler and Python's headers (python3-dev), then install this package again"
    )


class NativeEngine:
    """An `Engine` in C. Raises `StoreError` where it was not built.

    Args:
        syscalls: how the operating system is called. Methods in the place of those of `Syscalls` are called
            back with the GIL, for tests.
        threads: that move one transfer, with the calling one.
    """

    name = "native"

    def __init__(self, syscalls: Syscalls, threads: int) -> None:
        if native is None:
            raise StoreError(f"engine = 'native': {_advice()}")
        self._calls = None if _is_libc(type(syscalls)) else syscalls
        self._threads = threads
        self._move = native.move
        self._pool = native.pool(threads)

    def read(
        self, transfer: Transfer, deadline: float, verify: bool = True, find_holes: bool = False
    ) -> None:
        """See `Engine.read`."""
        flags = (_CHECKS if verify else 0) | (_FINDS_HOLES if find_holes and not verify else 0)
        self._run(transfer, flags, deadline, None)

    def write(self, transfer: Transfer, deadline: float, publication: Publication | None = None) -> None:
        """See `Engine.write`."""
        published = self._run(transfer, _WRITES | _CHECKS, deadline, publication)
        if publication is not None and published != _NOT_TRIED:
            publication.done = published in (0, _GONE)
            publication.gone = published == _GONE
            publication.error = OSError(published, os.strerror(published)) if published > 0 else None

    def journal(self, fd: int, end: int) -> Journal:
        """See `Engine.journal`."""
        return NativeJournal(self._calls, fd, end)

    def close(self) -> None:
        """See `Engine.close`: the threads end with the last reference to their pool."""

    def _run(self, t: Transfer, flags: int, deadline: float, publication: Publication | None) -> int:
        total = len(t) * t.block_bytes
        # Large pieces: a thread that goes on where it was finds its memory faster.
        piece = max(LEAST_PIECE_BYTES, total // (2 * self._threads))
        if t.direct:
            piece = min(piece, DIRECT_BYTES)
        chunk = DIRECT_BYTES if t.direct else CHUNK_BYTES if flags & _CHECKS else CALL_BYTES
        journal, records = None, None
        if publication is not None and isinstance(publication.journal, NativeJournal):
            journal, records = publication.journal.tail, publication.records
        code, published = self._move(
            self._pool, self._calls, flags, t.addresses, t.sizes, t.fds, t.offsets, t.crc, t.status, piece,
            chunk, deadline, journal, records,
        )  # fmt: skip
        if code:
            t.error = OSError(code, os.strerror(code))
        return published


def _is_libc(kind: type[Syscalls]) -> bool:
    """Has no method that is called here been put in the place of the true one?"""
    return all(getattr(kind, name) is true for name, true in _TRUE_CALLS.items())


class NativeJournal:
    """A `Journal` in C, to which `NativeEngine.write` can append without the GIL."""

    def __init__(self, calls: Syscalls | None, fd: int, end: int) -> None:
        assert native is not None
        self.fd = fd
        self.tail: Any = native.Journal(fd, end)
        self._calls = calls

    @property
    def end(self) -> int:
        return self.tail.end

    @property
    def broken(self) -> int:
        return self.tail.broken

    def append(self, records: np.ndarray, deadline: float) -> None:
        """See `Journal.append`."""
        if not 0 < len(records) <= MAX_BATCH_RECORDS:
            raise ValueError(f"{len(records)} records in one append; 1 to {MAX_BATCH_RECORDS} are allowed")
        own = np.ascontiguousarray(records)
        code = self.tail.append(self._calls, own.view(np.uint8), len(own), deadline)
        if code:
            what = "the journal is closed after a failed append" if code == errno.EBADF else os.strerror(code)
            raise OSError(code, what)
