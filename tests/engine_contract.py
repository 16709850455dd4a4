"""What tests of engines share: memory with guards around it, blocks in real files, records of a journal."""

import contextlib
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from crc32c import crc32c
from faults import Fault, FaultySyscalls

from posix_store import Syscalls
from posix_store.engine import Engine, Publication
from posix_store.errors import Reason, StoreError
from posix_store.journal import Journal
from posix_store.native import engine_named
from posix_store.segment import PUT, RECORD
from posix_store.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE
from posix_store.transfer import Transfer

ENGINES = ["native", "python"]
GUARD = 0xA5
UNTOUCHED = 0x5C
JOURNAL_START = 64


def engine_of(name: str, calls: Syscalls | None = None, threads: int = 3) -> Engine:
    """An engine. Skips where the native one cannot be built, and fails where it only was not."""
    try:
        return engine_named(name, calls or Syscalls(), threads)
    except StoreError as error:
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        if shutil.which("cc") is None or not header.exists():
            pytest.skip(f"needs a C compiler (cc) and Python.h: {error}")
        raise


class EngineMaker:
    """Makes engines of one name, and closes them at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: list[Engine] = []

    def __call__(self, *calls: Fault | Syscalls, threads: int = 3) -> Engine:
        """An engine that calls libc, or a `Syscalls`, or one with these faults."""
        if calls and isinstance(calls[0], Syscalls):
            engine = engine_of(self.name, calls[0], threads)
        else:
            faults = [fault for fault in calls if isinstance(fault, Fault)]
            engine = engine_of(self.name, FaultySyscalls(*faults) if faults else None, threads)
        self._made.append(engine)
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._made:
            engine.close()


@contextlib.contextmanager
def open_files(folder: Path, count: int) -> Iterator[list[int]]:
    """New empty files, open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    fds = [os.open(folder / f"file{i}", flags) for i in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def punch(fd: int, offset: int, length: int) -> None:
    """Make a hole in a file. Parts of pages become zeros."""
    Syscalls().fallocate(fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, offset, length)


def soon(seconds: float = 60.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


class Memory:
    """n blocks of k components somewhere in one buffer, all else in it being guards.

    Args:
        sizes: bytes of each component.
        gap: bytes between two components at most; 0 makes all of them adjacent, block after block.
        alignment: of each component; needs `gap` 0 and sizes that are multiples of it.
    """

    def __init__(
        self, sizes: Sequence[int], count: int, rng: np.random.Generator, gap: int = 13, alignment: int = 1
    ) -> None:
        self.sizes = np.array(sizes, np.int64)
        steps = np.tile(self.sizes, count)
        if gap:
            steps = steps + rng.integers(0, gap + 1, len(steps)) * rng.integers(0, 2, len(steps))
        begins = (np.cumsum(steps) - steps).reshape(count, len(sizes))
        if gap:
            begins = rng.permutation(begins)
        self.buffer = np.full(int(steps.sum()) + 64 + 2 * alignment, GUARD, np.uint8)
        base = 17 if alignment == 1 else -self.buffer.ctypes.data % alignment
        self._begins = begins + base
        self.addresses = self._begins + self.buffer.ctypes.data

    @property
    def rows(self) -> np.ndarray:
        """The bytes of each block, uint8 (n, block_bytes)."""
        rows = np.empty((len(self._begins), int(self.sizes.sum())), np.uint8)
        for at, block, columns in self._parts():
            rows[block, columns] = self.buffer[at]
        return rows

    @rows.setter
    def rows(self, rows: np.ndarray) -> None:
        for at, block, columns in self._parts():
            self.buffer[at] = rows[block, columns]

    def guards_are_intact(self) -> bool:
        outside = np.ones(len(self.buffer), bool)
        for at, _, _ in self._parts():
            outside[at] = False
        return bool((self.buffer[outside] == GUARD).all())

    def _parts(self) -> Iterator[tuple[np.ndarray | slice, int | slice, slice]]:
        """Where parts of blocks are in the buffer, which blocks they are of, and which bytes of these.

        Small components of all blocks come at once, large ones one by one: an index of bytes is 8 x as large.
        """
        ends = np.cumsum(self.sizes)
        for column, size, end in zip(self._begins.T, self.sizes.tolist(), ends.tolist(), strict=True):
            columns = slice(end - size, end)
            if size < 500:
                yield column[:, None] + np.arange(size), slice(None), columns
                continue
            for block, begin in enumerate(column.tolist()):
                yield slice(begin, begin + size), block, columns


def random_places(
    rng: np.random.Generator, count: int, length: int, fds: Sequence[int], gap: int, shuffled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Files int32 (n,) and offsets int64 (n,) of blocks that do not overlap.

    Args:
        gap: bytes between two blocks at most; half of them are neighbours. 0: all are.
        shuffled: are the blocks in another order than in their files?
    """
    which = rng.integers(0, len(fds), count)
    if not shuffled:
        which.sort()
    offsets = np.zeros(count, np.int64)
    for number in range(len(fds)):
        mine = np.flatnonzero(which == number)
        gaps = rng.integers(0, gap + 1, len(mine)) * rng.integers(0, 2, len(mine))
        offsets[rng.permutation(mine) if shuffled else mine] = np.cumsum(gaps + length) - length
    return np.array(fds, np.int32)[which], offsets


@dataclass
class Blocks:
    """n blocks: where each is in which file, and the only right bytes of it."""

    sizes: np.ndarray
    fds: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray

    @classmethod
    def random(
        cls,
        fds: Sequence[int],
        sizes: Sequence[int],
        count: int,
        seed: int = 0,
        gap: int = 0,
        shuffled: bool = False,
    ) -> "Blocks":
        rng = np.random.default_rng(seed)
        length = sum(sizes)
        where = random_places(rng, count, length, fds, gap, shuffled)
        return cls(np.array(sizes, np.int64), *where, rng.integers(0, 256, (count, length), np.uint8))

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def length(self) -> int:
        return int(self.sizes.sum())

    @property
    def crcs(self) -> np.ndarray:
        return np.array([crc32c(row.tobytes()) for row in self.rows], np.uint32)

    def transfer(self, memory: Memory, crc: np.ndarray | None = None, direct: bool = False) -> Transfer:
        return Transfer.of(memory.addresses, self.sizes, self.fds, self.offsets, crc, direct)

    def memory(self, seed: int = 1, gap: int = 13) -> Memory:
        """Memory for these blocks, all guards."""
        return Memory(self.sizes.tolist(), len(self), np.random.default_rng(seed), gap)

    def filled(self, seed: int = 1, gap: int = 13) -> Memory:
        """Memory with the bytes of these blocks."""
        memory = self.memory(seed, gap)
        memory.rows = self.rows
        return memory

    def store(self) -> None:
        """Write the bytes into the files, without an engine; gaps are filled, so that there is no hole."""
        for fd in np.unique(self.fds).tolist():
            end = int((self.offsets[self.fds == fd]).max()) + self.length
            os.pwrite(fd, bytes([UNTOUCHED]) * end, 0)
        for row, fd, offset in zip(self.rows, self.fds.tolist(), self.offsets.tolist(), strict=True):
            os.pwrite(fd, row, offset)

    def on_disk(self) -> np.ndarray:
        """What the files hold at the places of the blocks, uint8 (n, block_bytes); zeros behind the end."""
        rows = np.zeros_like(self.rows)
        for row, fd, offset in zip(rows, self.fds.tolist(), self.offsets.tolist(), strict=True):
            data = os.pread(fd, self.length, offset)
            row[: len(data)] = np.frombuffer(data, np.uint8)
        return rows

    def outside_is_untouched(self) -> bool:
        """Is nothing written between the blocks? There are `UNTOUCHED` bytes or holes before."""
        for fd in np.unique(self.fds).tolist():
            data = np.frombuffer(os.pread(fd, os.fstat(fd).st_size, 0), np.uint8)
            outside = np.ones(len(data), bool)
            for offset in self.offsets[self.fds == fd].tolist():
                outside[offset : offset + self.length] = False
            if not np.isin(data[outside], (0, UNTOUCHED)).all():
                return False
        return True


def load(
    engine: Engine,
    blocks: Blocks,
    *,
    crc: np.ndarray | None = None,
    deadline: float | None = None,
    verify: bool = True,
    find_holes: bool = False,
    gap: int = 13,
) -> Transfer:
    """Read the blocks; asserts that what is OK has the right bytes, and that nothing else was touched."""
    memory = blocks.memory(gap=gap)
    transfer = blocks.transfer(memory, blocks.crcs if crc is None else crc)
    engine.read(transfer, soon() if deadline is None else deadline, verify, find_holes)
    ok = transfer.status == Reason.OK
    assert (memory.rows[ok] == blocks.rows[ok]).all(), "bytes of blocks that are OK are wrong"
    assert memory.guards_are_intact(), "memory outside the blocks was written to"
    return transfer


def save(
    engine: Engine,
    blocks: Blocks,
    *,
    deadline: float | None = None,
    publication: Publication | None = None,
    gap: int = 13,
) -> Transfer:
    """Write the blocks; asserts that what is OK is in the files, and that nothing else was touched."""
    memory = blocks.filled(gap=gap)
    before = memory.buffer.copy()
    transfer = blocks.transfer(memory)
    engine.write(transfer, soon() if deadline is None else deadline, publication)
    assert (memory.buffer == before).all(), "a write changed the memory"
    ok = transfer.status == Reason.OK
    assert (blocks.on_disk()[ok] == blocks.rows[ok]).all(), "bytes on disk of blocks that are OK are wrong"
    assert (transfer.crc[ok] == blocks.crcs[ok]).all(), "checksums of blocks that are OK are wrong"
    assert blocks.outside_is_untouched(), "something was written between the blocks"
    return transfer


def records_of(blocks: Blocks) -> np.ndarray:
    """`RECORD` (n,) of these blocks, unsealed and without checksums."""
    records = np.zeros(len(blocks), RECORD)
    ids = np.random.default_rng(len(blocks)).integers(0, 256, (len(blocks), 16), np.uint8)
    records["id"] = ids.view("V16").reshape(-1)
    records["offset"], records["length"] = blocks.offsets, blocks.length
    records["kind"] = PUT
    return records


def some_records(count: int, mark: int = 0) -> np.ndarray:
    """`RECORD` (n,): `parent` holds (mark, position) as two uint64."""
    records = np.zeros(count, RECORD)
    marks = np.stack([np.full(count, mark, np.uint64), np.arange(count, dtype=np.uint64)], axis=1)
    records["parent"] = marks.view("V16").reshape(-1)
    records["kind"] = PUT
    return records


def marks_of(records: np.ndarray) -> np.ndarray:
    """(mark, position) of each of `some_records`, uint64 (n, 2)."""
    return np.ascontiguousarray(records["parent"]).view(np.uint64).reshape(-1, 2)


def publication_for(blocks: Blocks, journal: Journal) -> Publication:
    return Publication(journal, records_of(blocks))


def journal_bytes(fd: int) -> bytes:
    """What was appended."""
    return os.pread(fd, os.fstat(fd).st_size, JOURNAL_START)


def tasks() -> set[int]:
    """The threads of this process, as the kernel sees them."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def blocked_signals(thread: int) -> int:
    """Bit n - 1 is set where signal n is blocked in a thread."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
