"""What a process knows of the segments in a namespace, and of what is new in a journal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posix_store.segment import PUT, RECORD_BYTES, SECOND_PARTS, SEGMENT_HEADER_BYTES, SegmentName


@dataclass
class SegmentInfo:
    """A segment known to this process. `number` is its place in the catalog, never reused.

    `read` is how far its journal has been followed, `stamp` the size, inode and time of change (ns) that the
    journal had when all of it was looked at, `generation` how often it had been rewritten then.
    """

    name: SegmentName
    number: int
    uid: bytes
    own: bool
    read: int = RECORD_BYTES
    stamp: tuple[int, int, int] = (0, 0, 0)
    generation: int = 0
    sealed: bool = False
    dropped: bool = False
    evicts: bool = False
    """Are there EVICT records in its journal?"""
    revision: int = 0
    """Changes before and after blocks of before may have been found again, in a rewritten journal."""
    short_since: float | None = None
    """When the segment was first seen to be shorter than its journal says, by `time.monotonic()`."""

    @property
    def size(self) -> int:
        """Bytes of the journal when all of it was looked at, 0 before that."""
        return self.stamp[0]


LONG_GONE = SegmentInfo(SegmentName("gone", 0), -1, bytes(16), own=False, sealed=True, dropped=True)


@dataclass(frozen=True)
class News:
    """What is new in a journal; `sealed` and `stamp` as in `SegmentInfo`, true once `records` are applied."""

    segment: SegmentInfo
    records: np.ndarray
    sealed: bool
    stamp: tuple[int, int, int]


@dataclass
class CatalogCounters:
    """Counts since the process opened the namespace."""

    refreshes: int = 0
    damaged_records: int = 0
    damaged_journals: int = 0
    truncated_blocks: int = 0
    vanished_segments: int = 0


def backed(records: np.ndarray, size: int) -> np.ndarray:
    """Records without the puts whose bytes do not lie within a segment file of `size` bytes."""
    end = records["offset"] + records["length"]
    whole = (end <= size) & (records["offset"] >= SEGMENT_HEADER_BYTES)
    whole &= records["shard"] <= records["last_shard"]
    return records[(records["kind"] != PUT) | whole]


def fine_times(records: np.ndarray) -> np.ndarray:
    """float64 (n,): the times of one journal's records, to 1/256 s where that is recorded, in their order."""
    part = np.where(records["last_shard"] == 0, records["copy"], 0)
    order: np.ndarray = np.arange(len(records)) / (len(records) + 1)
    return records["time"] + (part + order) / SECOND_PARTS
