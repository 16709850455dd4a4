"""A bound on what waits to be written: a disk that is slower than its server must not fill the memory."""

from __future__ import annotations

import threading
from types import TracebackType


class WriteQueue:
    """Counts the bytes of dumps that wait or are being written, in the background or not.

    Thread-safe; never waits. When the queue is full the newest blocks are dropped: those of the batch that
    comes last, from its tail, so that what is stored of a chain is its head.

    **Use**: at the call, before a dump is handed to another thread, with the blocks in chain order and
    without those that are stored already::

        place = queue.admit(length, count)      # place.blocks of them may be dumped, the rest is `QUEUE`
        with place:                             # gives the bytes back, also when the dump raises
            ...

    A place may be taken in one thread and given back in another.

    Args:
        limit_bytes: most bytes at a time. A queue that is empty takes one block of any size all the same, or
            it would never be stored.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        """Bytes that wait or are being written now."""
        self.most_bytes = 0
        """The most there has been."""
        self.admitted_blocks = 0
        self.dropped_blocks = 0
        self._lock = threading.Lock()

    def admit(self, nbytes_each: int, count: int) -> Place:
        """A place for as many leading blocks of a batch as fit, maybe none.

        Args:
            nbytes_each: bytes of each block, more than 0.
            count: blocks in the batch.
        """
        with self._lock:
            room = max(0, self.limit_bytes - self.bytes) // nbytes_each
            blocks = min(count, max(room, 0 if self.bytes else 1))
            self.bytes += blocks * nbytes_each
            self.most_bytes = max(self.most_bytes, self.bytes)
            self.admitted_blocks += blocks
            self.dropped_blocks += count - blocks
        return Place(self, blocks, blocks * nbytes_each)

    def _release(self, place: Place, nbytes: int | None) -> None:
        with self._lock:
            given = place.nbytes if nbytes is None else min(nbytes, place.nbytes)
            place.nbytes -= given
            self.bytes -= given


class Place:
    """What a dump holds in a `WriteQueue`; as a context manager, until the end of the `with`.

    Attributes:
        blocks: leading blocks of the batch that were admitted. Does not change.
        nbytes: bytes that it holds still.
    """

    def __init__(self, queue: WriteQueue, blocks: int, nbytes: int) -> None:
        self.blocks = blocks
        self.nbytes = nbytes
        self._queue = queue

    def release(self, nbytes: int | None = None) -> None:
        """Give bytes back early, never more than it holds; None: all. Idempotent then."""
        self._queue._release(self, nbytes)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
