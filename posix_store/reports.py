"""What an operator sees of a namespace: numbers, and a check of every byte."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from posix_store.buffers import scratch
from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.engine import Engine
from posix_store.errors import Reason
from posix_store.evictor import EvictionReport
from posix_store.files import SegmentFiles
from posix_store.health import Health
from posix_store.index import Entries
from posix_store.root import StoreRoot
from posix_store.syscalls import close_quietly
from posix_store.transfer import Transfer

_BATCH_BYTES = 32 << 20
_EXAMPLES = 20


@dataclass(frozen=True)
class StoreStats:
    """A namespace of a store, as one process sees it. Sizes are in bytes."""

    root: str
    namespace: str
    blocks: int
    """Complete blocks that can be loaded."""
    incomplete_blocks: int
    """Blocks of which some shards are not recorded yet."""
    payload_bytes: int
    segments: int
    live_writers: int
    """Segments that a living process still appends to (of this machine, where locks are local)."""
    allocated_bytes: int
    """What the file system has allocated to the whole root, preallocated space included."""
    capacity: int
    index_memory_bytes: int
    read_only_because: str | None
    evicted: dict[str, int] = field(default_factory=dict)
    """What this process has evicted, in all namespaces: `blocks`, `bytes` of disk, whole `segments`."""
    health: dict[str, Any] = field(default_factory=dict)
    """The breakers of reads and writes and the queue of writes, of this process."""
    counters: dict[str, Any] = field(default_factory=dict)
    catalog: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class VerifyReport:
    """Outcome of reading every block of a namespace; shards count as blocks."""

    blocks: int = 0
    bytes: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Blocks that could not be read back as they were dumped, by reason."""
    examples: list[str] = field(default_factory=list)
    """Ids (hex) of some bad blocks, with segment file and offset."""
    damaged_records: int = 0
    """Journal records that failed their checksum: their blocks are not found any more."""
    repaired: int = 0
    """Bad blocks that were recorded as gone, so that they are stored again and their space is free."""

    @property
    def ok(self) -> bool:
        return not self.bad and not self.damaged_records


def store_stats(
    root: StoreRoot,
    namespace: str,
    catalog: Catalog,
    counters: Counters,
    evicted: EvictionReport,
    health: Health,
) -> StoreStats:
    """Numbers of a namespace. Raises `OSError` when the root cannot be listed."""
    segments = catalog.segments
    return StoreStats(
        root=root.path,
        namespace=namespace,
        blocks=len(catalog.index),
        incomplete_blocks=catalog.incomplete_blocks,
        payload_bytes=catalog.index.bytes,
        segments=len(segments),
        live_writers=sum(
            _has_writer(root, catalog.path(segment)) for segment in segments if not segment.sealed
        ),
        allocated_bytes=root.allocated_bytes(),
        capacity=root.current_capacity(),
        index_memory_bytes=catalog.index.memory_bytes,
        read_only_because=root.read_only_because,
        evicted=asdict(evicted),
        health=health.snapshot(),
        counters=counters.snapshot(),
        catalog=asdict(catalog.counters),
    )


def _has_writer(root: StoreRoot, path: str) -> bool:
    try:
        fd = root.syscalls.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        root.syscalls.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        close_quietly(root.syscalls, fd)


def verify_blocks(
    catalog: Catalog, files: SegmentFiles, engine: Engine, progress: Callable[[int, int], None] | None
) -> tuple[VerifyReport, Entries]:
    """Read and check all blocks, segment by segment; also gives the entries that are damaged."""
    entries = catalog.index.entries()
    order = np.lexsort((entries.at.offset, entries.at.length, entries.at.segment))
    entries = entries.take(order)
    report = VerifyReport(damaged_records=catalog.counters.damaged_records)
    damaged = []
    for start, end in _batches(entries):
        damaged.append(
            start + _verify_batch(catalog, files, engine, entries.take(np.arange(start, end)), report)
        )
        if progress:
            progress(report.blocks, len(entries))
    return report, entries.take(np.concatenate(damaged) if damaged else np.empty(0, np.int64))


def _batches(entries: Entries) -> Iterator[tuple[int, int]]:
    """Runs of sorted entries of one segment, one length, and a bounded number of bytes."""
    segment, length = entries.at.segment, entries.at.length
    changes = np.flatnonzero((np.diff(segment) != 0) | (np.diff(length) != 0)) + 1
    bounds = [0, *changes.tolist(), len(entries)]
    for first, last in itertools.pairwise(bounds):
        each = max(1, _BATCH_BYTES // int(length[first])) if last > first else 1
        for start in range(first, last, each):
            yield start, min(start + each, last)


def _verify_batch(
    catalog: Catalog, files: SegmentFiles, engine: Engine, entries: Entries, report: VerifyReport
) -> np.ndarray:
    """Check entries of one segment and one length; int64 (m,): which of them are damaged."""
    count, length = len(entries), int(entries.at.length[0])
    status = _read_batch(files, engine, entries)
    wrong = np.isin(status, (Reason.CHECKSUM, Reason.LENGTH))
    if wrong.any():
        there = catalog.still_there(entries.ids, entries.shard, entries.at)
        if there is not None:
            status[wrong & ~there] = Reason.EVICTED
    report.blocks += count
    report.bytes += count * length
    number = int(entries.at.segment[0])
    for row in np.flatnonzero(status != Reason.OK).tolist():
        reason = Reason(int(status[row])).name.lower()
        report.bad[reason] = report.bad.get(reason, 0) + 1
        if len(report.examples) < _EXAMPLES:
            where = f"{catalog.segment(number).name.data} at {int(entries.at.offset[row])}"
            report.examples.append(f"{entries.ids[row].tobytes().hex()} in {where}: {reason}")
    return np.flatnonzero(np.isin(status, (Reason.CHECKSUM, Reason.LENGTH)))


def _read_batch(files: SegmentFiles, engine: Engine, entries: Entries) -> np.ndarray:
    count, length = len(entries), int(entries.at.length[0])
    number = int(entries.at.segment[0])
    memory = scratch(count * length)
    addresses = memory.ctypes.data + np.arange(count, dtype=np.int64).reshape(-1, 1) * length
    with files.opened([number]) as (fds, failed):
        if failed:
            return np.full(count, failed[number], np.uint8)
        transfer = Transfer.of(
            addresses,
            np.array([length], np.int64),
            np.full(count, fds[number], np.int32),
            entries.at.offset,
            entries.at.crc,
        )
        engine.read(transfer, float("inf"))
    return transfer.status
