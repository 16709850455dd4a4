"""The portable engine: needs no compiler.

It hands whole requests to `preadv` and `pwritev` through raw iovec arrays, so a system call moves up to
`IOV_MAX` components and no Python object is made for any of them. Requests are shared among a few
threads; the calling thread is one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import count

import numpy as np
from crc32c import crc32c

from posix_store.engine import Publication, reason_of
from posix_store.errors import Reason
from posix_store.journal import Journal, PythonJournal
from posix_store.syscalls import Syscalls
from posix_store.transfer import Requests, Transfer, plan

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
CALL_BYTES = 64 << 20
"""Bytes of one system call at most, so that deadlines are looked at often even on a slow disk."""
MIN_REQUEST_BYTES = 1 << 20
"""Below this, another thread costs more than it brings."""


class PythonEngine:
    """An `Engine` in Python.

    Args:
        syscalls: how the operating system is called.
        threads: that move one transfer.
    """

    name = "python"

    def __init__(self, syscalls: Syscalls, threads: int) -> None:
        self._calls = syscalls
        self._threads = threads
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="posix-store-io")

    def read(
        self, transfer: Transfer, deadline: float, verify: bool = True, find_holes: bool = False
    ) -> None:
        """See `Engine.read`."""

        def run(requests: Requests, request: int) -> None:
            _move(transfer, requests, request, self._calls.preadv, deadline, Reason.LENGTH)
            blocks = requests.order[requests.first[request] : requests.first[request + 1]]
            if verify:
                blocks = blocks[transfer.status[blocks] == Reason.OK]
                wrong = checksums(transfer, blocks) != transfer.crc[blocks]
                transfer.status[blocks[wrong]] = Reason.CHECKSUM

        self._share(transfer, run)
        if find_holes and not verify:
            self._refuse_holes(transfer)

    def write(self, transfer: Transfer, deadline: float, publication: Publication | None = None) -> None:
        """See `Engine.write`."""

        def run(requests: Requests, request: int) -> None:
            blocks = requests.order[requests.first[request] : requests.first[request + 1]]
            transfer.crc[blocks] = checksums(transfer, blocks)
            _move(transfer, requests, request, self._calls.pwritev, deadline, Reason.IO_ERROR)

        self._share(transfer, run)
        if publication is not None and len(transfer) and not transfer.status.any():
            self._publish(transfer, publication, deadline)

    def journal(self, fd: int, end: int) -> Journal:
        """See `Engine.journal`."""
        return PythonJournal(self._calls, fd, end)

    def close(self) -> None:
        """See `Engine.close`."""
        self._pool.shutdown(wait=False)

    def _publish(self, transfer: Transfer, publication: Publication, deadline: float) -> None:
        publication.records["payload_crc"] = transfer.crc
        try:
            publication.journal.append(publication.records, deadline)
        except OSError as error:
            publication.error = error
            return
        publication.done = True
        for fd in (int(transfer.fds[0]), publication.journal.fd):
            with contextlib.suppress(OSError):
                publication.gone |= self._calls.fstat(fd).st_nlink == 0

    def _share(self, transfer: Transfer, run: Callable[[Requests, int], None]) -> None:
        if not len(transfer):
            return
        share = len(transfer) * transfer.block_bytes // self._threads + 1
        requests = plan(transfer, max(MIN_REQUEST_BYTES, share))
        numbers = count()

        def work() -> None:
            while (number := next(numbers)) < len(requests):
                run(requests, number)

        helpers: list[Future[None]] = []
        # A forked child has none of the threads, and maybe a lock that nobody will let go of.
        most = min(self._threads, len(requests)) if os.getpid() == self._pid else 1
        try:
            with contextlib.suppress(RuntimeError):  # no more threads: then there are fewer
                for _ in range(most - 1):
                    helpers.append(self._pool.submit(work))
            work()
        finally:
            # A helper that has not started has nothing left to do; one that runs must be waited for.
            wait([helper for helper in helpers if not helper.cancel()])
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def _refuse_holes(self, transfer: Transfer) -> None:
        """A block is written whole, and a hole is never filled. So this needs no journal, and holds also when
        somebody has deleted one. It is asked once for all blocks before the next hole.
        """
        order = np.lexsort((transfer.offsets, transfer.fds))
        for fd in np.unique(transfer.fds).tolist():
            blocks = order[transfer.fds[order] == fd]
            begins = transfer.offsets[blocks]
            ends = begins + transfer.block_bytes
            at = 0
            while at < len(blocks):
                try:
                    hole = max(int(begins[at]), self._calls.seek_hole(fd, int(begins[at])))
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        break  # this file system does not tell
                    hole = int(begins[at])  # behind the end of the file
                first = int(np.searchsorted(ends, hole, "right"))
                at = int(np.searchsorted(begins, hole, "right"))  # what lies between blocks may be a hole
                holey = blocks[first:at]
                transfer.status[holey[transfer.status[holey] == Reason.OK]] = Reason.EVICTED


def _move(
    transfer: Transfer,
    requests: Requests,
    request: int,
    call: Callable[[int, int, int, int], int],
    deadline: float,
    at_end: Reason,
) -> None:
    """Run one request to its end, whatever happens on the way: a block that fails costs only itself."""
    first, last = requests.first[request], requests.first[request + 1]
    components, length = len(transfer.sizes), transfer.block_bytes
    blocks = requests.order[first:last]
    iov = requests.iov[first * components : last * components]
    iov_ends = np.cumsum(iov[:, 1].astype(np.int64))
    fd, offset = int(requests.fds[request]), int(requests.offsets[request])
    done, total = 0, len(blocks) * length
    while done < total:
        block = done // length
        if time.monotonic() > deadline:
            transfer.status[blocks[block:]] = Reason.TIMEOUT
            return
        part = _remaining(iov, iov_ends, done)
        try:
            moved = call(fd, part.ctypes.data, len(part), offset + done)
        except OSError as error:
            transfer.error = transfer.error or error
            transfer.status[blocks[block]] = reason_of(error)
            done = (block + 1) * length
            continue
        if moved <= 0:
            transfer.status[blocks[block:]] = at_end
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
    sizes = transfer.sizes.tolist()
    result = np.empty(len(blocks), np.uint32)
    for i, row in enumerate(transfer.addresses[blocks].tolist()):
        crc = 0
        for address, length in zip(row, sizes, strict=True):
            crc = crc32c(_array_type(length).from_address(address), crc)
        result[i] = crc
    return result
