"""A store on a disk that can be made sick: calls that hang until told otherwise, and what must not wait."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from faults import FaultySyscalls
from storekit import (
    NAMESPACE,
    assert_counters_add_up,
    assert_no_lock_is_held,
    dump,
    ids_of,
    memory_directory,
    open_store,
)

from posix_store import PosixStore
from posix_store.segment import SEGMENT_HEADER_BYTES

T = TypeVar("T")
LENGTH = 4096
PROMPT = 0.5
"""Seconds within which a call that needs nothing of what hangs must end, on a busy machine too."""
KNOWN, DAMAGED = ids_of(1, 8), ids_of(2, 8)


class Hang:
    """A hook for `Fault.before`: calls wait in it until `let_go`."""

    def __init__(self) -> None:
        self.waiting = 0
        self._begun = threading.Semaphore(0)
        self._end = threading.Event()

    def __call__(self) -> None:
        self.waiting += 1
        self._begun.release()
        self._end.wait(60)

    def begun(self) -> None:
        """Wait until one more call hangs."""
        assert self._begun.acquire(timeout=5), "the call that should hang was never made"

    def let_go(self) -> None:
        self._end.set()


class Patient:
    """A store on a disk that can be made sick."""

    def __init__(self, store: PosixStore, calls: FaultySyscalls, path: Path) -> None:
        self.store = store
        self.calls = calls
        self.path = path
        self.hang = Hang()
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Run something that may be held up."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return future

    def prompt(self, work: Callable[[], T], seconds: float = PROMPT) -> T:
        """What `work` returns; it must end in time."""
        started = time.monotonic()
        result = self.start(work).result(timeout=10)
        took = time.monotonic() - started
        assert took < seconds, f"{took:.2f} s"
        return result

    def recovers(self, ask: Callable[[], Any], within: float = 3.0) -> None:
        """Ask again and again, as an engine does, until the answer is yes."""
        end = time.monotonic() + within
        while not self.start(ask).result(timeout=10):
            assert time.monotonic() < end, f"not yet after {within} s"
            time.sleep(0.02)

    def made(self, kind: str) -> int:
        return self.calls.counts[kind]

    def finish(self) -> None:
        self.hang.let_go()
        self.calls.faults = []
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread did not end although nothing hangs any more"


@contextlib.contextmanager
def patient(**options: Any) -> Iterator[Patient]:
    """A store that holds KNOWN and DAMAGED (whose bytes are wrong on disk). In the end all is well again."""
    with memory_directory() as path:
        with open_store(path / "store") as writer:
            dump(writer, DAMAGED, LENGTH)
        (segment,) = (path / "store" / NAMESPACE).glob("*.seg")
        with segment.open("r+b") as file:
            file.seek(SEGMENT_HEADER_BYTES)
            file.write(b"\xff" * DAMAGED.shape[0] * LENGTH)
        calls = FaultySyscalls()
        store = open_store(path / "store", syscalls=calls, **options)
        it = Patient(store, calls, path / "store")
        try:
            dump(store, KNOWN, LENGTH)
            yield it
        finally:
            it.finish()
            store.close()
        assert_counters_add_up(store)
        assert_no_lock_is_held(path / "store")
