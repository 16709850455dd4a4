"""Loads: find, read, verify, report; and forget what turned out to be bad."""

from __future__ import annotations

import logging
import os

import numpy as np

from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.engine import Engine
from posix_store.errors import Reason
from posix_store.files import SegmentFiles
from posix_store.index import Locations
from posix_store.io_mode import IoMode
from posix_store.recency import Recency
from posix_store.segment import evict_records
from posix_store.syscalls import Syscalls
from posix_store.transfer import Transfer, runs
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)


class Loader:
    """Runs load batches. Thread-safe.

    Args:
        verify: compare checksums.
        io_mode: which batches go around the page cache.
    """

    def __init__(
        self,
        catalog: Catalog,
        files: SegmentFiles,
        writer: SegmentWriter,
        engine: Engine,
        recency: Recency,
        counters: Counters,
        calls: Syscalls,
        verify: bool,
        io_mode: IoMode,
    ) -> None:
        self._catalog = catalog
        self._files = files
        self._writer = writer
        self._recency = recency
        self._engine = engine
        self._counters = counters
        self._calls = calls
        self._verify = verify
        self._io_mode = io_mode

    def load(
        self, ids: np.ndarray, shards: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> np.ndarray:
        """Load n blocks; uint8 (n,) of `Reason`. Arguments as in `PosixStore.load_data`, normalised."""
        at = self._catalog.locate(ids, shards)
        length = int(sizes.sum())
        good = at.present & (at.length == length)
        if good.all():  # nothing has to be picked out then
            status, opened, error = self._read(at, addresses, sizes, deadline)
            rows, there = np.arange(len(ids)), at
        else:
            rows = np.flatnonzero(good)
            there = at.take(rows)
            status = np.where(at.present, np.uint8(Reason.LENGTH), np.uint8(Reason.ABSENT))
            status[rows], opened, error = self._read(there, addresses[rows], sizes, deadline)
        if not self._verify or np.count_nonzero(status[rows]):
            if self._verify:
                self._drop_stale(at, status, rows[opened])
            self._look_again(ids[rows], shards[rows], there, status, rows)
            self._forget(ids, shards, at, status, rows[opened], error)
        used = ids[(status == Reason.OK) & (shards == 0)]
        self._recency.used(used)
        self._counters.loaded(status, length)
        return status

    def prefetch(self, ids: np.ndarray) -> None:
        """Start read-ahead of whole blocks."""
        at = self._catalog.locate(ids, np.zeros(len(ids), np.uint16))
        at = at.take(at.present)
        with self._files.opened(np.unique(at.segment).tolist()) as (fds, _):
            for number, fd in fds.items():
                of = at.segment == number
                start = int(at.offset[of].min())
                end = int((at.offset + at.length)[of].max())
                self._files.read_ahead(fd, start, end - start)

    def _read(
        self, at: Locations, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> tuple[np.ndarray, np.ndarray, OSError | None]:
        """Read n blocks: uint8 (n,) of `Reason`, bool (n,): whose segment was opened, the first error."""
        status = np.zeros(len(addresses), np.uint8)
        if not len(addresses):
            return status, np.zeros(0, bool), None
        first = int(at.segment[0])
        if (at.segment == first).all():
            numbers, which = [first], None
        else:
            found, which = np.unique(at.segment, return_inverse=True)
            numbers = found.tolist()
        direct = self._io_mode.direct and self._io_mode.takes(
            addresses, sizes, int(np.bitwise_or.reduce(at.offset))
        )
        with self._files.opened(numbers, direct) as (fds, failed):
            fd_of = np.array([fds.get(number, -1) for number in numbers], np.int32)
            fd_of = np.repeat(fd_of, len(status)) if which is None else fd_of[which]
            opened = fd_of >= 0
            if failed:
                for number, reason in failed.items():
                    status[at.segment == number] = reason
                at, addresses, fd_of = at.take(opened), addresses[opened], fd_of[opened]
            transfer = Transfer.of(addresses, sizes, fd_of, at.offset, at.crc, direct)
            self._engine.read(transfer, deadline, self._verify, find_holes=not self._verify)
            if self._io_mode.drops and not direct:
                for fd, start, end in runs(transfer):
                    self._files.drop_behind(fd, start, end - start)
        status[opened] = transfer.status
        return status, opened, transfer.error

    def _drop_stale(self, at: Locations, status: np.ndarray, tried: np.ndarray) -> None:
        """Forget segments whose open file has become useless (ESTALE): their blocks are stored again."""
        for number in np.unique(at.segment[tried[status[tried] == Reason.EVICTED]]).tolist():
            self._catalog.drop_segment(number)

    def _look_again(
        self, ids: np.ndarray, shards: np.ndarray, at: Locations, status: np.ndarray, rows: np.ndarray
    ) -> None:
        """Tell blocks that were evicted while they were read from damaged ones.

        Who evicts says so before the space is freed, so a look after the read tells. Without checksums, only
        that tells a block from the zeros of a hole.
        """
        wrong = np.isin(status[rows], (Reason.CHECKSUM, Reason.LENGTH))
        if self._verify and not wrong.any():
            return
        there = self._catalog.still_there(ids, shards, at)
        if there is not None:
            status[rows[~there & (wrong | (status[rows] == Reason.OK))]] = Reason.EVICTED
        elif not self._verify:
            status[rows[status[rows] == Reason.OK]] = Reason.TIMEOUT

    def _forget(
        self,
        ids: np.ndarray,
        shards: np.ndarray,
        at: Locations,
        status: np.ndarray,
        tried: np.ndarray,
        error: OSError | None,
    ) -> None:
        """Drop blocks that cannot be read, so that they are stored again when they are computed again."""
        gone = tried[status[tried] == Reason.EVICTED]
        self._catalog.index.drop(ids[gone], shards[gone], at.take(gone))
        unreadable = np.isin(status[tried], (Reason.CHECKSUM, Reason.LENGTH, Reason.IO_ERROR))
        bad = tried[unreadable]
        if not bad.size:
            return
        damaged, unread = bad[status[bad] != Reason.IO_ERROR], bad[status[bad] == Reason.IO_ERROR]
        self._catalog.index.drop(ids[damaged], shards[damaged], at.take(damaged))
        self._catalog.set_aside(ids[unread], shards[unread], at.take(unread))
        uids = np.array([np.void(self._catalog.segment(number).uid) for number in at.segment[damaged]], "V16")
        logger.warning(
            "posix_store %s: %d of %d blocks cannot be used (%d damaged, %d unreadable%s); they are misses",
            os.path.dirname(self._catalog.directory),
            bad.size,
            len(ids),
            damaged.size,
            bad.size - damaged.size,
            f": {error}; `ucm-sglang doctor` tests the disk" if error else "",
        )
        if damaged.size:
            now = self._catalog.clock.now()
            self._writer.note(evict_records(ids[damaged], uids, at.offset[damaged], now))
