"""What `ucm-sglang verify --repair` does beyond single blocks.

Segments that nothing can be read from go; journals with damaged records are rewritten without them.

A segment is only deleted when no living process may be writing it, and never because the disk returned an
error, or because a newer version of this package wrote it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from posix_store import StoreError
from posix_store.capacity import SpaceKeeper
from posix_store.compaction import compact
from posix_store.freeing import IDLE_WRITER_SECONDS, Freer
from posix_store.known import SegmentInfo
from posix_store.reclaim import reclaim
from posix_store.root import EVICTION_LOCK_FILE, StoreRoot
from posix_store.segment import (
    FORMAT_VERSION,
    JOURNAL_MAGIC,
    PUT,
    RECORD_BYTES,
    SEGMENT_MAGIC,
    FormatError,
    SegmentName,
    decode_header,
    decode_records,
)
from posix_store.syscalls import close_quietly, read_at
from posix_store.writer import SegmentWriter
from ucm_sglang.cli.holdings import Holdings, segment_files, segment_names

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 10.0
_JOURNAL_ONLY_BYTES = 1 << 20
_MAGICS = (JOURNAL_MAGIC, SEGMENT_MAGIC)
_GOOD, _DAMAGED, _UNKNOWN = "good", "damaged", "unknown"


@dataclass
class Removal:
    """What became of segments that are damaged otherwise than in single blocks."""

    deleted: int = 0
    """Segments of which nothing can be read."""
    freed_bytes: int = 0
    rewritten: int = 0
    """Journals that are rid of damaged records, and of blocks beyond the end of their segment."""
    left: int = 0
    """Segments that stay as they are: their writer lives, or may live, or they are not for this version to
    judge."""


def repair_segments(root: StoreRoot, namespace: str, min_free: int | None) -> Removal:
    """Delete segments whose journal, or whose own header, is damaged, and rewrite journals that are in part.

    Raises `StoreError` when others hold a lock for too long, and `OSError`.
    """
    removal = Removal()
    if _has_damaged_records(Holdings(root, namespace)):
        # Only sealed journals can be rewritten; this seals those of dead writers.
        with _locked(root):
            for _ in reclaim(root):
                pass
    with _locked(root, EVICTION_LOCK_FILE):
        holdings = Holdings(root, namespace)
        _with_bad_headers(holdings, min_free, removal)
        if _has_damaged_records(holdings):
            _rewrite_journals(holdings, removal)
        known = {segment.name for segment in holdings.catalog.segments}
        for name in segment_names(root, namespace) - known:
            state = _header(root, namespace, name.journal, JOURNAL_MAGIC)
            if state == _DAMAGED:
                _without_journal(root, namespace, name, removal)
            elif state == _UNKNOWN:
                _note(removal, 0, name)
    return removal


def _with_bad_headers(holdings: Holdings, min_free: int | None, removal: Removal) -> None:
    """Segments with a good journal whose own header is damaged: no block in them can be read."""
    root, namespace, catalog = holdings.root, holdings.namespace, holdings.catalog
    bad = [
        segment
        for segment in catalog.segments
        if _header(root, namespace, segment.name.data, SEGMENT_MAGIC, segment) == _DAMAGED
    ]
    if not bad:
        return
    space = SpaceKeeper(root, min_free, chunk=0)
    writer = SegmentWriter(root, namespace, None, space, catalog, _JOURNAL_ONLY_BYTES)
    try:
        freer = Freer(root, space, catalog, writer)
        for segment in bad:
            # Not unlinked here: what its journal says of other segments has to be kept.
            freed = freer.delete(segment, with_blocks=True)
            _note(removal, freed, segment.name)
    finally:
        writer.close()


def _has_damaged_records(holdings: Holdings) -> bool:
    counters = holdings.catalog.counters
    return bool(counters.damaged_records or counters.truncated_blocks)


def _rewrite_journals(holdings: Holdings, removal: Removal) -> None:
    """Rewrite journals without damaged records, and those of blocks beyond the end of their segment."""
    for segment in holdings.catalog.segments:
        try:
            damaged = _is_damaged_in_part(holdings, segment)
        except OSError as error:
            logger.warning("%s: %s", segment.name.journal, error)
            damaged = True
        if damaged and segment.sealed and compact(holdings.root, holdings.catalog, segment, force=True):
            removal.rewritten += 1
        elif damaged:
            _note(removal, 0, segment.name)


def _is_damaged_in_part(holdings: Holdings, segment: SegmentInfo) -> bool:
    calls, directory = holdings.root.syscalls, holdings.catalog.directory
    size = calls.stat(os.path.join(directory, segment.name.data)).st_size
    fd = calls.open(os.path.join(directory, segment.name.journal), os.O_RDONLY)
    try:
        data = read_at(calls, fd, calls.fstat(fd).st_size, 0)
    finally:
        close_quietly(calls, fd)
    records, _, damaged = decode_records(memoryview(data)[RECORD_BYTES:])
    ends = records["offset"] + records["length"]
    return damaged > 0 or bool(((records["kind"] == PUT) & (ends > size)).any())


def _without_journal(root: StoreRoot, namespace: str, name: SegmentName, removal: Removal) -> None:
    """Delete a segment whose journal cannot be read, if no process is writing it."""
    freed = 0
    # Under the store lock no writer has made files that it has not locked yet.
    with _locked(root), contextlib.ExitStack() as stack:
        paths = [os.path.join(root.namespace_path(namespace), each) for each in (name.data, name.journal)]
        if all(_is_ours_to_delete(root, name, path, stack) for path in paths):
            freed = sum(allocated for _, allocated in segment_files(root, namespace, name))
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    root.syscalls.unlink(path)
    _note(removal, freed, name)


def _note(removal: Removal, freed: int, name: SegmentName) -> None:
    if freed:
        removal.deleted += 1
        removal.freed_bytes += freed
    else:
        removal.left += 1
        logger.warning("%s stays: a process may be writing it, or it cannot be judged here", name.data)


def _is_ours_to_delete(root: StoreRoot, name: SegmentName, path: str, stack: contextlib.ExitStack) -> bool:
    """Lock a file of a segment for the time of `stack`; False when it has, or may have, a living writer."""
    try:
        fd = root.syscalls.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    stack.callback(close_quietly, root.syscalls, fd)
    try:
        root.syscalls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # The lock of another machine may not be seen here, so its files must have been idle for long.
    idle = time.time() - root.syscalls.fstat(fd).st_mtime
    return name.is_of_this_host or idle > IDLE_WRITER_SECONDS


def _header(
    root: StoreRoot, namespace: str, file: str, magic: bytes, segment: SegmentInfo | None = None
) -> str:
    """The state of a file's header: unknown when the disk returns an error or it is of a newer version."""
    try:
        head = _head(root, os.path.join(root.namespace_path(namespace), file))
    except FileNotFoundError:
        # Half of a segment: what its writer left, or is deleting at this moment.
        return _DAMAGED if segment is None else _GOOD
    except OSError:
        return _UNKNOWN
    try:
        uid, _ = decode_header(head, magic, bytes.fromhex(namespace))
    except FormatError:
        return _UNKNOWN if _is_newer(head) else _DAMAGED
    return _GOOD if segment is None or uid == segment.uid else _DAMAGED


def _head(root: StoreRoot, path: str) -> bytes:
    fd = root.syscalls.open(path, os.O_RDONLY)
    try:
        return read_at(root.syscalls, fd, RECORD_BYTES, 0)
    finally:
        close_quietly(root.syscalls, fd)


def _is_newer(head: bytes) -> bool:
    """Does a header look like one of a format version that this code does not know?"""
    return head[:8] in _MAGICS and struct.unpack_from("<I", head.ljust(12, b"\0"), 8)[0] > FORMAT_VERSION


@contextlib.contextmanager
def _locked(root: StoreRoot, *file: str) -> Iterator[None]:
    with root.lock(_LOCK_SECONDS, *file) as held:
        if not held:
            which = "eviction" if file else "store"
            raise StoreError(
                f"path = {root.path}: another process has held the {which} lock for {_LOCK_SECONDS:g} s; try "
                "again"
            )
        yield
