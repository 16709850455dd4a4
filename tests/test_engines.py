"""Both engines move the same bytes and report the same: one contract suite, run on both. Defends issue 4.

Transfers are moved between memory with guards and real files in memory (tmpfs where there is one).
"""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_contract import ENGINES, Blocks, EngineMaker, Memory, load, open_files, save, soon
from faults import Fault, FaultySyscalls
from storekit import memory_directory

from posix_store.errors import Reason
from posix_store.transfer import Transfer

KIB = 1 << 10
MIB = 1 << 20
FOREVER = float("inf")

ERRORS = [
    (errno.ENOSPC, Reason.FULL),
    (errno.EDQUOT, Reason.FULL),
    (errno.EROFS, Reason.READ_ONLY),
    (errno.ESTALE, Reason.EVICTED),
    (errno.ENOENT, Reason.EVICTED),
    (errno.EIO, Reason.IO_ERROR),
    (errno.EBADF, Reason.IO_ERROR),
    (errno.ETIMEDOUT, Reason.TIMEOUT),
]

# name: (sizes of the components, blocks, files, gap in files at most, shuffled, gap in memory at most)
SHAPES: dict[str, tuple[list[int], int, int, int, bool, int]] = {
    "one byte": ([1], 1, 1, 0, False, 13),
    "one component, in order": ([4096], 128, 1, 0, False, 0),
    "one component, shuffled": ([4096], 128, 1, 0, True, 13),
    "unaligned components in three files": ([1, 4095, 100, 31], 60, 3, 500, True, 13),
    "in file order, with gaps": ([700, 300], 60, 2, 77, False, 13),
    "memory all adjacent, several components": ([100, 28, 4000], 90, 1, 0, False, 0),
    "memory adjacent, blocks shuffled": ([100, 28, 4000], 90, 1, 0, True, 0),
    "1023 components": ([5] * 1023, 3, 1, 0, True, 13),
    "IOV_MAX components": ([5] * 1024, 3, 1, 0, True, 13),
    "more components than IOV_MAX": ([1, 9, 64] * 667, 4, 1, 0, True, 13),
    "2000 adjacent components": ([17] * 2000, 4, 1, 0, False, 0),
    "blocks of just a chunk": ([256 * KIB], 5, 1, 0, False, 13),
    "blocks a byte above a chunk": ([256 * KIB, 1], 5, 1, 0, True, 13),
    "components that straddle chunks": ([100_000, 200_001, 77], 7, 2, 0, True, 13),
    "blocks larger than a piece": ([MIB + 5, MIB // 3], 3, 1, 0, True, 13),
    "many small blocks": ([61], 3000, 4, 9, True, 13),
    "many tiny components": ([2, 3], 1500, 1, 0, True, 13),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def files(folder: Path) -> Iterator[list[int]]:
    """Four empty files."""
    with open_files(folder, 4) as fds:
        yield fds


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param) as maker:
        yield maker


def spread(fds: list[int], count: int = 12, size: int = 1000) -> Blocks:
    """Blocks none of which is a neighbour of another: each takes a system call of its own."""
    blocks = Blocks.random(fds[:1], [size // 4, size - size // 4], count)
    blocks.offsets = blocks.offsets * 2
    blocks.store()
    return blocks


# ---- Round trips ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_is_read(make: EngineMaker, files: list[int], shape: str, threads: int) -> None:
    sizes, count, n_files, gap, shuffled, memory_gap = SHAPES[shape]
    blocks = Blocks.random(files[:n_files], sizes, count, count, gap, shuffled)
    written = save(make(threads=threads), blocks, gap=memory_gap)
    assert not written.status.any() and written.error is None
    for verify in (True, False):
        read = load(make(threads=threads), blocks, crc=written.crc, verify=verify, gap=memory_gap)
        assert not read.status.any() and read.error is None


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_when_every_call_is_made_by_a_test(make: EngineMaker, files: list[int], shape: str) -> None:
    """The path by which faults are injected moves the same bytes as libc."""
    sizes, count, n_files, gap, shuffled, memory_gap = SHAPES[shape]
    blocks = Blocks.random(files[:n_files], sizes, count, count, gap, shuffled)
    calls = FaultySyscalls()
    assert not save(make(calls), blocks, gap=memory_gap).status.any()
    assert not load(make(calls), blocks, gap=memory_gap).status.any()
    assert calls.counts["pwritev"] and calls.counts["preadv"]
    assert set(calls.counts) <= {"pwritev", "preadv", "open for writing"}


def test_neighbours_in_a_file_are_one_call(make: EngineMaker, files: list[int]) -> None:
    """No system call for each block: 60 blocks of 1 KiB are few calls, whatever their order."""
    blocks = Blocks.random(files[:1], [1000, 24], 60, shuffled=True)
    calls = FaultySyscalls()
    engine = make(calls)
    save(engine, blocks)
    load(engine, blocks)
    assert calls.counts["pwritev"] <= 4 and calls.counts["preadv"] <= 4


def test_one_block_is_read_to_several_places(make: EngineMaker, files: list[int]) -> None:
    blocks = Blocks.random(files[:1], [500, 2000], 10)
    blocks.store()
    again = np.array([3, 3, 9, 0, 3, 1, 9, 2, 3])
    copies = Blocks(blocks.sizes, blocks.fds[again], blocks.offsets[again], blocks.rows[again])
    assert not load(make(), copies).status.any()


def test_blocks_that_overlap_in_a_file_are_read(make: EngineMaker, files: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    os.pwrite(files[0], data, 0)
    offsets = np.array([0, 1, 700, 699, 2500, 1500, 3000], np.int64)
    rows = np.stack([data[at : at + 2000] for at in offsets])
    blocks = Blocks(np.array([2000]), np.full(7, files[0], np.int32), offsets, rows)
    assert not load(make(), blocks).status.any()


def test_no_blocks(make: EngineMaker, files: list[int]) -> None:
    calls = FaultySyscalls()
    engine = make(calls)
    none = Blocks.random(files[:1], [100], 0)
    transfer = Transfer.of(np.zeros((0, 1), np.int64), none.sizes, none.fds, none.offsets)
    engine.read(transfer, soon())
    engine.write(transfer, soon())
    assert transfer.error is None and not calls.calls


@pytest.mark.parametrize("direct", [False, True])
def test_direct_transfers(make: EngineMaker, tmp_path: Path, direct: bool) -> None:
    """`direct` is a matter of request sizes only. With O_DIRECT where the file system takes it."""
    page = mmap.PAGESIZE
    sizes = [64 * KIB, 8 * page, page]
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(tmp_path / "direct", flags | os.O_DIRECT)
    except OSError:
        fd = os.open(tmp_path / "direct", flags)
    try:
        blocks = Blocks.random([fd], sizes, 40, shuffled=True)
        memory = Memory(sizes, 40, np.random.default_rng(1), gap=0, alignment=page)
        memory.rows = blocks.rows
        engine = make()
        written = blocks.transfer(memory, direct=direct)
        engine.write(written, soon())
        assert not written.status.any() and (written.crc == blocks.crcs).all()
        other = Memory(sizes, 40, np.random.default_rng(1), gap=0, alignment=page)
        read = blocks.transfer(other, written.crc, direct=direct)
        engine.read(read, soon())
        assert not read.status.any() and (other.rows == blocks.rows).all() and other.guards_are_intact()
    finally:
        os.close(fd)


# ---- Outcomes ----


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 999, 1000, 5500, 9999])
def test_a_file_that_ends_early(make: EngineMaker, files: list[int], cut: int, verify: bool) -> None:
    """Blocks that the file holds whole are right; the others are LENGTH, never zeros."""
    blocks = Blocks.random(files[:1], [300, 700], 10, shuffled=True)
    blocks.store()
    os.ftruncate(files[0], cut)
    status = load(make(), blocks, verify=verify).status
    assert status.tolist() == np.where(blocks.offsets + 1000 <= cut, Reason.OK, Reason.LENGTH).tolist()


def test_flipped_bits_are_found_where_they_are(make: EngineMaker, files: list[int]) -> None:
    blocks = Blocks.random(files[:2], [1, 4000, 95], 40, gap=60, shuffled=True)
    blocks.store()
    wrong = [0, 7, 8, 39]
    for block, byte in zip(wrong, (0, 1, 4000, 4095), strict=True):
        fd, offset = int(blocks.fds[block]), int(blocks.offsets[block]) + byte
        os.pwrite(fd, bytes([blocks.rows[block, byte] ^ 0x10]), offset)
    transfer = load(make(), blocks)
    assert np.flatnonzero(transfer.status == Reason.CHECKSUM).tolist() == wrong
    assert (np.delete(transfer.status, wrong) == Reason.OK).all() and transfer.error is None
    assert (transfer.crc == blocks.crcs).all(), "the expected checksums are the caller's"


def test_wrong_checksum_is_found(make: EngineMaker, files: list[int]) -> None:
    blocks = Blocks.random(files[:1], [300_000], 4)
    blocks.store()
    crc = blocks.crcs
    crc[2] ^= 1
    assert load(make(), blocks, crc=crc).status.tolist() == [0, 0, Reason.CHECKSUM, 0]


def test_a_passed_deadline_makes_no_call(make: EngineMaker, files: list[int]) -> None:
    blocks = spread(files)
    calls = FaultySyscalls()
    engine = make(calls)
    memory = blocks.memory()
    for move in (engine.read, engine.write):
        transfer = blocks.transfer(memory, blocks.crcs)
        move(transfer, time.monotonic() - 0.001)
        assert (transfer.status == Reason.TIMEOUT).all()
    assert not calls.calls and (memory.rows == 0xA5).all()


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_a_deadline_that_passes_meanwhile(make: EngineMaker, files: list[int], kind: str) -> None:
    """The block whose call was under way is right; those whose turn comes later get TIMEOUT."""
    blocks = spread(files)
    deadline = time.monotonic() + 0.1

    def wait() -> None:
        time.sleep(max(0.0, deadline - time.monotonic()) + 0.002)

    engine = make(Fault(nth=3, kinds=[kind], before=wait), threads=1)
    transfer = (load if kind == "preadv" else save)(engine, blocks, deadline=deadline)
    assert transfer.status.tolist() == [0, 0, 0, *[Reason.TIMEOUT] * 9]


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_a_deadline_that_passes_within_a_block(make: EngineMaker, files: list[int], kind: str) -> None:
    blocks = Blocks.random(files[:1], [1000], 3)
    blocks.store()
    deadline = time.monotonic() + 0.1
    wait = Fault(
        nth=2, kinds=[kind], short=700, before=lambda: time.sleep(max(0, deadline - time.monotonic()))
    )
    engine = make(Fault(kinds=[kind], short=700, times=FOREVER), wait, threads=1)
    transfer = (load if kind == "preadv" else save)(engine, blocks, deadline=deadline)
    assert transfer.status.tolist() == [0, Reason.TIMEOUT, Reason.TIMEOUT]


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
@pytest.mark.parametrize(("error", "reason"), ERRORS, ids=[errno.errorcode[e] for e, _ in ERRORS])
def test_an_error_costs_one_block(
    make: EngineMaker, files: list[int], kind: str, error: int, reason: Reason
) -> None:
    blocks = spread(files)
    engine = make(Fault(nth=5, kinds=[kind], error=error), threads=1)
    transfer = (load if kind == "preadv" else save)(engine, blocks)
    assert transfer.status.tolist() == [0, 0, 0, 0, reason, *[0] * 7]
    assert transfer.error is not None and transfer.error.errno == error
    assert transfer.error.strerror == os.strerror(error)


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_an_error_among_neighbours_costs_one_block(make: EngineMaker, files: list[int], kind: str) -> None:
    """A call that would move many blocks fails: only one is given up, the others are tried again."""
    blocks = Blocks.random(files[:1], [1000, 24], 40)
    blocks.store()
    transfer = (load if kind == "preadv" else save)(
        make(Fault(kinds=[kind], error=errno.EIO), threads=1), blocks
    )
    assert transfer.status.tolist() == [Reason.IO_ERROR, *[0] * 39]


def test_the_first_error_is_told(make: EngineMaker, files: list[int]) -> None:
    engine = make(
        Fault(nth=2, kinds=["preadv"], error=errno.ESTALE),
        Fault(nth=4, kinds=["preadv"], error=errno.EIO),
        threads=1,
    )
    transfer = load(engine, spread(files))
    assert transfer.error is not None and transfer.error.errno == errno.ESTALE


def test_a_bad_descriptor_costs_the_blocks_of_its_file(make: EngineMaker, files: list[int]) -> None:
    """Without anything injected: a descriptor that is open for writing only, then one for reading only."""
    blocks = Blocks.random(files[:1], [4096], 8)
    blocks.fds[3:5] = files[1]
    blocks.store()
    engine = make()
    for move, flags in ((engine.read, os.O_WRONLY), (engine.write, os.O_RDONLY)):
        half_open = os.open(f"/proc/self/fd/{files[1]}", flags)
        memory = blocks.filled()
        transfer = blocks.transfer(memory, blocks.crcs)
        transfer.fds[3:5] = half_open
        move(transfer, soon())
        os.close(half_open)
        assert transfer.status.tolist() == [0, 0, 0, Reason.IO_ERROR, Reason.IO_ERROR, 0, 0, 0]
        assert transfer.error is not None and transfer.error.errno == errno.EBADF


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
@pytest.mark.parametrize("short", [1, 7, 99, 100, 101, 299, 4095])
def test_short_transfers_are_continued(make: EngineMaker, files: list[int], kind: str, short: int) -> None:
    sizes = [100, 1, 199] if short < 200 else [100, 5000, 199]
    blocks = Blocks.random(files[:2], sizes, 6, gap=40, shuffled=True)
    blocks.store()
    engine = make(Fault(kinds=[kind], short=short, times=FOREVER))
    assert not (load if kind == "preadv" else save)(engine, blocks).status.any()


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_only_some_transfers_are_short(make: EngineMaker, files: list[int], kind: str) -> None:
    """A short transfer ends in the middle of a component, of a block and between blocks."""
    blocks = Blocks.random(files[:1], [10, 90, 300_000], 3)
    blocks.store()
    for short in (5, 50, 100, 300_100, 300_105, 123_456):
        for nth in range(1, 4):
            engine = make(Fault(nth=nth, kinds=[kind], short=short))
            assert not (load if kind == "preadv" else save)(engine, blocks).status.any()


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_a_transfer_of_nothing(make: EngineMaker, files: list[int], kind: str) -> None:
    """A call that moves no byte is the end of the file, or a disk that takes nothing; it ends the request."""
    blocks = Blocks.random(files[:1], [1000], 4)
    blocks.store()
    engine = make(Fault(kinds=[kind], short=1500), Fault(nth=2, kinds=[kind], short=0), threads=1)
    transfer = (load if kind == "preadv" else save)(engine, blocks)
    reason = Reason.LENGTH if kind == "preadv" else Reason.IO_ERROR
    assert transfer.status.tolist() == [0, reason, reason, reason]


def call_counts(make: EngineMaker, blocks: Blocks, kind: str, faults: list[Fault]) -> int:
    """How many calls of a kind one transfer takes."""
    calls = FaultySyscalls(*faults)
    (load if kind == "preadv" else save)(make(calls), blocks)
    return calls.counts[kind]


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
@pytest.mark.parametrize("short", [None, 700])
def test_whichever_call_fails(make: EngineMaker, files: list[int], kind: str, short: int | None) -> None:
    """For each N: when the N-th call fails, one block fails and every other one is right."""
    blocks = Blocks.random(files[:3], [100, 1900], 14, gap=500, shuffled=True)
    blocks.store()
    move = load if kind == "preadv" else save

    def shortened() -> list[Fault]:
        return [Fault(kinds=[kind], short=short, times=FOREVER)] if short else []

    count = call_counts(make, blocks, kind, shortened())
    assert count >= 5
    for nth in range(1, count + 1):
        transfer = move(make(*shortened(), Fault(nth=nth, kinds=[kind], error=errno.EIO)), blocks)
        failed = transfer.status[transfer.status != Reason.OK]
        assert failed.tolist() == [Reason.IO_ERROR], f"call {nth} of {count}"


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
@pytest.mark.parametrize("short", [None, 700])
def test_every_nth_call_fails(make: EngineMaker, files: list[int], kind: str, short: int | None) -> None:
    blocks = Blocks.random(files[:3], [100, 1900], 14, gap=500, shuffled=True)
    blocks.store()
    move = load if kind == "preadv" else save
    for every in range(1, 20):
        faults = [Fault(nth=n, kinds=[kind], error=errno.ENOSPC) for n in range(every, 60, every)]
        if short:
            faults.append(Fault(kinds=[kind], short=short, times=FOREVER))
        calls = FaultySyscalls(*faults)
        transfer = move(make(calls), blocks)
        failed = int((transfer.status != Reason.OK).sum())
        assert failed == min(14, calls.counts[kind] // every), f"every {every}"
        assert np.isin(transfer.status, (Reason.OK, Reason.FULL)).all()
