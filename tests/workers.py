"""Other processes for tests: functions that run in them, and a handle on one that runs.

They are forked from a server that has numpy and the store loaded, so that one costs milliseconds and no test
forks a process with threads.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from faults import KINDS, Fault, FaultySyscalls
from storekit import dump, ids_of, load, open_store

from posix_store import PosixStore, Reason, StoreError

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workers"])


class Worker:
    """A process that runs `function(connection, *arguments)`. Use it in a `with`: it is killed at the end."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(function, theirs, *arguments), daemon=True)
        _start_server()
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self, timeout: float = 30) -> Any:
        """The next report."""
        assert self.connection.poll(timeout), "no report from a worker"
        return self.connection.recv()

    def send(self, order: Any) -> None:
        self.connection.send(order)

    def reports(self) -> Iterator[Any]:
        """What was reported and not received yet, until the process has ended."""
        try:
            while True:
                yield self.receive()
        except (EOFError, ConnectionResetError):
            self.process.join(30)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have come to its end
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.join(30)
        self.process.close()
        self.connection.close()


def _start_server() -> None:
    """Start the server that children are forked from, so that it finds and loads this module too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        forkserver.ensure_running()


def _run(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    function(connection, *arguments)


@dataclass(frozen=True)
class Point:
    """A moment in a process's life: before, after or half-way through the `nth` call that matches."""

    nth: int = 1
    kinds: tuple[str, ...] = KINDS
    suffix: str = ""
    after: bool = False
    short: int | None = None
    """Bytes that the call still transfers."""
    signal: int = signal.SIGKILL

    def fault(self) -> Fault:
        def strike() -> None:
            os.kill(os.getpid(), self.signal)

        late = self.after or self.short is not None
        return Fault(
            self.nth,
            self.kinds,
            self.suffix,
            short=self.short,
            before=None if late else strike,
            after=strike if late else None,
        )


@dataclass(frozen=True)
class Promise:
    """Blocks that a dump has reported as stored."""

    ids: np.ndarray
    shards: int = 1


def batch_ids(seed: int, batch: int, count: int) -> np.ndarray:
    """Ids of the blocks in a writer's n-th batch."""
    return ids_of(seed * 10_000 + batch, count)


def dump_and_report(
    connection: Connection, store: PosixStore, ids: np.ndarray, length: int, shards: int = 1
) -> None:
    """Dump blocks, and tell which were stored before anything else is done."""
    stored = np.ones(len(ids), bool)
    for shard in range(shards):
        stored &= dump(store, ids, length, shard, shards) == Reason.OK
    connection.send(Promise(ids[stored], shards))


def scripted_writer(
    connection: Connection, root: str, seed: int, batches: int, count: int, length: int, point: Point
) -> None:
    """Dump whole and sharded batches in a fixed order, close, and die at `point` on the way."""
    calls = FaultySyscalls(point.fault())
    store = open_store(root, segment_bytes=16 * length, io_threads=1, syscalls=calls)
    for batch in range(batches):
        dump_and_report(connection, store, batch_ids(seed, batch, count), length, shards=1 + batch % 2)
    store.close()


def tireless_writer(connection: Connection, root: str, seed: int, count: int, length: int) -> None:
    """Dump from two threads, whole batches and shards, until killed."""
    store = open_store(root, segment_bytes=40 * length)
    with ThreadPoolExecutor(2) as pool:
        for batch in range(10_000):
            ids = batch_ids(seed, batch, 2 * count)
            halves = [
                pool.submit(dump_and_report, connection, store, half, length, 1 + batch % 2)
                for half in (ids[:count], ids[count:])
            ]
            for half in halves:
                half.result()
            if batch == 0:
                connection.send("started")


def obedient(connection: Connection, root: str, options: dict[str, Any], length: int) -> None:
    """Open a store, and dump, look up or load what each order (verb, ids) says; answer with the outcome."""
    store = open_store(root, **options)
    connection.send(os.getpid())
    while True:
        verb, ids = connection.recv()
        if verb == "dump":
            connection.send(dump(store, ids, length))
        elif verb == "lookup":
            connection.send(store.lookup(ids))
        elif verb == "load":
            connection.send(load(store, ids, length))
        elif verb == "close":
            connection.send(store.close())


def one_dump(connection: Connection, root: str, seed: int, length: int, point: Point) -> None:
    """Dump one small batch to have a segment, then one that meets `point`."""
    calls = FaultySyscalls()
    store = open_store(root, io_threads=1, segment_bytes=7 * length, syscalls=calls)
    dump_and_report(connection, store, batch_ids(seed, 0, 2), length)
    calls.faults = [point.fault()]
    dump_and_report(connection, store, batch_ids(seed, 1, 2), length)


def eager_dumper(connection: Connection, root: str, seeds: list[int], count: int, length: int) -> None:
    """Wait for a word, then dump batches as fast as possible; answer with the status of each."""
    store = open_store(root)
    connection.send("ready")
    connection.recv()
    connection.send([dump(store, ids_of(seed, count), length) for seed in seeds])


def greedy_dumper(
    connection: Connection,
    root: str,
    seed: int,
    count: int,
    length: int,
    seconds: float,
    options: dict[str, Any],
) -> None:
    """Dump new blocks for some time, full or not; answer with how many were stored."""
    store = open_store(root, **options)
    stored = 0
    end = time.monotonic() + seconds
    batch = 0
    while time.monotonic() < end:
        stored += int((dump(store, batch_ids(seed, batch, count), length) == Reason.OK).sum())
        batch += 1
    connection.send((stored, batch, store.counters.snapshot()))


def steady_reader(connection: Connection, root: str, ids: np.ndarray, length: int) -> None:
    """Look up and load until told to stop, checking every byte; answer with loads by reason."""
    store = open_store(root)
    seen = np.zeros(max(Reason) + 1, np.int64)
    connection.send("ready")
    while not connection.poll():
        store.lookup(ids)
        seen += np.bincount(load(store, ids, length), minlength=len(seen))
    connection.send(seen)


def as_another_user(
    connection: Connection, root: str, ids: np.ndarray, length: int, capacity: int | None
) -> None:
    """Give up all rights, open the store and use it; answer with what worked, or with the refusal."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        store = open_store(root, capacity=capacity)
    except StoreError as error:
        connection.send(str(error))
        return
    loaded = int((load(store, ids, length) == Reason.OK).sum())
    stored = int((dump(store, ids_of(77, 3), length) == Reason.OK).sum())
    connection.send({"loaded": loaded, "stored": stored})


def forking_writer(connection: Connection, root: str, length: int) -> None:
    """Dump, have a forked child load and close its copy of the store, and when told go on dumping."""
    store = open_store(root, io_threads=1)
    dump_and_report(connection, store, batch_ids(1, 0, 2), length)
    connection.recv()
    child = os.fork()
    if not child:
        load(store, batch_ids(1, 0, 2), length)
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    connection.send("forked")
    connection.recv()
    dump_and_report(connection, store, batch_ids(1, 1, 2), length)
    connection.recv()
