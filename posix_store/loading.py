"""Loads: find, read, verify, report; and forget what turned out to be bad."""

from __future__ import annotations

import logging

import numpy as np

from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.engine import Engine
from posix_store.errors import Reason
from posix_store.files import SegmentFiles
from posix_store.index import Locations
from posix_store.transfer import plan
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

MIN_REQUEST_BYTES = 1 << 20
"""Below this, another thread costs more than it brings."""


class Loader:
    """Runs load batches. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        files: SegmentFiles,
        writer: SegmentWriter,
        engine: Engine,
        counters: Counters,
        io_threads: int,
        verify: bool,
    ) -> None:
        self._catalog = catalog
        self._files = files
        self._writer = writer
        self._engine = engine
        self._counters = counters
        self._io_threads = io_threads
        self._verify = verify

    def load(
        self, ids: np.ndarray, shards: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> np.ndarray:
        """Load n blocks; uint8 (n,) of `Reason`. Arguments as in `PosixStore.load_data`, normalised."""
        status = np.full(len(ids), Reason.ABSENT, np.uint8)
        at = self._catalog.locate(ids, shards)
        length = int(sizes.sum())
        status[at.present] = Reason.LENGTH
        wanted = np.flatnonzero(at.present & (at.length == length))
        if wanted.size:
            status[wanted], opened = self._read(at.take(wanted), addresses[wanted], sizes, deadline)
            self._forget(ids, shards, at, status, wanted[opened])
        self._counters.loaded(status, length)
        return status

    def prefetch(self, ids: np.ndarray) -> None:
        """Start read-ahead of whole blocks."""
        at = self._catalog.locate(ids, np.zeros(len(ids), np.uint16))
        at = at.take(at.present)
        with self._files.opened(np.unique(at.segment)) as (fds, _):
            for number, fd in fds.items():
                of = at.segment == number
                start = int(at.offset[of].min())
                end = int((at.offset + at.length)[of].max())
                self._files.read_ahead(fd, start, end - start)

    def _read(
        self, at: Locations, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read n blocks: uint8 (n,) of `Reason`, and bool (n,): whose segment could be opened."""
        status = np.zeros(len(addresses), np.uint8)
        numbers, which = np.unique(at.segment, return_inverse=True)
        with self._files.opened(numbers) as (fds, failed):
            for number, reason in failed.items():
                status[at.segment == number] = reason
            fd_of = np.array([fds.get(int(number), -1) for number in numbers], np.int32)[which]
            opened = fd_of >= 0
            readable = np.flatnonzero(opened)
            if readable.size:
                share = readable.size * int(sizes.sum()) // self._io_threads + 1
                transfer, order = plan(
                    addresses[readable], sizes, fd_of[readable], at.offset[readable], at.crc[readable],
                    max(MIN_REQUEST_BYTES, share),
                )  # fmt: skip
                self._engine.read(transfer, deadline, self._verify)
                status[readable[order]] = transfer.status
        return status, opened

    def _forget(
        self, ids: np.ndarray, shards: np.ndarray, at: Locations, status: np.ndarray, tried: np.ndarray
    ) -> None:
        """Drop blocks that cannot be read, so that they are stored again when they are computed again."""
        for number in np.unique(at.segment[tried[status[tried] == Reason.EVICTED]]).tolist():
            # The descriptor has become useless (ESTALE). The journal is not read again, so what is in this
            # segment is stored again when it is computed again.
            self._catalog.drop_segment(number)
        unreadable = np.isin(status[tried], (Reason.CHECKSUM, Reason.LENGTH, Reason.IO_ERROR))
        bad = tried[unreadable]
        if not bad.size:
            return
        self._catalog.index.drop(ids[bad], shards[bad], at.take(bad))
        damaged = bad[status[bad] != Reason.IO_ERROR]
        logger.warning(
            "%d of %d blocks cannot be used (%d damaged, %d unreadable); they count as misses",
            bad.size, len(ids), damaged.size, bad.size - damaged.size,
        )  # fmt: skip
        self._writer.evict(
            [
                (ids[i].tobytes(), self._catalog.segment(int(at.segment[i])).uid, int(at.offset[i]))
                for i in damaged.tolist()
            ]
        )
