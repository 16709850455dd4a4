"""Makes tests/golden/store_v1 and store_v1_evicted: stores of format 1 that every later version must read.

    python tests/golden/make_store_v1.py [DIRECTORY]

Names, uids and times are fixed, so the same bytes come out each time. A format that needs other bytes is a
new version with a new directory; these stay. The second has what evictions leave behind: holes, records of
uses, journals that were rewritten, pins, and files that lock.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from crc32c import crc32c

from posix_store.pins import Pin, encode_pins
from posix_store.root import encode_settings
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD,
    SEAL,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    TOUCH,
    align,
    encode_header,
    seal_records,
)

NAMESPACE = "00112233445566778899aabbccddeeff"
TIME = 1_700_000_000
ALPHA = "alpha.example-101-18bcfe56800-0a0b0c0d"
BETA = "beta_example-202-18bcfe56be8-1a1b1c1d"
GAMMA = "gamma-303-18bcfe56c00-2a2b2c2d"


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
    generation: int = 0
    """How often the journal was rewritten."""
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        digest, created = bytes.fromhex(NAMESPACE), TIME * 10**9
        header = encode_header(SEGMENT_MAGIC, self.uid, digest, created)
        self.data = header.ljust(SEGMENT_HEADER_BYTES, b"\0")
        self.journal = encode_header(JOURNAL_MAGIC, self.uid, digest, created, self.generation)

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

    def evictions(self, blocks: list[tuple[int, int, GoldenSegment]]) -> np.ndarray:
        """Records that blocks (number, shard, segment that holds it) were evicted."""
        records = np.zeros(len(blocks), RECORD)
        for record, (number, shard, segment) in zip(records, blocks, strict=True):
            record["kind"], record["id"], record["parent"] = EVICT, name(number), segment.uid
            record["offset"], record["time"] = segment.offsets[number, shard], TIME + 90
        return records

    def uses(self, numbers: list[int], time: int) -> np.ndarray:
        """Records that blocks were used."""
        records = np.zeros(len(numbers), RECORD)
        records["kind"], records["id"], records["time"] = TOUCH, [name(number) for number in numbers], time
        return records

    def punch(self, number: int, shard: int, length: int) -> None:
        """A hole in the place of a block; reading it gives zeros."""
        start = self.offsets[number, shard]
        assert start % 4096 == 0 and length == 4096, "holes are whole pages"
        self.data = self.data[:start] + bytes(length) + self.data[start + length :]

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


def segments_with_evictions() -> list[GoldenSegment]:
    first = GoldenSegment(ALPHA + "-000000", b"uid of alpha 100", generation=2)
    other = GoldenSegment(BETA + "-000000", b"uid of beta 1000")
    third = GoldenSegment(GAMMA + "-000000", b"uid of gamma 100", generation=1)

    # Blocks 21 to 24 were stored in one append. Block 23 was evicted, its space is a hole, and the journal
    # that said so is rewritten without it: sealed, of generation 2.
    everything = first.batch([(21, 0, 0), (22, 0, 0), (23, 0, 0), (24, 0, 0)], 4096, {22: 21, 23: 22, 24: 22})
    first.punch(23, 0, 4096)
    first.append(everything[[0, 1, 3]])
    # Block 25 is of two shards; both were stored twice, and the first copy is gone from the journal.
    first.batch([(25, 0, 1), (25, 1, 1)], 4096, {})
    first.append(first.batch([(25, 1, 1), (25, 0, 1)], 60, {}, copy=1))

    # Uses are appended by themselves and among the blocks of an append. The page says: skip them.
    other.append(other.uses([22, 21], TIME + 30))
    blocks = other.batch([(26, 0, 0), (27, 0, 0)], 4096, {26: 24, 27: 26})
    other.append(np.concatenate([blocks[:1], other.uses([24], TIME + 40), blocks[1:]]))
    # Kind 9 is of a later version, which wrote here in between.
    unknown = other.uses([21], TIME + 50)
    unknown["kind"], unknown["offset"], unknown["length"] = 9, other.offsets[26, 0], 4096
    other.append(unknown)
    # Of blocks 28 and 29, which the third writer stored, only the second is left; 29 is used.
    third.append(third.batch([(28, 0, 0), (29, 0, 0)], 4096, {29: 28}))
    third.append(third.uses([29], TIME + 70))
    third.punch(28, 0, 4096)
    # Block 26 is evicted by the third writer, and was stored again by the first one's next segment.
    third.append(third.evictions([(26, 0, other)]))
    other.punch(26, 0, 4096)
    again = GoldenSegment(ALPHA + "-000001", b"uid of alpha 101")
    again.append(again.batch([(26, 0, 0)], 4096, {26: 24}))
    # Who evicted 28 noted it here, with an eviction of 23 that nobody needs any more, and one of a segment
    # that is gone.
    gone = GoldenSegment(GAMMA + "-000009", b"uid of gamma 109")
    gone.batch([(21, 0, 0)], 4096, {})
    again.append(again.evictions([(28, 0, third), (23, 0, first), (21, 0, gone)]))
    again.append(again.uses([27], TIME + 95))
    first.append(again.evictions([(28, 0, third)]))
    first.append(first.uses([25], TIME + 80))
    first.seal()
    third.seal()
    return [first, again, other, third]


def make(root: Path) -> None:
    """Write the store into a directory that does not exist yet."""
    _write(root, segments())


def make_evicted(root: Path) -> None:
    """Write the one with evictions into a directory that does not exist yet."""
    directory = root / NAMESPACE
    _write(root, segments_with_evictions())
    (root / "STORE.lock").touch()
    (root / "EVICT.lock").touch()
    (directory / "SERVED.lock").touch()
    (directory / "PINS.json").write_bytes(
        encode_pins([Pin(name(24), (name(21), name(22)), "system prompt", TIME)])
    )
    # Whoever was rewriting this journal died.
    (directory / f".{BETA}-000000.idx.0badcafe").write_bytes(b"UCMPSIDX")


def _write(root: Path, made: list[GoldenSegment]) -> None:
    directory = root / NAMESPACE
    directory.mkdir(parents=True)
    (root / "STORE.json").write_bytes(encode_settings(1, 1 << 30, TIME))
    (directory / "NAMESPACE.json").write_bytes(b'{\n "model": "golden",\n "schema": 1\n}\n')
    for segment in made:
        (directory / f"{segment.stem}.seg").write_bytes(segment.data)
        (directory / f"{segment.stem}.idx").write_bytes(segment.journal)


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    make(directory / "store_v1")
    make_evicted(directory / "store_v1_evicted")
