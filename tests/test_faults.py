"""Issue 2, must hold 4, and invariants I1, I3: a system call fails or falls short, each of them in turn.

One scripted life of a store is run again and again, each time with a fault at the next system call, until the
fault comes too late to strike. What is checked each time is in `Life` and `aftermath`.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import CHANGES, KINDS, READS, WRITES, Fault, FaultySyscalls
from storekit import (
    assert_counters_add_up,
    assert_no_lock_is_held,
    dump,
    held_open,
    ids_of,
    load,
    memory_directory,
    open_store,
)

import posix_store.syscalls as syscalls_module
from posix_store import PosixStore, Reason, StoreError

LENGTH, SEGMENT = 1100, 12 << 10
"""Bytes of a block (no multiple of 4 KiB or 16) and of a segment (so small that most dumps begin one)."""
FIRST, SECOND, SHARDED, NEW = ids_of(1, 4), ids_of(2, 5), ids_of(3, 2), ids_of(4, 1)
EVERY = np.concatenate([FIRST, SECOND])
ERRORS = (errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.EROFS)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


class Life:
    """A scripted scenario over one system-call shim, and what was promised in it.

    No exception may leave look-ups, loads and dumps (I3). Construction may raise `StoreError`, and `clear`,
    `verify` and `stats`, which only an operator calls, may raise `OSError`.
    """

    def __init__(self, root: Path, calls: FaultySyscalls) -> None:
        self.root = root
        self.calls = calls
        self.promised: dict[tuple[int, int], list[bytes]] = {}
        self.raised: list[str] = []
        self._stores: list[PosixStore] = []

    def run(self) -> None:
        try:
            self.script()
        except StoreError as error:
            self.raised.append("construction")
            assert re.fullmatch(r"path = \S+: .+; .+", str(error)), f"without key, value or fix: {error}"
            assert str(self.root) in str(error)
        finally:
            for store in self._stores:
                store.close()
                assert_counters_add_up(store)

    def script(self) -> None:
        raise NotImplementedError

    def open(self) -> PosixStore:
        store = open_store(
            self.root, segment_bytes=SEGMENT, io_threads=1, breaker_failures=1000, syscalls=self.calls
        )
        self._stores.append(store)
        return store

    def dump(self, store: PosixStore, ids: np.ndarray, shards: int = 1) -> None:
        done = np.ones(len(ids), bool)
        for shard in range(shards):
            done &= dump(store, ids, LENGTH, shard, shards) == Reason.OK
        for shard in range(shards):
            self.promised.setdefault((shard, shards), []).extend(block.tobytes() for block in ids[done])

    def look(self, store: PosixStore) -> None:
        found = store.lookup(EVERY)
        last = store.lookup_on_prefix(FIRST)
        assert found[: last + 1].all()
        store.prefetch(EVERY)
        load(store, EVERY, LENGTH)

    def operate(self, method: Callable[[], object]) -> None:
        try:
            method()
        except (StoreError, OSError):
            self.raised.append(method.__name__)


class Serving(Life):
    """One instance dumps, with a segment roll and with shards; a second one finds and loads it all."""

    def script(self) -> None:
        writer = self.open()
        self.dump(writer, FIRST)
        self.dump(writer, SECOND)  # begins a new segment
        self.dump(writer, SHARDED, shards=2)
        self.dump(writer, FIRST)  # stored already
        reader = self.open()
        self.look(reader)
        for shard in range(2):
            load(reader, SHARDED, LENGTH, shard)


class Clearing(Life):
    """One process clears what another writes, and both go on."""

    def script(self) -> None:
        writer = self.open()
        self.dump(writer, FIRST)
        other = self.open()
        self.promised.clear()
        self.operate(other.clear)
        self.dump(writer, SECOND)
        self.dump(other, FIRST)
        self.operate(writer.verify)
        self.operate(writer.stats)


def aftermath(life: Life, may_lose: bool, may_litter: bool) -> None:
    """What a process without faults finds later: a sound store, with all that was promised, and usable."""
    assert_no_lock_is_held(life.root)
    for path in (life.root / "EVICT.lock", *life.root.glob("*/SERVED.lock")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open_store(life.root, segment_bytes=SEGMENT, io_threads=1) as store:
        for (shard, _), blocks in life.promised.items():
            if blocks:
                ids = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, 16)
                status = load(store, ids, LENGTH, shard)
                assert may_lose or (status == Reason.OK).all(), f"blocks reported stored are lost: {status}"
        report = store.verify()
        assert report.ok, report
        assert (dump(store, NEW, LENGTH) == Reason.OK).all()
        assert (load(store, NEW, LENGTH) == Reason.OK).all()
    if not may_litter:
        assert [path.name for path in life.root.rglob(".*")] == [], "a temporary file was left behind"


def strike_each_call(
    root: Path,
    life_type: type[Life],
    make: Callable[[int], list[Fault]],
    calls: Iterable[int] = range(1, 10_000),
    may_lose: bool = False,
    may_litter: bool = False,
) -> None:
    """Run a scenario with the faults of `make(n)` for the n of `calls`, until they come too late."""
    struck = 0
    for nth in calls:
        faults = make(nth)
        life = life_type(root / str(nth), FaultySyscalls(*faults))
        try:
            life.run()
            if not faults[0].fired:
                break
            if life.root.is_dir():
                aftermath(life, may_lose, may_litter)
            assert held_open(root) == [], "descriptors leaked"
        except Exception as error:
            raise AssertionError(f"with the fault at call {nth}: {faults}") from error
        struck += 1
    assert struck > 5, "the scenario makes no such calls"


def call_sites(root: Path, life_type: type[Life], kinds: Collection[str] = KINDS) -> list[int]:
    """Numbers of the calls that are the first from their place: line of the scenario, way through the store.

    What is left out are only repetitions, like the second file of the same listing.
    """
    numbers: dict[tuple[tuple[str, int], ...], int] = {}

    def note() -> None:
        frames = traceback.walk_stack(None)
        numbers.setdefault(tuple((frame.f_code.co_filename, line) for frame, line in frames), watch.seen)

    watch = Fault(kinds=kinds, times=float("inf"), before=note)
    life_type(root / "sites", FaultySyscalls(watch)).run()
    return sorted(numbers.values())


@pytest.mark.parametrize("life", [Serving, Clearing])
def test_every_call_fails_once(root: Path, life: type[Life]) -> None:
    """Must hold 4: each system call in turn fails with EIO."""
    strike_each_call(root, life, lambda nth: [Fault(nth, error=errno.EIO)])


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_calls_from_every_place_fail_with_every_error(root: Path, error: int) -> None:
    """Must hold 4: the calls from each place in the code in turn fail in other ways."""
    strike_each_call(root, Serving, lambda nth: [Fault(nth, error=error)], call_sites(root, Serving))


@pytest.mark.parametrize(
    ("life", "error", "kinds"),
    [
        pytest.param(Serving, errno.EIO, set(KINDS) - {"close"}, id="EIO-everywhere"),
        pytest.param(Serving, errno.ENOSPC, {*WRITES, "fallocate", "mkdir"}, id="ENOSPC-on-growth"),
        pytest.param(Clearing, errno.EROFS, {*CHANGES, "open for writing"}, id="EROFS-on-changes"),
    ],
)
def test_every_call_fails_from_some_point_on(
    root: Path, life: type[Life], error: int, kinds: set[str]
) -> None:
    """Must hold 4: the disk dies, fills up, or turns read-only at each point, and stays so."""
    strike_each_call(
        root,
        life,
        lambda nth: [Fault(nth, kinds, times=float("inf"), error=error)],
        call_sites(root, life, kinds),
        may_litter=True,
    )


@pytest.mark.parametrize("short", [1, 100, 4096])
def test_every_transfer_falls_short_once(root: Path, short: int) -> None:
    """Must hold 4: each read and write in turn moves fewer bytes than it was asked for."""
    strike_each_call(root, Serving, lambda nth: [Fault(nth, READS + WRITES, short=short)])


def test_every_write_moves_nothing_once(root: Path) -> None:
    """Must hold 4: each write in turn reports that nothing was written."""
    strike_each_call(root, Serving, lambda nth: [Fault(nth, WRITES, short=0)])


def test_every_read_meets_the_end_of_the_file_once(root: Path) -> None:
    """Must hold 4: each read in turn finds nothing. Blocks that look truncated may be given up for good."""
    strike_each_call(root, Serving, lambda nth: [Fault(nth, READS, short=0)], may_lose=True)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_every_write_stops_half_way(root: Path, error: int) -> None:
    """Must hold 4, I2: each write in turn puts down a part and fails; nothing of the part is ever visible."""
    strike_each_call(
        root, Serving, lambda nth: [Fault(nth, WRITES, short=70), Fault(nth + 1, WRITES, error=error)]
    )


def test_calls_that_follow_another_writer_fail(root: Path) -> None:
    """Must hold 4, 6: a look-up that cannot read a journal now finds its blocks once it can."""
    with open_store(root) as writer:
        dump(writer, FIRST, LENGTH)
        for nth in range(1, 100):
            fault = Fault(nth)
            calls = FaultySyscalls()
            with open_store(root, syscalls=calls) as reader:
                fresh = ids_of(1000 + nth, 2)
                dump(writer, fresh, LENGTH)
                time.sleep(0.021)
                calls.faults = [fault]
                fault.error = errno.EIO
                reader.lookup(fresh)
                assert load(reader, FIRST, LENGTH).max() in (Reason.OK, Reason.IO_ERROR)
                calls.faults = []
                time.sleep(0.021)
                assert reader.lookup(fresh).all()
                assert (load(reader, fresh, LENGTH) == Reason.OK).all()
            if not fault.fired:
                break
        assert nth > 5


def test_short_transfers_lose_nothing(root: Path) -> None:
    """Must hold 4: when every read and write moves only a part, all blocks are stored and loaded."""
    calls = FaultySyscalls(Fault(kinds=READS + WRITES, short=1000, times=float("inf")))
    blocks = ids_of(7, 20)
    with open_store(root, capacity=48 << 20, syscalls=calls) as store:
        assert (dump(store, blocks, 70_000) == Reason.OK).all()
        assert (load(store, blocks, 70_000) == Reason.OK).all()
    with open_store(root, capacity=None, syscalls=calls) as store:
        assert (load(store, blocks, 70_000) == Reason.OK).all()
        assert store.verify().ok


@pytest.mark.parametrize("short", [1, 20])
def test_a_short_read_of_the_settings_changes_nothing(root: Path, short: int) -> None:
    """Must hold 4: a short read must not pass for a damaged STORE.json, which would be replaced."""
    open_store(root, capacity=5 << 20).close()
    before = (root / "STORE.json").read_bytes()
    calls = FaultySyscalls(Fault(kinds=READS, suffix="STORE.json", short=short))
    with contextlib.suppress(StoreError):
        open_store(root, capacity=None, syscalls=calls).close()
    assert (root / "STORE.json").read_bytes() == before


def test_interrupted_calls_are_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Must hold 4: EINTR from the kernel never surfaces, also where Python does not retry by itself."""
    interrupted = InterruptedLibc(syscalls_module._libc)
    monkeypatch.setattr(syscalls_module, "_libc", interrupted)
    with open_store(root, engine="python") as store:  # the native engine calls libc by itself
        assert (dump(store, FIRST, LENGTH) == Reason.OK).all()
        assert (load(store, FIRST, LENGTH) == Reason.OK).all()
    assert interrupted.times >= 3, "neither preadv, pwritev nor fallocate was interrupted"


