"""What dead writers left behind that nobody can ever use: given back before space is counted.

Runs under the store lock, once in each process that writes, spread over its first reservations.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator

from posix_store.root import STORE_FILE, StoreRoot, is_temporary
from posix_store.segment import (
    EVICT,
    EXTENT_ALIGNMENT,
    JOURNAL_MAGIC,
    PUT,
    RECORD_BYTES,
    SEAL,
    SEGMENT_HEADER_BYTES,
    FormatError,
    SegmentName,
    decode_header,
    decode_records,
    own_host,
    seal_record,
    seal_records,
)
from posix_store.syscalls import Syscalls, close_quietly, read_at, write_at

logger = logging.getLogger(__name__)

_TEMPORARY_SECONDS = 3600
_ALL = (float("inf"), float("inf"))
"""What a sealed journal publishes ends: with the files."""


def reclaim(root: StoreRoot) -> Iterator[None]:
    """Cut back the files of dead writers, delete those without a record, and old temporary files.

    Stops after each writer's file, so that the caller can let the store lock go and go on another time.
    """
    try:
        _old_temporaries(root, root.path, lambda name: name.startswith(f".{STORE_FILE}."))
        for namespace in root.namespaces():
            directory = root.namespace_path(namespace)
            _old_temporaries(root, directory, is_temporary)
            parsed = (SegmentName.parse(name) for name in root.syscalls.listdir(directory))
            # Of this host only: a lock that another host holds is not seen where the file system keeps locks
            # local.
            for name in {item[0] for item in parsed if item and item[0].host == own_host()}:
                paths = [os.path.join(directory, name.data), os.path.join(directory, name.journal)]
                with contextlib.suppress(OSError, FormatError):
                    _segment(root.syscalls, paths, bytes.fromhex(namespace))
                yield
    except OSError as error:
        logger.warning("posix_store %s: cannot look for what dead writers left: %s", root.path, error)


def _segment(calls: Syscalls, paths: list[str], namespace: bytes) -> None:
    """Cut a dead writer's segment and journal back to the last batch that was published.

    Raises `OSError` when the writer lives, and `FormatError` when the journal is not for us to judge.
    """
    with contextlib.ExitStack() as stack:
        opened = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                opened[path] = calls.open(path, os.O_RDWR)
                stack.callback(close_quietly, calls, opened[path])
                # Refused while its writer lives, and where locks do not work. Held until the end.
                calls.flock(opened[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        if len(opened) < 2 or not (published := _published(calls, opened[paths[1]], namespace)):
            logger.info("deleting %s: its writer died before it had stored anything", paths[0])
            for path in opened:
                calls.unlink(path)
            return
        for path, end in zip(paths, published, strict=True):
            calls.ftruncate(opened[path], int(min(end, calls.fstat(opened[path]).st_size)))
        if published != _ALL and published[1] % EXTENT_ALIGNMENT:
            # So that nobody need look at this journal again. (Where it needs a new disk block, it is left.)
            write_at(calls, opened[paths[1]], seal_records(seal_record()), int(published[1]))


def _published(calls: Syscalls, journal: int, namespace: bytes) -> tuple[float, float] | None:
    """Where what a journal publishes ends in the segment and in the journal; None when that is nothing."""
    size = calls.fstat(journal).st_size
    if size < RECORD_BYTES:
        return None
    decode_header(read_at(calls, journal, RECORD_BYTES, 0), JOURNAL_MAGIC, namespace)
    last, consumed, _ = decode_records(read_at(calls, journal, RECORD_BYTES, size - RECORD_BYTES))
    if consumed and last[0]["kind"] == SEAL:
        return _ALL
    data = read_at(calls, journal, size - RECORD_BYTES, RECORD_BYTES)
    if len(data) < size - RECORD_BYTES:
        raise OSError(errno.EIO, "the journal could not be read whole, so nothing is deleted")
    records, consumed, _ = decode_records(data)
    puts = records[records["kind"] == PUT]
    if not len(puts) and not (records["kind"] == EVICT).any():
        return None
    ends = puts["offset"] + puts["length"]
    return max(SEGMENT_HEADER_BYTES, int(ends.max(initial=0))), RECORD_BYTES + consumed


def _old_temporaries(root: StoreRoot, directory: str, temporary: Callable[[str], bool]) -> None:
    for name in root.syscalls.listdir(directory):
        if temporary(name):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if time.time() - root.syscalls.stat(path).st_mtime > _TEMPORARY_SECONDS:
                    root.syscalls.unlink(path)
