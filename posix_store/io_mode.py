"""Through the page cache or around it: found out for each store, and asked for each batch."""

from __future__ import annotations

import errno
import logging
import os

import numpy as np

from posix_store.errors import StoreError
from posix_store.root import STORE_FILE, StoreRoot
from posix_store.syscalls import Syscalls, close_quietly

logger = logging.getLogger(__name__)

IO_MODES = ("auto", "buffered", "direct")
PAGE_CACHE = ("keep", "drop")
DIRECT_ALIGNMENT = 4096
"""Addresses, sizes and offsets are multiples of this with O_DIRECT; some file systems would take less."""


class IoMode:
    """Whether batches go around the page cache. Thread-safe.

    A batch does when the store does and all its addresses, sizes and offsets are multiples of
    `DIRECT_ALIGNMENT`; another is moved through the page cache, which is said once and counted.

    Args:
        wanted: `buffered`; `direct`; `auto`: direct where the root lies on NVMe and takes O_DIRECT. There the
            device is fast enough, and the memory of the host is better used for the engine's own cache.
        page_cache: `keep` or `drop` what other batches leave there.
        root: of the store.

    Attributes:
        direct: does the store go around the page cache?
        drops: is what other batches leave in the page cache to be dropped?
        why: why it does or does not, in words.
        fallbacks: batches that could not.

    Raises:
        StoreError: no such name, or `direct` where the file system does not take it.
    """

    def __init__(self, wanted: str, page_cache: str, root: StoreRoot) -> None:
        if page_cache not in PAGE_CACHE:
            raise StoreError(f"page_cache = {page_cache!r}: unknown; name one of {', '.join(PAGE_CACHE)}")
        self.drops = page_cache == "drop"
        if wanted not in IO_MODES:
            raise StoreError(f"io_mode = {wanted!r}: unknown; name one of {', '.join(IO_MODES)}")
        self.fallbacks = 0
        self._path = root.path
        self.direct, self.why = False, "as configured"
        if wanted == "buffered":
            return
        refused = _why_not_direct(root)
        if wanted == "direct":
            if refused:
                raise StoreError(
                    f"io_mode = 'direct': {root.path} is on {root.file_system or 'a file system'}, which "
                    f"does not take O_DIRECT ({refused}); use io_mode = 'buffered' or another file system"
                )
            self.direct = True
        elif refused:
            self.why = f"no O_DIRECT: {refused}"
        elif not on_nvme(root.path, root.syscalls):
            self.why = "not on NVMe"
        else:
            self.direct, self.why = True, "on NVMe"

    @property
    def name(self) -> str:
        return "direct" if self.direct else "buffered"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"

    def takes(self, addresses: np.ndarray, sizes: np.ndarray, offset: int) -> bool:
        """Can a batch go around the page cache?

        Args:
            addresses: int64 (n, k).
            sizes: int64 (k,).
            offset: any of the blocks' offsets, or all of them or-ed together.
        """
        if not self.direct:
            return False
        bits = int(np.bitwise_or.reduce(addresses, axis=None)) | int(np.bitwise_or.reduce(sizes)) | offset
        if bits % DIRECT_ALIGNMENT == 0:
            return True
        if not self.fallbacks:
            logger.warning(
                "posix_store %s: io_mode is direct, but a batch is not aligned to %d bytes (blocks of %d "
                "bytes in pieces of %s, addresses to %d): it and others like it go through the page cache. "
                "Page-aligned host memory and a page size whose bytes are a multiple of %d avoid that",
                self._path, DIRECT_ALIGNMENT, int(sizes.sum()), sorted(set(sizes.tolist())),
                _alignment(addresses), DIRECT_ALIGNMENT,
            )  # fmt: skip
        self.fallbacks += 1
        return False


def on_nvme(path: str, calls: Syscalls) -> bool:
    """Does a directory lie on NVMe, also through partitions, LVM and RAID? False when that cannot be told."""
    try:
        device = calls.stat(path).st_dev
        block = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        return _is_nvme(block, calls)
    except OSError:
        return False


def _is_nvme(block: str, calls: Syscalls) -> bool:
    if "/nvme" in block:
        return True
    try:
        below = calls.listdir(os.path.join(block, "slaves"))
    except OSError:
        return False
    return bool(below) and all(
        _is_nvme(os.path.realpath(os.path.join(block, "slaves", name)), calls) for name in below
    )


def _alignment(addresses: np.ndarray) -> int:
    bits = int(np.bitwise_or.reduce(addresses, axis=None))
    return min(bits & -bits, DIRECT_ALIGNMENT)


def _why_not_direct(root: StoreRoot) -> str:
    """Why a file in the root cannot be opened with O_DIRECT; nothing if it can."""
    try:
        path = os.path.join(root.path, STORE_FILE)
        close_quietly(root.syscalls, root.syscalls.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return ""
