"""What is written becomes visible whole or not at all, on both engines. Defends I2, I11 and issue 4."""

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine_contract import (
    ENGINES,
    JOURNAL_START,
    Blocks,
    EngineMaker,
    engine_of,
    journal_bytes,
    marks_of,
    open_files,
    publication_for,
    records_of,
    save,
    some_records,
    soon,
)
from faults import Fault, FaultySyscalls
from storekit import memory_directory

from posix_store.errors import Reason
from posix_store.segment import MAX_BATCH_RECORDS, RECORD_BYTES, decode_records, seal_records
from posix_store.transfer import Transfer

FOREVER = float("inf")
FAILURES = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE]


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def files(folder: Path) -> Iterator[list[int]]:
    """A segment, a journal, and two more."""
    with open_files(folder, 4) as fds:
        yield fds


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param) as maker:
        yield maker


def whole(fd: int) -> np.ndarray:
    """The records in a journal, in which there is nothing else."""
    data = journal_bytes(fd)
    records, consumed, damaged = decode_records(data)
    assert consumed == len(data) and not damaged
    return records


# ---- With a write ----


@pytest.mark.parametrize("count", [1, 2, 257, 3000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_written_is_published(
    make: EngineMaker, files: list[int], count: int, shuffled: bool
) -> None:
    blocks = Blocks.random(files[:1], [100, 28], count, shuffled=shuffled)
    engine = make()
    publication = publication_for(blocks, engine.journal(files[1], JOURNAL_START))
    assert not save(engine, blocks, publication=publication).status.any()
    assert publication.done and not publication.gone and publication.error is None
    expected = records_of(blocks)
    expected["payload_crc"] = blocks.crcs
    assert journal_bytes(files[1]) == seal_records(expected)
    assert publication.journal.end == JOURNAL_START + count * RECORD_BYTES
    assert not publication.journal.broken
    assert publication.records.tobytes() == expected.tobytes(), "the caller puts these into its index"


def test_both_engines_write_the_same_journal(files: list[int]) -> None:
    """Byte for byte, over many appends of both kinds and with short writes."""
    journals = []
    for name, fd in zip(ENGINES, files[1:3], strict=True):
        engine = engine_of(name, FaultySyscalls(Fault(kinds=["pwrite"], short=1000, times=FOREVER)))
        journal = engine.journal(fd, JOURNAL_START)
        for count in (1, 20, 3, 500):
            blocks = Blocks.random(files[:1], [70], count, seed=count, shuffled=True)
            publication = publication_for(blocks, journal)
            os.ftruncate(files[0], 0)
            save(engine, blocks, publication=publication)
            assert publication.done
            journal.append(some_records(count), soon())
        engine.close()
        journals.append(journal_bytes(fd))
    assert journals[0] == journals[1] and len(journals[0]) == 2 * 524 * RECORD_BYTES


@pytest.mark.parametrize("times", [1, FOREVER])
def test_a_batch_with_a_failed_block_is_not_published(
    make: EngineMaker, files: list[int], times: float
) -> None:
    """Not a part of it, and not a byte of the journal."""
    blocks = Blocks.random(files[:1], [1000], 10)
    calls = FaultySyscalls(Fault(nth=3, kinds=["pwritev"], error=errno.ENOSPC, times=times))
    calls.faults.append(Fault(kinds=["pwritev"], short=1000, times=FOREVER))
    engine = make(calls)
    publication = publication_for(blocks, engine.journal(files[1], JOURNAL_START))
    transfer = save(engine, blocks, publication=publication)
    assert Reason.FULL in transfer.status
    assert not publication.done and not publication.gone and publication.error is None
    assert not calls.counts["pwrite"] and publication.journal.end == JOURNAL_START
    assert not publication.journal.broken and os.fstat(files[1]).st_size == 0


def test_a_batch_after_its_deadline_is_not_published(make: EngineMaker, files: list[int]) -> None:
    blocks = Blocks.random(files[:1], [1000], 10)
    engine = make()
    publication = publication_for(blocks, engine.journal(files[1], JOURNAL_START))
    transfer = save(engine, blocks, publication=publication, deadline=time.monotonic() - 1)
    assert (transfer.status == Reason.TIMEOUT).all()
    assert not publication.done and publication.error is None and os.fstat(files[1]).st_size == 0


def test_no_blocks_publish_nothing(make: EngineMaker, files: list[int]) -> None:
    none = Blocks.random(files[:1], [100], 0)
    engine = make()
    publication = publication_for(none, engine.journal(files[1], JOURNAL_START))
    transfer = Transfer.of(np.zeros((0, 1), np.int64), none.sizes, none.fds, none.offsets)
    engine.write(transfer, soon(), publication)
    assert not publication.done and publication.error is None and os.fstat(files[1]).st_size == 0


@pytest.mark.parametrize("deleted", [[0], [1], [0, 1]])
def test_files_that_were_deleted_meanwhile(
    make: EngineMaker, files: list[int], folder: Path, deleted: list[int]
) -> None:
    blocks = Blocks.random(files[:1], [1000], 10)
    engine = make()
    publication = publication_for(blocks, engine.journal(files[1], JOURNAL_START))
    for number in deleted:
        (folder / f"file{number}").unlink()
    assert not save(engine, blocks, publication=publication).status.any()
    assert publication.done and publication.gone and publication.error is None


@pytest.mark.parametrize("nth", [1, 2])
def test_not_being_told_whether_files_were_deleted(make: EngineMaker, files: list[int], nth: int) -> None:
    """The records are there: that is what counts. Only a count of zero links says that they are not."""
    blocks = Blocks.random(files[:1], [1000], 2)
    engine = make(Fault(nth=nth, kinds=["fstat"], error=errno.EIO))
    publication = publication_for(blocks, engine.journal(files[1], JOURNAL_START))
    save(engine, blocks, publication=publication)
    assert publication.done and not publication.gone and publication.error is None


@pytest.mark.parametrize("error", FAILURES, ids=[errno.errorcode[e] for e in FAILURES])
@pytest.mark.parametrize("written", [None, 0, 64, 100])
def test_a_journal_that_fails(make: EngineMaker, files: list[int], error: int, written: int | None) -> None:
    """Nothing is visible, and nothing may follow what the failed append may have left."""
    faults = [] if written is None else [Fault(kinds=["pwrite"], short=written)]
    nth = 2 if written else 1
    calls = FaultySyscalls(*faults)
    if written != 0:
        calls.faults.append(Fault(nth=nth, kinds=["pwrite"], error=error))
    engine = make(calls)
    blocks = Blocks.random(files[:1], [1000], 10)
    journal = engine.journal(files[1], JOURNAL_START)
    publication = publication_for(blocks, journal)
    assert not save(engine, blocks, publication=publication).status.any()
    assert not publication.done and not publication.gone
    assert publication.error is not None
    assert publication.error.errno == (errno.EIO if written == 0 else error)
    assert not len(decode_records(journal_bytes(files[1]))[0])
    assert journal.broken and journal.end == JOURNAL_START
    size = os.fstat(files[1]).st_size
    again = publication_for(blocks, journal)
    save(engine, blocks, publication=again)
    assert not again.done and again.error is not None and again.error.errno == errno.EBADF
    with pytest.raises(OSError) as refused:
        journal.append(some_records(1), soon())
    assert refused.value.errno == errno.EBADF
    assert os.fstat(files[1]).st_size == size and calls.counts["pwrite"] == nth


# ---- By itself ----


@pytest.mark.parametrize("short", [1, 63, 64, 65, 1000])
def test_short_appends_are_continued(make: EngineMaker, files: list[int], short: int) -> None:
    journal = make(Fault(kinds=["pwrite"], short=short, times=FOREVER)).journal(files[1], JOURNAL_START)
    records = some_records(7)
    journal.append(records, soon())
    assert journal_bytes(files[1]) == seal_records(some_records(7)) and not journal.broken
    assert journal.end == JOURNAL_START + 7 * RECORD_BYTES


def test_an_append_that_fails_raises(make: EngineMaker, files: list[int]) -> None:
    journal = make(Fault(nth=2, kinds=["pwrite"], error=errno.ENOSPC)).journal(files[1], JOURNAL_START)
    journal.append(some_records(2), soon())
    for expected in (errno.ENOSPC, errno.EBADF):
        with pytest.raises(OSError) as error:
            journal.append(some_records(3), soon())
        assert error.value.errno == expected
    assert journal.broken and len(whole(files[1])) == 2 and journal.fd == files[1]


@pytest.mark.parametrize("count", [0, MAX_BATCH_RECORDS + 1])
def test_an_append_has_a_number_of_records_that_can_be_told(
    make: EngineMaker, files: list[int], count: int
) -> None:
    journal = make().journal(files[1], JOURNAL_START)
    with pytest.raises(ValueError, match="records in one append"):
        journal.append(some_records(count), soon())
    assert not journal.broken and os.fstat(files[1]).st_size == 0


def test_the_largest_append(make: EngineMaker, files: list[int]) -> None:
    journal = make().journal(files[1], JOURNAL_START)
    journal.append(some_records(MAX_BATCH_RECORDS), soon())
    assert (marks_of(whole(files[1]))[:, 1] == np.arange(MAX_BATCH_RECORDS)).all()


def test_records_that_are_not_contiguous(make: EngineMaker, files: list[int]) -> None:
    journal = make().journal(files[1], JOURNAL_START)
    journal.append(some_records(10)[::2], soon())
    assert marks_of(whole(files[1]))[:, 1].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("failing", [RuntimeError, KeyboardInterrupt])
def test_an_append_that_is_interrupted_closes_the_journal(
    make: EngineMaker, files: list[int], failing: type[BaseException]
) -> None:
    """Its bytes may be there and readers past them: these would never see an append in their place."""

    def interrupt() -> None:
        raise failing

    engine = make(Fault(kinds=["pwrite"], after=interrupt))
    journal = engine.journal(files[1], JOURNAL_START)
    with pytest.raises(failing):
        journal.append(some_records(3), soon())
    before = journal_bytes(files[1])
    with pytest.raises(OSError, match="closed"):
        journal.append(some_records(1), soon())
    assert journal_bytes(files[1]) == before and journal.broken


# ---- Many at a time ----


def test_concurrent_appends_take_turns(make: EngineMaker, files: list[int]) -> None:
    """Writes that publish and appends by themselves: each is whole and in one place, and none is lost."""
    engine = make()
    journal = engine.journal(files[1], JOURNAL_START)
    threads, rounds = 8, 25
    shared = Blocks.random(files[:1], [100], threads * 4)

    def work(thread: int) -> None:
        mine = slice(thread * 4, thread * 4 + 4)
        blocks = Blocks(shared.sizes, shared.fds[mine], shared.offsets[mine], shared.rows[mine])
        for number in range(rounds):
            mark = thread * rounds + number
            if number % 2:
                journal.append(some_records(1 + mark % 5, mark), soon())
                continue
            publication = publication_for(blocks, journal)
            publication.records = some_records(4, mark)
            memory = blocks.filled()
            engine.write(blocks.transfer(memory), soon(), publication)
            assert publication.done and publication.error is None

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    seen = marks_of(whole(files[1])).tolist()
    groups = [(mark, [at for _, at in group]) for mark, group in itertools.groupby(seen, key=lambda r: r[0])]
    assert sorted(mark for mark, _ in groups) == list(range(threads * rounds))
    for mark, positions in groups:
        length = 1 + mark % 5 if mark % rounds % 2 else 4
        assert positions == list(range(length)), mark
    assert journal.end == JOURNAL_START + len(seen) * RECORD_BYTES


def test_appends_wait_no_longer_than_their_deadline(make: EngineMaker, files: list[int]) -> None:
    """Another append hangs in the kernel: those behind it give up in time and leave no trace (I11)."""
    go_on, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go_on.wait(30)

    engine = make(Fault(kinds=["pwrite"], before=hang))
    journal = engine.journal(files[1], JOURNAL_START)
    blocks = Blocks.random(files[:1], [100], 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(journal.append, some_records(2, 1), soon())
        try:
            assert hangs.wait(10)
            begin = time.monotonic()
            with pytest.raises(OSError, match=r"(?i)took too long|timed out") as error:
                journal.append(some_records(2, 2), soon(0.05))
            assert error.value.errno == errno.ETIMEDOUT
            publication = publication_for(blocks, journal)
            assert not save(engine, blocks, publication=publication, deadline=soon(0.05)).status.any()
            assert time.monotonic() - begin < 5
            assert not publication.done and publication.error is not None
            assert publication.error.errno == errno.ETIMEDOUT
            with pytest.raises(OSError, match=r"(?i)took too long|timed out"):
                journal.append(some_records(2, 3), soon(-1))
            assert not journal.broken and journal.end == JOURNAL_START
        finally:
            go_on.set()
        first.result(10)
    journal.append(some_records(1, 4), soon(-1))  # nobody is before it: its turn is now
    assert marks_of(whole(files[1]))[:, 0].tolist() == [1, 1, 4]


def test_journals_do_not_wait_for_each_other(make: EngineMaker, files: list[int], folder: Path) -> None:
    go_on, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go_on.wait(30)

    engine = make(Fault(kinds=["pwrite"], suffix="file1", before=hang))
    one, other = (engine.journal(fd, JOURNAL_START) for fd in files[1:3])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.append, some_records(1), soon())
        try:
            assert hangs.wait(10)
            other.append(some_records(1), soon(5))
        finally:
            go_on.set()
        first.result(10)
    assert len(whole(files[1])) == len(whole(files[2])) == 1
