"""Sick disks: issue 3. System calls that hang, fail or are slow; I11 (bounded), I3 (nothing raised).

A call hangs in a hook of the shim of system calls until the test lets it go. Everything that could be held up
by one that hangs runs in a thread of its own, so that a defect fails a test instead of hanging it.
"""

import errno
import math
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
from faults import Fault
from patient import DAMAGED, KNOWN, LENGTH, PROMPT, Patient, patient
from storekit import NAMESPACE, dump, ids_of, load, open_store, payloads

from posix_store import Reason
from posix_store.breaker import MOST_HUNG_PROBES

FAILURES, OPEN, SLOW = 3, 0.25, 0.15
BREAKER = {"breaker_failures": FAILURES, "breaker_seconds": OPEN, "slow_seconds": SLOW}
FOREVER = math.inf
UNKNOWN, NEW = ids_of(3, 8), ids_of(4, 8)


def loads(it: Patient, ids: np.ndarray) -> list[Reason]:
    """Outcomes of a load, each of which is given once."""
    return [Reason(int(value)) for value in np.unique(load(it.store, ids, LENGTH))]


def dumps(it: Patient, ids: np.ndarray) -> list[Reason]:
    return [Reason(int(value)) for value in np.unique(dump(it.store, ids, LENGTH))]


def in_background(it: Patient, ids: np.ndarray) -> Callable[[], np.ndarray]:
    """Starts a dump in the background; waits for its status."""
    task = it.store.dump(ids, 0, list(payloads(ids, LENGTH)))
    return lambda: task.status(10)


HUNG_WRITES = {
    "data": Fault(kinds=["pwritev"]),
    "journal": Fault(kinds=["pwrite"], suffix=".idx"),
    "space": Fault(kinds=["fallocate"]),
    "segment deleted?": Fault(kinds=["fstat"], times=math.inf),  # the background thread asks as well
}


def hung_write(it: Patient, what: str) -> Future[list[Reason]]:
    """A dump in a thread, one system call of which hangs. It is of 2 MiB, so that space must be reserved."""
    fault = HUNG_WRITES[what]
    it.calls.faults = [Fault(kinds=fault.kinds, suffix=fault.suffix, times=fault.times, before=it.hang)]
    large = ids_of(50, 512)
    future = it.start(lambda: dumps(it, large))
    it.hang.begun()
    return future


@pytest.mark.parametrize("maintenance", [True, False], ids=["keeper", "no keeper"])
@pytest.mark.parametrize("what", HUNG_WRITES)
def test_a_hung_write_holds_up_no_reader(what: str, maintenance: bool) -> None:
    """Issue 3: a write that hangs never blocks a load or a look-up, even one that misses or finds damage."""
    with patient(maintenance=maintenance) as it:
        written = hung_write(it, what)
        for _ in range(2):
            time.sleep(0.021)  # so that a miss looks at the directory
            assert it.prompt(lambda: it.store.lookup(KNOWN)).all()
            assert not it.prompt(lambda: it.store.lookup(UNKNOWN)).any()
            assert it.prompt(lambda: it.store.lookup_on_prefix(KNOWN)) == len(KNOWN) - 1
            assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.OK]
            assert it.prompt(lambda: loads(it, UNKNOWN)) == [Reason.ABSENT]
            it.prompt(lambda: it.store.prefetch(KNOWN))
        assert it.prompt(lambda: loads(it, DAMAGED)) == [Reason.CHECKSUM]
        assert not it.prompt(lambda: it.store.lookup(DAMAGED)).any()
        assert it.prompt(it.store.counters.snapshot)["loaded_blocks"] == 2 * len(KNOWN)
        assert not written.done()
        it.hang.let_go()
        assert written.result(10) == [Reason.OK]
        assert loads(it, ids_of(50, 512)) == [Reason.OK]


@pytest.mark.parametrize("what", HUNG_WRITES)
def test_a_hung_write_holds_up_a_dump_until_its_deadline(what: str) -> None:
    """Issue 3, I11: a dump in another thread is stored, or gives up in time; later all goes on."""
    timeout = 0.2
    with patient(timeout=timeout) as it:
        written = hung_write(it, what)
        for seed in range(60, 62):
            outcome = it.prompt(lambda seed=seed: dumps(it, ids_of(seed, 8)), timeout + PROMPT)
            assert set(outcome) <= {Reason.OK, Reason.TIMEOUT, Reason.BREAKER}, outcome
            found = it.prompt(lambda seed=seed: it.store.lookup(ids_of(seed, 8)))
            assert found.all() if outcome == [Reason.OK] else not found.any()
        assert not written.done()
        it.hang.let_go()
        assert set(written.result(10)) <= {Reason.OK, Reason.TIMEOUT}
        it.recovers(lambda: dumps(it, NEW) == [Reason.OK])
        assert loads(it, NEW) == [Reason.OK]


