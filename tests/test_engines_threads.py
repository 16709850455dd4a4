"""Engines beside other threads, forks, signals and unforeseen failures. Defends I3, I9 and issue 4."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine_contract import (
    ENGINES,
    JOURNAL_START,
    Blocks,
    EngineMaker,
    blocked_signals,
    engine_of,
    load,
    open_files,
    publication_for,
    save,
    soon,
    tasks,
)
from faults import Fault
from storekit import memory_directory

from posix_store import Syscalls
from posix_store.engine import Engine
from posix_store.errors import Reason
from posix_store.transfer import Transfer

MIB = 1 << 20
FOREVER = float("inf")
PROMPT = 30.0
"""Seconds within which what must not hang is done, on however busy a machine."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def files(folder: Path) -> Iterator[list[int]]:
    with open_files(folder, 2) as fds:
        yield fds


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param) as maker:
        yield maker


@pytest.fixture
def wide(files: list[int]) -> Blocks:
    """Enough blocks that several threads share them, in the Python engine as well."""
    blocks = Blocks.random(files[:1], [60_000, 5_536], 48, shuffled=True)
    blocks.store()
    return blocks


def long_read(fd: int, place: np.ndarray, times: int = 600) -> Transfer:
    """The same MiB over and over to the same place: takes long, and little memory."""
    os.pwrite(fd, bytes(MIB), 0)
    addresses = np.full((times, 1), place.ctypes.data)
    return Transfer.of(addresses, np.array([MIB]), np.full(times, fd), np.zeros(times), np.ones(times))


# ---- The GIL ----


def test_other_threads_run_during_a_read(make: EngineMaker, files: list[int]) -> None:
    """With the interpreter's own switching off, another thread runs only if the engine lets go of the GIL."""
    place = np.zeros(MIB, np.uint8)
    transfer = long_read(files[0], place)
    engine = make(threads=1)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0002)

    interval = sys.getswitchinterval()
    ticker = threading.Thread(target=tick)
    ticker.start()
    sys.setswitchinterval(100)
    try:
        before = ticks[0]
        engine.read(transfer, soon(), verify=False)
        during = ticks[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        ticker.join()
    assert not transfer.status.any()
    assert during >= 5


def test_a_native_read_asks_for_the_gil_once(files: list[int]) -> None:
    """A thread that hogs the GIL costs one wait for each batch, not one for each system call."""
    engine = engine_of("native", threads=2)
    blocks = Blocks.random(files[:1], [1000], 200)
    blocks.offsets *= 2  # no two are neighbours, so that there are 200 calls
    blocks.store()
    crc, memory = blocks.crcs, blocks.memory()
    stop = threading.Event()

    def hog() -> None:
        while not stop.is_set():
            pass

    interval, wait = sys.getswitchinterval(), 0.05
    hogging = threading.Thread(target=hog)
    hogging.start()
    sys.setswitchinterval(wait)
    try:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            engine.read(blocks.transfer(memory, crc), soon())
            times.append(time.perf_counter() - begin)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        hogging.join()
    assert (memory.rows == blocks.rows).all()
    assert min(times) < 10 * wait


# ---- Many at a time ----


def test_many_threads_share_an_engine(make: EngineMaker, files: list[int]) -> None:
    """Reads and writes of six threads at once, each of its own blocks: nothing is mixed up."""
    engine = make(threads=3)
    everything = Blocks.random(files[:1], [30_000, 2_768], 6 * 24)
    everything.store()

    def work(thread: int) -> None:
        mine = np.arange(thread * 24, thread * 24 + 24)
        np.random.default_rng(thread).shuffle(mine)
        blocks = Blocks(
            everything.sizes, everything.fds[mine], everything.offsets[mine], everything.rows[mine]
        )
        memory, crc = blocks.memory(), blocks.crcs
        for _ in range(6):
            memory.rows = np.zeros_like(blocks.rows)
            read = blocks.transfer(memory, crc)
            engine.read(read, soon())
            assert not read.status.any() and (memory.rows == blocks.rows).all()
            written = blocks.transfer(memory)
            engine.write(written, soon())
            assert not written.status.any() and (written.crc == crc).all()

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, thread) for thread in range(6)]:
            done.result(PROMPT)
    assert (everything.on_disk() == everything.rows).all()


