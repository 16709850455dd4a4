"""Every system call the store makes, in one object, so that tests can fail the N-th of them.

Methods raise `OSError` and retry `EINTR`. All are thread-safe; none keeps state.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Callable

from posix_store.compiled import native

FALLOC_KEEP_SIZE = 0x01
FALLOC_PUNCH_HOLE = 0x02

RWF_NOWAIT = 0x08
AT_EMPTY_PATH = 0x1000
STATX_NLINK = 0x04

_libc = ctypes.CDLL(None, use_errno=True)
_IO_ARGS = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong]
for _name in ("preadv", "pwritev"):
    _function = getattr(_libc, _name)
    _function.argtypes, _function.restype = _IO_ARGS, ctypes.c_ssize_t
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
_libc.fallocate.restype = ctypes.c_int

# The same library, called with the GIL in hand: for calls that are over before it would change hands.
_at_once = ctypes.PyDLL(None, use_errno=True)
_at_once.pread.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_longlong]
_at_once.pread.restype = ctypes.c_ssize_t


def _prepared(name: str, *arguments: object) -> Callable[..., int] | None:
    """A function that not every libc has, to be called with the GIL in hand."""
    function = getattr(_at_once, name, None)
    if function is not None:
        function.argtypes, function.restype = (
            arguments,
            ctypes.c_ssize_t if name == "preadv2" else ctypes.c_int,
        )
    return function


_preadv2 = _prepared("preadv2", ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_int)
_statx = _prepared("statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _call(function: Callable[..., int], *arguments: object) -> int:
    """Call a libc function; `OSError` for its errno."""
    while True:
        result = function(*arguments)
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Syscalls:
    """The operating system. Tests subclass it to inject errors, short transfers and delays."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, iov: int, count: int, offset: int) -> int:
        """Read at `offset` into `count` iovecs that start at address `iov`; bytes read, 0 at end of file."""
        return _call(_libc.preadv, fd, iov, count, offset)

    def pwritev(self, fd: int, iov: int, count: int, offset: int) -> int:
        """Write `count` iovecs that start at address `iov` to `offset`; bytes written."""
        return _call(_libc.pwritev, fd, iov, count, offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        _call(_libc.fallocate, fd, mode, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        os.posix_fadvise(fd, offset, length, advice)

    def set_direct(self, fd: int) -> None:
        """Go around the page cache from now on (O_DIRECT)."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def seek_hole(self, fd: int, offset: int) -> int:
        """Where the first hole at or behind `offset` begins; the end of the file counts as one."""
        return os.lseek(fd, offset, os.SEEK_HOLE)

    def peek(self, fd: int, length: int, in_memory: bool) -> bytes:
        """The first bytes of a file, without letting go of the GIL, which costs up to 5 ms to get back.

        Raises `BlockingIOError` when they are not in the page cache. Not every file system can tell
        (`OSError`); with `in_memory` it is one on which a read never waits, and is not asked.
        """
        data = ctypes.create_string_buffer(length)
        if in_memory:
            count = _call(_at_once.pread, fd, data, length, 0)
        elif _preadv2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        else:
            iov = _Iovec(ctypes.addressof(data), length)
            count = _call(_preadv2, fd, ctypes.addressof(iov), 1, 0, RWF_NOWAIT)
        return data.raw[:count]

    def peek_links(self, fd: int) -> int:
        """How many names an open file has, without letting go of the GIL."""
        if _statx is None:
            return os.fstat(fd).st_nlink
        found = ctypes.create_string_buffer(256)
        _call(_statx, fd, b"", AT_EMPTY_PATH, STATX_NLINK, found)
        return int.from_bytes(found.raw[16:20], sys.byteorder)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def access(self, path: str, mode: int) -> bool:
        return os.access(path, mode, effective_ids=True)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)


def fallocate_in_steps(calls: Syscalls, fd: int, mode: int, offset: int, length: int, step: int) -> None:
    """`fallocate` that holds up writes to the file for no longer than one step takes, where C was built.

    What it has allocated when it fails stays allocated.
    """
    if native is None or type(calls).fallocate is not _TRUE_FALLOCATE:
        calls.fallocate(fd, mode, offset, length)
        return
    code, _ = native.fallocate(fd, mode, offset, length, step)
    if code:
        raise OSError(code, os.strerror(code))


_TRUE_FALLOCATE = Syscalls.fallocate


def close_quietly(calls: Syscalls, fd: int) -> None:
    """Close a descriptor that nothing was written through: it is closed whatever the call returns."""
    with contextlib.suppress(OSError):
        calls.close(fd)


def read_at(calls: Syscalls, fd: int, length: int, offset: int) -> bytes:
    """`length` bytes at `offset`, fewer only at the end of the file."""
    data = b""
    while len(data) < length:
        part = calls.pread(fd, length - len(data), offset + len(data))
        if not part:
            break
        data += part
    return data


def write_at(calls: Syscalls, fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = calls.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, "wrote nothing")
        view, offset = view[written:], offset + written