@pytest.mark.parametrize("kinds", [["fallocate", "unlink"], ["pwrite"]], ids=["freeing", "record"])
def test_a_hung_eviction_holds_up_nobody(kinds: list[str]) -> None:
    """Issue 3: who makes room for its dump hangs; others read as ever, and dump until their deadline."""
    timeout = 0.2
    with patient(timeout=timeout, capacity=1 << 20, segment_bytes=128 << 10, maintenance=False) as it:
        for seed in range(80, 100):
            dumps(it, ids_of(seed, 16))
        it.calls.faults = [Fault(kinds=kinds, before=it.hang)]
        evicting = it.start(lambda: [dumps(it, ids_of(seed, 16)) for seed in range(100, 120)])
        it.hang.begun()
        latest = next(
            ids_of(seed, 16) for seed in range(119, 79, -1) if it.store.lookup(ids_of(seed, 16)).all()
        )
        assert it.prompt(lambda: loads(it, latest)) == [Reason.OK]
        assert not it.prompt(lambda: it.store.lookup(UNKNOWN)).any()
        it.prompt(lambda: dumps(it, NEW), timeout + PROMPT)
        it.hang.let_go()
        evicting.result(20)
        it.recovers(lambda: dumps(it, NEW) == [Reason.OK])


def test_hung_dumps_in_the_background_leave_room_for_loads() -> None:
    """Issue 3: loads in the background do not queue behind dumps that hang."""
    with patient() as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, before=it.hang)]
        tasks = [
            it.store.dump(ids_of(seed, 8), 0, list(payloads(ids_of(seed, 8), LENGTH)))
            for seed in range(60, 64)
        ]
        it.hang.begun()
        memory = np.zeros((len(KNOWN), LENGTH), np.uint8)
        task = it.store.load(KNOWN, 0, list(memory))
        assert it.prompt(lambda: it.store.wait(task, 5)).all()
        assert (memory == payloads(KNOWN, LENGTH)).all()
        assert not any(it.store.check(task) for task in tasks)
        it.hang.let_go()
        for task in tasks:
            assert set(task.status(10)) <= {Reason.OK, Reason.TIMEOUT, Reason.BREAKER}


HUNG_READS = {
    "listing": Fault(kinds=["listdir"], suffix=NAMESPACE),
    "size of a journal": Fault(kinds=["stat"], suffix=".idx"),
    "journal": Fault(kinds=["open", "pread"], suffix=".idx"),
    "header of a segment": Fault(kinds=["open", "pread"], suffix=".seg"),
}


