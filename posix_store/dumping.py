"""Dumps: skip what is stored, reserve, write, publish."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from posix_store.admission import Admission
from posix_store.breaker import Breaker
from posix_store.capacity import NoSpace, SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.engine import Engine, Publication, reason_of
from posix_store.errors import Reason
from posix_store.evictor import Evictor
from posix_store.files import SegmentFiles
from posix_store.io_mode import IoMode
from posix_store.recency import Recency
from posix_store.segment import (
    EXTENT_ALIGNMENT,
    MAX_BATCH_RECORDS,
    PUT,
    RECORD,
    RECORD_BYTES,
    SECOND_PARTS,
    as_halves,
    as_void,
)
from posix_store.transfer import Transfer
from posix_store.writer import Extent, SegmentWriter

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 60.0
MOST_WAIT = 0.5
"""Seconds that a dump waits for room, each time; then its blocks go unstored."""
MOST_TRIES = 4


class Dumper:
    """Runs dump batches. Thread-safe.

    Args:
        read_only_because: set when nothing may be written; why.
        io_mode: which batches go around the page cache.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: SegmentWriter,
        files: SegmentFiles,
        space: SpaceKeeper,
        evictor: Evictor,
        recency: Recency,
        admission: Admission,
        breaker: Breaker,
        on_low: Callable[[], None],
        engine: Engine,
        counters: Counters,
        read_only_because: str | None,
        io_mode: IoMode,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._files = files
        self._space = space
        self._evictor = evictor
        self._recency = recency
        self._admission = admission
        self._breaker = breaker
        self._on_low = on_low
        self._engine = engine
        self._counters = counters
        self._read_only = read_only_because is not None
        self._io_mode = io_mode
        self._root_path = space.root_path
        self._lock = threading.Lock()
        self._logged_at = float("-inf")

    def dump(
        self,
        ids: np.ndarray,
        shards: np.ndarray,
        n_shards: int,
        parents: np.ndarray,
        addresses: np.ndarray,
        sizes: np.ndarray,
        deadline: float,
    ) -> np.ndarray:
        """Store n blocks; uint8 (n,) of `Reason`. Arguments as in `PosixStore.dump_data`, normalised."""
        length = int(sizes.sum())
        stored = self._stored(ids, shards, n_shards, length)
        repeats = _distinct(ids, shards)
        missing = ~stored
        if repeats is None and not stored.any():  # nothing has to be picked out then
            status, written = self._store_new(ids, shards, n_shards, parents, addresses, sizes, deadline)
        else:
            status, written = np.zeros(len(ids), np.uint8), 0
            first, which = repeats or (np.arange(len(ids)), np.arange(len(ids)))
            self._recency.used(ids[first[~missing[first] & (shards[first] == 0)]])
            new = first[missing[first]]
            if new.size:
                status[new], written = self._store_new(
                    ids[new], shards[new], n_shards, parents[new], addresses[new], sizes, deadline
                )
                status = np.where(missing, status[first][which], status)
        self._counters.dumped(status, written, length)
        if written and (self._space.is_low or self._writer.wants_space):
            self._on_low()
        return status

    def _store_new(
        self,
        ids: np.ndarray,
        shards: np.ndarray,
        n_shards: int,
        parents: np.ndarray,
        addresses: np.ndarray,
        sizes: np.ndarray,
        deadline: float,
    ) -> tuple[np.ndarray, int]:
        """Store blocks that are distinct and not stored, if they are admitted.

        uint8 (n,) of `Reason`, and how many blocks were written.
        """
        if n_shards == 1:
            admitted = self._admission.admit(ids, parents)
            if not admitted.all():
                status = np.full(len(ids), Reason.NOT_ADMITTED, np.uint8)
                if not admitted.any():
                    return status, 0
                ids, shards, parents = ids[admitted], shards[admitted], parents[admitted]
                status[admitted], written = self._write_down(
                    ids, shards, 1, parents, addresses[admitted], sizes, deadline
                )
                return status, written
        return self._write_down(ids, shards, n_shards, parents, addresses, sizes, deadline)

    def _write_down(
        self,
        ids: np.ndarray,
        shards: np.ndarray,
        n_shards: int,
        parents: np.ndarray,
        addresses: np.ndarray,
        sizes: np.ndarray,
        deadline: float,
    ) -> tuple[np.ndarray, int]:
        # What they hang on must not leave as if nothing followed it.
        self._recency.parents_used(parents)
        records = _records(ids, parents, shards, n_shards, int(sizes.sum()), self._catalog.clock.now())
        return self._store(records, addresses, sizes, deadline)

    def _stored(self, ids: np.ndarray, shards: np.ndarray, n_shards: int, length: int) -> np.ndarray:
        at = self._catalog.locate(ids, shards, most_missing=True)
        return at.present & (at.length == length) & (at.last_shard == n_shards - 1)

    def _store(
        self, records: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> tuple[np.ndarray, int]:
        """Write blocks and publish their records; as many of the first ones as there is space for.

        uint8 (n,) of `Reason`, and how many blocks were written.
        """
        if self._read_only:
            return np.full(len(records), Reason.READ_ONLY, np.uint8), 0
        length = int(sizes.sum())
        with self._breaker.operation(len(records) * length, deadline) as operation:
            if not operation.allowed:
                return np.full(len(records), Reason.BREAKER, np.uint8), 0
            status, written, late = self._store_what_fits(records, addresses, sizes, deadline)
            errors = (status == Reason.IO_ERROR).sum()
            operation.ended(written * length, errors=int(errors), late=late)
        return status, written

    def _store_what_fits(
        self, records: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> tuple[np.ndarray, int, int]:
        """The same, and how many blocks were late in being written.

        Those that waited for a lock are not among these: its holder may be stopped, and the disk be well.
        """
        status = np.zeros(len(records), np.uint8)
        count, length, tries = len(records), int(sizes.sum()), 0
        while count > 0:
            if time.monotonic() > deadline:
                status[:count] = Reason.TIMEOUT
                break
            try:
                status[:count], written = self._write(records[:count], addresses[:count], sizes, deadline)
                late = int((status[:count] == Reason.TIMEOUT).sum()) if status.any() else 0
                return status, written, late
            except _Deleted:
                self._writer.look_again()
                status[:count] = Reason.EVICTED
                tries += 1
                if tries > MOST_TRIES:
                    break
            except NoSpace as full:
                status[:count] = full.reason
                tries += 1
                patience = min(deadline, time.monotonic() + MOST_WAIT)
                if full.missing and tries <= MOST_TRIES:
                    if self._evictor.make_room(full.missing, patience):
                        continue
                    self._space.say_full(full)
                    tries = MOST_TRIES
                if not full.divisible:
                    self._say("%d blocks go unstored: %s", count, full)
                    break
                count -= -(-max(full.missing, EXTENT_ALIGNMENT) // (length + RECORD_BYTES))
            except OSError as error:
                status[:count] = self._failed(error, count)
                break
        return status, 0, 0

    def _write(
        self, records: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> tuple[np.ndarray, int]:
        """Write blocks and publish them: uint8 (n,) of `Reason`, and how many are new to everybody.

        Raises `_Deleted` when somebody has deleted the segment meanwhile, and what `SegmentWriter` raises.
        """
        count, length = len(records), int(sizes.sum())
        try:
            with self._writer.extent(length * count, count, deadline) as extent:
                offsets = extent.offset + np.arange(count, dtype=np.int64) * length
                records["offset"] = offsets
                fd, direct = self._descriptor(extent, addresses, sizes)
                transfer = Transfer.of(addresses, sizes, np.full(count, fd, np.int32), offsets, direct=direct)
                publication = None
                if self._may_be_published_at_once(records):
                    publication = Publication(extent.segment.tail, records)
                extent.named = publication is not None  # an exception may come just behind the append
                self._engine.write(transfer, deadline, publication)
                extent.named = publication is not None and publication.done
                if self._io_mode.drops and not direct:
                    self._files.drop_behind(fd, extent.offset, extent.length)
                if publication is not None and publication.error is not None:
                    raise publication.error
                if publication is not None and publication.done:
                    if publication.gone or not self._writer.published(extent.segment, records):
                        raise _Deleted
                    return transfer.status, count
                return transfer.status, self._publish(extent, records, transfer, deadline)
        except _NothingWritten:
            why = Reason(int(transfer.status[0])).name.lower()
            self._say("%d blocks go unstored: %s", count, _in_words(why, transfer.error))
        except _NothingNew:
            pass
        return transfer.status, 0

    def _descriptor(self, extent: Extent, addresses: np.ndarray, sizes: np.ndarray) -> tuple[int, bool]:
        """What a batch is written through, and whether that goes around the page cache.

        In an extent, which is aligned, blocks are where the multiples of their length are.
        """
        if self._io_mode.direct and self._io_mode.takes(addresses, sizes, int(sizes.sum())):
            try:
                return extent.segment.direct_fd(), True
            except OSError as error:
                self._say("O_DIRECT is refused (%s): blocks are written through the page cache", error)
        return extent.fd, False

    def _may_be_published_at_once(self, records: np.ndarray) -> bool:
        """Must nothing be looked up between writing and publishing?"""
        return (
            not self._writer.noted_records
            and not records["last_shard"][0]
            and not self._catalog.others_write
            and len(records) <= MAX_BATCH_RECORDS
        )

    def _publish(self, extent: Extent, records: np.ndarray, transfer: Transfer, deadline: float) -> int:
        """Publish what was written of a batch; how many blocks that are new to everybody."""
        good = transfer.status == Reason.OK
        if not good.any():
            raise _NothingWritten
        records["payload_crc"] = transfer.crc
        new = good & ~self._stored_meanwhile(records, extent.length // len(records))
        if not new.any():
            raise _NothingNew
        if not self._writer.publish(extent, records[new], deadline):
            raise _Deleted
        return int(new.sum())

    def _stored_meanwhile(self, records: np.ndarray, length: int) -> np.ndarray:
        """bool (n,): which blocks others have stored while this process wrote them: one copy is enough.

        What was written of them is space without a record, which eviction gives back with its segment.
        """
        if len(records) == 0 or (records["last_shard"] > 0).any():
            return np.zeros(len(records), bool)
        self._catalog.follow()
        ids = as_halves(records["id"])
        at = self._catalog.index.locate(ids, records["shard"].astype(np.uint16))
        return at.present & (at.length == length) & (at.last_shard == 0)

    def _failed(self, error: OSError, count: int) -> np.ndarray:
        self._say("%d blocks go unstored: %s", count, error)
        return np.full(count, reason_of(error), np.uint8)

    def _say(self, message: str, *arguments: object) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._logged_at < _LOG_EVERY_SECONDS:
                return
            self._logged_at = now
        logger.warning("posix_store %s: " + message, self._root_path, *arguments)


def _in_words(reason: str, error: OSError | None) -> str:
    return f"{reason} ({error}); `ucm-sglang doctor` tests the disk" if error else reason


class _Deleted(Exception):
    """Somebody has deleted the segment: what was published in it is seen by nobody."""


class _NothingWritten(Exception):
    """No block of a batch could be written: its extent must be given back."""


class _NothingNew(Exception):
    """Others have stored all blocks of a batch in the meantime: its extent must be given back."""


def _records(
    ids: np.ndarray, parents: np.ndarray, shards: np.ndarray, n_shards: int, length: int, now: float
) -> np.ndarray:
    records = np.zeros(len(ids), RECORD)
    records["kind"] = PUT
    records["id"] = as_void(ids)
    records["parent"] = as_void(parents)
    records["length"] = length
    records["shard"] = shards
    records["last_shard"] = n_shards - 1
    records["time"] = int(now)
    if n_shards == 1:
        records["copy"] = int(now % 1 * SECOND_PARTS)
    return records


def _distinct(ids: np.ndarray, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows of the first of each (id, shard), and for every row the place of its first in that list.

    None when all are distinct.
    """
    halves = np.sort(ids[:, 0])
    if (halves[1:] != halves[:-1]).all():  # the usual case, at a fraction of the cost of what follows
        return None
    keys = np.empty(len(ids), [("hi", "<u8"), ("lo", "<u8"), ("shard", "<u2")])
    keys["hi"], keys["lo"], keys["shard"] = ids[:, 0], ids[:, 1], shards
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    # In the order of the batch: chains are written head first.
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[which]