def test_a_slow_transfer_does_not_hold_up_another(make: EngineMaker, files: list[int], wide: Blocks) -> None:
    """All threads of the pool hang in one file: a batch on another is moved by its own thread."""
    go_on, hanging = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        hanging.release()
        assert go_on.wait(PROMPT)

    engine = make(Fault(kinds=["preadv"], suffix="file0", before=hang, times=FOREVER), threads=3)
    other = Blocks.random(files[1:], [65_536], 48)
    other.store()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(load, engine, wide)
        try:
            assert all(hanging.acquire(timeout=PROMPT) for _ in range(3))
            assert not load(engine, other).status.any()
            assert not slow.done()
        finally:
            go_on.set()
        assert not slow.result(PROMPT).status.any()


# ---- Its end ----


def test_closing_while_reads_run(make: EngineMaker, wide: Blocks) -> None:
    """A read that was begun, and one that comes later, give right bytes and never raise."""
    crc, memories = wide.crcs, [wide.memory() for _ in range(2)]
    for _ in range(10):
        engine = make(threads=3)
        begun = threading.Barrier(3)

        def work(memory: object, engine: Engine = engine, begun: threading.Barrier = begun) -> None:
            transfer = wide.transfer(memory, crc)  # type: ignore[arg-type]
            begun.wait()
            for _ in range(3):
                engine.read(transfer, soon())
                assert not transfer.status.any()

        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(work, memory) for memory in memories]
            begun.wait()
            engine.close()
            engine.close()
            for read in reads:
                read.result(PROMPT)
    assert all((memory.rows == wide.rows).all() for memory in memories)


def test_dropping_an_engine_while_a_read_runs(make: EngineMaker, wide: Blocks) -> None:
    name, memory = make.name, wide.memory()
    for _ in range(10):
        transfer = wide.transfer(memory, wide.crcs)
        reading = threading.Thread(target=engine_of(name, threads=3).read, args=(transfer, soon()))
        reading.start()
        gc.collect()
        reading.join(PROMPT)
        assert not reading.is_alive() and not transfer.status.any()


@pytest.mark.parametrize("close", [True, False])
def test_engines_leave_no_threads_behind(make: EngineMaker, wide: Blocks, close: bool) -> None:
    """60 engines that each used their threads, closed or only dropped (I9: `close` is never needed)."""
    gc.collect()
    before, most = tasks(), 0
    crc, memory = wide.crcs, wide.memory()
    for _ in range(60):
        engine = engine_of(make.name, threads=4)
        engine.read(wide.transfer(memory, crc), soon())
        most = max(most, len(tasks() - before))
        if close:
            engine.close()
        del engine
    assert most, "no thread was started, so nothing was tested"
    end = soon(PROMPT)
    while tasks() - before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.005)
    assert not tasks() - before


# ---- Failures that are no errors of the file system ----