@pytest.mark.parametrize("what", HUNG_READS)
def test_a_hung_look_at_the_directory_holds_up_others_for_a_bounded_time(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: one call for metadata hangs in another thread; what is known is answered, soon at once."""
    other_ids = ids_of(70, 8)
    with patient(maintenance=False) as it, open_store(it.path) as other:
        assert loads(it, KNOWN) == [Reason.OK]  # its segment is open
        dump(other, other_ids, LENGTH)
        if what == "header of a segment":
            time.sleep(0.021)
            assert it.store.lookup(other_ids).all()
        monkeypatch.setattr("posix_store.catalog.HIT_MAX_AGE", 0.0)  # loads look at the directory too
        fault = HUNG_READS[what]
        it.calls.faults = [Fault(kinds=fault.kinds, suffix=fault.suffix, before=it.hang)]
        asked = it.start(lambda: loads(it, other_ids))
        it.hang.begun()
        if what == "header of a segment":
            assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.OK]
        assert it.prompt(lambda: it.store.lookup(KNOWN)).all()
        time.sleep(0.021)
        it.prompt(lambda: it.store.lookup(UNKNOWN), 0.5 + PROMPT)  # the time of one look
        for _ in range(3):
            assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.OK]
            assert not it.prompt(lambda: it.store.lookup(UNKNOWN)).any()
            assert it.prompt(lambda: loads(it, UNKNOWN)) == [Reason.ABSENT]
            assert it.prompt(lambda: dumps(it, NEW)) == [Reason.OK]
        it.hang.let_go()
        assert set(asked.result(10)) <= {Reason.OK, Reason.ABSENT, Reason.TIMEOUT}
        it.recovers(lambda: loads(it, other_ids) == [Reason.OK])


def test_a_look_that_hangs_costs_others_little() -> None:
    """I11: one call in one look-up hangs. Others wait for the time of one look, and not each time again."""
    with patient() as it:
        it.calls.faults = [Fault(kinds=["listdir"], suffix=NAMESPACE, before=it.hang)]
        time.sleep(0.021)
        asked = it.start(lambda: it.store.lookup(UNKNOWN))
        it.hang.begun()
        started = time.monotonic()
        for _ in range(10):
            assert not it.store.lookup(UNKNOWN).any()
            assert it.store.lookup(KNOWN).all() and loads(it, KNOWN) == [Reason.OK]
            time.sleep(0.021)
        assert time.monotonic() - started < 0.5 + 10 * 0.021 + PROMPT
        assert dumps(it, NEW) == [Reason.OK]
        it.hang.let_go()
        assert not asked.result(10).any()


def test_one_thread_that_hangs_trips_the_breaker() -> None:
    """Issue 3: an engine that loads from one thread cannot fail three times, so hanging on is enough."""
    with patient(**BREAKER | {"slow_seconds": 0.1}) as it:
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, before=it.hang)]
        hung = it.start(lambda: loads(it, KNOWN))
        it.hang.begun()
        assert it.prompt(lambda: it.store.lookup(KNOWN)).all()
        time.sleep(FAILURES * 0.1)
        assert not it.prompt(lambda: it.store.lookup(KNOWN)).any()
        assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.BREAKER]
        it.hang.let_go()
        assert hung.result(10) == [Reason.OK]
        it.recovers(lambda: it.store.lookup(KNOWN).all() and loads(it, KNOWN) == [Reason.OK])


def test_what_hangs_in_the_background_is_refused_at_once() -> None:
    """Issue 3: all threads of the background hang; tasks that come later do not wait for one of them."""
    with patient(**BREAKER | {"slow_seconds": 0.1}) as it:
        it.calls.faults = [Fault(kinds=["preadv", "pwritev"], times=FOREVER, before=it.hang)]
        memory = np.zeros((len(KNOWN), LENGTH), np.uint8)
        tasks = [it.store.load(KNOWN, 0, list(memory)) for _ in range(2)]
        tasks += [
            it.store.dump(ids, 0, list(payloads(ids, LENGTH))) for ids in (ids_of(60, 4), ids_of(61, 4))
        ]
        for _ in tasks:
            it.hang.begun()
        time.sleep(FAILURES * 0.1)
        late = it.store.load(KNOWN, 0, list(memory)), it.store.dump(NEW, 0, list(payloads(NEW, LENGTH)))
        for task in late:
            assert (it.prompt(lambda task=task: task.status(5)) == Reason.BREAKER).all()
        it.hang.let_go()
        for task in tasks:
            assert (task.status(10) == Reason.OK).all()
        it.recovers(lambda: loads(it, KNOWN) == [Reason.OK] and dumps(it, NEW) == [Reason.OK])


def test_hung_reads_trip_the_breaker() -> None:
    """Issue 3: while reads hang, others are misses at once; when the disk comes back, so do the hits."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, before=it.hang)]
        hung = [it.start(lambda: loads(it, KNOWN)) for _ in range(FAILURES)]
        for _ in hung:
            it.hang.begun()
        time.sleep(SLOW)
        assert not it.prompt(lambda: it.store.lookup(KNOWN)).any(), "an engine would wait for what it loads"
        assert it.prompt(lambda: it.store.lookup_on_prefix(KNOWN)) == -1
        assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.BREAKER]
        assert it.store.counters.snapshot()["misses"] == {"breaker": len(KNOWN)}
        assert it.made("preadv") == FAILURES, "the disk was asked again"
        assert it.prompt(lambda: dumps(it, NEW)) == [Reason.OK], "writes are another direction"
        it.hang.let_go()
        assert all(future.result(10) == [Reason.OK] for future in hung), "late, but right"
        it.recovers(lambda: it.store.lookup(KNOWN).all() and loads(it, KNOWN) == [Reason.OK])
        assert loads(it, NEW) == [Reason.OK]


def test_threads_do_not_pile_up_behind_a_hung_disk() -> None:
    """Issue 3: engines ask on and on; few of them are ever caught."""
    with patient(**BREAKER | {"breaker_seconds": 0.05, "slow_seconds": 0.05}) as it:
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, before=it.hang)]
        for _ in range(12):
            it.start(lambda: loads(it, KNOWN))
            time.sleep(0.06)
        assert it.hang.waiting <= FAILURES + MOST_HUNG_PROBES
        assert it.hang.waiting == sum(thread.is_alive() for thread in it.threads)
        it.hang.let_go()
        it.recovers(lambda: it.store.lookup(KNOWN).all() and loads(it, KNOWN) == [Reason.OK])


