"""The map from (block id, shard) to a location, in an array of rows and an open-addressing table.

A location costs a row of 72 bytes and 8 to 16 of table, whatever the number of blocks, and a batch
is one vectorised pass: a dict would need Python objects and a Python step for each key.
Thread-safe: one lock, held for the pass.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from posix_store.policies import Residents
from posix_store.table import ROW, Table


@dataclass(frozen=True)
class Locations:
    """Where n entries are. Entries with `segment` -1 are absent; their other fields mean nothing."""

    segment: np.ndarray
    """int32 (n,): number of the segment in the catalog, -1 when absent."""
    offset: np.ndarray
    """int64 (n,): bytes from the start of the segment file."""
    length: np.ndarray
    """int64 (n,): bytes of the payload."""
    crc: np.ndarray
    """uint32 (n,): CRC-32C of the payload."""
    last_shard: np.ndarray
    """uint16 (n,): index of the last shard of the block, 0 for a block that is not sharded."""

    @property
    def present(self) -> np.ndarray:
        return self.segment >= 0

    def take(self, which: np.ndarray) -> Locations:
        return Locations(
            self.segment[which],
            self.offset[which],
            self.length[which],
            self.crc[which],
            self.last_shard[which],
        )


@dataclass(frozen=True)
class Entries:
    """Keys, locations, and what eviction wants to know."""

    ids: np.ndarray
    """uint64 (n, 2)."""
    shard: np.ndarray
    """uint16 (n,)."""
    at: Locations
    parents: np.ndarray
    """uint64 (n, 2): the block before each in its chain, zeros where unknown."""
    stored: np.ndarray
    """float64 (n,): Unix seconds."""
    used: np.ndarray
    """float64 (n,): when it was last stored or loaded, Unix seconds."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: np.ndarray) -> Entries:
        return Entries(
            self.ids[which],
            self.shard[which],
            self.at.take(which),
            self.parents[which],
            self.stored[which],
            self.used[which],
        )

    def followed_by(self, others: Entries) -> Entries:
        """These and others."""
        if not len(others):
            return self
        joined = [
            np.concatenate([getattr(self, name), getattr(others, name)])
            for name in ("ids", "shard", "parents", "stored", "used")
        ]
        at = Locations(
            *(np.concatenate([getattr(each.at, name) for each in (self, others)]) for name in _WHERE)
        )
        return Entries(joined[0], joined[1], at, *joined[2:])


_MOST_WAITING = 64
"""Batches of which the uses may wait."""
_WHERE = ("segment", "offset", "length", "crc", "last_shard")


