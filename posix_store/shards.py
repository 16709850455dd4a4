"""Blocks written in several shards: nothing is handed on before all shards of a block are recorded.

Shards of one block are only put together when one writer wrote them all: two writers may have computed
the same block with different rounding, and a mixture is neither's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from posix_store.index import Entries, Locations
from posix_store.segment import as_halves


@dataclass
class _Waiting:
    """Shards of one copy of a block: (segment number, PUT record) by shard index."""

    copy: int
    shards: dict[int, tuple[int, np.void]] = field(default_factory=dict)


class ShardAssembler:
    """Holds back PUT records of incomplete blocks. Not thread-safe: the catalog's lock guards it."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bytes, int], _Waiting] = {}
        self._copies = 0

    def __len__(self) -> int:
        """Number of blocks of which some shards are missing."""
        return len(self._waiting)

    def assign_copies(self, writer: str, puts: np.ndarray) -> None:
        """Fill in `copy` of a writer's own PUT records before they are appended.

        Shards join the copy that waits for them, also in the place of a shard that it has already. A block
        of which nothing waits, because it is new or was whole before, begins another copy.
        """
        begun: dict[tuple[str, bytes, int], int] = {}
        for i in np.flatnonzero(puts["last_shard"] > 0).tolist():
            key = _key(writer, puts[i])
            if key not in begun:
                waiting = self._waiting.get(key)
                begun[key] = waiting.copy if waiting else self._copies
                self._copies = (self._copies + (waiting is None)) % 256
            puts["copy"][i] = begun[key]

    def complete(
        self, writer: str, segment_number: int, puts: np.ndarray, stored: np.ndarray
    ) -> Iterator[Entries]:
        """Entries of the blocks that are complete with these PUT records (`RECORD` array).

        `stored`, float64 (n,), is when each was stored, finer than the whole seconds in the records.
        """
        whole = puts["last_shard"] == 0
        if whole.all():
            if len(puts):
                yield _entries(puts, np.full(len(puts), segment_number, np.int32), stored)
            return
        if whole.any():
            yield _entries(puts[whole], np.full(int(whole.sum()), segment_number, np.int32), stored[whole])
        finished: list[tuple[int, np.void]] = []
        for put in puts[~whole]:
            key = _key(writer, put)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.copy != int(put["copy"]):
                waiting = self._waiting[key] = _Waiting(int(put["copy"]))
            waiting.shards[int(put["shard"])] = (segment_number, put.copy())
            if len(waiting.shards) == key[2] + 1:
                finished += self._waiting.pop(key).shards.values()
        if finished:
            records = np.array([put for _, put in finished], puts.dtype)
            numbers = np.array([number for number, _ in finished], np.int32)
            yield _entries(records, numbers, np.full(len(records), stored.max()))

    def ranges_in(self, segment_number: int) -> list[tuple[int, int]]:
        """Offset and length of the waiting shards in a segment."""
        return [
            (int(put["offset"]), int(put["length"]))
            for waiting in self._waiting.values()
            for number, put in waiting.shards.values()
            if number == segment_number
        ]

    def segments(self) -> set[int]:
        """Numbers of the segments that hold waiting shards."""
        return {number for waiting in self._waiting.values() for number, _ in waiting.shards.values()}

    def forget_writer(self, writer: str) -> None:
        """Drop the shards of a writer that will not store the others any more."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[0] != writer}

    def forget(self, segment_number: int) -> None:
        """Drop the shards in a segment that is gone."""
        for key, waiting in list(self._waiting.items()):
            kept = {shard: at for shard, at in waiting.shards.items() if at[0] != segment_number}
            if kept:
                waiting.shards = kept
            else:
                del self._waiting[key]


def _key(writer: str, put: np.void) -> tuple[str, bytes, int]:
    return writer, put["id"].tobytes(), int(put["last_shard"])


def _entries(puts: np.ndarray, segments: np.ndarray, stored: np.ndarray) -> Entries:
    at = Locations(
        segments,
        puts["offset"].astype(np.int64),
        puts["length"].astype(np.int64),
        puts["payload_crc"].astype(np.uint32),
        puts["last_shard"].astype(np.uint16),
    )
    return Entries(
        as_halves(puts["id"]), puts["shard"].astype(np.uint16), at, as_halves(puts["parent"]), stored, stored
    )
