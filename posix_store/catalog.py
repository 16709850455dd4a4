"""What is in a namespace: every writer's segments, found and followed through their journals.

The catalog of a process is a cache of the directory. `refresh` lists it, reads what has been appended
since the last look, and forgets segments whose file is gone. Nobody is told anything by anybody.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from posix_store.clock import Clock
from posix_store.early import EarlyEvictions
from posix_store.index import Entries, Index, Locations, parents_in
from posix_store.known import LONG_GONE, CatalogCounters, News, SegmentInfo, backed, fine_times
from posix_store.mount_type import may_be_shared
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD_BYTES,
    SEAL,
    TOUCH,
    FormatError,
    SegmentName,
    as_halves,
    decode_header,
    decode_records,
    parse_name,
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
_LOOKS = 3
"""A journal may vanish during a look; then another is needed to know everything."""
_READ_BYTES = 256 << 20
_MOST_DISPLACED = 10_000
_MOST_GONE = 1_000
"""Segments that are remembered after they have gone, for loads under way and for evictions in them."""
_UNKNOWN_SECONDS = 86400.0
_ATTRIBUTE_SECONDS = 3.0
"""On a network file system the size of a segment may be known later than what its journal says."""


class Catalog:
    """Segments of one namespace and the index of their blocks. Thread-safe."""

    def __init__(self, root: StoreRoot, namespace: str, ttl: float | None = None) -> None:
        self.index = Index()
        self.counters = CatalogCounters()
        self.clock = Clock()
        self.complete = False
        """Did the last look see everything that was there?"""
        self.on_drop: Callable[[int], None] = lambda number: None
        """Called with the number of each segment that is forgotten; must be quick and not call back."""
        self.directory = root.namespace_path(namespace)
        self._root = root
        self._calls = root.syscalls
        self._digest = bytes.fromhex(namespace)
        self._ttl = ttl
        # Held during a look, which makes system calls. `_lock` guards what is known, and is held for none.
        self._look_lock = threading.Lock()
        self._look_began = 0.0
        self._looks = 0
        self._last_complete = 0
        self._lock = threading.Lock()
        self._segments: dict[int, SegmentInfo] = {}
        self._next_number = 0
        self._gone: OrderedDict[int, SegmentInfo] = OrderedDict()
        self._by_name: dict[SegmentName, SegmentInfo] = {}
        self._by_uid: dict[bytes, SegmentInfo] = {}
        self._ignored: dict[str, int] = {}
        self._assembler = ShardAssembler()
        self._early = EarlyEvictions()
        self._displaced: list[Entries] = []
        self._forgotten: dict[int, list[tuple[int, int]]] = {}
        self._looked_at = float("-inf")
        self._resume_at = 0
        self._said: set[tuple[str, str]] = set()

    def segment(self, number: int) -> SegmentInfo:
        """A segment by its number; one that went long ago is an empty name, of which no file is there."""
        return self._segments.get(number) or self._gone.get(number) or LONG_GONE

    @property
    def segments(self) -> list[SegmentInfo]:
        """Every segment that is not gone."""
        return [segment for segment in list(self._segments.values()) if not segment.dropped]

    def matters(self, evictions: np.ndarray) -> np.ndarray:
        """bool (n,): which EVICT records (`RECORD` array) must be kept.

        Those of segments that are there. Where not all journals could be read, for a day also those of
        segments that were never known here, since they may be about to be found.
        """
        with self._lock:
            known = np.array([np.void(uid) for uid in self._by_uid] or [np.void(16)], "V16")
            gone = np.array([np.void(each.uid) for each in self._gone.values()] or [np.void(16)], "V16")
        matter: np.ndarray = np.isin(evictions["parent"], known)
        if not self.complete or self._ignored:
            recent = evictions["time"] > self.clock.now() - _UNKNOWN_SECONDS
            matter |= recent & ~np.isin(evictions["parent"], gone)
        return matter

    @property
    def others_write(self) -> bool:
        """Is there a segment of another process to which records may still be appended?"""
        return any(not (s.own or s.sealed or s.dropped) for s in list(self._segments.values()))

    @property
    def incomplete_blocks(self) -> int:
        """Blocks of which some shards are not recorded yet."""
        return len(self._assembler)

    def path(self, segment: SegmentInfo) -> str:
        return os.path.join(self.directory, segment.name.data)

    def _journal_path(self, segment: SegmentInfo) -> str:
        return os.path.join(self.directory, segment.name.journal)

    def add_own(self, name: SegmentName, uid: bytes) -> SegmentInfo:
        """Register a segment that this process writes: its journal need not be read."""
        with self._lock:
            segment = self._by_name.get(name) or self._add(name, uid, own=True)
            segment.own = True
            return segment

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): which blocks are stored. Looks at the directory only when one is missing."""
        self._expire()
        found = self.index.contains(ids)
        if not found.all() and self.refresh():
            found = self.index.contains(ids)
        return found

    def locate(self, ids: np.ndarray, shards: np.ndarray, most_missing: bool = False) -> Locations:
        """Where blocks are, after a look at the directory when the last is too old for the answer.

        With `most_missing` the caller expects that they are nowhere: where no other process writes, an older
        look will do then.
        """
        self._expire()
        self.refresh(HIT_MAX_AGE)
        at = self.index.locate(ids, shards)
        if most_missing and not self.others_write:
            return at
        if not at.present.all() and self.refresh():
            at = self.index.locate(ids, shards)
        return at

    def assign_copies(self, segment: SegmentInfo, records: np.ndarray) -> None:
        """Fill in `copy` of PUT records that this process is about to append to its segment."""
        with self._lock:
            self._assembler.assign_copies(segment.name.writer, records)

    def still_there(self, ids: np.ndarray, shards: np.ndarray, at: Locations) -> np.ndarray | None:
        """bool (n,): which blocks are, by all that journals say now, still where they were located.

        None when the journals could not be read whole, so that this is not known. A block is evicted by a
        record first, and only then is its space freed: bytes read before this call are right where it says
        True.
        """
        if not self.follow_all():
            return None
        now = self.index.locate(ids, shards)
        return now.present & (now.segment == at.segment) & (now.offset == at.offset)

    def follow_all(self) -> bool:
        """Read everything that journals say at this moment; False when they could not be read whole."""
        first = self._looks + 1  # not one that is under way
        for _ in range(_LOOKS):
            self.refresh(max_age=0)
            if self._last_complete >= first:
                return True
        return False

    def publish_own(self, segment: SegmentInfo, records: np.ndarray) -> bool:
        """Make PUT records that this process has just appended visible to its own look-ups.

        False when the segment has been deleted or refused meanwhile: nobody will find them.
        """
        with self._lock:
            if segment.dropped:
                return False
            now = self.clock.now()
            if self._early.knows(segment.uid) or not self.index.put_new(records, segment.number, now):
                self._apply_puts(segment, records, np.full(len(records), now))
            return True

    def forget_blocks(self, entries: Entries) -> int:
        """Forget blocks whose EVICT records this process has just appended; how many blocks that were."""
        return self.index.drop(entries.ids, entries.shard, entries.at)

    def take_displaced(self) -> list[Entries]:
        """Copies of blocks in the place of which another copy is found now, since the last call.

        They have no EVICT record, and would come back when the other copy is evicted.
        """
        with self._lock:
            displaced, self._displaced = self._displaced, []
        return displaced

    def set_aside(self, ids: np.ndarray, shards: np.ndarray, at: Locations) -> None:
        """Forget blocks that cannot be read at the moment. They stay on the disk; others may find them."""
        with self._lock:  # first: what the index does not name, and this neither, may be freed
            for number, offset, length in zip(
                at.segment.tolist(), at.offset.tolist(), at.length.tolist(), strict=True
            ):
                self._forgotten.setdefault(number, []).append((offset, length))
        self.index.drop(ids, shards, at)

    def waiting_ranges(self, number: int) -> list[tuple[int, int]]:
        """Offset and length of what must stay in a segment though the index does not name it.

        Shards whose blocks are not whole yet, and blocks that were set aside.
        """
        with self._lock:
            return self._assembler.ranges_in(number) + self._forgotten.get(number, [])

    def segments_with_waiting_shards(self) -> set[int]:
        """Numbers of the segments in which there are shards of blocks that are not whole yet."""
        with self._lock:
            return self._assembler.segments()

    def forget_waiting(self, writer: str) -> None:
        """Forget the shards of a dead writer's blocks that are not whole."""
        with self._lock:
            self._assembler.forget_writer(writer)

    def drop_segment(self, number: int) -> None:
        """Forget a segment, whose file is gone or is not what its journal says."""
        with self._lock:
            segment = self._segments.get(number)
            if segment is not None:
                self._drop(segment)

    def forget(self, name: SegmentName) -> None:
        """Forget a segment that this process has deleted."""
        with self._lock:
            if name in self._by_name:
                self._drop(self._by_name[name], is_gone=True)

    def refresh(self, max_age: float = MISS_MAX_AGE, budget: float = LOOK_SECONDS) -> bool:
        """Look at the directory unless that was done in the last `max_age` seconds; True when it was.

        Never raises: what cannot be read now, or not within `budget` seconds, is tried again next time.
        """
        if time.monotonic() - self._looked_at < max_age:
            return False
        # Another thread may be held up by a sick disk; what is known is a good enough answer then.
        patience = min(budget, threading.TIMEOUT_MAX)
        if self._look_lock.locked() and time.monotonic() - self._look_began > LOOK_SECONDS:
            patience = 0 if budget <= LOOK_SECONDS else patience
        if not self._look_lock.acquire(timeout=patience):
            self.complete = False
            return False
        try:
            if time.monotonic() - self._looked_at < max_age:
                return False
            self._look_began = time.monotonic()
            self._looks += 1
            self._refresh(self._look_began + budget)
            if self.complete:
                self._last_complete = self._looks
            self._looked_at = time.monotonic()
            return True
        finally:
            self._look_lock.release()

    def follow(self) -> None:
        """Read what is new in the journals of other writers that are known, without a look at the directory.

        Makes no system call when there is no other writer. Never raises and waits for nobody.
        """
        names = [s.name for s in self.segments if not (s.own or s.sealed)]
        if names and self._look_lock.acquire(blocking=False):
            try:
                news = [news for name in names for news in self._follow(name)]
                with self._lock:
                    self._apply(news, last_look=False)
            finally:
                self._look_lock.release()

    def _expire(self) -> None:
        if self._ttl is not None:
            self.index.expired_before = self.clock.now() - self._ttl

    # -- callers hold the lock of looks -------------------------------------------------------------

    def _refresh(self, deadline: float) -> None:
        self.counters.refreshes += 1
        self.complete = False
        known = self._next_number
        try:
            names = set(self._calls.listdir(self.directory))
        except FileNotFoundError:
            names = set()
        except OSError as error:
            self._say("cannot list %s: %s", self.directory, error)
            return
        with self._lock:
            for segment in self.segments:
                # Made by this process since the directory was listed, it is not gone.
                if segment.name.data not in names and not (segment.own and segment.number >= known):
                    self.counters.vanished_segments += 1
                    self._drop(segment, is_gone=True)
        parsed = filter(None, map(parse_name, names))
        journals = [
            name for name, kind in parsed if kind == "idx" and name.data in names and self._may_grow(name)
        ]
        # Oldest first: of two copies of a block, the later put wins.
        journals.sort(key=lambda name: (name.started_ms, name.stem))
        news: list[News] = []
        start, self._resume_at = self._resume_at, 0
        self.complete = True
        for count, name in enumerate(journals[start:] + journals[:start]):
            if count and time.monotonic() > deadline:
                self._resume_at = journals.index(name)
                self.complete = False
                break
            news += self._follow(name)
        with self._lock:
            self._apply(news, last_look=self.complete)

    def _say(self, message: str, path: str, error: OSError) -> None:
        """Warn once for each file and error: a look at the directory is taken many times a second."""
        if (path, str(error)) not in self._said:
            self._said.add((path, str(error)))
            logger.warning(message, path, error)

    def _may_grow(self, name: SegmentName) -> bool:
        known = self._by_name.get(name)
        return known is None or not (known.own or known.sealed or known.dropped)

    def _follow(self, name: SegmentName) -> list[News]:
        """The records that are new in one journal."""
        known = self._by_name.get(name)
        path = os.path.join(self.directory, name.journal)
        try:
            status = self._calls.stat(path)
            size = status.st_size
            # A rewritten journal may have the size of the old one.
            stamp = (size, status.st_ino, status.st_mtime_ns)
            if size < RECORD_BYTES or size == self._ignored.get(name.stem):
                return []
            if known is not None and stamp == known.stamp:
                return []
            return self._read_journal(name, path, stamp)
        except FormatError as error:
            self.counters.damaged_journals += 1
            self._ignored[name.stem] = size
            if known is not None:
                self.drop_segment(known.number)
            logger.warning("ignoring %s: %s", path, error)
        except FileNotFoundError:
            # Before it went, what it said of others may have been carried over to a journal read already.
            self.complete = False
        except OSError as error:
            self.complete = False
            self._say("cannot read %s: %s", path, error)
        return []

    def _read_journal(self, name: SegmentName, path: str, stamp: tuple[int, int, int]) -> list[News]:
        size = stamp[0]
        fd = self._calls.open(path, os.O_RDONLY)
        try:
            # Read again at each look: someone may have put another journal in the place of this one.
            head = read_at(self._calls, fd, RECORD_BYTES, 0)
            if len(head) < RECORD_BYTES:
                raise OSError(errno.EIO, "the header could not be read whole")
            uid, generation = decode_header(head, JOURNAL_MAGIC, self._digest)
            with self._lock:
                segment = self._by_name.get(name) or self._add(name, uid, own=False)
            if segment.uid != uid:
                raise FormatError(f"journal is of segment {uid.hex()}, it was of {segment.uid.hex()}")
            if segment.generation != generation:  # rewritten: what is known of it already comes once more
                segment.generation, segment.read = generation, RECORD_BYTES
            # Of a huge journal a part at a time; the rest is read at the next look.
            length = max(0, min(_READ_BYTES, size - segment.read))
            data = read_at(self._calls, fd, length, segment.read)
            records, consumed, damaged = decode_records(data)
            there = backed(records, self._calls.stat(self.path(segment)).st_size)
            if self._may_grow_yet(segment, short=len(there) < len(records)):
                # What is there already comes once more at the next look, which does no harm.
                consumed, size, damaged = 0, 0, 0
            else:
                self.counters.truncated_blocks += len(records) - len(there)
            whole = segment.read + length == size
            segment.read += consumed
            sealed = consumed > 0 and bool((records["kind"] == SEAL).any())
            seen = stamp if whole and len(data) == length else (0, 0, 0)
            news = News(segment, there, sealed, seen)
            self.complete &= whole and len(data) == length
            self.counters.damaged_records += damaged
        finally:
            close_quietly(self._calls, fd)
        return [news]

    def _may_grow_yet(self, segment: SegmentInfo, short: bool) -> bool:
        """Is the segment shorter than its journal says only because its size is an old one?"""
        if not short or not may_be_shared(self._root.file_system):
            segment.short_since = None
            return False
        now = time.monotonic()
        segment.short_since = segment.short_since or now
        return now - segment.short_since < _ATTRIBUTE_SECONDS

    # -- callers hold the lock ----------------------------------------------------------------------

    def _apply(self, news: list[News], last_look: bool) -> None:
        # Evictions first, wherever they stand: else a copy that was evicted could displace a good one.
        for each in news:
            self._apply_evictions(each.records[each.records["kind"] == EVICT])
        for each in news:
            segment = each.segment
            if not segment.dropped:
                segment.revision += segment.generation > 0
                puts = each.records[each.records["kind"] == PUT]
                self._apply_puts(segment, puts, fine_times(puts))
                segment.revision += segment.generation > 0
            # Only now: who finds it sealed and without blocks may delete it.
            segment.evicts |= bool((each.records["kind"] == EVICT).any())
            segment.sealed |= each.sealed
            segment.stamp = each.stamp
            if segment.sealed:
                self._root.only_shrinks(self.path(segment), self._journal_path(segment))
        for each in news:
            records = each.records
            touches = records[records["kind"] == TOUCH]
            if len(touches):
                self.index.touch(as_halves(touches["id"]), fine_times(touches))
            if len(records):
                self.clock.seen(float(records["time"].max()))
        if last_look:
            self._early.looked()

    def _add(self, name: SegmentName, uid: bytes, own: bool) -> SegmentInfo:
        segment = SegmentInfo(name, self._next_number, uid, own)
        self._segments[segment.number] = segment
        self._next_number += 1
        self._by_name[name] = segment
        self._by_uid[uid] = segment
        return segment

    def _drop(self, segment: SegmentInfo, is_gone: bool = False) -> None:
        """Forget a segment. With `is_gone` its files are gone: its name need not be remembered either."""
        if is_gone and segment.number in self._segments:
            del self._segments[segment.number], self._by_name[segment.name], self._by_uid[segment.uid]
            self._gone[segment.number] = segment
            if len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)
        if segment.dropped:
            return
        segment.dropped = True
        self.index.drop_segment(segment.number)
        self._early.forget(segment.uid)
        self._assembler.forget(segment.number)
        self._forgotten.pop(segment.number, None)
        self.on_drop(segment.number)

    def _apply_puts(self, segment: SegmentInfo, puts: np.ndarray, stored: np.ndarray) -> None:
        gone = self._early.take(segment.uid, puts["offset"])
        if gone.any():
            puts, stored = puts[~gone], stored[~gone]
        for complete in self._assembler.complete(segment.name.writer, segment.number, puts, stored):
            displaced = self.index.put(complete)
            self.index.touch(*parents_in(complete))
            if len(displaced):
                self._displaced = [*self._displaced, displaced][-_MOST_DISPLACED:]

    def _apply_evictions(self, records: np.ndarray) -> None:
        """Forget blocks; those that are not known yet, when they come."""
        for uid in np.unique(records["parent"]):
            of = records[records["parent"] == uid]
            segment = self._by_uid.get(uid.tobytes())
            if segment is not None and segment.dropped:
                continue
            offsets = of["offset"].astype(np.int64)
            known = np.zeros(len(of), bool)
            if segment is not None:
                known = self.index.drop_at(segment.number, as_halves(of["id"]), offsets)
            if not known.all():
                self._early.add(uid.tobytes(), offsets[~known])