def test_failing_reads_trip_the_breaker() -> None:
    """Issue 3: N loads that fail in a row; then none asks the disk; it recovers by itself. Dumps go on."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, error=errno.EIO)]
        for block in KNOWN[:FAILURES]:
            assert loads(it, block[None]) == [Reason.IO_ERROR]
        asked = it.made("preadv")
        assert loads(it, KNOWN[FAILURES:]) == [Reason.BREAKER]
        assert not it.store.lookup(KNOWN).any()
        assert it.made("preadv") == asked
        assert dumps(it, NEW) == [Reason.OK]
        time.sleep(OPEN)
        assert loads(it, KNOWN[FAILURES : FAILURES + 1]) == [Reason.IO_ERROR], "a probe"
        assert it.made("preadv") == asked + 1
        assert loads(it, NEW) == [Reason.BREAKER]
        it.calls.faults = []
        it.recovers(lambda: it.store.lookup(NEW).all() and loads(it, NEW) == [Reason.OK])
        rest = KNOWN[FAILURES + 1 :]
        assert it.store.lookup(rest).all() and loads(it, rest) == [Reason.OK]


def test_slow_reads_trip_the_breaker() -> None:
    """Issue 3: a disk that takes seconds for a page is left alone too."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, delay=SLOW + 0.02)]
        for block in KNOWN[:FAILURES]:
            assert loads(it, block[None]) == [Reason.OK]
        assert it.prompt(lambda: loads(it, KNOWN)) == [Reason.BREAKER]
        it.calls.faults = []
        it.recovers(lambda: loads(it, KNOWN) == [Reason.OK])


def test_failing_writes_do_not_stop_reads() -> None:
    """Issue 3: N dumps that fail in a row; then none asks the disk; loads and look-ups are as ever."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, error=errno.EIO)]
        for seed in range(60, 60 + FAILURES):
            assert dumps(it, ids_of(seed, 4)) == [Reason.IO_ERROR]
        asked = it.calls.changes
        assert dumps(it, NEW) == [Reason.BREAKER]
        assert dumps(it, KNOWN) == [Reason.OK], "stored already"
        assert it.calls.changes == asked
        assert it.store.counters.snapshot()["unstored"] == {"io_error": 4 * FAILURES, "breaker": len(NEW)}
        assert it.store.lookup(KNOWN).all() and loads(it, KNOWN) == [Reason.OK]
        it.calls.faults = []
        it.recovers(lambda: dumps(it, NEW) == [Reason.OK])
        assert loads(it, NEW) == [Reason.OK]


def test_blocks_that_are_stored_prove_nothing_of_writes() -> None:
    """Issue 3: engines dump what is stored again and again; that neither hides failures nor is a probe."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, error=errno.EIO)]
        for seed in range(60, 60 + FAILURES):
            assert dumps(it, ids_of(seed, 4)) == [Reason.IO_ERROR]
            assert dumps(it, KNOWN) == [Reason.OK]
        assert dumps(it, NEW) == [Reason.BREAKER]
        time.sleep(OPEN)
        dumps(it, KNOWN)
        assert dumps(it, NEW) == [Reason.IO_ERROR], "a probe"
        assert dumps(it, NEW) == [Reason.BREAKER]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_a_sick_one(error: int) -> None:
    """Issue 3: pages go unstored as `full`; the moment there is space, they are stored."""
    with patient(**BREAKER) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, error=error)]
        for seed in range(60, 60 + 2 * FAILURES):
            assert dumps(it, ids_of(seed, 4)) == [Reason.FULL]
        it.calls.faults = []
        assert dumps(it, NEW) == [Reason.OK]


def test_damage_is_not_a_sick_disk() -> None:
    """Issue 3: wrong bytes are read as fast as right ones; misses, not the breaker."""
    with patient(**BREAKER) as it:
        for block in DAMAGED:
            assert loads(it, block[None]) == [Reason.CHECKSUM]
        for _ in range(2 * FAILURES):
            assert loads(it, UNKNOWN) == [Reason.ABSENT]
        assert loads(it, KNOWN) == [Reason.OK] and it.store.lookup(KNOWN).all()


