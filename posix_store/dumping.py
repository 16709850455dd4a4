"""Dumps: skip what is stored, reserve, write, publish."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from posix_store.capacity import NoSpace
from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.engine import Engine, reason_of
from posix_store.errors import Reason
from posix_store.loading import MIN_REQUEST_BYTES
from posix_store.segment import EXTENT_ALIGNMENT, PUT, RECORD, RECORD_BYTES
from posix_store.transfer import Transfer, plan
from posix_store.writer import Extent, SegmentWriter

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 60.0


class Dumper:
    """Runs dump batches. Thread-safe.

    Args:
        read_only_because: set when nothing may be written; why.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: SegmentWriter,
        engine: Engine,
        counters: Counters,
        io_threads: int,
        read_only_because: str | None,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._engine = engine
        self._counters = counters
        self._io_threads = io_threads
        self._read_only = read_only_because is not None
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
        status = np.zeros(len(ids), np.uint8)
        missing = ~self._stored(ids, shards, n_shards, length)
        first, which = _distinct(ids, shards)
        new = first[missing[first]]
        if new.size:
            records = np.zeros(new.size, RECORD)
            records["kind"] = PUT
            records["id"] = np.ascontiguousarray(ids[new]).view("V16").reshape(-1)
            records["parent"] = np.ascontiguousarray(parents[new]).view("V16").reshape(-1)
            records["length"] = length
            records["shard"] = shards[new]
            records["last_shard"] = n_shards - 1
            records["time"] = int(time.time())
            status[new] = self._store(records, addresses[new], sizes, deadline)
            status = np.where(missing, status[first][which], status)
        self._counters.dumped(status, int((status[new] == Reason.OK).sum()), length)
        return status

    def _stored(self, ids: np.ndarray, shards: np.ndarray, n_shards: int, length: int) -> np.ndarray:
        at = self._catalog.locate(ids, shards)
        return at.present & (at.length == length) & (at.last_shard == n_shards - 1)

    def _store(
        self, records: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> np.ndarray:
        """Write blocks and publish their records; as many of the first ones as there is space for."""
        if self._read_only:
            return np.full(len(records), Reason.READ_ONLY, np.uint8)
        status = np.zeros(len(records), np.uint8)
        count, length = len(records), int(sizes.sum())
        while count > 0:
            if time.monotonic() > deadline:
                status[:count] = Reason.TIMEOUT
                break
            try:
                status[:count] = self._write(records[:count], addresses[:count], sizes, deadline)
                break
            except NoSpace as full:
                status[:count] = full.reason
                if full.missing is None:
                    self._say("%d blocks go unstored: %s", count, full)
                    break
                count -= -(-max(full.missing, EXTENT_ALIGNMENT) // (length + RECORD_BYTES))
            except OSError as error:
                status[:count] = self._failed(error, count)
                break
        return status

    def _write(
        self, records: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, deadline: float
    ) -> np.ndarray:
        length = int(sizes.sum())
        try:
            with self._writer.extent(length * len(records), len(records)) as extent:
                transfer = self._planned(extent, addresses, sizes)
                self._engine.write(transfer, deadline)
                written = transfer.status == Reason.OK
                if not written.any():
                    raise _NothingWritten
                records["offset"] = extent.offset + np.arange(len(records)) * length
                records["payload_crc"] = transfer.crc
                if not self._writer.publish(extent.segment, records[written]):
                    transfer.status[written] = Reason.EVICTED
        except _NothingWritten:
            self._say("%d blocks go unstored: %s", len(records), Reason(int(transfer.status[0])).name.lower())
        return transfer.status

    def _planned(self, extent: Extent, addresses: np.ndarray, sizes: np.ndarray) -> Transfer:
        count, length = len(addresses), int(sizes.sum())
        share = max(MIN_REQUEST_BYTES, count * length // self._io_threads + 1)
        transfer, _ = plan(
            addresses,
            sizes,
            np.full(count, extent.fd, np.int32),
            extent.offset + np.arange(count, dtype=np.int64) * length,
            np.zeros(count, np.uint32),
            share,
        )
        return transfer

    def _failed(self, error: OSError, count: int) -> np.ndarray:
        self._say("%d blocks go unstored: %s", count, error)
        return np.full(count, reason_of(error), np.uint8)

    def _say(self, message: str, *arguments: object) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._logged_at < _LOG_EVERY_SECONDS:
                return
            self._logged_at = now
        logger.warning(message, *arguments)


class _NothingWritten(Exception):
    """No block of a batch could be written: its extent must be given back."""


def _distinct(ids: np.ndarray, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the first of each (id, shard), and for every row the place of its first in that list."""
    keys = np.empty(len(ids), [("hi", "<u8"), ("lo", "<u8"), ("shard", "<u2")])
    keys["hi"], keys["lo"], keys["shard"] = ids[:, 0], ids[:, 1], shards
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    # In the order of the batch: chains are written head first.
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[which]