class InterruptedLibc:
    """A libc in which every second call of each function fails with EINTR."""

    def __init__(self, real: ctypes.CDLL) -> None:
        self.times = 0
        self._functions = {
            name: self._interrupt(getattr(real, name)) for name in ("preadv", "pwritev", "fallocate")
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        return self._functions[name]

    def _interrupt(self, function: Callable[..., int]) -> Callable[..., int]:
        turns = itertools.cycle([True, False])

        def call(*arguments: int) -> int:
            if next(turns):
                self.times += 1
                ctypes.set_errno(errno.EINTR)
                return -1
            return function(*arguments)

        return call


def test_a_storm_of_signals_is_harmless(root: Path) -> None:
    """Must hold 4, I9: a process whose signals have handlers dumps and loads as ever."""
    received = []
    old = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    stop = threading.Event()

    def storm() -> None:
        while not stop.wait(0.0005):
            os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=storm)
    sender.start()
    try:
        with open_store(root) as store:
            for seed in range(20):
                blocks = ids_of(seed, 16)
                assert (dump(store, blocks, 40_000) == Reason.OK).all()
                assert (load(store, blocks, 40_000) == Reason.OK).all()
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGUSR1, old)
    assert received


def test_a_slow_disk_costs_a_miss_not_a_hang(root: Path) -> None:
    """I11: blocks whose turn comes after the deadline are counted as `timeout`, and the call returns."""
    calls = FaultySyscalls()
    with open_store(root, timeout=0.2, io_threads=1, syscalls=calls) as store:
        groups = [ids_of(seed, 2) for seed in range(8)]
        for number, ids in enumerate(groups):
            dump(store, ids, LENGTH)
            dump(store, ids_of(100 + number, 1), LENGTH)  # so that the groups are no neighbours
        calls.faults = [Fault(kinds=["preadv"], times=float("inf"), delay=0.08)]
        started = time.monotonic()
        status = load(store, np.concatenate(groups), LENGTH)
        assert time.monotonic() - started < 2
        assert status[0] == Reason.OK and status[-1] == Reason.TIMEOUT
        assert store.counters.snapshot()["misses"] == {"timeout": int((status == Reason.TIMEOUT).sum())}
        calls.faults = []
        assert (load(store, np.concatenate(groups), LENGTH) == Reason.OK).all(), "a timeout is no damage"


