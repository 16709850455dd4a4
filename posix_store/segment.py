"""The on-disk format and nothing else: file names, headers, journal records (docs/FORMAT.md).

All integers are little-endian. A segment file (`.seg`) is a 4 KiB header followed by extents; its
journal (`.idx`) is a 64-byte header followed by 64-byte records. Both carry the segment's random
16-byte uid and the namespace digest, so that neither can be mistaken for another's.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from posix_store.compiled import native

FORMAT_VERSION = 1
EXTENT_ALIGNMENT = 4096
SEGMENT_HEADER_BYTES = 4096
RECORD_BYTES = 64
MAX_BATCH_RECORDS = 1 << 16
SECOND_PARTS = 256
"""`copy` of a TOUCH, and of a PUT of a block that is not sharded, is the part of the second of its time."""
MAX_SHARDS = 1 << 16
ID_BYTES = 16
MAX_BLOCK_BYTES = (1 << 32) - 1

SEGMENT_MAGIC = b"UCMPSSEG"
JOURNAL_MAGIC = b"UCMPSIDX"

PUT, EVICT, SEAL, TOUCH = 1, 2, 3, 4

RECORD = np.dtype(
    {
        "names": [
            "id", "parent", "offset", "length", "payload_crc", "shard", "last_shard",
            "kind", "copy", "remaining", "time", "crc",
        ],
        "formats": ["V16", "V16", "<u8", "<u4", "<u4", "<u2", "<u2", "u1", "u1", "<u2", "<u4", "<u4"],
        "offsets": [0, 16, 32, 40, 44, 48, 50, 52, 53, 54, 56, 60],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""One journal record. `parent` is the id of the block before this one in its chain (zeros: unknown),
or, in an EVICT record, the uid of the segment that holds the block. `copy` is equal for the shards that
make up one copy of a block. A TOUCH record says that the block of its id was used at `time`.
`remaining` counts the records of the same append that follow: a batch is visible only when its record
0 (the last) is whole."""

_HEADER = struct.Struct("<8sI16s16sQQ")
assert _HEADER.size + 4 == RECORD_BYTES

_NAME = re.compile(
    r"(?P<writer>[a-z0-9_.]{1,40}-\d{1,10}-[0-9a-f]{1,12}-[0-9a-f]{8})-(?P<seq>\d{6})\.(?P<kind>seg|idx)"
)
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")


class FormatError(Exception):
    """A header is damaged, of another namespace or segment, or of a newer format version."""


@dataclass(frozen=True)
class SegmentName:
    """Name of a segment and its journal: `<host>-<pid>-<start>-<random>-<seq>`."""

    writer: str
    seq: int

    @property
    def stem(self) -> str:
        return f"{self.writer}-{self.seq:06d}"

    @property
    def data(self) -> str:
        return self.stem + ".seg"

    @property
    def journal(self) -> str:
        return self.stem + ".idx"

    @property
    def host(self) -> str:
        return self.writer.split("-")[0]

    @property
    def is_of_this_host(self) -> bool:
        return self.host == own_host()

    @property
    def started_ms(self) -> int:
        """When the writer started, in Unix milliseconds by its clock."""
        return int(self.writer.split("-")[-2], 16)

    @classmethod
    def parse(cls, file_name: str) -> tuple[SegmentName, str] | None:
        """(name, "seg" or "idx") for a file this format made, else None."""
        match = _NAME.fullmatch(file_name)
        return (cls(match["writer"], int(match["seq"])), match["kind"]) if match else None


@functools.lru_cache(maxsize=1 << 16)
def parse_name(file_name: str) -> tuple[SegmentName, str] | None:
    """`SegmentName.parse`, remembered: a directory is listed many times a second."""
    return SegmentName.parse(file_name)


@functools.cache
def own_host() -> str:
    """The name of this host as it stands in the names of writers."""
    return re.sub(r"[^a-z0-9_.]", "_", socket.gethostname().lower())[:40] or "host"


def new_writer_name() -> str:
    """A name no other process, living or dead, has: host, pid, start time (ms), 32 random bits."""
    return f"{own_host()}-{os.getpid()}-{int(time.time() * 1000):x}-{secrets.token_hex(4)}"


def encode_header(magic: bytes, uid: bytes, namespace: bytes, created_ns: int, generation: int = 0) -> bytes:
    """64 bytes: magic, format version, uid, namespace digest, creation time (ns), generation, CRC-32C.

    `generation` counts how often a journal was rewritten; it is 0 in segments.
    """
    head = _HEADER.pack(magic, FORMAT_VERSION, uid, namespace, created_ns, generation)
    return head + struct.pack("<I", crc32c(head))


