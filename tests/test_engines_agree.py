"""Holes are found, and both engines agree whatever a transfer looks like. Defends I1 and issue 4."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_contract import ENGINES, Blocks, EngineMaker, engine_of, load, open_files, punch, save
from faults import Fault, FaultySyscalls
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import memory_directory

from posix_store.engine import Engine
from posix_store.errors import Reason

FOREVER = float("inf")


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


# ---- Holes ----


def punched(fds: list[int], missing: np.ndarray, size: int = 4096) -> Blocks:
    """Neighbouring blocks in one file, of which those with True are holes."""
    blocks = Blocks.random(fds[:1], [size], len(missing))
    os.ftruncate(fds[0], len(missing) * size)
    for block in np.flatnonzero(~missing).tolist():
        os.pwrite(fds[0], blocks.rows[block], block * size)
    return blocks


def read_holes(engine: Engine, blocks: Blocks) -> list[int]:
    """Rows that are OK and hold a hole's zeros are wrong: `load` asserts that."""
    return np.flatnonzero(load(engine, blocks, verify=False, find_holes=True).status).tolist()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pattern", range(6))
def test_holes_are_found(make: EngineMaker, files: list[int], pattern: int, threads: int) -> None:
    missing = np.random.default_rng(pattern).random(150) < (0, 0.02, 0.3, 0.7, 0.98, 1)[pattern]
    blocks = punched(files, missing)
    assert read_holes(make(threads=threads), blocks) == np.flatnonzero(missing).tolist()
    transfer = load(make(threads=threads), blocks, verify=False, find_holes=True)
    assert (transfer.status[missing] == Reason.EVICTED).all()


def test_a_hole_in_a_part_of_a_block(make: EngineMaker, files: list[int]) -> None:
    """A block of several pages of which one is a hole: at its begin, in the middle, at its end."""
    pages = np.zeros(25, bool)
    pages[[5, 12, 19]] = True
    punched(files, pages)
    blocks = Blocks.random(files[:1], [1000, 4 * 4096 + 3096], 5)
    blocks.rows = blocks.on_disk()
    status = load(make(), blocks, verify=False, find_holes=True).status
    assert status.tolist() == [0, Reason.EVICTED, Reason.EVICTED, Reason.EVICTED, 0]


@pytest.mark.parametrize(("begin", "length", "in_hole"), [
    (4096, 4096, False), (4096, 4097, True), (8191, 1, False), (8192, 1, True),
    (12287, 1, True), (12287, 2, True), (12288, 1, False),
])  # fmt: skip
def test_a_byte_in_a_hole(
    make: EngineMaker, files: list[int], begin: int, length: int, in_hole: bool
) -> None:
    """The third of four pages is a hole: one byte of it is enough, and its neighbours are not in it."""
    punched(files, np.array([False, False, True, False]))
    blocks = Blocks.random(files[:1], [length], 1)
    blocks.offsets[0] = begin
    blocks.rows = blocks.on_disk()
    status = load(make(), blocks, verify=False, find_holes=True).status
    assert status.tolist() == [Reason.EVICTED if in_hole else Reason.OK]


def test_holes_in_several_files_and_orders(make: EngineMaker, files: list[int]) -> None:
    blocks = Blocks.random(files[:3], [4096], 60, shuffled=True)
    missing = np.random.default_rng(1).random(60) < 0.4
    for fd in files[:3]:
        os.ftruncate(fd, 60 * 4096)
    for block in np.flatnonzero(~missing).tolist():
        os.pwrite(int(blocks.fds[block]), blocks.rows[block], int(blocks.offsets[block]))
    assert read_holes(make(), blocks) == np.flatnonzero(missing).tolist()


def test_holes_between_blocks_are_nobodys(make: EngineMaker, files: list[int]) -> None:
    """Space between blocks was never written: only a block that is itself in a hole is refused."""
    blocks = Blocks.random(files[:2], [4000, 96], 40, shuffled=True)
    blocks.offsets *= 3
    missing = np.random.default_rng(2).random(40) < 0.3
    for block in np.flatnonzero(~missing).tolist():
        os.pwrite(int(blocks.fds[block]), blocks.rows[block], int(blocks.offsets[block]))
    for fd in files[:2]:
        os.ftruncate(fd, 130 * 4096)
    assert read_holes(make(), blocks) == np.flatnonzero(missing).tolist()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_that_does_not_tell(make: EngineMaker, files: list[int], error: int) -> None:
    blocks = punched(files, np.zeros(10, bool))
    engine = make(Fault(kinds=["seek_hole"], error=error, times=FOREVER))
    transfer = load(engine, blocks, verify=False, find_holes=True)
    assert not transfer.status.any() and transfer.error is None


