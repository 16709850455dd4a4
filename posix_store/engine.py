"""Engines move a prepared batch. This is the pure-Python one.

It hands whole requests to `preadv` and `pwritev` through raw iovec arrays, so a system call moves up to
`IOV_MAX` components and no Python object is made for any of them. Requests are shared among a few
threads; the calling thread is one of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import count
from typing import Protocol

import numpy as np
from crc32c import crc32c

from posix_store.errors import Reason
from posix_store.syscalls import Syscalls
from posix_store.transfer import Transfer

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
CALL_BYTES = 64 << 20
"""Bytes of one system call at most, so that deadlines are looked at often even on a slow disk."""

_REASONS = {
    errno.ENOSPC: Reason.FULL,
    errno.EDQUOT: Reason.FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.ENOENT: Reason.EVICTED,
    errno.ESTALE: Reason.EVICTED,
    errno.ETIMEDOUT: Reason.TIMEOUT,
}


def reason_of(error: OSError) -> Reason:
    """The reason under which a failed system call is counted."""
    return _REASONS.get(error.errno or 0, Reason.IO_ERROR)


class Engine(Protocol):
    """Runs transfers. Thread-safe. Errors become block statuses; nothing is raised for them."""

    name: str

    def read(self, transfer: Transfer, deadline: float, verify: bool) -> None:
        """Fill memory from files and set `status`. With `verify`, compare each block with its `crc`.

        `deadline` is in `time.monotonic()` seconds: blocks whose turn comes later get `TIMEOUT`.
        When it returns, nothing writes to the memory any more.
        """

    def write(self, transfer: Transfer, deadline: float) -> None:
        """Write memory to files; set `status` and `crc`."""

    def close(self) -> None:
        """Let go of threads. Idempotent."""


class PythonEngine:
    """The portable engine: needs no compiler."""

    name = "python"

    def __init__(self, syscalls: Syscalls, threads: int) -> None:
        self._calls = syscalls
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="posix-store-io")

    def read(self, transfer: Transfer, deadline: float, verify: bool) -> None:
        def run(request: int) -> None:
            _move(transfer, request, self._calls.preadv, deadline, Reason.LENGTH)
            if verify:
                blocks = np.arange(transfer.first[request], transfer.first[request + 1])
                blocks = blocks[transfer.status[blocks] == Reason.OK]
                wrong = checksums(transfer, blocks) != transfer.crc[blocks]
                transfer.status[blocks[wrong]] = Reason.CHECKSUM

        self._share(run, len(transfer.fds))

    def write(self, transfer: Transfer, deadline: float) -> None:
        def run(request: int) -> None:
            blocks = np.arange(transfer.first[request], transfer.first[request + 1])
            transfer.crc[blocks] = checksums(transfer, blocks)
            _move(transfer, request, self._calls.pwritev, deadline, Reason.IO_ERROR)

        self._share(run, len(transfer.fds))

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _share(self, run: Callable[[int], None], requests: int) -> None:
        numbers = count()

        def work() -> None:
            while (number := next(numbers)) < requests:
                run(number)

        helpers = [self._pool.submit(work) for _ in range(min(self._threads, requests) - 1)]
        try:
            work()
        finally:
            # A helper that has not started has nothing left to do; one that runs must be waited for.
            wait([helper for helper in helpers if not helper.cancel()])
        for helper in helpers:
            if not helper.cancelled():
                helper.result()


def _move(
    transfer: Transfer,
    request: int,
    call: Callable[[int, int, int, int], int],
    deadline: float,
    at_end: Reason,
) -> None:
    """Run one request to its end, whatever happens on the way: a block that fails costs only itself."""
    first, last = transfer.first[request], transfer.first[request + 1]
    iov = transfer.iov[first * transfer.components : last * transfer.components]
    iov_ends = np.cumsum(iov[:, 1].astype(np.int64))
    block_ends = np.cumsum(transfer.lengths[first:last])
    fd, offset = int(transfer.fds[request]), int(transfer.offsets[request])
    done, total = 0, int(block_ends[-1])
    while done < total:
        block = int(np.searchsorted(block_ends, done, "right"))
        if time.monotonic() > deadline:
            transfer.status[first + block : last] = Reason.TIMEOUT
            return
        part = _remaining(iov, iov_ends, done)
        try:
            moved = call(fd, part.ctypes.data, len(part), offset + done)
        except OSError as error:
            transfer.error = transfer.error or error
            transfer.status[first + block] = reason_of(error)
            done = int(block_ends[block])
            continue
        if moved <= 0:
            transfer.status[first + block : last] = at_end
            return
        done += moved


def _remaining(iov: np.ndarray, iov_ends: np.ndarray, done: int) -> np.ndarray:
    """The iovecs of the next system call when `done` bytes of the request have been moved."""
    start = int(np.searchsorted(iov_ends, done, "right"))
    stop = int(np.searchsorted(iov_ends, done + CALL_BYTES, "right"))
    part = iov[start : min(max(stop, start + 1), start + IOV_MAX)]
    moved = done - (int(iov_ends[start - 1]) if start else 0)
    if moved:
        part = part.copy()
        part[0, 0] += np.uint64(moved)
        part[0, 1] -= np.uint64(moved)
    return part


@lru_cache(maxsize=64)
def _array_type(length: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * length


def checksums(transfer: Transfer, blocks: np.ndarray) -> np.ndarray:
    """CRC-32C of the memory of each block, uint32 (len(blocks),)."""
    pieces = transfer.iov.reshape(-1, transfer.components, 2)[blocks].tolist()
    result = np.empty(len(blocks), np.uint32)
    for i, block in enumerate(pieces):
        crc = 0
        for address, length in block:
            crc = crc32c(_array_type(length).from_address(address), crc)
        result[i] = crc
    return result