def test_a_full_queue_drops_the_newest_pages() -> None:
    """Issue 3: the head of the chain that does not fit is stored, its tail is counted as `queue`."""
    with patient(write_queue_bytes=10 * LENGTH) as it:
        first, second, third = ids_of(60, 4), ids_of(61, 10), ids_of(62, 3)
        it.calls.faults = [Fault(kinds=["pwritev"], before=it.hang)]
        wait = in_background(it, first)
        it.hang.begun()
        assert (
            it.prompt(lambda: dump(it.store, second, LENGTH)).tolist() == [Reason.OK] * 6 + [Reason.QUEUE] * 4
        )
        assert it.store.lookup(second).tolist() == [True] * 6 + [False] * 4
        assert it.store.lookup_on_prefix(second) == 5
        assert it.store.counters.snapshot()["unstored"] == {"queue": 4}
        it.hang.let_go()
        assert (wait() == Reason.OK).all()
        assert (dump(it.store, second, LENGTH) == Reason.OK).all(), "there is room again"
        assert (dump(it.store, third, LENGTH) == Reason.OK).all()


def test_what_waits_in_the_background_is_in_the_queue() -> None:
    """Issue 3: dumps handed over while others hang hold no memory without bound, and no caller waits."""
    with patient(write_queue_bytes=10 * LENGTH) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, before=it.hang)]
        batches = [ids_of(seed, 4) for seed in range(60, 70)]
        waits = [it.prompt(lambda ids=ids: in_background(it, ids)) for ids in batches]
        it.hang.begun()
        it.hang.let_go()
        stored = [int((wait() == Reason.OK).sum()) for wait in waits]
        assert stored == [4, 4, 2] + [0] * 7
        for ids, count in zip(batches, stored, strict=True):
            assert it.store.lookup(ids).tolist() == [True] * count + [False] * (4 - count)
        assert it.store.counters.snapshot()["unstored"] == {"queue": 30}


def test_one_page_larger_than_the_queue() -> None:
    """Issue 3: it would never be stored otherwise."""
    with patient(write_queue_bytes=LENGTH - 1) as it:
        assert dump(it.store, NEW, LENGTH).tolist() == [Reason.OK] + [Reason.QUEUE] * (len(NEW) - 1)
        for start in range(1, len(NEW)):
            assert dump(it.store, NEW[start : start + 1], LENGTH).tolist() == [Reason.OK]
        assert (dump(it.store, NEW, LENGTH) == Reason.OK).all(), "what is stored takes no room"


def test_the_deadline_of_a_load() -> None:
    """Issue 3, I11: 60 reads of 50 ms each, with 0.3 s to do it: what was not reached is `timeout`."""
    ids, timeout, call = ids_of(60, 120), 0.3, 0.05
    with patient(timeout=timeout, io_threads=1) as it:
        assert dumps(it, ids) == [Reason.OK]
        apart = ids[::2]  # so that no two of them are neighbours
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, delay=call)]
        status = it.prompt(lambda: load(it.store, apart, LENGTH), timeout + call + 0.2)
        done = int((status == Reason.OK).sum())
        assert 1 <= done <= timeout / call + 1
        assert status.tolist() == [Reason.OK] * done + [Reason.TIMEOUT] * (len(apart) - done)
        it.calls.faults = []
        it.recovers(lambda: loads(it, apart) == [Reason.OK])


def test_the_deadline_of_a_dump() -> None:
    """Issue 3, I11: the head of the chain that was written in time is stored."""
    ids, timeout, call = ids_of(60, 60), 0.3, 0.05
    with patient(timeout=timeout, io_threads=1) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, delay=call, short=LENGTH)]
        status = it.prompt(lambda: dump(it.store, ids, LENGTH), timeout + call + 0.2)
        done = int((status == Reason.OK).sum())
        assert 1 <= done <= timeout / call + 1
        assert status.tolist() == [Reason.OK] * done + [Reason.TIMEOUT] * (len(ids) - done)
        assert it.store.lookup_on_prefix(ids) == done - 1
        it.calls.faults = []
        it.recovers(lambda: dumps(it, ids) == [Reason.OK])


def test_batches_that_run_out_of_time_trip_the_breaker() -> None:
    """Issue 3: a disk on which no batch ends in time costs N deadlines, not one for each request."""
    with patient(timeout=0.1, io_threads=1, **BREAKER) as it:
        ids = ids_of(60, 64)
        assert dumps(it, ids) == [Reason.OK]
        it.calls.faults = [Fault(kinds=["preadv"], times=FOREVER, delay=0.03)]
        for _ in range(FAILURES):
            assert loads(it, ids[::2]) == [Reason.OK, Reason.TIMEOUT]
        assert loads(it, ids[::2]) == [Reason.BREAKER]
        it.calls.faults = []
        it.recovers(lambda: loads(it, ids) == [Reason.OK])
