"""Reads a store with nothing but docs/FORMAT.md and the standard library.

Independent of posix_store on purpose: what this finds in a store, anybody can.

    python tests/mini_reader.py ROOT NAMESPACE
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STEM = re.compile(r"(?P<writer>[a-z0-9_.]{1,40}-\d+-(?P<start>[0-9a-f]{1,12})-[0-9a-f]{8})-\d{6}")
HEADER = struct.Struct("<8sI16s16sQQI")
RECORD = struct.Struct("<16s16sQIIHHBBHII")
PUT, EVICT, SEAL, TOUCH = 1, 2, 3, 4
"""Only the first two matter to who reads a store once."""
FIRST_EXTENT = 4096


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class NotReadable(Exception):
    """The store is of a newer format."""


@dataclass(frozen=True)
class Segment:
    path: Path
    writer: str
    uid: bytes


@dataclass(frozen=True)
class Record:
    id: bytes
    parent: bytes
    offset: int
    length: int
    payload_crc: int
    shard: int
    last_shard: int
    kind: int
    copy: int
    remaining: int
    time: int
    crc: int


Place = tuple[Segment, Record]


def check_settings(root: Path) -> None:
    """Refuse a newer store; a damaged STORE.json does not matter."""
    try:
        fields = json.loads((root / "STORE.json").read_bytes())
        checksum = fields.pop("crc32c")
        intact = crc32c(json.dumps(fields).encode()) == checksum
    except (OSError, ValueError, KeyError, AttributeError):
        return
    if intact and fields["format"] > 1:
        raise NotReadable(f"format {fields['format']}")


def header_uid(data: bytes, magic: bytes, namespace: str) -> bytes | None:
    """The uid of a segment or journal, None when the header is not what it must be."""
    if len(data) < HEADER.size:
        return None
    found, version, uid, digest, _created, _generation, crc = HEADER.unpack_from(data)
    right = (magic, 1, bytes.fromhex(namespace), crc32c(data[:60]))
    return uid if (found, version, digest, crc) == right else None


def records(journal: bytes) -> list[Record]:
    """The records of whole appends, without damaged ones."""
    found, counted = [], 0
    for start in range(64, len(journal) - 63, 64):
        record = Record(*RECORD.unpack_from(journal, start))
        if crc32c(journal[start : start + 60]) == record.crc:
            found.append(record)
            if record.remaining == 0:
                counted = len(found)
    return found[:counted]


def journals(directory: Path, namespace: str) -> Iterator[tuple[Segment, list[Record]]]:
    stems = []
    for path in directory.glob("*.idx"):
        match = STEM.fullmatch(path.stem)
        if match and path.with_suffix(".seg").exists():
            stems.append((int(match["start"], 16), path.stem, match["writer"]))
    for _, stem, writer in sorted(stems):
        journal = (directory / f"{stem}.idx").read_bytes()
        uid = header_uid(journal, b"UCMPSIDX", namespace)
        if uid is not None:
            yield Segment(directory / f"{stem}.seg", writer, uid), records(journal)


def blocks(root: Path, namespace: str) -> dict[bytes, list[Place]]:
    """Where the shards of each whole block are."""
    check_settings(root)
    standing: dict[bytes, list[Place]] = {}
    partial: dict[tuple[str, bytes, int], dict[int, Place]] = {}
    everything = list(journals(root / namespace, namespace))
    evicted = {(one.parent, one.offset) for _, found in everything for one in found if one.kind == EVICT}
    for segment, found in everything:
        size = segment.path.stat().st_size
        for record in found:
            if (segment.uid, record.offset) in evicted:
                continue
            inside = record.offset >= FIRST_EXTENT and record.offset + record.length <= size
            if record.kind != PUT or not inside or record.shard > record.last_shard:
                continue
            key = (segment.writer, record.id, record.last_shard)
            shards = partial.setdefault(key, {})
            if any(other.copy != record.copy for _, other in shards.values()):
                shards.clear()
            shards[record.shard] = (segment, record)
            if len(shards) == record.last_shard + 1:
                standing[record.id] = [shards[shard] for shard in range(record.last_shard + 1)]
                del partial[key]
    return standing


def read(place: Place, namespace: str) -> bytes | None:
    """The bytes of a shard; None when they are not what was stored."""
    segment, record = place
    with segment.path.open("rb") as file:
        if header_uid(file.read(64), b"UCMPSSEG", namespace) != segment.uid:
            return None
        file.seek(record.offset)
        data = file.read(record.length)
    intact = len(data) == record.length and crc32c(data) == record.payload_crc
    return data if intact else None


def read_store(root: Path, namespace: str) -> dict[bytes, list[bytes | None]]:
    """The shards of every whole block of a namespace."""
    return {
        block: [read(place, namespace) for place in places]
        for block, places in blocks(root, namespace).items()
    }


if __name__ == "__main__":
    for block, shards in sorted(read_store(Path(sys.argv[1]), sys.argv[2]).items()):
        print(block.hex(), [shard and len(shard) for shard in shards])
