"""The root directory: `STORE.json`, the store lock, the namespace directories.

A root is ours when `STORE.json` says so, or when everything in it has a name that only this store
gives. Anything else that is not empty is refused, and nothing in it is touched (invariant I7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from crc32c import crc32c

from posix_store.errors import StoreError
from posix_store.mount_type import mount_type
from posix_store.segment import FORMAT_VERSION, NAMESPACE_NAME, SegmentName
from posix_store.syscalls import Syscalls, close_quietly, read_at, write_at

logger = logging.getLogger(__name__)

STORE_FILE = "STORE.json"
LOCK_FILE = "STORE.lock"
EVICTION_LOCK_FILE = "EVICT.lock"
SERVED_FILE = "SERVED.lock"
"""In a namespace: locked by every process that has it open. A file, because FUSE and NFS keep locks on
directories to one machine; never replaced, because a lock is one of the file and not of its name."""
NAMESPACE_FILE = "NAMESPACE.json"
PINS_FILE = "PINS.json"
DEFAULT_CAPACITY_SHARE = 0.5
DEFAULT_MIN_FREE_SHARE = 0.05
_MAX_JSON_BYTES = 1 << 20
_COUNT_AGE = 1.0
_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class StoreRoot:
    """An opened root directory.

    Args:
        path: the directory; made when it is missing and `create` is set.
        capacity: bytes on disk for the whole root; None keeps what `STORE.json` says, or for a new
            store takes half of the free space.
        create: whether a new store may be made here. Nothing is ever written without it.

    Raises:
        StoreError: the path is no directory, is foreign, cannot be written, or is of a newer format.
    """

    def __init__(
        self, path: str, *, capacity: int | None = None, create: bool = True, syscalls: Syscalls | None = None
    ) -> None:
        self.path = os.path.abspath(path)
        self.syscalls = syscalls or Syscalls()
        self.read_only_because: str | None = None if create else "opened read-only"
        self._settings_seen: tuple[int, int] | None = None
        self._final: set[str] = set()
        self._last_size: dict[str, int] = {}
        self._counted_at = float("-inf")
        try:
            self._open(capacity, create)
        except OSError as error:
            raise StoreError(self._explain(error)) from error

    def _open(self, capacity: int | None, create: bool) -> None:
        if create:
            self._refuse_inside_another()
        names = self._list_or_create(create)
        settings = self._read_settings(names)
        if settings is None and not create and not self._namespaces_in(names):
            raise StoreError(f"path = {self.path}: no store here; make one with `ucm-sglang init`")
        if settings is not None and (capacity is None or capacity == settings["capacity"]):
            self.capacity, self.created = settings["capacity"], settings["created"]
        else:
            old = settings["capacity"] if settings else None
            self.capacity = capacity or self._default_capacity()
            self.created = settings["created"] if settings else int(time.time())
            if create:
                self._write_settings(known=STORE_FILE in names)
                if old is not None and not self.read_only_because:
                    logger.info(
                        "posix_store %s: capacity changed from %d to %d bytes", self.path, old, self.capacity
                    )
        self._device = self.syscalls.stat(self.path).st_dev
        if create and not self.read_only_because:
            self.read_only_because = self._why_not_writable()
        if self.capacity <= 0:
            raise StoreError(f"capacity = {self.capacity}: must be more than 0 bytes")

    def _refuse_inside_another(self) -> None:
        """A new store within another one would be a foreign thing there, and be counted twice."""
        above = os.path.dirname(self.path)
        while above != os.path.dirname(above):
            if self.syscalls.access(os.path.join(above, STORE_FILE), os.F_OK):
                raise StoreError(
                    f"path = {self.path}: lies in the store {above}; name a directory outside it"
                )
            above = os.path.dirname(above)

    def _why_not_writable(self) -> str | None:
        """Why nothing can be stored, None when it can: each dump needs the store lock."""
        lock = os.path.join(self.path, LOCK_FILE)
        if self.syscalls.access(lock, os.F_OK):
            path, allowed = lock, self.syscalls.access(lock, os.R_OK | os.W_OK)
        else:
            path, allowed = self.path, self.syscalls.access(self.path, os.W_OK | os.X_OK)
        if allowed:
            return None
        logger.warning("posix_store %s: %s is not writable; give this user access", self.path, path)
        return f"{path} is not writable"

    def _list_or_create(self, create: bool) -> list[str]:
        try:
            status = self.syscalls.stat(self.path)
        except FileNotFoundError:
            if not create:
                raise StoreError(
                    f"path = {self.path}: no store here; make one with `ucm-sglang init`"
                ) from None
            self.syscalls.makedirs(self.path)
            return []
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(
                f"path = {self.path}: is not a directory; name a directory of its own for the store"
            )
        return self.syscalls.listdir(self.path)

    def _read_settings(self, names: list[str]) -> dict[str, Any] | None:
        """Contents of STORE.json; None when the store is new, or is ours with the file lost or damaged."""
        foreign = [name for name in names if not self._is_ours(name)]
        if STORE_FILE not in names:
            if foreign:
                raise StoreError(
                    f"path = {self.path}: holds files of others ({', '.join(sorted(foreign)[:3])}) and no "
                    f"{STORE_FILE}; name an empty or a new directory"
                )
            return None
        settings = decode_settings(self._read(os.path.join(self.path, STORE_FILE)))
        if settings is None:
            logger.warning(
                "posix_store %s: %s is damaged or was edited by hand; it is rebuilt with the configured or "
                "default capacity. Set it with `ucm-sglang init %s --capacity ...`",
                self.path, STORE_FILE, self.path,
            )  # fmt: skip
            return None
        if settings["format"] > FORMAT_VERSION:
            raise StoreError(
                f"path = {self.path}: the store has format {settings['format']}, this version reads "
                f"{FORMAT_VERSION}; upgrade ucm-sglang or name another directory"
            )
        return settings

    def _is_ours(self, name: str) -> bool:
        if name in (STORE_FILE, LOCK_FILE, EVICTION_LOCK_FILE) or name.startswith("." + STORE_FILE):
            return True
        return bool(NAMESPACE_NAME.fullmatch(name)) and all(
            is_namespace_file(entry) for entry in self.syscalls.listdir(os.path.join(self.path, name))
        )

    def _default_capacity(self) -> int:
        disk = self.syscalls.statvfs(self.path)
        return max(1, int(disk.f_bavail * disk.f_frsize * DEFAULT_CAPACITY_SHARE) >> 20 << 20)

    def _write_settings(self, known: bool) -> None:
        data = encode_settings(FORMAT_VERSION, self.capacity, self.created)
        try:
            self.write_file(os.path.join(self.path, STORE_FILE), data)
        except OSError as error:
            if not known:
                raise
            if error.errno in _READ_ONLY_ERRORS:
                self.read_only_because = os.strerror(error.errno)
            logger.warning("posix_store %s: cannot write %s: %s", self.path, STORE_FILE, error)

    def _explain(self, error: OSError) -> str:
        try:
            status = self.syscalls.stat(self.path)
            owner = f"owner {status.st_uid}:{status.st_gid}, mode {stat.S_IMODE(status.st_mode):o}"
        except OSError:
            owner = "cannot be examined"
        fix = "free some space" if error.errno == errno.ENOSPC else "give this user read and write access"
        return (
            f"path = {self.path}: {error.strerror or error} (this process is {os.geteuid()}:{os.getegid()}, "
            f"{owner}); {fix} or name another directory"
        )

    # -- files ------------------------------------------------------------------------------------

    def write_file(self, path: str, data: bytes) -> None:
        """Replace a small file atomically. Raises `OSError`; leaves nothing behind when it does."""
        calls = self.syscalls
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
        fd = calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                write_at(calls, fd, data, 0)
                # Without this, a power failure can leave the new name on an empty file.
                calls.fsync(fd)
            finally:
                calls.close(fd)
            calls.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                calls.unlink(temporary)
            raise

    def _read(self, path: str) -> bytes:
        fd = self.syscalls.open(path, os.O_RDONLY)
        try:
            return read_at(self.syscalls, fd, _MAX_JSON_BYTES, 0)
        finally:
            close_quietly(self.syscalls, fd)

    def namespaces(self) -> list[str]:
        """Names (32 hex digits) of the namespace directories."""
        return self._namespaces_in(self.syscalls.listdir(self.path))

    @staticmethod
    def _namespaces_in(names: list[str]) -> list[str]:
        return sorted(name for name in names if NAMESPACE_NAME.fullmatch(name))

    def namespace_path(self, namespace: str) -> str:
        return os.path.join(self.path, namespace)

    def make_namespace(self, namespace: str, identity: Mapping[str, Any] | None) -> None:
        """Make a namespace's directory and its NAMESPACE.json where missing. Raises `OSError`.

        Without an identity NAMESPACE.json is left as it is.
        """
        directory = self.namespace_path(namespace)
        with contextlib.suppress(FileExistsError):
            self.syscalls.mkdir(directory)
        served = os.path.join(directory, SERVED_FILE)
        if not self.syscalls.access(served, os.F_OK):
            close_quietly(self.syscalls, self.syscalls.open(served, os.O_RDWR | os.O_CREAT))
        if identity is None and self.syscalls.access(os.path.join(directory, NAMESPACE_FILE), os.F_OK):
            return
        path = os.path.join(directory, NAMESPACE_FILE)
        data = json.dumps(dict(identity or {}), indent=1, sort_keys=True).encode() + b"\n"
        try:
            if self._read(path) == data:
                return
        except FileNotFoundError:
            pass
        self.write_file(path, data)

    def has_namespace(self, namespace: str) -> bool:
        """Is a namespace's directory there, with its NAMESPACE.json?"""
        return self.syscalls.access(os.path.join(self.namespace_path(namespace), NAMESPACE_FILE), os.F_OK)

    def read_identity(self, namespace: str) -> dict[str, Any] | None:
        """The identity fields of a namespace; None when its NAMESPACE.json is missing or damaged."""
        try:
            data = json.loads(self._read(os.path.join(self.namespace_path(namespace), NAMESPACE_FILE)))
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def current_capacity(self) -> int:
        """The capacity in bytes, read again when another process has changed STORE.json."""
        path = os.path.join(self.path, STORE_FILE)
        try:
            status = self.syscalls.stat(path)
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._settings_seen:
                settings = decode_settings(self._read(path))
                if settings and settings["format"] <= FORMAT_VERSION:
                    self.capacity = settings["capacity"]
                self._settings_seen = seen
        except OSError as error:
            logger.debug("posix_store %s: cannot read %s again: %s", self.path, STORE_FILE, error)
        return self.capacity

    def only_shrinks(self, *paths: str) -> None:
        """Nobody writes to these files any more: what they had allocated is the most they have."""
        self._final.update(paths)

    def changed(self, path: str) -> None:
        """This process has freed a part of a file: it is asked about again."""
        self._last_size.pop(path, None)

    @property
    def remembers_sizes(self) -> bool:
        """Does `allocated_bytes` without `exact` count files as they were more than a second ago?"""
        return bool(self._last_size) and time.monotonic() - self._counted_at > _COUNT_AGE

    def allocated_bytes(self, budget: float = float("inf"), exact: bool = True) -> int:
        """Bytes that the file system has allocated to everything under the root.

        Without `exact`, files that only shrink count as at the last time: it may be less, and never more.

        Raises `OSError`; `TimeoutError` when it takes more than `budget` seconds to ask for every file.
        """
        deadline = time.monotonic() + budget
        total = 0
        seen = set()
        for path in self._everything():
            if exact or path not in self._last_size:
                size = self._blocks(path)
                if path in self._final:
                    self._last_size[path] = size
            else:
                size = self._last_size[path]
            total += size
            seen.add(path)
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "too long to ask what each file has allocated", self.path)
        if exact:
            self._counted_at = time.monotonic()
        if len(self._final) > 2 * len(seen):
            self._final &= seen
            self._last_size = {path: size for path, size in self._last_size.items() if path in seen}
        return total

    def _everything(self) -> Iterator[str]:
        yield self.path
        for name in self.syscalls.listdir(self.path):
            path = os.path.join(self.path, name)
            yield path
            if NAMESPACE_NAME.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    yield from (os.path.join(path, entry) for entry in self.syscalls.listdir(path))

    def _blocks(self, path: str) -> int:
        try:
            return self.syscalls.stat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    def serve(self, namespace: str) -> int | None:
        """Mark a namespace as in use for as long as the returned descriptor is open; None: it is not there.

        Never raises: where that does not work, a namespace looks unused, and its blocks may go before
        those of others once they have not been used for a while.
        """
        try:
            fd = self.syscalls.open(os.path.join(self.namespace_path(namespace), SERVED_FILE), os.O_RDONLY)
        except OSError:
            return None
        try:
            # Somebody who asks whether it is in use holds it for a moment.
            if self.try_lock(fd, 1.0, fcntl.LOCK_SH):
                return fd
        except OSError as error:
            logger.debug("posix_store %s: no lock on %s: %s", self.path, namespace, error)
        close_quietly(self.syscalls, fd)
        return None

    def is_served(self, namespace: str) -> bool:
        """Has a living process the namespace open? True also where that cannot be found out."""
        try:
            fd = self.syscalls.open(os.path.join(self.namespace_path(namespace), SERVED_FILE), os.O_RDWR)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            return not self.try_lock(fd, 0)
        except OSError:
            return True
        finally:
            close_quietly(self.syscalls, fd)

    @functools.cached_property
    def file_system(self) -> str | None:
        """Type of the file system, as in /proc/self/mountinfo; None when that cannot be found out."""
        try:
            return mount_type(self.path, self.syscalls)
        except OSError:
            return None

    @contextlib.contextmanager
    def lock(self, timeout: float, file: str = LOCK_FILE) -> Iterator[bool]:
        """The lock on space and deletion (or another), shared by all processes of the root.

        Yields False when it could not be had within `timeout` seconds. The kernel frees it when its
        holder dies. Raises `OSError` when the file system refuses.
        """
        with self.locked_file(timeout, file) as fd:
            yield fd is not None

    @contextlib.contextmanager
    def locked_file(self, timeout: float, file: str) -> Iterator[int | None]:
        """Like `lock`; yields the descriptor of the file that is locked, which can be written to, or None."""
        path = os.path.join(self.path, file)
        try:
            fd = self.syscalls.open(path, os.O_RDWR | os.O_CREAT)
        except FileExistsError:  # on network file systems, when two machines make it at the same moment
            fd = self.syscalls.open(path, os.O_RDWR)
        try:
            if self.syscalls.fstat(fd).st_dev != self._device:
                # Going on would fill the file system below the mount point.
                raise OSError(errno.ENODEV, "is not on the file system that was opened; was it unmounted?")
            yield fd if self.try_lock(fd, timeout) else None
        finally:
            close_quietly(self.syscalls, fd)

    def try_lock(self, fd: int, timeout: float, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock an open file, trying for `timeout` seconds. Raises `OSError` when locks do not work."""
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while True:
            try:
                self.syscalls.flock(fd, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(pause)
            pause = min(pause * 2, 0.02)


def is_namespace_file(name: str) -> bool:
    """Did this store make a file of that name in a namespace directory?"""
    ours = name in (NAMESPACE_FILE, PINS_FILE, SERVED_FILE)
    return ours or is_temporary(name) or SegmentName.parse(name) is not None


def is_temporary(name: str) -> bool:
    """Is it the name of a file in a namespace directory that is half-way to replacing another?"""
    base = name[1:].rpartition(".")[0]
    return name.startswith(".") and (
        base in (NAMESPACE_FILE, PINS_FILE) or SegmentName.parse(base) is not None
    )


def encode_settings(version: int, capacity: int, created: int) -> bytes:
    """STORE.json: format version, capacity in bytes, creation time (Unix seconds), and their CRC-32C."""
    fields = {"format": version, "capacity": capacity, "created": created}
    return json.dumps({**fields, "crc32c": crc32c(json.dumps(fields).encode())}, indent=1).encode() + b"\n"


def decode_settings(data: bytes) -> dict[str, Any] | None:
    """The fields of STORE.json, None when they are damaged.

    Of a newer format only `format` is known to be there.
    """
    try:
        fields = json.loads(data)
        checksum = fields.pop("crc32c")
        if crc32c(json.dumps(fields).encode()) != checksum:
            return None
        required = ("format",) if fields["format"] > FORMAT_VERSION else ("format", "capacity", "created")
        if any(type(fields[name]) is not int or fields[name] < 0 for name in required):
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return dict(fields)
