"""The type of the file system that a directory lies on."""

from __future__ import annotations

import os

from posix_store.syscalls import Syscalls, close_quietly, read_at

COPY_ON_WRITE = ("btrfs",)
"""The space of a hole is free only when the whole extent around it has gone."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "ocfs2", "gfs2")
_OTHER_FUSE = ("fuse", "fuseblk", "virtiofs")
_MAX_BYTES = 4 << 20


def mount_type(path: str, calls: Syscalls) -> str | None:
    """Type as in /proc/self/mountinfo: `ext4`, `fuse.glusterfs`, ...; None when its mount is not listed.

    By the number of the mount, because devices do not tell subvolumes. Raises `OSError`.
    """
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lines = _text(f"/proc/self/fdinfo/{fd}", calls).splitlines()
    finally:
        close_quietly(calls, fd)
    numbers = [line.split()[1] for line in lines if line.startswith("mnt_id:")]
    for line in _text("/proc/self/mountinfo", calls).splitlines():
        head, _, tail = line.partition(" - ")
        if numbers and tail and head.split(" ", 1)[0] == numbers[0]:
            return tail.split(" ", 1)[0]
    return None


def is_shared_between_machines(kind: str | None) -> bool | None:
    """Can several machines mount it? True for known network file systems, None for other FUSE ones."""
    if kind is None or kind in _OTHER_FUSE:
        return None
    return kind in _NETWORK or kind.startswith("fuse.")


def may_be_shared(kind: str | None) -> bool:
    """Could another machine write to a file system of this type? False where its type is not known."""
    return kind is not None and is_shared_between_machines(kind) is not False


def _text(path: str, calls: Syscalls) -> str:
    fd = calls.open(path, os.O_RDONLY)
    try:
        return read_at(calls, fd, _MAX_BYTES, 0).decode(errors="replace")
    finally:
        close_quietly(calls, fd)
