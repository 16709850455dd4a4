"""What dead writers left behind that nobody can ever use: given back before space is counted.

Runs under the store lock, once in each process that writes, before its first reservation.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time

from posix_store.root import NAMESPACE_FILE, STORE_FILE, StoreRoot
from posix_store.segment import RECORD_BYTES, SegmentName
from posix_store.syscalls import Syscalls

logger = logging.getLogger(__name__)

_TEMPORARY_SECONDS = 3600


def trim(calls: Syscalls, fd: int) -> None:
    """Free the blocks preallocated beyond the end of a file.

    Truncating it to its own size does that everywhere; punching a hole does not on ext4.
    """
    try:
        calls.ftruncate(fd, calls.fstat(fd).st_size)
    except OSError as error:
        logger.debug("cannot trim: %s", error)


def reclaim(root: StoreRoot) -> None:
    """Trim the files of dead writers, delete those without a single record, and old temporary files."""
    try:
        _old_temporaries(root, root.path, STORE_FILE)
        for namespace in root.namespaces():
            directory = root.namespace_path(namespace)
            _old_temporaries(root, directory, NAMESPACE_FILE)
            _namespace(root.syscalls, directory)
    except OSError as error:
        logger.warning("store %s: cannot look for what dead writers left: %s", root.path, error)


def _namespace(calls: Syscalls, directory: str) -> None:
    parsed = (SegmentName.parse(name) for name in calls.listdir(directory))
    for name in {item[0] for item in parsed if item}:
        with contextlib.suppress(OSError):
            _segment(calls, os.path.join(directory, name.data), os.path.join(directory, name.journal))


def _segment(calls: Syscalls, data: str, journal: str) -> None:
    with contextlib.ExitStack() as stack:
        opened = []
        for path in (data, journal):
            try:
                fd = calls.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            stack.callback(calls.close, fd)
            # Refused while its writer lives, and where locks do not work. Held until the end of the block.
            calls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.append((path, fd))
        records = calls.fstat(opened[-1][1]).st_size - RECORD_BYTES if len(opened) == 2 else 0
        if records >= RECORD_BYTES:
            for _, fd in opened:
                trim(calls, fd)
            return
        logger.info("deleting %s: its writer died before it had stored anything", data)
        for path, _ in opened:
            calls.unlink(path)


def _old_temporaries(root: StoreRoot, directory: str, base: str) -> None:
    for name in root.syscalls.listdir(directory):
        if name.startswith(f".{base}."):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if time.time() - root.syscalls.stat(path).st_mtime > _TEMPORARY_SECONDS:
                    root.syscalls.unlink(path)