def decode_header(data: bytes, magic: bytes, namespace: bytes) -> tuple[bytes, int]:
    """The uid and the generation in a header, after checking everything else in it.

    Raises:
        FormatError: with what is wrong.
    """
    if len(data) < RECORD_BYTES:
        raise FormatError(f"header has {len(data)} of {RECORD_BYTES} bytes")
    head = data[: _HEADER.size]
    (crc,) = struct.unpack_from("<I", data, _HEADER.size)
    if crc32c(head) != crc:
        raise FormatError("header checksum differs")
    found_magic, version, uid, found_namespace, _created, generation = _HEADER.unpack(head)
    if found_magic != magic:
        raise FormatError(f"magic is {found_magic!r}, not {magic!r}")
    if version != FORMAT_VERSION:
        raise FormatError(f"format version {version}, this code reads {FORMAT_VERSION}")
    if found_namespace != namespace:
        raise FormatError(f"namespace is {found_namespace.hex()}, not {namespace.hex()}")
    return bytes(uid), int(generation)


def seal_record() -> np.ndarray:
    """One SEAL record, `RECORD` (1,)."""
    record = np.zeros(1, RECORD)
    record["kind"] = SEAL
    record["time"] = int(time.time())
    return record


def evict_records(ids: np.ndarray, uids: np.ndarray, offsets: np.ndarray, now: float) -> np.ndarray:
    """EVICT records, `RECORD` (n,).

    Args:
        ids: uint64 (n, 2).
        uids: V16 (n,), of the segments that hold the blocks.
        offsets: int64 (n,), of the payloads in them.
        now: Unix seconds.
    """
    records = np.zeros(len(ids), RECORD)
    records["kind"] = EVICT
    records["id"] = as_void(ids)
    records["parent"] = uids
    records["offset"] = offsets
    records["time"] = int(now)
    return records


def touch_records(ids: np.ndarray, used: np.ndarray) -> np.ndarray:
    """TOUCH records, `RECORD` (n,), for ids uint64 (n, 2) that were used at Unix seconds `used` (n,)."""
    records = np.zeros(len(ids), RECORD)
    records["kind"] = TOUCH
    records["id"] = as_void(ids)
    records["time"] = used.astype(np.uint32)
    records["copy"] = (used % 1 * SECOND_PARTS).astype(np.uint8)
    return records


def as_void(ids: np.ndarray) -> np.ndarray:
    """V16 (n,) of ids uint64 (n, 2)."""
    return np.ascontiguousarray(ids).view("V16").reshape(-1)


def as_halves(ids: np.ndarray) -> np.ndarray:
    """uint64 (n, 2) of ids V16 (n,)."""
    return np.ascontiguousarray(ids).view(np.uint64).reshape(-1, 2)


def seal_records(records: np.ndarray) -> bytes:
    """Fill `remaining` and `crc` of one append's records and return its bytes.

    Args:
        records: `RECORD` array of 1 to `MAX_BATCH_RECORDS` entries; changed in place.
    """
    count = len(records)
    if not 0 < count <= MAX_BATCH_RECORDS:
        raise ValueError(f"{count} records in one append; 1 to {MAX_BATCH_RECORDS} are allowed")
    records["remaining"] = np.arange(count - 1, -1, -1)
    records["crc"] = _record_crcs(records)
    return records.tobytes()


def decode_records(data: bytes | memoryview) -> tuple[np.ndarray, int, int]:
    """Whole batches at the start of `data`, which begins at a record boundary.

    Returns:
        (records, consumed, damaged): the intact records of all complete batches as a `RECORD` array,
        the bytes up to the end of the last complete batch, and how many records within them failed
        their checksum. A torn or unfinished batch at the end is neither returned nor consumed.
    """
    count = len(data) // RECORD_BYTES
    records = np.frombuffer(data, RECORD, count)
    intact = _record_crcs(records) == records["crc"]
    ends = np.flatnonzero(intact & (records["remaining"] == 0))
    whole = int(ends[-1]) + 1 if ends.size else 0
    kept = records[:whole][intact[:whole]]
    return kept, whole * RECORD_BYTES, whole - len(kept)


def _record_crcs(records: np.ndarray) -> np.ndarray:
    """CRC-32C of bytes 0..59 of each record, uint32 (n,)."""
    if native is not None:
        crcs = np.empty(len(records), np.uint32)
        native.record_crcs(np.ascontiguousarray(records), crcs)
        return crcs
    view = memoryview(records.tobytes())
    last = RECORD_BYTES - 4
    starts = range(0, len(view), RECORD_BYTES)
    return np.fromiter((crc32c(view[s : s + last]) for s in starts), np.uint32, len(records))


def align(value: int, alignment: int = EXTENT_ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment
