"""What dead writers left behind that nobody can ever use: given back before space is counted.

Runs under the store lock, once in each process that writes, before its first reservation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time

from posix_store.root import NAMESPACE_FILE, STORE_FILE, StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    PUT,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    FormatError,
    SegmentName,
    decode_header,
    decode_records,
)
from posix_store.syscalls import Syscalls, close_quietly, read_at

logger = logging.getLogger(__name__)

_TEMPORARY_SECONDS = 3600


def reclaim(root: StoreRoot) -> None:
    """Cut back the files of dead writers, delete those without a record, and old temporary files."""
    try:
        _old_temporaries(root, root.path, STORE_FILE)
        for namespace in root.namespaces():
            _old_temporaries(root, root.namespace_path(namespace), NAMESPACE_FILE)
            _namespace(root, namespace)
    except OSError as error:
        logger.warning("posix_store %s: cannot look for what dead writers left: %s", root.path, error)


def _namespace(root: StoreRoot, namespace: str) -> None:
    directory = root.namespace_path(namespace)
    parsed = (SegmentName.parse(name) for name in root.syscalls.listdir(directory))
    for name in {item[0] for item in parsed if item}:
        paths = [os.path.join(directory, name.data), os.path.join(directory, name.journal)]
        with contextlib.suppress(OSError, FormatError):
            _segment(root.syscalls, paths, bytes.fromhex(namespace))


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
        journal_end, data_end = 0, 0
        if len(opened) == 2:
            journal_end, data_end = _published(calls, opened[paths[1]], namespace)
        if data_end:
            for path, end in zip(paths, (data_end, journal_end), strict=True):
                calls.ftruncate(opened[path], min(end, calls.fstat(opened[path]).st_size))
            return
        logger.info("deleting %s: its writer died before it had stored anything", paths[0])
        for path in opened:
            calls.unlink(path)


def _published(calls: Syscalls, journal: int, namespace: bytes) -> tuple[int, int]:
    """Where the last whole batch of a journal ends, and where its bytes end in the segment; 0 for nothing."""
    size = calls.fstat(journal).st_size
    if size < RECORD_BYTES:
        return 0, 0
    data = read_at(calls, journal, size, 0)
    if len(data) < size:
        raise OSError(errno.EIO, "the journal could not be read whole, so nothing is deleted")
    decode_header(data[:RECORD_BYTES], JOURNAL_MAGIC, namespace)
    records, consumed, _ = decode_records(data[RECORD_BYTES:])
    puts = records[records["kind"] == PUT]
    if not len(puts) and not (records["kind"] == EVICT).any():
        return 0, 0
    ends = puts["offset"] + puts["length"]
    return RECORD_BYTES + consumed, max(SEGMENT_HEADER_BYTES, int(ends.max(initial=0)))


def _old_temporaries(root: StoreRoot, directory: str, base: str) -> None:
    for name in root.syscalls.listdir(directory):
        if name.startswith(f".{base}."):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if time.time() - root.syscalls.stat(path).st_mtime > _TEMPORARY_SECONDS:
                    root.syscalls.unlink(path)