class Raising(Syscalls):
    """One call of a kind raises what is no OSError; the others are slow, and counted while they run."""

    def __init__(self, kind: str, raised: BaseException, delay: float = 0.0) -> None:
        self.kind, self.raised, self.delay = kind, raised, delay
        self.running = 0
        self.left = 1
        self._lock = threading.Lock()

    def _guard(self, kind: str) -> None:
        with self._lock:
            if kind == self.kind and self.left:
                self.left -= 1
                raise self.raised

    def _slow(self, call: Callable[..., int], *arguments: int) -> int:
        with self._lock:
            self.running += 1
        time.sleep(self.delay)
        try:
            return call(*arguments)
        finally:
            with self._lock:
                self.running -= 1

    def preadv(self, fd: int, iov: int, count: int, offset: int) -> int:
        self._guard("preadv")
        return self._slow(super().preadv, fd, iov, count, offset)

    def pwritev(self, fd: int, iov: int, count: int, offset: int) -> int:
        self._guard("pwritev")
        return self._slow(super().pwritev, fd, iov, count, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._guard("pwrite")
        return super().pwrite(fd, data, offset)

    def seek_hole(self, fd: int, offset: int) -> int:
        self._guard("seek_hole")
        return super().seek_hole(fd, offset)

    def fstat(self, fd: int) -> os.stat_result:
        self._guard("fstat")
        return super().fstat(fd)


@pytest.mark.parametrize("kind", ["preadv", "seek_hole"])
@pytest.mark.parametrize("raised", [RuntimeError("unforeseen"), KeyboardInterrupt()])
def test_what_is_no_oserror_leaves_a_read(
    make: EngineMaker, wide: Blocks, kind: str, raised: BaseException
) -> None:
    """It comes out of the read, after which nothing writes to memory and the engine goes on working."""
    calls = Raising(kind, raised, delay=0.01)
    engine = make(calls)
    memory = wide.memory()
    with pytest.raises(type(raised)):
        engine.read(wide.transfer(memory, wide.crcs), soon(), verify=False, find_holes=True)
    assert calls.running == 0, "a thread of the engine is still at work"
    calls.delay = 0
    assert not load(engine, wide).status.any()


@pytest.mark.parametrize("kind", ["pwritev", "pwrite"])
def test_what_is_no_oserror_leaves_a_write(
    make: EngineMaker, files: list[int], wide: Blocks, kind: str
) -> None:
    calls = Raising(kind, RuntimeError("unforeseen"), delay=0.01)
    engine = make(calls)
    memory = wide.filled()
    publication = publication_for(wide, engine.journal(files[1], JOURNAL_START))
    with pytest.raises(RuntimeError, match="unforeseen"):
        engine.write(wide.transfer(memory), soon(), publication)
    assert calls.running == 0, "a thread of the engine is still at work"
    assert not publication.done, "nobody will ever see the records"
    calls.delay = 0
    assert not save(engine, wide).status.any()


def test_no_thread_can_be_started(make: EngineMaker, wide: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread does the work then; nobody is told that a load failed."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    engine = make(threads=4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not load(engine, wide).status.any()


# ---- Forks ----


def child_exits(child: int) -> int:
    """The exit status of a child, which is killed when it hangs."""
    end = soon(PROMPT)
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def fork_and_read(engine: Engine, blocks: Blocks) -> int:
    """A child reads with the engine that it inherits."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(load(engine, blocks).status.any())
        finally:
            os._exit(code)
    return child_exits(child)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_reads(make: EngineMaker, wide: Blocks) -> None:
    engine = make(threads=4)
    assert fork_and_read(engine, wide) == 0
    load(engine, wide)
    assert fork_and_read(engine, wide) == 0, "after the parent has started threads, which the child lacks"
    assert not load(engine, wide).status.any()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_child_forked_while_others_read(make: EngineMaker, wide: Blocks) -> None:
    """Whatever locks the other threads hold at that moment."""
    engine = make(threads=4)
    stop = threading.Event()

    def work() -> None:
        memory, crc = wide.memory(), wide.crcs
        while not stop.is_set():
            engine.read(wide.transfer(memory, crc), soon())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        codes = [fork_and_read(engine, wide) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 5


def test_a_child_ends_as_usual(make: EngineMaker, folder: Path) -> None:
    """Parent and child leave the interpreter in the ordinary way, their engine neither closed nor dropped."""
    program = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from engine_contract import Blocks, engine_of, load, open_files
folder = Path({str(folder)!r})
with open_files(folder, 1) as fds:
    blocks = Blocks.random(fds, [65536], 48)
    blocks.store()
    engine = engine_of({make.name!r}, threads=4)
    assert not load(engine, blocks).status.any()
    child = os.fork()
    assert not load(engine, blocks).status.any()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    sys.exit(0)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * PROMPT)
    assert result.returncode == 0, result.stderr


# ---- Signals ----


def test_signals_are_left_to_other_threads(files: list[int], wide: Blocks) -> None:
    """No signal is delivered to a thread of the native engine, whatever the threads that started it take."""
    before = tasks()
    engine = engine_of("native", threads=4)
    load(engine, wide)
    own = tasks() - before
    assert len(own) == 3
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM):
        assert all(blocked_signals(thread) >> (number - 1) & 1 for thread in own), number
        assert not blocked_signals(threading.get_native_id()) >> (number - 1) & 1


def test_a_handler_runs_while_a_read_goes_on(make: EngineMaker, files: list[int]) -> None:
    """Signals sent to the process during a read in another thread reach the main thread's handler (I9)."""
    place = np.zeros(MIB, np.uint8)
    transfer = long_read(files[0], place)
    engine = make(threads=3)
    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.get_native_id()))
    reading = threading.Thread(target=engine.read, args=(transfer, soon()))
    try:
        reading.start()
        for sent in range(1, 21):
            os.kill(os.getpid(), signal.SIGUSR1)
            end = soon(PROMPT)
            while len(seen) < sent and time.monotonic() < end:
                time.sleep(0)
        reading.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen == [threading.get_native_id()] * 20
    assert (transfer.status == Reason.CHECKSUM).all()


def test_a_timer_that_interrupts_system_calls(make: EngineMaker, wide: Blocks) -> None:
    """A handler that runs every few hundred microseconds: no transfer is cut short, none fails (EINTR)."""
    seen = [0]

    def count(*_: object) -> None:
        seen[0] += 1

    engine = make(threads=2)
    old = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(4):
            assert not load(engine, wide).status.any()
            assert not save(engine, wide).status.any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert seen[0] > 4
