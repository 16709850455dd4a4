"""Looks at the store and at the servers' processes from outside, while they run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posix_store.catalog import Catalog
from posix_store.errors import StoreError
from posix_store.root import StoreRoot

_PAGE = os.sysconf("SC_PAGE_SIZE")


def allocated(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and allocated bytes of everything under a directory, by path, less what vanishes meanwhile."""
    found = {}
    for path in _walk(str(root)):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            found[path] = (status.st_ino, status.st_blocks * 512)
    return found


def _walk(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path)
    except (FileNotFoundError, NotADirectoryError):
        return


class StoreWatch(threading.Thread):
    """Adds up what the store takes up on disk, many times a second, and follows which blocks come and go.

    Adding up takes time, in which one file may shrink and another grow, so that a sum may be of no instant.
    What is above the limit counts if a second look finds every file unchanged.

    Args:
        root: the store's directory. It is only read.
        limit: bytes.
    """

    def __init__(self, root: Path, limit: int, pause: float = 0.05) -> None:
        super().__init__(name="store-watch", daemon=True)
        self._root, self._limit, self._pause = root, limit, pause
        self._ended = threading.Event()
        self._catalogs: dict[str, Catalog] = {}
        self._seen: set[bytes] = set()
        self._present: set[bytes] = set()
        self.now = self.peak = self.samples = self.unsettled = 0
        self.exceeded: list[int] = []
        """Sums above the limit, confirmed."""
        self.evicted = 0
        """Blocks that were there at one look and not at the next; one that returns may go once more."""
        self.error: BaseException | None = None

    @property
    def stored(self) -> int:
        """Different blocks that have been seen."""
        return len(self._seen)

    @property
    def present(self) -> int:
        return len(self._present)

    def run(self) -> None:
        look_at = 0.0
        try:
            while not self._ended.wait(self._pause):
                self._add_up()
                if time.monotonic() >= look_at:
                    self._look_at_blocks()
                    look_at = time.monotonic() + 1.0
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _add_up(self) -> None:
        self.samples += 1
        seen = allocated(self._root)
        total = sum(size for _, size in seen.values())
        for _ in range(40):
            if total <= self._limit:
                break
            again = allocated(self._root)
            if again == seen:
                self.exceeded.append(total)
                break
            seen, total = again, sum(size for _, size in again.values())
        else:
            self.unsettled += 1
            return
        self.now, self.peak = total, max(self.peak, total)

    def _look_at_blocks(self) -> None:
        try:
            root = StoreRoot(str(self._root), create=False)
        except StoreError:
            return  # the server has not made it yet
        present: set[bytes] = set()
        for name in root.namespaces():
            catalog = self._catalogs.get(name)
            if catalog is None:
                catalog = self._catalogs[name] = Catalog(root, name)
            catalog.refresh(max_age=0.0)
            present.update(row.tobytes() for row in catalog.index.entries().ids)
        self.evicted += len(self._present - present)
        self._seen |= present
        self._present = present


@dataclass(frozen=True)
class Sample:
    """A server at a moment. rss: bytes, all its processes together; fds: open descriptors, likewise.

    at: seconds of load. life: which start of the server.
    """

    server: str
    life: int
    at: float
    rss: int
    fds: int


def processes_of(group: int) -> list[int]:
    """Process ids of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group:
                found.append(int(stat.parent.name))
    return found


def measure(server: str, life: int, at: float, group: int) -> Sample:
    """Memory and descriptors of all processes of a group, now."""
    rss = fds = 0
    for pid in processes_of(group):
        with contextlib.suppress(OSError):
            rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
            fds += len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(server, life, at, rss, fds)
