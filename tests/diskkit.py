"""What tests of a full store share: a disk of its own where possible, a watch, processes that evict."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from faults import FaultySyscalls
from mounts import KINDS, CannotMount, mounted
from storekit import memory_directory, open_store, payloads
from workers import Point, batch_ids, dump_and_report

from posix_store import PosixStore
from posix_store.segment import decode_records


@dataclass(frozen=True)
class Disk:
    """A directory and how to measure it: `used()` in bytes, at one instant or a little less than that."""

    path: Path
    used: Callable[[], int]


@contextlib.contextmanager
def disk_in_memory() -> Iterator[Disk]:
    """A tmpfs of our own, whose use is one number; where nothing can be mounted, a directory in memory."""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(mounted(KINDS["tmpfs"]))
        except CannotMount:
            path = stack.enter_context(memory_directory())
            yield Disk(path, lambda: at_least(path))
            return
        empty = _used(path)
        yield Disk(path, lambda: _used(path) - empty)


def at_least(root: Path) -> int:
    """Bytes that a tree had at some moment, or less: while others work, a sum is not of one moment.

    Of each file the smaller of two looks counts: a file that was looked at before it shrank and another after
    it grew would make a sum that never was.
    """
    first, second = _blocks(root), _blocks(root)
    return sum(min(first[path], second[path]) for path in first.keys() & second.keys())


def _blocks(root: Path) -> dict[str, int]:
    found = {}
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                found[path] = os.lstat(path).st_blocks * 512
    return found


def _used(path: Path) -> int:
    disk = os.statvfs(path)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def soon() -> float:
    return time.monotonic() + 10


def look(store: PosixStore) -> None:
    """Have a store see what others have done."""
    store._catalog.refresh(max_age=0)


def dump_chain(store: PosixStore, ids: np.ndarray, behind: np.ndarray | None = None) -> np.ndarray:
    """Dump blocks of 4096 bytes, each behind the one before it, the first behind `behind` (uint8 (16,))."""
    first = np.zeros(16, np.uint8) if behind is None else behind
    parents = np.concatenate([first[None], ids[:-1]])
    rows = list(payloads(ids, 4096))
    return store.dump(ids, None, rows, parents=parents, background=False).status()


def records_on_disk(root: Path) -> np.ndarray:
    """The records of all journals, `RECORD` (n,)."""
    parts = [decode_records(path.read_bytes()[64:])[0] for path in sorted(root.glob("*/*.idx"))]
    return np.concatenate(parts)


class Watch:
    """Measures without a pause while a `with` lasts; `most` is the most bytes there ever were."""

    def __init__(self, used: Callable[[], int]) -> None:
        self._used = used
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = 0
        self.samples = 0

    def _run(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, self._used())
            self.samples += 1
            self._stop.wait(0.0002)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, self._used())


def evicting_writer(
    connection: Connection,
    root: str,
    seed: int,
    batches: int,
    count: int,
    length: int,
    point: Point,
    options: dict[str, Any],
) -> None:
    """Dump batches, every other one in two shards, into a store that holds a few of them; die at `point`."""
    store = open_store(root, io_threads=1, syscalls=FaultySyscalls(point.fault()), **options)
    for batch in range(batches):
        dump_and_report(connection, store, batch_ids(seed, batch, count), length, shards=1 + batch % 2)
    store.evictor.tidy(time.monotonic() + 10)
    store.close()


def lock_holder(connection: Connection, path: str) -> None:
    """Hold the lock on a file until killed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    connection.send("held")
    connection.recv()
