"""What tests of a store on several roots share."""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from faults import KINDS, Fault, FaultySyscalls
from storekit import NAMESPACE, dump, load

from posix_store import PosixStore, Reason
from posix_store.ids import as_ids
from posix_store.opening import open_store
from posix_store.placement import Placement
from posix_store.striped import StripedStore

CAPACITIES = [32 << 20, 64 << 20, 48 << 20]
ALWAYS = float("inf")


def opened(roots: Sequence[str], capacities: Sequence[int] = CAPACITIES, **options: Any) -> StripedStore:
    options = {"min_free": 0, "segment_bytes": 1 << 20, **options}
    store = open_store(roots, NAMESPACE, capacities=capacities[: len(roots)], **options)
    assert isinstance(store, StripedStore)
    return store


def opened_on(roots: Sequence[str], calls: Sequence[FaultySyscalls], **options: Any) -> StripedStore:
    """A store whose roots have system calls of their own, so that one can be sick alone."""
    options = {"min_free": 0, "segment_bytes": 1 << 20, **options}
    stores = [
        PosixStore(root, NAMESPACE, capacity=capacity, syscalls=own, **options)
        for root, capacity, own in zip(roots, CAPACITIES, calls, strict=True)
    ]
    return StripedStore(stores)


def homes(roots: Sequence[str], ids: np.ndarray, capacities: Sequence[int] = CAPACITIES) -> np.ndarray:
    return Placement(roots, capacities[: len(roots)]).homes(as_ids(ids))


def broken(error: int) -> Fault:
    """Every system call fails, from now on."""
    return Fault(kinds=set(KINDS) - {"close"}, times=ALWAYS, error=error)


def striped_process(connection: Connection, roots: list[str], length: int) -> None:
    """Do what each order (verb, ids) says, in a store on several roots, or in a forked child of it."""
    store = open_store(roots, NAMESPACE, min_free=0, segment_bytes=1 << 20)
    connection.send("ready")
    while True:
        verb, ids = connection.recv()
        if verb == "fork":
            child = os.fork()
            if not child:
                os._exit(int(not (load(store, ids, length) == Reason.OK).all()))
            connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif verb == "lookup":
            connection.send(store.lookup(ids))
        else:
            connection.send({"dump": dump, "load": load}[verb](store, ids, length))
