"""What the file system under a root can do, found out by trying it on one small file.

File systems differ in what they refuse and, worse, in what they accept without doing it. So each ability is
judged by its effect, not by the answer of the call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from posix_store.mount_type import COPY_ON_WRITE, is_shared_between_machines, mount_type
from posix_store.root import STORE_FILE, StoreRoot
from posix_store.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    Syscalls,
    close_quietly,
    read_at,
    write_at,
)

_BYTES = 64 << 10
_HOLE = (16 << 10, 48 << 10)
_SECTOR, _PAGE = 512, 4096
_ATTRIBUTE_PATIENCE = 2.0
"""Seconds to wait for a size to be seen by path; attribute caches usually live for one."""
_LOOKUPS = 9
_LACKING = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.ENOLCK)
"""Answers that mean "cannot"; any other error means that this was not the moment to ask."""


@dataclass(frozen=True)
class Abilities:
    """What one file system can do. An ability is True, False, or None: could not be found out.

    `errors` says why for every ability that is not True, by its name.
    """

    file_system: str | None = None
    """Type as in /proc/self/mountinfo: `ext4`, `fuse.glusterfs`, ..."""
    preallocation: bool | None = None
    """`fallocate` beyond the end of a file, which keeps its size."""
    allocation_counted: bool | None = None
    """What was preallocated is in `st_blocks` at once, so that other writers know of it."""
    punching: bool | None = None
    """A hole reads as zeros, is not in `st_blocks`, and its space is free for others."""
    direct_io: bool | None = None
    """O_DIRECT is accepted, and reads what it wrote."""
    direct_alignment: int | None = None
    """Bytes that O_DIRECT transfers must be multiples of: 512 or 4096. None without `direct_io`."""
    flock: bool | None = None
    """A second descriptor on this machine is refused. Says nothing of other machines."""
    flock_directory: bool | None = None
    """The same for descriptors of a directory."""
    exclusive_create: bool | None = None
    """O_EXCL refuses a name that exists."""
    replace: bool | None = None
    """Rename puts a file in the place of another."""
    append_visible: bool | None = None
    """What is appended is read at once through another descriptor."""
    attribute_seconds: float | None = None
    """Seconds until the size by path shows an append of this machine; 0.0: at once."""
    metadata_seconds: float | None = None
    """Seconds for the look-up of a name that does not exist, median of a few."""
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def shared_between_machines(self) -> bool | None:
        """Can several machines mount it? True for known network file systems, None for other FUSE ones."""
        return is_shared_between_machines(self.file_system)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "shared_between_machines": self.shared_between_machines}

    def describe(self) -> str:
        """One line for the log."""
        has = [name for name in _LISTED if getattr(self, name) is True]
        lacks = [name for name in _LISTED if getattr(self, name) is False]
        unknown = [name for name in _LISTED if getattr(self, name) is None]
        parts = [
            f"{label}: {', '.join(_LISTED[name] for name in names)}"
            for label, names in (("has", has), ("lacks", lacks), ("unknown", unknown))
            if names
        ]
        if self.direct_alignment:
            parts.append(f"O_DIRECT in multiples of {self.direct_alignment}")
        if self.attribute_seconds:
            parts.append(f"sizes seen after {self.attribute_seconds:.3f} s")
        if self.metadata_seconds is not None:
            parts.append(f"look-up of a name {1e6 * self.metadata_seconds:.0f} us")
        return f"{self.file_system or 'unknown file system'}; {'; '.join(parts)}"

    def consequences(self) -> list[str]:
        """What each missing ability means for the store, one sentence each; empty when nothing is missing."""
        found = [text for name, text in _WITHOUT.items() if getattr(self, name) is False]
        if self.preallocation is not False and self.allocation_counted is False:
            found.append(_NOT_COUNTED)
        if self.attribute_seconds:
            found.append(
                f"sizes are seen {self.attribute_seconds:.1f} s late, and so are blocks of other processes"
            )
        if self.file_system is not None and self.shared_between_machines is not False:
            found.append(_SEVERAL_MACHINES)
        return found


_LISTED = {
    "preallocation": "preallocation",
    "allocation_counted": "preallocation in st_blocks",
    "punching": "hole punching",
    "direct_io": "O_DIRECT",
    "flock": "flock",
    "flock_directory": "flock of directories",
    "exclusive_create": "exclusive create",
    "replace": "replace by rename",
    "append_visible": "appends seen at once",
}
_WITHOUT = {
    "preallocation": "no preallocation: one process at a time writes",
    "punching": "no hole punching: whole segments are evicted; smaller ones keep more of what is useful",
    "direct_io": "no O_DIRECT: all transfers go through the page cache",
    "flock": (
        "no flock: capacity is not exact when several processes write, nothing is reclaimed from dead "
        "writers, and which namespaces are in use is not known"
    ),
    "flock_directory": "no flock of directories: which namespaces are in use is not known",
    "exclusive_create": "no exclusive create: do not keep a store here",
    "replace": "files cannot be replaced by rename: STORE.json cannot be changed; do not keep a store here",
    "append_visible": "appends are not seen at once: other processes find new blocks late",
}
_NOT_COUNTED = "preallocated space is not counted in st_blocks: one process at a time writes"
_SEVERAL_MACHINES = (
    "may be mounted on several machines: attributes may be cached there (often for 1 s), and locks may be "
    "local to each machine; see More than one machine in docs/OPERATIONS.md"
)


def probe(root: StoreRoot) -> Abilities:
    """Find out what the file system under a root can do. Never raises `OSError`.

    Takes a few milliseconds on a local disk. Writes at most two small files (64 KiB) in the root, under names
    that the store knows as its own, and removes them; of a root that is read-only, or not writable now, only
    the type and the time of a look-up are known.
    """
    found = _Findings(root)
    found.measure("file_system", found.type_name)
    found.measure("metadata_seconds", found.look_up_seconds)
    if root.read_only_because:
        found.nothing_more(root.read_only_because)
        return Abilities(**found.values, errors=found.errors)
    try:
        found.try_all()
    except OSError as error:
        found.nothing_more(_text(error))
    finally:
        found.clean_up()
    return Abilities(**found.values, errors=found.errors)


class _Findings:
    """One probe of one root: the file it uses, and what it has found so far."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._calls: Syscalls = root.syscalls
        self._path = os.path.join(root.path, f".{STORE_FILE}.probe-{secrets.token_hex(8)}")
        self._other = self._path + ".new"
        self._open: list[int] = []
        self.values: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    def measure(self, name: str, measurement: Callable[[], Any]) -> Any:
        """Note what a measurement gives. An error of the file system is noted as False or None."""
        value: Any = None
        try:
            value = measurement()
        except OSError as error:
            self.errors[name] = _text(error)
            if error.errno in _LACKING and name in _LISTED:
                value = False
        self.values[name] = value
        return value

    def nothing_more(self, why: str) -> None:
        for name in _LISTED:
            if self.values.setdefault(name, None) is None:
                self.errors.setdefault(name, why)

    def try_all(self) -> None:
        """Every trial that needs a file. Raises `OSError` when there can be none."""
        fd = self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        second = self._opened(os.O_RDWR)
        self.measure("exclusive_create", self._exclusive_create)
        self.measure("flock", lambda: self._locks(fd, second, fcntl.LOCK_EX, "flock"))
        self.measure("flock_directory", self._directory_locks)
        self.measure("append_visible", lambda: self._append(fd, second))
        self.measure("attribute_seconds", lambda: self._size_by_path(fd))
        if self.measure("preallocation", lambda: self._preallocate(fd)):
            self.measure("allocation_counted", lambda: self._counted(fd))
        else:
            self.values["allocation_counted"] = self.values["preallocation"]
            self.errors["allocation_counted"] = "no preallocation"
        self.measure("punching", lambda: self._punch(fd))
        self.measure("direct_io", self._direct)
        self.measure("replace", self._replace)

    def clean_up(self) -> None:
        for fd in self._open:
            close_quietly(self._calls, fd)
        for path in (self._path, self._other):
            with contextlib.suppress(OSError):
                self._calls.unlink(path)

    def _opened(self, flags: int, path: str | None = None) -> int:
        fd = self._calls.open(path or self._path, flags)
        self._open.append(fd)
        return fd

    def _not(self, name: str, why: str) -> bool:
        self.errors[name] = why
        return False

    # -- what can be read ---------------------------------------------------------------------------

    def type_name(self) -> str | None:
        found = mount_type(self._root.path, self._calls)
        if found is None:
            self.errors["file_system"] = "its mount is not in /proc/self/mountinfo"
        return found

    def look_up_seconds(self) -> float:
        """Time to learn that a name does not exist. Each time another name: no cache knows the answer."""
        times = []
        for number in range(_LOOKUPS):
            began = time.perf_counter()
            with contextlib.suppress(FileNotFoundError):
                self._calls.stat(f"{self._path}-{number}")
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    # -- trials -------------------------------------------------------------------------------------

    def _exclusive_create(self) -> bool:
        try:
            self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return True
        return self._not("exclusive_create", "O_EXCL opened a file that was there")

    def _locks(self, first: int, second: int, operation: int, name: str) -> bool:
        self._calls.flock(first, operation | fcntl.LOCK_NB)
        try:
            self._calls.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            for fd in (first, second):
                with contextlib.suppress(OSError):
                    self._calls.flock(fd, fcntl.LOCK_UN)
        return self._not(name, "two descriptors held the lock at once")

    def _directory_locks(self) -> bool:
        """On the root itself, which nothing of the store ever locks."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        first, second = self._opened(flags, self._root.path), self._opened(flags, self._root.path)
        return self._locks(first, second, fcntl.LOCK_SH, "flock_directory")

    def _append(self, fd: int, second: int) -> bool:
        for offset in range(0, 4 * _SECTOR, _SECTOR):
            data = secrets.token_bytes(_SECTOR)
            write_at(self._calls, fd, data, offset)
            if read_at(self._calls, second, 2 * _SECTOR, offset) != data:
                return self._not("append_visible", "a second descriptor did not read what was appended")
        return True

    def _size_by_path(self, fd: int) -> float | None:
        size = self._calls.stat(self._path).st_size
        write_at(self._calls, fd, secrets.token_bytes(_SECTOR), size)
        began, waited = time.perf_counter(), 0.0
        while self._calls.stat(self._path).st_size != size + _SECTOR:
            waited = time.perf_counter() - began
            if waited > _ATTRIBUTE_PATIENCE:
                self.errors["attribute_seconds"] = f"not seen within {_ATTRIBUTE_PATIENCE} s"
                return None
            time.sleep(0.005)
        return waited

    def _preallocate(self, fd: int) -> bool:
        size = self._calls.fstat(fd).st_size
        self._calls.fallocate(fd, FALLOC_KEEP_SIZE, 0, _BYTES)
        if self._calls.fstat(fd).st_size != size:
            return self._not("preallocation", "the size of the file changed")
        return True

    def _counted(self, fd: int) -> bool:
        blocks = self._calls.fstat(fd).st_blocks * 512
        if blocks >= _BYTES:
            return True
        return self._not("allocation_counted", f"{_BYTES} bytes were preallocated, {blocks} are in st_blocks")

    def _punch(self, fd: int) -> bool:
        # Random bytes: file systems may store zeros as a hole, and compress what repeats.
        data = secrets.token_bytes(_BYTES)
        write_at(self._calls, fd, data, 0)
        before = self._calls.fstat(fd).st_blocks
        start, end = _HOLE
        self._calls.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, start, end - start)
        if read_at(self._calls, fd, _BYTES, 0) != data[:start] + bytes(end - start) + data[end:]:
            return self._not("punching", "the hole does not read as zeros, or its neighbours were lost")
        if self._calls.fstat(fd).st_blocks >= before:
            return self._not("punching", "st_blocks did not fall")
        if self.values["file_system"] in COPY_ON_WRITE:
            return self._not(
                "punching", "copy on write: the space of a hole is free only when its whole extent has gone"
            )
        return True

    def _direct(self) -> bool:
        fd = self._opened(os.O_RDWR | os.O_DIRECT)
        try:
            for alignment in (_SECTOR, _PAGE):
                try:
                    same = self._direct_transfer(fd, alignment)
                except OSError as error:
                    if error.errno != errno.EINVAL or alignment == _PAGE:
                        raise
                    continue
                if not same:
                    return self._not("direct_io", "O_DIRECT read other bytes than it wrote")
                self.values["direct_alignment"] = alignment
                return True
        finally:
            self._open.remove(fd)
            close_quietly(self._calls, fd)
        return False

    def _direct_transfer(self, fd: int, length: int) -> bool:
        """Write and read `length` bytes at that offset, from memory that is aligned to no more than that."""
        memory = np.frombuffer(mmap.mmap(-1, 4 * _PAGE), np.uint8)
        source, target = memory[length : 2 * length], memory[2 * _PAGE :][length : 2 * length]
        source[:] = np.frombuffer(secrets.token_bytes(length), np.uint8)
        for call, piece in ((self._calls.pwritev, source), (self._calls.preadv, target)):
            iov = np.array([[piece.ctypes.data, length]], np.uint64)
            if call(fd, iov.ctypes.data, 1, length) != length:
                raise OSError(errno.EIO, "a short transfer")
        return bool((source == target).all())

    def _replace(self) -> bool:
        fd = self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL, self._other)
        data = secrets.token_bytes(_SECTOR)
        write_at(self._calls, fd, data, 0)
        self._calls.rename(self._other, self._path)
        replaced = self._opened(os.O_RDONLY)
        if read_at(self._calls, replaced, _BYTES, 0) != data:
            return self._not("replace", "the old file was still there")
        return True


def _text(error: OSError) -> str:
    return error.strerror or str(error)