class Index:
    """id and shard -> location. The last `put` of a key wins.

    Args:
        compiled: False does without C, for tests.

    Attributes:
        expired_before: blocks stored before this (Unix seconds) are not found, though they are still there.
    """

    def __init__(self, compiled: bool = True) -> None:
        self.expired_before = float("-inf")
        self._lock = threading.Lock()
        self._rows = 0
        self._data = np.empty(0, ROW)
        self._resize(1024)
        self._free: list[int] = []
        self._table = Table(compiled)
        self._blocks = 0
        self._bytes = 0
        self._uses: list[tuple[np.ndarray, float]] = []

    @property
    def compiled(self) -> bool:
        """Is it looked up in C?"""
        return self._table.compiled

    def __len__(self) -> int:
        """Number of complete blocks."""
        return self._blocks

    @property
    def bytes(self) -> int:
        """Sum of payload bytes of all entries."""
        return self._bytes

    @property
    def last_use(self) -> float:
        """When any block was last stored or loaded, Unix seconds; -inf when there is none."""
        with self._lock:
            self._apply_uses()
            there = self._segment[: self._rows] >= 0
            return float(self._used[: self._rows][there].max(initial=float("-inf")))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the columns and the table take."""
        return int(self._table.nbytes + self._data.nbytes)

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool (n,): is the block of each id (uint64 (n, 2)) recorded? Blocks appear only when complete."""
        with self._lock:
            return self._find_fresh(ids, np.zeros(len(ids), np.uint16)) >= 0

    def locate(self, ids: np.ndarray, shards: np.ndarray) -> Locations:
        """Locations of (id, shard) pairs, copied, so that they stay what they are."""
        with self._lock:
            if self.expired_before > float("-inf"):
                return self._locations(self._find_fresh(ids, shards))
            return Locations(*self._table.locate(self._data, ids, shards))

    def put(self, entries: Entries) -> Entries:
        """Record entries; all shards of a block must come in one call.

        Returns the copies that have lost their place by that: nobody will find them here any more.
        """
        entries, repeated = _last_of_each_key(entries)
        with self._lock:
            rows = self._find(entries.ids, entries.shard)
            known = rows >= 0
            displaced = repeated
            if known.any():
                moved = self._segment[rows] != entries.at.segment
                moved |= self._offset[rows] != entries.at.offset
                displaced = self._entries(rows[known & moved]).followed_by(repeated)
                self._bytes -= int(self._length[rows[known]].sum())
                fresh = np.flatnonzero(~known)
                rows[fresh] = self._add(entries.ids[fresh], entries.shard[fresh])
            else:  # the usual case
                rows = self._add(entries.ids, entries.shard)
            where = self._as_slice(rows)
            self._last_shard[where] = entries.at.last_shard
            self._segment[where] = entries.at.segment
            self._offset[where] = entries.at.offset
            self._length[where] = entries.at.length
            self._crc[where] = entries.at.crc
            self._parent[where] = entries.parents
            self._stored[where] = entries.stored
            self._used[where] = np.maximum(self._used[where], entries.used)
            self._bytes += int(entries.at.length.sum())
        return displaced

    def put_new(self, records: np.ndarray, segment: int, when: float) -> bool:
        """Record blocks that were just stored from their PUT records.

        False when they are sharded, not one chain (or all without parents), or known already.
        Nothing has been done then. What `put` does, at a fraction of its cost.

        Args:
            records: `RECORD` (n,), distinct.
            segment: number of the segment.
            when: Unix seconds.
        """
        words = records.view(np.uint64).reshape(-1, 8)
        ids, parents = np.ascontiguousarray(words[:, :2]), words[:, 2:4]
        if records["last_shard"].any():
            return False
        if parents.any() and not (parents[1:] == ids[:-1]).all():
            return False
        with self._lock:
            if (self._find(ids, np.zeros(len(ids), np.uint16)) >= 0).any():
                return False
            rows = self._allocate(len(ids))
            arguments = (self._data, rows, self._live_rows, records, segment, when)
            if not self._table.insert_records(*arguments):
                self._free.extend(rows.tolist())
                return False
            self._blocks += len(ids)
            self._bytes += int(records["length"].sum())
        if parents[0].any():
            self.touch_soon(parents[:1].copy(), when)
        return True

    def drop(self, ids: np.ndarray, shards: np.ndarray, at: Locations) -> int:
        """Forget the blocks of entries that are still where `at` says; the number of blocks forgotten."""
        with self._lock:
            rows = self._find(ids, shards)
            same = rows >= 0
            same &= (self._segment[rows] == at.segment) & (self._offset[rows] == at.offset)
            return self._remove(rows[same])

    def drop_at(self, segment: int, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Forget the blocks stored at these offsets of a segment; bool (n,): which of them were known.

        Args:
            ids: uint64 (n, 2), what journals call the blocks there.
        """
        with self._lock:
            rows = self._find(ids, np.zeros(len(ids), np.uint16))
            known = (rows >= 0) & (self._segment[rows] == segment) & (self._offset[rows] == offsets)
            gone = rows[known]
            if not known.all():  # further shards, and ids that a damaged record gives wrongly
                there = np.flatnonzero(self._segment[: self._rows] == segment)
                there = there[np.isin(self._offset[there], offsets[~known])]
                known |= np.isin(offsets, self._offset[there])
                gone = np.concatenate([gone, there])
            self._remove(gone)
            return known

    def drop_segment(self, segment: int) -> int:
        """Forget everything in a segment; the number of blocks forgotten."""
        with self._lock:
            return self._remove(np.flatnonzero(self._segment[: self._rows] == segment))

    def touch(self, ids: np.ndarray, used: float | np.ndarray) -> np.ndarray:
        """Note when blocks (all their shards count as one) were used; uint64 (n, 2): their parents.

        Args:
            ids: uint64 (n, 2), distinct. Those that are not known are left out, with zeros for a parent.
            used: Unix seconds, one for all or float64 (n,). An earlier use than the last is no news.
        """
        with self._lock:
            rows = self._find(ids, np.zeros(len(ids), np.uint16))
            known = rows >= 0
            there = rows[known]
            when = np.broadcast_to(np.asarray(used, np.float64), (len(ids),))[known]
            self._used[there] = np.maximum(self._used[there], when)
            return np.where(known[:, None], self._parent[rows], np.uint64(0))

    def used_since(self, ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """bool (n,): which blocks were used after these times (Unix seconds). Not those that are gone."""
        with self._lock:
            self._apply_uses()
            rows = self._find(ids, np.zeros(len(ids), np.uint16))
            return (rows >= 0) & (self._used[rows] > used)

    def touch_soon(self, ids: np.ndarray, used: float) -> None:
        """`touch` at the latest when somebody asks about uses. Costs next to nothing."""
        with self._lock:
            self._uses.append((ids, used))
            if len(self._uses) >= _MOST_WAITING:
                self._apply_uses()

    def residents(self) -> tuple[Residents, np.ndarray]:
        """A copy of every block, and int32 (n,): the segment of its first shard."""
        with self._lock:
            self._apply_uses()
            rows = np.flatnonzero((self._segment[: self._rows] >= 0) & (self._shard[: self._rows] == 0))
            return Residents(
                self._ids[rows],
                self._parent[rows],
                self._stored[rows],
                self._used[rows],
                self._block_lengths(rows),
            ), self._segment[rows]

    def entries_of(self, ids: np.ndarray) -> Entries:
        """Copies of the entries of blocks (uint64 (n, 2)), with all shards; unknown ones are left out."""
        with self._lock:
            self._apply_uses()
            rows = self._find(ids, np.zeros(len(ids), np.uint16))
            return self._entries(np.unique(self._with_siblings(rows[rows >= 0])))

    def ranges_in(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment number, offset and length (int64 (n,)) of every entry in some segments, in that order."""
        with self._lock:
            rows = np.flatnonzero(np.isin(self._segment[: self._rows], segments))
            rows = rows[np.lexsort((self._offset[rows], self._segment[rows]))]
            return (
                self._segment[rows].astype(np.int64),
                self._offset[rows],
                self._length[rows].astype(np.int64),
            )

    def count_by_segment(self, segments: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries, and bytes of payload, in each of the first `segments` segments: int64 (segments,)."""
        with self._lock:
            rows = np.flatnonzero(self._segment[: self._rows] >= 0)
            numbers = self._segment[rows]
            count = np.bincount(numbers, minlength=segments)
            held = np.bincount(numbers, weights=self._length[rows], minlength=segments)
            return count[:segments], held[:segments].astype(np.int64)

    def entries(self) -> Entries:
        """A copy of every entry, in the order of segment and offset."""
        with self._lock:
            self._apply_uses()
            rows = np.flatnonzero(self._segment[: self._rows] >= 0)
            return self._entries(rows[np.lexsort((self._offset[rows], self._segment[rows]))])

    # -- callers hold the lock -----------------------------------------------------------------------

    def _apply_uses(self) -> None:
        """Uses are noted in the order in which they came, so that the last one stands."""
        if not self._uses:
            return
        ids = np.concatenate([each for each, _ in self._uses])
        used = np.repeat([when for _, when in self._uses], [len(each) for each, _ in self._uses])
        self._uses = []
        rows = self._find(ids, np.zeros(len(ids), np.uint16))
        np.maximum.at(self._used, rows[rows >= 0], used[rows >= 0])

    def _block_lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64 (n,): bytes of blocks, all shards together, by the rows of their first shards."""
        lengths = self._length[rows].astype(np.int64)
        sharded = np.flatnonzero(self._last_shard[rows] > 0)
        if sharded.size:
            every = np.unique(self._with_siblings(rows[sharded]))
            first = self._find(self._ids[every], np.zeros(len(every), np.uint16))
            sums = np.zeros(self._rows, np.int64)
            np.add.at(sums, first, self._length[every].astype(np.int64))
            lengths[sharded] = sums[rows[sharded]]
        return lengths

    def _entries(self, rows: np.ndarray) -> Entries:
        return Entries(
            self._ids[rows],
            self._shard[rows],
            self._locations(rows),
            self._parent[rows],
            self._stored[rows],
            self._used[rows],
        )

    def _find_fresh(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        rows = self._find(ids, shards)
        if self.expired_before > float("-inf"):
            rows[(rows >= 0) & (self._stored[rows] < self.expired_before)] = -1
        return rows

    def _locations(self, rows: np.ndarray) -> Locations:
        """Copies, so that they stay what they are. Row -1 is absent."""
        return Locations(
            np.where(rows >= 0, self._segment[rows], np.int32(-1)),
            self._offset[rows],
            self._length[rows].astype(np.int64),
            self._crc[rows],
            self._last_shard[rows],
        )

    def _find(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """int64 (n,): row of each key, -1 when absent."""
        return self._table.find(self._data, ids, shards)

    def _live_rows(self) -> np.ndarray:
        # Rows being inserted have their segment still unset, so they are not among these.
        return np.flatnonzero(self._segment[: self._rows] >= 0)

    def _add(self, ids: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """int64 (n,): new rows with these keys, which are distinct and absent."""
        rows = self._allocate(len(ids))
        where = self._as_slice(rows)
        self._ids[where] = ids
        self._shard[where] = shards
        self._used[where] = float("-inf")
        self._table.insert(self._data, rows, self._live_rows)
        self._blocks += len(ids) - int(np.count_nonzero(shards))
        return rows

    @staticmethod
    def _as_slice(rows: np.ndarray) -> np.ndarray | slice:
        """The same rows as a slice, if they follow each other: that is faster."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return rows

    def _allocate(self, count: int) -> np.ndarray:
        """Row numbers for new entries; their segment is -1 until the caller sets it."""
        reused = self._free[max(0, len(self._free) - count) :]
        if reused:
            del self._free[max(0, len(self._free) - count) :]
        needed = self._rows + count - len(reused)
        if needed > len(self._segment):
            self._resize(max(needed, len(self._segment) * 3 // 2))
        rows = np.arange(self._rows, needed)
        if reused:
            rows = np.concatenate([np.array(reused, np.int64), rows])
        self._rows = needed
        self._segment[rows] = -1
        return rows

    def _resize(self, rows: int) -> None:
        """Room for so many rows. The columns are views of them."""
        data = np.zeros(rows, ROW)
        data["segment"] = -1
        if self._rows:
            data[: self._rows] = self._data[: self._rows]
        self._data = data
        self._ids, self._parent = data["id"], data["parent"]
        self._stored, self._used = data["stored"], data["used"]
        self._offset, self._length, self._crc = data["offset"], data["length"], data["crc"]
        self._segment, self._shard, self._last_shard = data["segment"], data["shard"], data["last_shard"]

    def _remove(self, rows: np.ndarray) -> int:
        """Forget rows, and the other shards of the same blocks; the number of blocks forgotten."""
        rows = np.unique(self._with_siblings(rows))
        if not rows.size:
            return 0
        self._table.remove(self._data, rows)
        blocks = int((self._shard[rows] == 0).sum())
        self._bytes -= int(self._length[rows].sum())
        self._blocks -= blocks
        self._segment[rows] = -1
        self._free.extend(rows.tolist())
        return blocks

    def _with_siblings(self, rows: np.ndarray) -> np.ndarray:
        sharded = rows[self._last_shard[rows] > 0]
        if not sharded.size:
            return rows
        _, first = np.unique(self._ids[sharded].view("V16"), return_index=True)
        one_of_each = sharded[first]
        counts = self._last_shard[one_of_each].astype(np.int64) + 1
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        shards = (np.arange(len(starts)) - starts).astype(np.uint16)
        siblings = self._find(np.repeat(self._ids[one_of_each], counts, axis=0), shards)
        return np.concatenate([rows, siblings[siblings >= 0]])


def _last_of_each_key(entries: Entries) -> tuple[Entries, Entries]:
    """Entries without those whose key comes again later, and those."""
    none = entries.take(np.empty(0, np.int64))
    if len(entries) < 2:
        return entries, none
    ids = entries.ids
    halves = np.sort(ids[:, 0])
    if (halves[1:] != halves[:-1]).all():
        return entries, none  # the usual case, at a fraction of the cost of what follows
    order = np.lexsort((entries.shard, ids[:, 1], ids[:, 0]))
    a, b = order[:-1], order[1:]
    same = (ids[a] == ids[b]).all(axis=1) & (entries.shard[a] == entries.shard[b])
    if not same.any():
        return entries, none
    kept = np.ones(len(entries), bool)
    kept[a[same]] = False
    return entries.take(np.flatnonzero(kept)), entries.take(np.flatnonzero(~kept))


def parents_in(entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Ids (uint64 (m, 2)) of blocks on which entries hang that have just been stored, and when that was.

    They must not leave as if nothing followed them. In a chain that comes whole they are among the entries.
    """
    behind = np.asarray(entries.parents.any(axis=1))
    behind[1:] &= (entries.parents[1:] != entries.ids[:-1]).any(axis=1)
    rows = np.flatnonzero(behind)[::-1]  # the newest of several children counts
    if not rows.size:
        return entries.parents[:0], entries.stored[:0]
    parents, first = np.unique(entries.parents[rows], axis=0, return_index=True)
    return parents, entries.stored[rows[first]]
