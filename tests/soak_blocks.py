"""What the soak stores: chains of blocks whose ids and bytes are pure functions of their place.

The oracle for bytes. It shares no code with the store: whoever knows a chain and a position knows the block's
id, and whoever knows the id knows every right byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MASK = (1 << 64) - 1
_TABLE = np.random.default_rng(20240601).integers(0, 1 << 64, (1 << 17) + (1 << 16), np.uint64)
"""Random words; a block is a window of them, each xored with the block's own word."""
_STARTS = 1 << 17
FLIP = 0x5A
"""The killer corrupts a byte by xoring it with this, so that its work can be told from the store's."""


@dataclass(frozen=True)
class Space:
    """A namespace of the soak: what its blocks look like and how many a chain has."""

    number: int
    block_bytes: int
    batch: int
    """Blocks that one call dumps or loads at most."""
    longest: int
    """Blocks of the longest chain."""
    policy: str = "lru"
    segment_bytes: int = 8 << 20

    @property
    def name(self) -> str:
        return f"{self.number:x}5" * 16

    def length(self, chain: int) -> int:
        """Blocks in a chain."""
        return 1 + _mix_one(chain * 7 + self.number) % self.longest

    def shards(self, chain: int) -> int:
        """Shards of each block of a chain: one chain in five is sharded."""
        return 1 if chain % 5 else 2 + chain // 5 % 2

    def shard_bytes(self, chain: int) -> int:
        return self.block_bytes // self.shards(chain)

    def ids(self, chain: int, first: int, count: int) -> np.ndarray:
        """uint8 (count, 16): ids of the blocks at positions `first`... of a chain."""
        at = np.arange(first, first + count, dtype=np.uint64)
        seed = np.uint64(_mix_one(chain * 1021 + self.number + 1))
        steps = (at + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        halves = np.stack([_mix(seed ^ _mix(at)), _mix(seed + steps)], axis=1)
        return halves.astype("<u8").view(np.uint8)

    def parents(self, chain: int, first: int, count: int) -> np.ndarray:
        """uint8 (count, 16): ids of the blocks before these in the chain, zeros before the head."""
        parents = np.zeros((count, 16), np.uint8)
        skipped = int(first == 0)
        parents[skipped:] = self.ids(chain, first - 1 + skipped, count - skipped)
        return parents


def words(length: int) -> int:
    """64-bit words that hold `length` bytes."""
    return -(-length // 8)


def payloads(ids: np.ndarray, length: int, shard: int, out: np.ndarray | None = None) -> np.ndarray:
    """The only right bytes of blocks.

    Args:
        ids: uint8 (n, 16).
        length: bytes of each block or shard.
        out: uint64 (n or more, words(length) or more): filled from the beginning of its first rows.

    Returns:
        uint8 (n, length), a view.
    """
    count, width = len(ids), words(length)
    rows = np.empty((count, width), np.uint64) if out is None else out[:count, :width]
    halves = np.ascontiguousarray(ids).view("<u8")
    keys = _mix(halves[:, 0] ^ np.uint64(shard + 1))
    starts = (_mix(halves[:, 1] + np.uint64(shard)) % np.uint64(_STARTS)).tolist()
    for row, (start, key) in enumerate(zip(starts, keys, strict=True)):
        np.bitwise_xor(_TABLE[start : start + width], key, out=rows[row])
    return rows.view(np.uint8)[:, :length]


@dataclass(frozen=True)
class Difference:
    """How a block that was reported loaded differs from the only right bytes."""

    bytes: int
    first: int
    last: int
    flips: bool
    """Every byte that differs was xored with `FLIP`, and there are few: the killer's work."""
    zeros: int
    """Bytes that differ and are 0: what reading a hole gives."""


def difference(right: np.ndarray, got: np.ndarray) -> Difference | None:
    """Compare one block, uint8 (length,) each; None when they are equal."""
    at = np.flatnonzero(right != got)
    if not at.size:
        return None
    return Difference(
        bytes=int(at.size),
        first=int(at[0]),
        last=int(at[-1]),
        flips=bool(at.size <= 4 and ((right[at] ^ got[at]) == FLIP).all()),
        zeros=int((got[at] == 0).sum()),
    )


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, for uint64 arrays."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_one(value: int) -> int:
    return int(_mix(np.array([value & _MASK], np.uint64))[0])
