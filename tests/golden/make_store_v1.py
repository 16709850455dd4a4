"""Makes tests/golden/store_v1: a store of format 1 that every later version must read.

    python tests/golden/make_store_v1.py [DIRECTORY]

Names, uids and times are fixed, so the same bytes come out each time. A format that needs other bytes is a
new version with a new directory; this one stays.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from crc32c import crc32c

from posix_store.root import encode_settings
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD,
    SEAL,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    align,
    encode_header,
    seal_records,
)

NAMESPACE = "00112233445566778899aabbccddeeff"
TIME = 1_700_000_000
ALPHA = "alpha.example-101-18bcfe56800-0a0b0c0d"
BETA = "beta_example-202-18bcfe56be8-1a1b1c1d"


def name(number: int) -> bytes:
    """A block id that can be read in a hex dump."""
    return b"golden block %03d" % number


def payload(number: int, length: int, shard: int = 0) -> bytes:
    return hashlib.shake_128(b"%d/%d" % (number, shard)).digest(length)


@dataclass
class GoldenSegment:
    """A segment and its journal, put together in memory."""

    stem: str
    uid: bytes
    data: bytes = b""
    journal: bytes = b""
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        digest, created = bytes.fromhex(NAMESPACE), TIME * 10**9
        header = encode_header(SEGMENT_MAGIC, self.uid, digest, created)
        self.data = header.ljust(SEGMENT_HEADER_BYTES, b"\0")
        self.journal = encode_header(JOURNAL_MAGIC, self.uid, digest, created)

    def batch(
        self, blocks: list[tuple[int, int, int]], length: int, parents: dict[int, int], copy: int = 0
    ) -> np.ndarray:
        """Write an extent of (block, shard, last shard); the records that would publish it."""
        self.data = self.data.ljust(align(len(self.data)), b"\0")
        records = np.zeros(len(blocks), RECORD)
        for record, (number, shard, last) in zip(records, blocks, strict=True):
            bytes_ = payload(number, length, shard)
            record["kind"], record["id"], record["time"] = PUT, name(number), TIME
            record["parent"] = name(parents[number]) if number in parents else bytes(16)
            record["offset"], record["length"], record["payload_crc"] = len(self.data), length, crc32c(bytes_)
            record["shard"], record["last_shard"], record["copy"] = shard, last, copy
            self.offsets[number, shard] = len(self.data)
            self.data += bytes_
        return records

    def append(self, records: np.ndarray) -> None:
        self.journal += seal_records(records)

    def evict(self, number: int, shard: int, segment: GoldenSegment) -> None:
        record = np.zeros(1, RECORD)
        record["kind"], record["id"], record["parent"] = EVICT, name(number), segment.uid
        record["offset"], record["time"] = segment.offsets[number, shard], TIME + 60
        self.append(record)

    def seal(self) -> None:
        record = np.zeros(1, RECORD)
        record["kind"], record["time"] = SEAL, TIME + 120
        self.append(record)


def segments() -> list[GoldenSegment]:
    first = GoldenSegment(ALPHA + "-000000", b"uid of alpha 000")
    second = GoldenSegment(ALPHA + "-000001", b"uid of alpha 001")
    other = GoldenSegment(BETA + "-000000", b"uid of beta 0000")

    # A chain of three blocks; both shards of block 4, the last one first; the first shard of block 5.
    first.append(first.batch([(1, 0, 0), (2, 0, 0), (3, 0, 0)], 100, {2: 1, 3: 2}))
    first.append(first.batch([(4, 1, 1), (4, 0, 1), (5, 0, 1)], 80, {4: 3}))
    # Blocks 6 and 7 will be evicted by the other writer, block 7 by one of its shards.
    first.append(first.batch([(6, 0, 0)], 50, {}))
    first.append(first.batch([(7, 0, 1), (7, 1, 1)], 40, {}))
    first.seal()

    # Block 5 becomes whole in the writer's next segment, and block 7 is stored again.
    second.append(second.batch([(5, 1, 1)], 80, {}))
    second.append(second.batch([(7, 1, 1), (7, 0, 1)], 44, {}, copy=1))

    other.append(other.batch([(8, 0, 0)], 5000, {8: 3}))
    # Block 2 a second time; block 9 lacks a shard, which alpha does not make good.
    other.append(other.batch([(2, 0, 0)], 100, {2: 1}))
    other.append(other.batch([(9, 0, 1)], 60, {}))
    second.append(second.batch([(9, 1, 1)], 60, {}))
    other.evict(6, 0, first)
    other.evict(7, 1, first)
    # The writer died in an append of three records, of which one and a half were written.
    torn = seal_records(other.batch([(10, 0, 0), (11, 0, 0), (12, 0, 0)], 30, {}))
    other.journal += torn[: 64 + 32]
    return [first, second, other]


def make(root: Path) -> None:
    """Write the store into a directory that does not exist yet."""
    directory = root / NAMESPACE
    directory.mkdir(parents=True)
    (root / "STORE.json").write_bytes(encode_settings(1, 1 << 30, TIME))
    (directory / "NAMESPACE.json").write_bytes(b'{\n "model": "golden",\n "schema": 1\n}\n')
    for segment in segments():
        (directory / f"{segment.stem}.seg").write_bytes(segment.data)
        (directory / f"{segment.stem}.idx").write_bytes(segment.journal)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "store_v1")
