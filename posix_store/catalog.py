"""What is in a namespace: every writer's segments, found and followed through their journals.

The catalog of a process is a cache of the directory. `refresh` lists it, reads what has been appended
since the last look, and forgets segments whose file is gone. Nobody is told anything by anybody.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posix_store.index import Index, Locations
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD_BYTES,
    SEAL,
    SEGMENT_HEADER_BYTES,
    FormatError,
    SegmentName,
    decode_header,
    decode_records,
)
from posix_store.shards import ShardAssembler
from posix_store.syscalls import close_quietly, read_at

logger = logging.getLogger(__name__)

MISS_MAX_AGE = 0.02
"""Seconds for which the last look at the directory answers for blocks that are not known."""
HIT_MAX_AGE = 1.0
"""Seconds for which it answers, in loads and dumps, for blocks that are: others may have deleted them."""
LOOK_SECONDS = 0.5
"""Time for one look: on a slow file system the rest of the journals is followed at the next."""
_READ_BYTES = 256 << 20


@dataclass
class SegmentInfo:
    """A segment known to this process. `number` is its place in the catalog, never reused."""

    name: SegmentName
    number: int
    uid: bytes
    own: bool
    read: int = RECORD_BYTES
    sealed: bool = False
    dropped: bool = False


@dataclass
class CatalogCounters:
    """Counts since the process opened the namespace."""

    refreshes: int = 0
    damaged_records: int = 0
    damaged_journals: int = 0
    truncated_blocks: int = 0
    vanished_segments: int = 0


class Catalog:
    """Segments of one namespace and the index of their blocks. Thread-safe."""

    def __init__(self, root: StoreRoot, namespace: str) -> None:
        self.index = Index()
        self.counters = CatalogCounters()
        self.on_drop: Callable[[int], None] = lambda number: None
        """Called with the number of each segment that is forgotten; must be quick and not call back."""
        self._calls = root.syscalls
        self._digest = bytes.fromhex(namespace)
        self._directory = root.namespace_path(namespace)
        self._lock = threading.Lock()
        self._segments: list[SegmentInfo] = []
        self._by_name: dict[SegmentName, SegmentInfo] = {}
        self._by_uid: dict[bytes, SegmentInfo] = {}
        self._ignored: dict[str, int] = {}
        self._assembler = ShardAssembler()
        self._evicted_early: dict[bytes, set[int]] = {}
        self._looked_at = float("-inf")
        self._resume_at = 0
        self._unknown_before: set[bytes] = set()
        self._said: set[tuple[str, str]] = set()

    def segment(self, number: int) -> SegmentInfo:
        return self._segments[number]

    @property
    def segments(self) -> list[SegmentInfo]:
        """Every segment that is not gone."""
        return [segment for segment in self._segments if not segment.dropped]

    @property
    def incomplete_blocks(self) -> int:
        """Blocks of which some shards are not recorded yet."""
        return len(self._assembler)

    def path(self, segment: SegmentInfo) -> str:
        return os.path.join(self._directory, segment.name.data)

    def add_own(self, name: SegmentName, uid: bytes) -> SegmentInfo:
        """Register a segment that this process writes: its journal need not be read."""
        with self._lock:
            return self._add(name, uid, own=True)

    def locate(self, ids: np.ndarray, shards: np.ndarray) -> Locations:
        """Where blocks are, after a look at the directory when the last is too old for the answer."""
        self.refresh(HIT_MAX_AGE)
        at = self.index.locate(ids, shards)
        if not at.present.all() and self.refresh():
            at = self.index.locate(ids, shards)
        return at

    def assign_copies(self, segment: SegmentInfo, records: np.ndarray) -> None:
        """Fill in `copy` of PUT records that this process is about to append to its segment."""
        with self._lock:
            self._assembler.assign_copies(segment.name.writer, records)

    def publish_own(self, segment: SegmentInfo, records: np.ndarray) -> bool:
        """Make records that this process has just appended visible to its own look-ups.

        False when the segment has been deleted or refused meanwhile: nobody will find them.
        """
        with self._lock:
            if not segment.dropped:
                self._apply_puts(segment, records)
            return not segment.dropped

    def drop_segment(self, number: int) -> None:
        """Forget a segment, whose file is gone or is not what its journal says."""
        with self._lock:
            self._drop(self._segments[number])

    def forget(self, name: SegmentName) -> None:
        """Forget a segment that this process has deleted."""
        with self._lock:
            if name in self._by_name:
                self._drop(self._by_name[name])

    def refresh(self, max_age: float = MISS_MAX_AGE, budget: float = LOOK_SECONDS) -> bool:
        """Look at the directory unless that was done in the last `max_age` seconds; True when it was.

        Never raises: what cannot be read now, or not within `budget` seconds, is tried again next time.
        """
        if time.monotonic() - self._looked_at < max_age:
            return False
        with self._lock:
            if time.monotonic() - self._looked_at < max_age:
                return False
            self._refresh(time.monotonic() + budget)
            self._looked_at = time.monotonic()
            return True

    # -- callers hold the lock ----------------------------------------------------------------------

    def _refresh(self, deadline: float) -> None:
        self.counters.refreshes += 1
        try:
            names = set(self._calls.listdir(self._directory))
        except FileNotFoundError:
            names = set()
        except OSError as error:
            self._say("cannot list %s: %s", self._directory, error)
            return
        for segment in self._segments:
            if not segment.dropped and segment.name.data not in names:
                self.counters.vanished_segments += 1
                self._drop(segment)
        parsed = filter(None, map(SegmentName.parse, names))
        journals = [
            name for name, kind in parsed if kind == "idx" and name.data in names and self._may_grow(name)
        ]
        # Oldest first: of two copies of a block, the later put wins.
        journals.sort(key=lambda name: (name.started_ms, name.stem))
        news: list[tuple[SegmentInfo, np.ndarray]] = []
        start, self._resume_at = self._resume_at, 0
        for count, name in enumerate(journals[start:] + journals[:start]):
            if count and time.monotonic() > deadline:
                self._resume_at = journals.index(name)
                break
            news += self._follow(name)
        # Evictions first, wherever they stand: else a copy that was evicted could displace a good one.
        for _, records in news:
            self._apply_evictions(records[records["kind"] == EVICT])
        for segment, records in news:
            self._apply_puts(segment, records[records["kind"] == PUT])
        if not self._resume_at:
            self._forget_evictions_of_nothing()

    def _say(self, message: str, path: str, error: OSError) -> None:
        """Warn once for each file and error: a look at the directory is taken many times a second."""
        if (path, str(error)) not in self._said:
            self._said.add((path, str(error)))
            logger.warning(message, path, error)

    def _may_grow(self, name: SegmentName) -> bool:
        known = self._by_name.get(name)
        return known is None or not (known.own or known.sealed or known.dropped)

    def _follow(self, name: SegmentName) -> list[tuple[SegmentInfo, np.ndarray]]:
        """The records that are new in one journal."""
        known = self._by_name.get(name)
        path = os.path.join(self._directory, name.journal)
        try:
            size = self._calls.stat(path).st_size
            if size < RECORD_BYTES or size == self._ignored.get(name.stem):
                return []
            if known is not None and size < known.read + RECORD_BYTES:
                return []
            return self._read_journal(name, path, size)
        except FormatError as error:
            self.counters.damaged_journals += 1
            self._ignored[name.stem] = size
            if known is not None:
                self._drop(known)
            logger.warning("ignoring %s: %s", path, error)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._say("cannot read %s: %s", path, error)
        return []

    def _read_journal(self, name: SegmentName, path: str, size: int) -> list[tuple[SegmentInfo, np.ndarray]]:
        fd = self._calls.open(path, os.O_RDONLY)
        try:
            # Read again at each look: someone may have put another journal in the place of this one.
            uid = decode_header(read_at(self._calls, fd, RECORD_BYTES, 0), JOURNAL_MAGIC, self._digest)
            segment = self._by_name.get(name) or self._add(name, uid, own=False)
            if segment.uid != uid:
                raise FormatError(f"journal is of segment {uid.hex()}, it was of {segment.uid.hex()}")
            # Of a huge journal a part at a time; the rest is read at the next look.
            data = read_at(self._calls, fd, min(_READ_BYTES, size - segment.read), segment.read)
            records, consumed, damaged = decode_records(data)
            news = [(segment, self._backed(segment, records))]
            segment.read += consumed
            segment.sealed |= bool((records["kind"] == SEAL).any())
            self.counters.damaged_records += damaged
        finally:
            close_quietly(self._calls, fd)
        return news

    def _add(self, name: SegmentName, uid: bytes, own: bool) -> SegmentInfo:
        segment = SegmentInfo(name, len(self._segments), uid, own)
        self._segments.append(segment)
        self._by_name[name] = segment
        self._by_uid[uid] = segment
        return segment

    def _drop(self, segment: SegmentInfo) -> None:
        if segment.dropped:
            return
        segment.dropped = True
        self.index.drop_segment(segment.number)
        self._evicted_early.pop(segment.uid, None)
        self._assembler.forget(segment.number)
        self.on_drop(segment.number)

    def _backed(self, segment: SegmentInfo, records: np.ndarray) -> np.ndarray:
        """Records without the puts whose bytes do not lie within the segment file as it is now."""
        size = self._calls.stat(self.path(segment)).st_size
        end = records["offset"] + records["length"]
        whole = (end <= size) & (records["offset"] >= SEGMENT_HEADER_BYTES)
        whole &= records["shard"] <= records["last_shard"]
        lost = (records["kind"] == PUT) & ~whole
        self.counters.truncated_blocks += int(lost.sum())
        return records[~lost]

    def _apply_puts(self, segment: SegmentInfo, puts: np.ndarray) -> None:
        evicted = self._evicted_early.get(segment.uid)
        if evicted:
            gone = np.isin(puts["offset"], np.fromiter(evicted, np.uint64, len(evicted)))
            evicted.difference_update(puts["offset"][gone].tolist())
            puts = puts[~gone]
        for complete in self._assembler.complete(segment.name.writer, segment.number, puts):
            self.index.put(complete)

    def _apply_evictions(self, records: np.ndarray) -> None:
        for uid in np.unique(records["parent"]):
            offsets = records["offset"][records["parent"] == uid].astype(np.int64)
            self._evict(uid.tobytes(), offsets)

    def _forget_evictions_of_nothing(self) -> None:
        """Drop evictions in segments that were unknown at two complete looks.

        A segment is there before its eviction, so the second look would have found it.
        """
        unknown = {uid for uid in self._evicted_early if uid not in self._by_uid}
        for uid in unknown & self._unknown_before:
            del self._evicted_early[uid]
        self._unknown_before = unknown

    def _evict(self, uid: bytes, offsets: np.ndarray) -> None:
        """Forget blocks of a segment; those that are not known yet, when they come."""
        segment = self._by_uid.get(uid)
        if segment is not None and segment.dropped:
            return
        known = np.zeros(len(offsets), bool)
        if segment is not None:
            known = self.index.drop_at(segment.number, offsets)
        if not known.all():
            self._evicted_early.setdefault(uid, set()).update(offsets[~known].tolist())
