"""Open segment files for reading: each checked once, a bounded number open at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator

from posix_store.catalog import Catalog
from posix_store.engine import reason_of
from posix_store.errors import Reason
from posix_store.segment import RECORD_BYTES, SEGMENT_MAGIC, FormatError, decode_header
from posix_store.syscalls import Syscalls, close_quietly, read_at

logger = logging.getLogger(__name__)


_Key = tuple[int, bool]
"""Number of a segment, and whether its descriptor goes around the page cache."""


class SegmentFiles:
    """File descriptors by segment number, through the page cache or around it. Thread-safe.

    Args:
        limit: how many stay open while nobody uses them.
    """

    def __init__(self, catalog: Catalog, namespace: str, syscalls: Syscalls, limit: int = 128) -> None:
        self._catalog = catalog
        self._digest = bytes.fromhex(namespace)
        self._calls = syscalls
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[_Key, int] = OrderedDict()
        self._users: dict[_Key, int] = {}
        catalog.on_drop = self._close_dropped

    @contextlib.contextmanager
    def opened(
        self, numbers: list[int], direct: bool = False
    ) -> Iterator[tuple[dict[int, int], dict[int, Reason]]]:
        """Descriptors of segments for the body of the `with`, and reasons for those that cannot be had.

        With `direct` they go around the page cache.

        A segment whose file is gone or is another's is dropped from the catalog.
        """
        held: dict[int, int] = {}
        failed: dict[int, Reason] = {}
        try:
            for number in numbers:
                try:
                    held[number] = self._acquire((number, direct))
                except FormatError as error:
                    failed[number] = Reason.NAMESPACE
                    self._refuse(number, str(error))
                except OSError as error:
                    failed[number] = reason_of(error)
                    if failed[number] is Reason.EVICTED:
                        self._refuse(number, str(error))
            yield held, failed
        finally:
            for number in held:
                self._release((number, direct))

    def drop_behind(self, fd: int, offset: int, length: int) -> None:
        """Begin to write a range back, and take what is clean of it out of the page cache. Best effort."""
        try:
            self._calls.fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            logger.debug("nothing dropped from the page cache: %s", error)

    def read_ahead(self, fd: int, offset: int, length: int) -> None:
        """Ask the kernel to read a range into the page cache. Best effort."""
        try:
            self._calls.fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            logger.debug("no read-ahead: %s", error)

    def close(self) -> None:
        """Close what nobody uses."""
        with self._lock:
            self._close_down_to(0)

    def _acquire(self, key: _Key) -> int:
        with self._lock:
            if key in self._open:
                return self._use(key)
        # Without the lock: on a sick disk this may hang, and others want files that are open.
        fd = self._open_checked(key)
        with self._lock:
            if key in self._open:
                close_quietly(self._calls, fd)
            else:
                self._open[key] = fd
            return self._use(key)

    def _use(self, key: _Key) -> int:
        self._open.move_to_end(key)
        self._users[key] = self._users.get(key, 0) + 1
        return self._open[key]

    def _open_checked(self, key: _Key) -> int:
        number, direct = key
        segment = self._catalog.segment(number)
        fd = self._calls.open(self._catalog.path(segment), os.O_RDONLY)
        try:
            uid, _ = decode_header(read_at(self._calls, fd, RECORD_BYTES, 0), SEGMENT_MAGIC, self._digest)
            if uid != segment.uid:
                raise FormatError(f"segment is {uid.hex()}, its journal says {segment.uid.hex()}")
            if direct:
                self._go_around_the_cache(fd)
        except BaseException:
            close_quietly(self._calls, fd)
            raise
        return fd

    def _go_around_the_cache(self, fd: int) -> None:
        try:
            self._calls.set_direct(fd)
        except OSError as error:
            logger.warning("O_DIRECT is refused (%s): the file is read through the page cache", error)

    def _release(self, key: _Key) -> None:
        with self._lock:
            self._users[key] -= 1
            if self._users[key]:
                return
            del self._users[key]
            if self._catalog.segment(key[0]).dropped:
                close_quietly(self._calls, self._open.pop(key))
            if len(self._open) > self._limit:
                self._close_down_to(self._limit)

    def _close_dropped(self, number: int) -> None:
        """Let a deleted file go at once: while it is open, its space is not free."""
        with self._lock:
            for key in ((number, False), (number, True)):
                if key in self._open and key not in self._users:
                    close_quietly(self._calls, self._open.pop(key))

    def _close_down_to(self, limit: int) -> None:
        idle = [key for key in self._open if key not in self._users]
        for key in idle[: max(0, len(self._open) - limit)]:
            close_quietly(self._calls, self._open.pop(key))

    def _refuse(self, number: int, why: str) -> None:
        logger.warning("forgetting segment %s: %s", self._catalog.segment(number).name.data, why)
        self._catalog.drop_segment(number)
