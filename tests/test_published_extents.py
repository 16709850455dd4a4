"""An extent that a record may name is never given back, whatever comes between its append and the dump's end.

Defends I1 and I2: two reviews' findings on issue 4, where an engine appends the records itself.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storekit import PAGE, dump, ids_of, load, memory_directory, open_store

from posix_store import Reason
from posix_store.buffers import scratch
from posix_store.engine import Publication
from posix_store.syscalls import FALLOC_PUNCH_HOLE, Syscalls
from posix_store.transfer import Transfer

LENGTH = 2 * PAGE
FIRST, SECOND, THIRD = ids_of(1, 8), ids_of(2, 8), ids_of(3, 8)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory / "store"


class Interrupted(BaseException):
    """What a signal handler raises in the thread that dumps."""


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_signal_just_behind_the_append(root: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next dump writes somewhere else: what was published keeps its bytes."""
    with open_store(root, engine=engine) as store:
        dump(store, THIRD, LENGTH)  # so that there is a segment
        write = store.engine.write

        def interrupted(transfer: Transfer, deadline: float, publication: Publication | None = None) -> None:
            write(transfer, deadline, publication)
            raise Interrupted

        monkeypatch.setattr(store.engine, "write", interrupted)
        with pytest.raises(Interrupted):
            dump(store, FIRST, LENGTH)
        monkeypatch.undo()
        assert (dump(store, SECOND, LENGTH) == Reason.OK).all()
        with open_store(root, verify=False) as other:
            assert (load(other, FIRST, LENGTH) == Reason.OK).all()
            assert (load(other, SECOND, LENGTH) == Reason.OK).all()


def test_a_true_signal_at_any_time(root: Path) -> None:
    """A timer's handler raises in the middle of dumps, again and again; no loaded block has others' bytes."""

    def handler(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    length, tried = 64 * PAGE, []
    try:
        with open_store(root, capacity=512 << 20, segment_bytes=64 << 20) as store:
            for seed in range(20):
                ids = ids_of(100 + seed, 32)
                tried.append(ids)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.001 * (seed + 1))
                    dump(store, ids, length)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with open_store(root, capacity=512 << 20, verify=False) as other:
        for ids in tried:
            assert np.isin(load(other, ids, length), (Reason.OK, Reason.ABSENT)).all()


class Punches(Syscalls):
    """Counts holes that are punched, and deletes the store's files behind the next append to a journal."""

    def __init__(self, root: Path) -> None:
        self.root, self.armed, self.punched = root, False, 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        written = super().pwrite(fd, data, offset)
        if self.armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".idx"):
            self.armed = False
            for path in [*self.root.glob("*/*.seg"), *self.root.glob("*/*.idx")]:
                path.unlink()
        return written

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        self.punched += bool(mode & FALLOC_PUNCH_HOLE)
        super().fallocate(fd, mode, offset, length)


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_files_deleted_behind_the_append(root: Path, engine: str) -> None:
    """The blocks are stored again; no hole is punched into what somebody may be reading."""
    calls = Punches(root)
    with open_store(root, engine=engine, syscalls=calls) as store:
        dump(store, THIRD, LENGTH)
        calls.armed = True
        assert (dump(store, FIRST, LENGTH) == Reason.OK).all()
        assert calls.punched == 0
        with open_store(root) as other:
            assert (load(other, FIRST, LENGTH) == Reason.OK).all()


def test_many_dumps_begin_a_direct_segment_at_once(tmp_path: Path) -> None:
    """Each segment has one descriptor around the page cache, which is closed with it."""
    failed: list[object] = []

    def work(store: Any, number: int) -> None:
        memory = scratch(4 * 16 * PAGE)
        addresses = memory.ctypes.data + np.arange(4, dtype=np.int64).reshape(-1, 1) * 16 * PAGE
        for round_ in range(10):
            ids = ids_of(1000 + 10 * number + round_, 4)
            status = store.dump_data(ids, None, addresses, 16 * PAGE, background=False).status()
            failed.extend(status[status != Reason.OK].tolist())

    with open_store(tmp_path / "store", io_mode="direct") as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.islink(link)]
    assert not failed and not [name for name in opened if name.startswith(str(tmp_path))]