@pytest.mark.parametrize("kind", KINDS)
def test_the_shim_itself(tmp_path: Path, kind: str) -> None:
    """The instrument of all these tests: each kind of call is counted, and can be made to fail."""
    calls = FaultySyscalls(Fault(2, [kind], error=errno.EIO))
    path = str(tmp_path / "file")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"not empty")
    memory = np.arange(64, dtype=np.uint8)
    iov = np.array([[memory.ctypes.data, 64]], np.uint64)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    arguments: dict[str, tuple[object, ...]] = {
        "open": (path, os.O_RDONLY), "close": (os.dup(fd),), "pread": (fd, 10, 0), "pwrite": (fd, b"abc", 0),
        "preadv": (fd, iov.ctypes.data, 1, 0), "pwritev": (fd, iov.ctypes.data, 1, 0),
        "fallocate": (fd, 0, 0, 4096), "ftruncate": (fd, 0), "fadvise": (fd, 0, 0, os.POSIX_FADV_WILLNEED),
        "seek_hole": (fd, 0), "peek": (fd, 8, True), "peek_links": (fd,), "set_direct": (fd,),
        "fsync": (fd,), "fstat": (fd,), "stat": (path,), "access": (path, os.R_OK),
        "statvfs": (path,),
        "listdir": (str(tmp_path),), "mkdir": (str(tmp_path / "new"),),
        "makedirs": (str(tmp_path / "d" / "e"),),
        "rmdir": (str(tmp_path / "a"),), "rename": (str(tmp_path / "b"), str(tmp_path / "c")),
        "unlink": (path,), "flock": (fd, fcntl.LOCK_EX),
    }  # fmt: skip
    try:
        result = getattr(calls, kind)(*arguments[kind])
        if kind == "open":
            os.close(result)
        second = (os.dup(fd),) if kind == "close" else arguments[kind]
        with pytest.raises(OSError, match="Input/output error"):
            getattr(calls, kind)(*second)
    finally:
        os.close(fd)
    assert calls.counts[kind] == 2 and calls.calls == 2
