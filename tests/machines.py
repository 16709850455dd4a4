"""Stores on other machines, as far as a store can tell: processes with a host name and mount of their own."""

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from storekit import dump, load, open_store
from workers import Worker, batch_ids

from posix_store import PosixStore, Reason

LENGTH = 16 << 10
COUNT = 8
"""Blocks of a batch."""
_CLONE_NEWUTS = 0x04000000


def become_host(name: str) -> None:
    """Give this process, which must be root's, a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(name)


def serve_orders(connection: Connection, host: str, root: str, options: dict[str, Any]) -> None:
    """A store on the machine `host`; answers each order (verb, arguments...) with what the verb returns."""
    become_host(host)
    with open_store(root, **options) as store:
        connection.send(os.getpid())
        orders = Orders(connection, store)
        while True:
            verb, *arguments = connection.recv()
            connection.send(getattr(orders, verb)(*arguments))
            if verb == "close":
                return


class Orders:
    """What a machine can be told to do."""

    def __init__(self, connection: Connection, store: PosixStore) -> None:
        self._connection = connection
        self._store = store

    def dump(self, ids: np.ndarray) -> np.ndarray:
        return dump(self._store, ids, LENGTH)

    def load(self, ids: np.ndarray) -> np.ndarray:
        """Statuses; a wrong byte in what is reported loaded fails the worker."""
        return load(self._store, ids, LENGTH)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return self._store.lookup(ids)

    def find(self, ids: np.ndarray, patience: float) -> float | None:
        """Seconds until all are found; None when they are not in time."""
        return self._until(lambda: bool(self._store.lookup(ids).all()), patience)

    def lose(self, ids: np.ndarray, patience: float) -> float | None:
        """Seconds until none is found and none is loaded any more."""

        def gone() -> bool:
            return (
                not (load(self._store, ids, LENGTH) == Reason.OK).any() and not self._store.lookup(ids).any()
            )

        return self._until(gone, patience)

    @staticmethod
    def _until(condition: Any, patience: float) -> float | None:
        began = time.perf_counter()
        while time.perf_counter() - began < patience:
            if condition():
                return time.perf_counter() - began
            time.sleep(0.002)
        return None

    def dump_batches(self, seed: int, batches: int) -> np.ndarray:
        """Blocks by reason, int64 (reasons,)."""
        outcomes = [self.dump(batch_ids(seed, batch, COUNT)) for batch in range(batches)]
        return np.bincount(np.concatenate(outcomes), minlength=max(Reason) + 1)

    def dump_for_ever(self, seed: int) -> str:
        """Dump batches until another order, or death; tell the number of each that was stored."""
        batch = 0
        while not self._connection.poll():
            if (self.dump(batch_ids(seed, batch, COUNT)) == Reason.OK).all():
                self._connection.send(batch)
            batch += 1
        return "stopped"

    def load_for_ever(self, seed: int, batches: int) -> np.ndarray:
        """Load a writer's first batches again and again until another order; loads by reason."""
        seen = np.zeros(max(Reason) + 1, np.int64)
        ids = np.concatenate([batch_ids(seed, batch, COUNT) for batch in range(batches)])
        while not self._connection.poll():
            seen += np.bincount(self.load(ids), minlength=len(seen))
        return seen

    def verify(self) -> int:
        """Damaged blocks."""
        return len(self._store.verify().bad)

    def stats(self) -> Any:
        return self._store.stats()

    def counters(self) -> Any:
        return self._store.counters.snapshot()

    def clear(self) -> int:
        return self._store.clear()

    def close(self) -> None:
        self._store.close()


class Machine:
    """A handle on a store on another machine."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pid: int = worker.receive()

    def begin(self, verb: str, *arguments: Any) -> None:
        self.worker.send((verb, *arguments))

    def end(self) -> Any:
        return self.worker.receive(120)

    def ask(self, verb: str, *arguments: Any) -> Any:
        self.begin(verb, *arguments)
        return self.end()


@contextlib.contextmanager
def machine(host: str, root: os.PathLike[str], **options: Any) -> Iterator[Machine]:
    """A machine for the body of the `with`; its process is killed at the end."""
    with Worker(serve_orders, host, str(root), options) as worker:
        yield Machine(worker)
