"""Blocks written in several shards: nothing is handed on before all shards of a block are recorded.

Shards of one block are only put together when one writer wrote them all: two writers may have computed
the same block with different rounding, and a mixture is neither's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posix_store.index import Entries, Locations


class ShardAssembler:
    """Holds back PUT records of incomplete blocks. Not thread-safe: the catalog's lock guards it."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bytes, int], dict[int, tuple[int, np.void]]] = {}

    def __len__(self) -> int:
        """Number of blocks of which some shards are missing."""
        return len(self._waiting)

    def complete(self, writer: str, segment_number: int, puts: np.ndarray) -> Iterator[Entries]:
        """Entries of the blocks that are complete with these PUT records (`RECORD` array)."""
        whole = puts["last_shard"] == 0
        if whole.any():
            yield _entries(puts[whole], np.full(int(whole.sum()), segment_number, np.int32))
        finished: list[tuple[int, np.void]] = []
        for put in puts[~whole]:
            key = (writer, put["id"].tobytes(), int(put["last_shard"]))
            shards = self._waiting.setdefault(key, {})
            shards[int(put["shard"])] = (segment_number, put.copy())
            if len(shards) == key[2] + 1:
                finished += self._waiting.pop(key).values()
        if finished:
            records = np.array([put for _, put in finished], puts.dtype)
            yield _entries(records, np.array([number for number, _ in finished], np.int32))

    def forget(self, segment_number: int) -> None:
        """Drop the shards in a segment that is gone."""
        for key, shards in list(self._waiting.items()):
            for shard in [shard for shard, (number, _) in shards.items() if number == segment_number]:
                del shards[shard]
            if not shards:
                del self._waiting[key]


def _entries(puts: np.ndarray, segments: np.ndarray) -> Entries:
    at = Locations(
        segments,
        puts["offset"].astype(np.int64),
        puts["length"].astype(np.int64),
        puts["payload_crc"].astype(np.uint32),
        puts["last_shard"].astype(np.uint16),
    )
    ids = np.ascontiguousarray(puts["id"]).view(np.uint64).reshape(-1, 2)
    return Entries(ids, puts["shard"].astype(np.uint16), at)
