"""Loads: find, read, verify, report; and forget what turned out to be bad.

Without checksums, a load must not take the zeros of a hole for a block. As a rule `Wholeness` tells that
there is none, with no call that lets go of the GIL. While somebody makes holes, or where that cannot be told,
the file system is asked for holes in what was read, and the journals for what was evicted.
"""

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
from posix_store.transfer import Transfer, runs
from posix_store.wholeness import Known, Wholeness
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)


class Loader:
    """Runs load batches. Thread-safe.

    Args:
        whole: what is known to have no holes; None: checksums are compared.
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
        whole: Wholeness | None,
        io_mode: IoMode,
    ) -> None:
        self._catalog = catalog
        self._files = files
        self._writer = writer
        self._recency = recency
        self._engine = engine
        self._counters = counters
        self._whole = whole
        self._io_mode = io_mode

    def load(
        self, ids: np.ndarray, shards: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> np.ndarray:
        """Load n blocks; uint8 (n,) of `Reason`. Arguments as in `PosixStore.load_data`, normalised."""
        known, at = self._locate(ids, shards)
        length = int(sizes.sum())
        good = at.present & (at.length == length)
        if good.all():  # nothing has to be picked out then
            status, opened, error, sure = self._read_surely(known, at, addresses, sizes, deadline)
            rows, there = np.arange(len(ids)), at
        else:
            rows = np.flatnonzero(good)
            there = at.take(rows)
            status = np.where(at.present, np.uint8(Reason.LENGTH), np.uint8(Reason.ABSENT))
            status[rows], opened, error, sure = self._read_surely(
                known, there, addresses[rows], sizes, deadline
            )
        if not sure or np.count_nonzero(status[rows]):
            if self._whole is None:
                self._drop_stale(at, status, rows[opened])
            self._look_again(ids[rows], shards[rows], there, status, rows, sure)
            self._forget(ids, shards, at, status, rows[opened], error)
        used = ids[(status == Reason.OK) & (shards == 0)]
        self._recency.used(used)
        self._counters.loaded(status, length)
        return status

    def close(self) -> None:
        """Let go of files; loads go on, without what those told. Idempotent."""
        if self._whole is not None:
            self._whole.close()

    def prefetch(self, ids: np.ndarray) -> None:
        """Start read-ahead of whole blocks into the page cache; nothing where loads go around it."""
        if self._io_mode.direct:
            return
        at = self._catalog.locate(ids, np.zeros(len(ids), np.uint16))
        at = at.take(at.present)
        with self._files.opened(np.unique(at.segment).tolist()) as (fds, _):
            for number, start, end in runs(at.segment, at.offset, at.length):
                if number in fds:
                    self._files.read_ahead(fds[number], start, end - start)

    def _locate(self, ids: np.ndarray, shards: np.ndarray) -> tuple[Known | None, Locations]:
        """Where blocks are, and what tells that they are whole, if something does."""
        known = self._whole.begin() if self._whole is not None else None
        at = self._catalog.locate(ids, shards)
        if self._whole is None or known is None:
            return None, at
        there = at if at.present.all() else at.take(at.present)
        if not self._whole.covers(known, there):
            self._whole.learn(known, there)
            known = self._whole.begin()
            at = self._catalog.locate(ids, shards)
            there = at.take(at.present)
            if known is None or not self._whole.covers(known, there):
                return None, at
        return known, at

    def _read_surely(
        self,
        known: Known | None,
        at: Locations,
        addresses: np.ndarray,
        sizes: np.ndarray,
        deadline: float,
    ) -> tuple[np.ndarray, np.ndarray, OSError | None, bool]:
        """As `_read`, and: is what was read right, unless its status says so?"""
        if self._whole is None:
            return *self._read(at, addresses, sizes, deadline, find_holes=False), True
        if known is not None:
            result = self._read(at, addresses, sizes, deadline, find_holes=False)
            if self._whole.is_still(known):
                return *result, True
        return *self._read(at, addresses, sizes, deadline, find_holes=True), False

    def _read(
        self, at: Locations, addresses: np.ndarray, sizes: np.ndarray, deadline: float, find_holes: bool
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
            self._engine.read(transfer, deadline, self._whole is None, find_holes)
            if self._io_mode.drops and not direct:
                for fd, start, end in runs(transfer.fds, transfer.offsets, transfer.block_bytes):
                    self._files.drop_behind(fd, start, end - start)
        status[opened] = transfer.status
        return status, opened, transfer.error

    def _drop_stale(self, at: Locations, status: np.ndarray, tried: np.ndarray) -> None:
        """Forget segments whose open file has become useless (ESTALE): their blocks are stored again."""
        for number in np.unique(at.segment[tried[status[tried] == Reason.EVICTED]]).tolist():
            self._catalog.drop_segment(number)

    def _look_again(
        self,
        ids: np.ndarray,
        shards: np.ndarray,
        at: Locations,
        status: np.ndarray,
        rows: np.ndarray,
        sure: bool,
    ) -> None:
        """Tell blocks that were evicted while they were read from damaged ones.

        Who evicts says so before the space is freed, so a look after the read tells. Where it is not `sure`
        that what is OK is right, that tells a block from the zeros of a hole.
        """
        wrong = np.isin(status[rows], (Reason.CHECKSUM, Reason.LENGTH))
        if sure and not wrong.any():
            return
        there = self._catalog.still_there(ids, shards, at)
        if there is not None:
            status[rows[~there & (wrong | (status[rows] == Reason.OK))]] = Reason.EVICTED
        elif not sure:
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