def test_a_file_cut_after_it_was_read(make: EngineMaker, files: list[int]) -> None:
    """Behind the end of the file nothing is stored, so what was read there may have been a hole."""
    blocks = punched(files, np.zeros(10, bool))
    cut = Fault(kinds=["seek_hole"], before=lambda: os.ftruncate(files[0], 5 * 4096 + 7), times=FOREVER)
    assert read_holes(make(cut), blocks) == [5, 6, 7, 8, 9]


def test_holes_hide_no_other_failure(make: EngineMaker, files: list[int]) -> None:
    blocks = punched(files, np.ones(6, bool))
    engine = make(Fault(kinds=["preadv"], error=errno.EIO), threads=1)
    transfer = load(engine, blocks, verify=False, find_holes=True)
    assert transfer.status.tolist() == [Reason.IO_ERROR, *[Reason.EVICTED] * 5]


def test_holes_are_not_asked_for_where_checksums_tell(make: EngineMaker, files: list[int]) -> None:
    blocks = punched(files, np.array([False, True, False]))
    calls = FaultySyscalls()
    transfer = load(make(calls), blocks, find_holes=True)
    assert transfer.status.tolist() == [0, Reason.CHECKSUM, 0]
    assert not calls.counts["seek_hole"]


# ---- The same on both ----

transfers = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 9000), min_size=1, max_size=6),
        "count": st.integers(0, 24),
        "n_files": st.integers(1, 3),
        "gap": st.sampled_from([0, 1, 600]),
        "shuffled": st.booleans(),
        "memory_gap": st.sampled_from([0, 13]),
        "seed": st.integers(0, 1 << 16),
    }
)


def random_blocks(fds: list[int], shape: dict[str, Any]) -> Blocks:
    return Blocks.random(
        fds[: shape["n_files"]],
        shape["sizes"],
        shape["count"],
        shape["seed"],
        shape["gap"],
        shape["shuffled"],
    )


@given(
    shape=transfers,
    short=st.sampled_from([None, 500, 3001]),
    damage=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=5),
    cut=st.none() | st.integers(0, 1 << 20),
    verify=st.booleans(),
)
@settings(max_examples=60)
def test_both_engines_agree_on_reads(
    shape: dict[str, Any], short: int | None, damage: list[tuple[int, int]], cut: int | None, verify: bool
) -> None:
    """Files that are whole, cut and full of holes: the same statuses, and right bytes of OK blocks."""
    with memory_directory() as path, open_files(path, 3) as fds:
        blocks = random_blocks(fds, shape)
        if len(blocks):
            blocks.store()
            for fd in fds:
                end = os.fstat(fd).st_size
                for at, length in damage:
                    if end:  # a hole, as eviction leaves
                        punch(fd, at % end, length % 8192 + 1)
                if cut is not None:
                    os.ftruncate(fd, cut % (end + 1))
        expected = blocks.crcs
        blocks.rows = blocks.on_disk()
        results = []
        for name in ENGINES:
            calls = FaultySyscalls(Fault(kinds=["preadv"], short=short, times=FOREVER)) if short else None
            engine = engine_of(name, calls)
            transfer = load(
                engine, blocks, crc=expected, verify=verify, find_holes=True, gap=shape["memory_gap"]
            )
            results.append(transfer.status.tolist())
            engine.close()
        assert results[0] == results[1]
        assert set(results[0]) <= {Reason.OK, Reason.LENGTH, Reason.CHECKSUM, Reason.EVICTED}


@given(shape=transfers, short=st.sampled_from([None, 500, 3001]))
@settings(max_examples=40)
def test_both_engines_write_the_same(shape: dict[str, Any], short: int | None) -> None:
    with memory_directory() as path:
        results = []
        for name in ENGINES:
            (path / name).mkdir()
            with open_files(path / name, 3) as fds:
                blocks = random_blocks(fds, shape)
                calls = (
                    FaultySyscalls(Fault(kinds=["pwritev"], short=short, times=FOREVER)) if short else None
                )
                engine = engine_of(name, calls)
                transfer = save(engine, blocks, gap=shape["memory_gap"])
                engine.close()
                contents = [os.pread(fd, os.fstat(fd).st_size, 0) for fd in fds]
                results.append((transfer.status.tolist(), transfer.crc.tolist(), contents))
        assert results[0] == results[1]
