"""Scripted lives of an evicting store, for tests that strike or kill it at each system call.

A life is a script over one system-call shim; a ledger (`evictionkit`) knows what it has promised.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from evictionkit import (
    BATCH,
    LENGTH,
    NAMESPACES,
    OTHER,
    SEGMENT,
    Ledger,
    Remains,
    Times,
    Witness,
    dump_chain,
)
from faults import Fault
from storekit import NAMESPACE, allocated, assert_counters_add_up, ids_of, load, open_store
from workers import Point, batch_ids

from posix_store import PosixStore, Reason, StoreError, compaction
from posix_store.pins import Pin, update_pins


class Life:
    """A scripted life of stores in one root, all over one shim, but for those that only watch.

    No exception may leave look-ups, loads, dumps and evictions (I3). Construction may raise `StoreError`;
    what only an operator or the background thread calls may raise `StoreError` or `OSError`.
    """

    segment_bytes: ClassVar[int] = SEGMENT
    punching: ClassVar[bool] = True
    telling: ClassVar[bool] = True

    def __init__(self, root: Path, times: Times, *faults: Fault, seed: int = 0) -> None:
        self.root = root
        self.times = times
        self.ledger = Ledger(root)
        self.chains = {
            namespace: [ids_of(1000 * seed + 100 * number + k, BATCH) for k in range(5)]
            for number, namespace in enumerate(NAMESPACES)
        }
        self.sharded = ids_of(1000 * seed + 50, 2)
        self.remains = Remains(
            root, times, self.ledger, segment_bytes=self.segment_bytes, punching=self.punching,
            whole=dict(self.chains), sharded=[self.sharded],
        )  # fmt: skip
        self.calls = Witness(self.ledger, *faults, punching=self.punching, telling=self.telling)
        self.silent = Witness(self.ledger, punching=self.punching, telling=self.telling)
        self.over = False
        self.raised: list[str] = []
        self.stores: list[PosixStore] = []

    @property
    def freed(self) -> Counter[str]:
        return self.calls.freed + self.silent.freed

    def run(self) -> None:
        """Run the script up to its end, or up to a store that cannot be opened."""
        try:
            self.script()
        except StoreError as error:
            self.raised.append(str(error))
            assert str(error).startswith(f"path = {self.root}"), error
        finally:
            self.over = True
            self.calls.on_freeing = lambda: None
            for store in self.stores:
                store.close()
                assert_counters_add_up(store)

    def script(self) -> None:
        raise NotImplementedError

    def open(self, namespace: str = NAMESPACE, *, watcher: bool = False, **options: Any) -> PosixStore:
        calls = self.silent if watcher else self.calls
        store = open_store(self.root, **self.remains.options(namespace=namespace, syscalls=calls, **options))
        self.stores.append(store)
        return store

    def dump(self, store: PosixStore, ids: np.ndarray, shards: int = 1) -> None:
        """Dump a chain, in its shards one after another."""
        self.times.ahead += 1  # journals count in seconds
        done = np.ones(len(ids), bool)
        for shard in range(shards):
            done &= dump_chain(store, ids, shard, shards) == Reason.OK
            assert allocated(self.root) <= self.remains.capacity, "more than the capacity"
        self.ledger.stored(store.namespace, ids[done])
        self.calls.on_news(self.ledger)

    def look(self, *stores: PosixStore) -> None:
        """Look up and load everything that was ever dumped; `load` compares the bytes."""
        for store in stores:
            every = np.concatenate(self.chains[store.namespace])
            found = store.lookup(every)
            assert found[: store.lookup_on_prefix(every) + 1].all()
            load(store, every, LENGTH)
            if store.namespace == NAMESPACE:
                for shard in range(2):
                    load(store, self.sharded, LENGTH, shard)

    def evict(self, store: PosixStore, size: int, **options: Any) -> None:
        store.evictor.evict(size, time.monotonic() + 60, **options)
        self.ledger.look()
        assert allocated(self.root) <= self.remains.capacity, "more than the capacity"

    def operate(self, method: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            method(*arguments, **options)
        except (StoreError, OSError) as error:
            self.raised.append(f"{method.__name__}: {error}")
        self.ledger.look()
        assert allocated(self.root) <= self.remains.capacity, "more than the capacity"

    def tidy(self, store: PosixStore) -> None:
        self.operate(store.evictor.tidy, time.monotonic() + 60)

    def while_evicting(self, *watchers: PosixStore) -> None:
        """From now on, others load everything after each step in which space is freed."""
        self.calls.on_freeing = lambda: self.look(*watchers)


class Overflowing(Life):
    """Two namespaces outgrow the root; others load during each step of the evictions; a restart; pins."""

    def script(self) -> None:
        chains, others = self.chains[NAMESPACE], self.chains[OTHER]
        other = self.open(OTHER)
        self.dump(other, np.concatenate(others[:3]))
        one = self.open()
        self.dump(one, chains[0])
        self.dump(one, self.sharded, shards=2)
        self.while_evicting(*(self.open(watcher=True, verify=verify) for verify in (True, False)))
        self.operate(update_pins, one.root, NAMESPACE, add=[Pin(bytes(chains[0][1]))])
        for chain in chains[1:4]:
            self.dump(one, chain)
        one.close()
        one = self.open()
        self.dump(one, chains[4])
        self.operate(update_pins, one.root, NAMESPACE, remove=None)
        self.times.pass_by(2)
        self.dump(other, others[0])
        self.look(one, other)


class WholeSegments(Overflowing):
    """The same where holes cannot be punched."""

    segment_bytes = 24 << 10
    punching = False
    telling = False


class Overtaken(Life):
    """Blocks are evicted by others between the moment a load has found them and its reads."""

    verify: ClassVar[bool] = True

    def script(self) -> None:
        writer = self.open(watcher=True)
        for chain in self.chains[NAMESPACE][:4]:
            self.dump(writer, chain)
        third = self.open(watcher=True)
        reader = self.open(verify=self.verify)
        self.look(reader)
        overtake = Fault(kinds=["preadv"], times=3, before=lambda: self.evict(third, 3 * LENGTH))
        self.calls.faults.append(overtake)
        for _ in range(2):
            self.times.pass_by(0.03)
            self.look(reader)
        self.operate(reader.verify)


class OvertakenUnverified(Overtaken):
    """Nothing but the journals says that what was read is a hole."""

    verify = False
    telling = False


class Tidying(Life):
    """Garbage, dead journal records, evictions that are carried over, a namespace that nobody serves."""

    segment_bytes = 40 << 10

    def script(self) -> None:
        one, helper = self.open(), self.open()
        chains = self.chains[NAMESPACE]
        self.dump(one, np.concatenate(chains[:2]))
        other = self.open(OTHER)
        self.dump(other, self.chains[OTHER][0])
        other.close()
        reader = self.open(verify=False)
        self.look(reader)
        self.evict(helper, 2 * LENGTH)  # recorded in journals of its own
        self.dump(one, chains[2])
        self.times.pass_by(2)
        self.evict(helper, LENGTH)
        helper.close()
        self.tidy(one)  # carries those over, compacts
        self.look(reader)
        self.evict(one, 1 << 40, namespaces=[OTHER])
        one.close()
        self.times.pass_by(700)
        again = self.open()
        self.dump(again, chains[0])
        self.tidy(again)  # deletes what was in the other namespace
        self.tidy(again)  # and the directory
        self.look(reader, again)


class Expiring(Life):
    """Blocks outlive their time, are evicted for it, and are stored again."""

    telling = False

    def script(self) -> None:
        one = self.open(ttl=1000.0)
        chains = self.chains[NAMESPACE]
        self.dump(one, chains[0])
        self.dump(one, self.sharded, shards=2)
        watcher = self.open(watcher=True, verify=False)
        self.look(watcher)
        self.while_evicting(watcher)
        self.times.pass_by(2000)
        self.dump(one, chains[1])
        self.operate(one.upkeep.expire)
        self.operate(one.upkeep.round)
        self.dump(one, chains[0])
        self.look(one)
        one.close()
        again = self.open(ttl=1000.0)
        self.times.pass_by(2000)
        self.operate(again.upkeep.expire)
        self.look(again)
        self.dump(again, chains[1])


class Interleaved(Life):
    """One store does something, and others come in before its n-th call."""

    def __init__(self, root: Path, times: Times, nth: int, seed: int = 0) -> None:
        super().__init__(root, times, Fault(nth, before=self._come_in), seed=seed)

    def _come_in(self) -> None:
        if not self.over:
            self.meanwhile()

    def meanwhile(self) -> None:
        """What they do."""
        raise NotImplementedError


class LoadedMeanwhile(Interleaved):
    """A reader that has not noticed some evictions yet, while others go on evicting."""

    def script(self) -> None:
        chains = self.chains[NAMESPACE]
        writer, self.third = self.open(watcher=True), self.open(watcher=True)
        for chain in chains[:3]:
            self.dump(writer, chain)
        self.dump(self.third, chains[3])
        time.sleep(0.002)  # so that journals are followed in the order of their writers
        helper = self.open(watcher=True)
        reader = self.open(verify=False)
        self.look(reader)
        self.evict(helper, 2 * LENGTH)
        helper.close()
        self.look(reader)

    def meanwhile(self) -> None:
        self.evict(self.third, LENGTH)


class LoadedWhileCarriedOver(LoadedMeanwhile):
    """The records of those evictions move to another journal meanwhile."""

    def meanwhile(self) -> None:
        self.tidy(self.third)


class LoadedWhereHolesAreNotTold(LoadedWhileCarriedOver):
    """The same on a file system that does not say where holes are."""

    telling = False


class EvictedMeanwhile(Interleaved):
    """One store evicts and tidies, while the writer of those blocks stores others."""

    closing: ClassVar[bool] = False

    def script(self) -> None:
        chains = self.chains[NAMESPACE]
        self.writer = self.open(watcher=True)
        self.dump(self.writer, chains[0])
        helper = self.open(watcher=True)
        self.dump(helper, self.sharded, shards=2)
        helper.close()
        self.dump(self.writer, chains[1])
        third = self.open()
        self.evict(third, 7 * LENGTH)
        self.evict(third, 4 * LENGTH)
        self.tidy(third)

    def meanwhile(self) -> None:
        self.dump(self.writer, self.chains[NAMESPACE][2])
        if self.closing:
            self.writer.close()
        self.look(self.writer)


class EvictedWhileClosing(EvictedMeanwhile):
    closing = True


LIVES: tuple[type[Life], ...] = (
    Overflowing, WholeSegments, Overtaken, OvertakenUnverified, Tidying, Expiring,
)  # fmt: skip

INTERLEAVED: tuple[type[Interleaved], ...] = (
    LoadedMeanwhile, LoadedWhileCarriedOver, LoadedWhereHolesAreNotTold, EvictedMeanwhile,
    EvictedWhileClosing,
)  # fmt: skip


def live_and_die(
    connection: Connection, root: str, number: int, seed: int, ahead: float, point: Point
) -> None:
    """In another process: one life, that ends at `point`; tells what its ledger says when that changes."""
    times = Times()
    times.ahead = ahead
    times.install(pytest.MonkeyPatch())
    life = LIVES[number](Path(root), times, point.fault(), seed=seed)
    life.calls.on_news = connection.send
    life.run()


def evict_until_killed(connection: Connection, root: str, seed: int, options: dict[str, Any]) -> None:
    """In another process: store more than there is room for in two namespaces, look, tidy, all at once."""
    compaction.LEAST_BYTES = 128
    stores = [open_store(root, namespace=namespace, **options) for namespace in NAMESPACES]
    with ThreadPoolExecutor(3) as pool:
        for batch in range(10_000):
            ids = batch_ids(seed, batch, BATCH)
            before = batch_ids(seed, max(0, batch - 3), BATCH)
            shards = 1 + batch % 2
            tasks = [pool.submit(dump_all, stores[0], ids, shards), pool.submit(dump_all, stores[1], ids)]
            tasks.append(pool.submit(load, stores[batch % 2], before, LENGTH))
            if batch % 5 == 4:
                tasks.append(pool.submit(stores[0].evictor.tidy, time.monotonic() + 1))
            for task in tasks:
                task.result()
            connection.send(batch)


def dump_all(store: PosixStore, ids: np.ndarray, shards: int = 1) -> None:
    for shard in range(shards):
        dump_chain(store, ids, shard, shards)
