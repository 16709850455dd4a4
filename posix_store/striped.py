"""One store over several roots, such as several NVMe devices: each block lives whole on one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from posix_store.buffers import addresses_of
from posix_store.counters import Counters
from posix_store.crew import Crew
from posix_store.engine import Engine
from posix_store.errors import Reason
from posix_store.ids import Ids, as_ids, as_shards
from posix_store.io_mode import IoMode
from posix_store.placement import Placement
from posix_store.reports import StoreStats, VerifyReport
from posix_store.store import PosixStore, Shards
from posix_store.task import Task
from posix_store.transfer import address_matrix

logger = logging.getLogger(__name__)

CALLERS = 8
"""Calls that have a thread for each root at the same time; more still work, with fewer."""
_LOG_EVERY_SECONDS = 60.0

R = TypeVar("R")
Part = tuple[PosixStore, np.ndarray]
"""A root's store, and the rows of a batch that live there, int64 (m,)."""


@dataclass(frozen=True)
class StripedStats(StoreStats):
    """Sums over the roots. `root` names them all; what is not a number is that of the roots, put together."""

    roots: list[StoreStats] = field(default_factory=list)
    """The numbers of each root."""
    failed: dict[str, str] = field(default_factory=dict)
    """Roots that could not be examined, which are in no sum, and why."""


class StripedStore:
    """Blocks of one namespace on several roots. The verbs, results and thread rules of `PosixStore`.

    A block lives with all its shards on the root that its id says (see `Placement`), in proportion to the
    roots' capacities. A batch goes to all its roots at the same time, and each has the whole `timeout` for
    its part. The calling thread does one part itself.

    A root that fails while the store is open costs its own blocks: they are misses, or go unstored, with the
    reason that its `PosixStore` gives. The others serve.

    A root is known by its path and weighed by the capacity that its `STORE.json` gives when the store is
    opened. All processes should name the roots by the same paths, in any order. When a root is added, taken
    away, renamed or given another capacity, its share changes: blocks that have another home from then on are
    misses, are stored there when they are computed again, and leave their old root by eviction. Until all
    processes have been started again, those with the old capacities and those with the new share only the
    blocks whose home is the same.

    Args:
        stores: one of each root, all of one namespace, on different paths. Closed with this store.
    """

    def __init__(self, stores: Sequence[PosixStore]) -> None:
        self.stores = tuple(stores)
        self.namespace = self.stores[0].namespace
        self.counters = SummedCounters([store.counters for store in self.stores])
        self._placement = Placement(
            [store.root.path for store in self.stores], [store.root.capacity for store in self.stores]
        )
        self._crew = Crew(CALLERS * (len(self.stores) - 1), "posix-store-root")
        self._logged_at = float("-inf")

    @property
    def io_mode(self) -> IoMode:
        """That of the first root; others may lie on other devices."""
        return self.stores[0].io_mode

    @property
    def engine(self) -> Engine:
        """The engine of the first root; the others have one of the same kind."""
        return self.stores[0].engine

    # -- look-up ------------------------------------------------------------------------------------

    def lookup(self, ids: Ids) -> np.ndarray:
        """bool (n,): which blocks are stored, complete with all their shards."""
        keys = as_ids(ids)
        found = np.zeros(len(keys), bool)
        for store, rows in self._parts(keys):
            with self._survived(store):
                found[rows] = store.lookup(keys[rows])
        self.counters.own.looked_up(len(keys), int(found.sum()))
        return found

    def lookup_on_prefix(self, ids: Ids) -> int:
        """Index of the last block of the leading run of stored blocks; -1 when the first is missing."""
        keys = as_ids(ids)
        leading = len(keys)
        for store, all_rows in self._parts(keys):
            # What stands behind a gap on another root cannot matter any more.
            rows = all_rows[all_rows < leading]
            here = 0
            with self._survived(store):
                here = store.lookup_on_prefix(keys[rows]) + 1
            if here < len(rows):
                leading = int(rows[here])
        self.counters.own.looked_up(len(keys), leading)
        return leading - 1

    def prefetch(self, ids: Ids) -> None:
        """Ask the kernel to read blocks ahead into the page cache. Returns at once."""
        keys = as_ids(ids)
        for store, rows in self._parts(keys):
            with self._survived(store):
                store.prefetch(keys[rows])

    # -- transfers ----------------------------------------------------------------------------------

    def load_data(
        self,
        ids: Ids,
        shards: Shards,
        addresses: np.ndarray,
        sizes: int | np.ndarray,
        *,
        background: bool = True,
    ) -> Task:
        """Load blocks, or one shard of each, into memory. See `PosixStore.load_data`."""
        keys = as_ids(ids)
        which = as_shards(shards, len(keys))
        matrix, widths = address_matrix(addresses, sizes, len(keys))

        def load(part: Part, background: bool) -> Task:
            store, rows = part
            return store.load_data(keys[rows], which[rows], matrix[rows], widths, background=background)

        return self._start(load, keys, background)

    def dump_data(
        self,
        ids: Ids,
        shards: Shards,
        addresses: np.ndarray,
        sizes: int | np.ndarray,
        *,
        n_shards: int = 1,
        parents: Ids | None = None,
        ancestors: Ids | None = None,
        background: bool = True,
    ) -> Task:
        """Store blocks, or one shard of each. See `PosixStore.dump_data`.

        Args:
            ancestors: ids of blocks before these, in the order of their chain. A few dozen are plenty: each
                root needs the nearest one that it has itself, or it takes what follows for another chain.
        """
        keys = as_ids(ids)
        which = as_shards(shards, len(keys))
        as_shards(n_shards - 1, 1)
        if which.size and int(which.max()) >= n_shards:
            raise ValueError(f"shard {int(which.max())} of {n_shards}")
        chain = np.zeros_like(keys) if parents is None else as_ids(parents)
        if len(chain) != len(keys):
            raise ValueError(f"{len(chain)} parents for {len(keys)} blocks")
        matrix, widths = address_matrix(addresses, sizes, len(keys))
        chain = self._placement.parents(keys, chain, as_ids(b"" if ancestors is None else ancestors))

        def dump(part: Part, background: bool) -> Task:
            store, rows = part
            return store.dump_data(
                keys[rows], which[rows], matrix[rows], widths,
                n_shards=n_shards, parents=chain[rows], background=background,
            )  # fmt: skip

        return self._start(dump, keys, background)

    def load(self, ids: Ids, shards: Shards, buffers: Sequence[Any], *, background: bool = True) -> Task:
        """`load_data` into n writable buffers, or n sequences of k buffers (see `addresses_of`)."""
        addresses, sizes = addresses_of(buffers, writable=True)
        return self.load_data(ids, shards, addresses, sizes, background=background).keep(buffers)

    def dump(
        self,
        ids: Ids,
        shards: Shards,
        buffers: Sequence[Any],
        *,
        n_shards: int = 1,
        parents: Ids | None = None,
        ancestors: Ids | None = None,
        background: bool = True,
    ) -> Task:
        """`dump_data` from n buffers, or n sequences of k buffers (see `addresses_of`)."""
        addresses, sizes = addresses_of(buffers, writable=False)
        return self.dump_data(
            ids, shards, addresses, sizes,
            n_shards=n_shards, parents=parents, ancestors=ancestors, background=background,
        ).keep(buffers)  # fmt: skip

    def check(self, task: Task) -> bool:
        """Is the task done?"""
        return task.done()

    def wait(self, task: Task, timeout: float | None = None) -> np.ndarray:
        """bool (n,): which blocks of a task were loaded, or are stored. Raises `TimeoutError`."""
        return task.results(timeout)

    # -- administration -----------------------------------------------------------------------------

    def stats(self) -> StripedStats:
        """Sums over the roots and the numbers of each. Raises `OSError` when no root can be examined."""
        outcomes = self._crew.run(PosixStore.stats, self.stores)
        failed = {
            store.root.path: str(outcome)
            for store, outcome in zip(self.stores, outcomes, strict=True)
            if isinstance(outcome, OSError)
        }
        if len(failed) == len(outcomes):
            _results(outcomes)
        roots = _results([each for each in outcomes if not isinstance(each, OSError)])
        return _added_up(roots, self.counters.snapshot(), failed)

    def verify(
        self, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
    ) -> VerifyReport:
        """Read every block of the namespace on all roots. See `PosixStore.verify`.

        `progress` is called by several threads, one at a time. What a root raises is raised at the end.
        """
        lock = threading.Lock()
        told = np.zeros((len(self.stores), 2), np.int64)

        def verify(number: int) -> VerifyReport:
            def tell(done: int, total: int) -> None:
                with lock:
                    told[number] = done, total
                    if progress:
                        progress(*told.sum(axis=0).tolist())

            return self.stores[number].verify(tell, repair=repair)

        reports = _results(self._crew.run(verify, range(len(self.stores))))
        return VerifyReport(**_sum_of_fields(VerifyReport, reports))

    def clear(self) -> int:
        """Delete the segments of this namespace on all roots; the number of blocks that went.

        Goes through all roots, also when one fails, and then raises what that one raised. See
        `PosixStore.clear`.
        """
        return sum(_results(self._crew.run(PosixStore.clear, self.stores)))

    def close(self) -> None:
        """Let go of files and threads. Not needed for correctness (invariant I9). Idempotent."""
        for store in self.stores:
            with self._survived(store):
                store.close()
        self._crew.close()

    def __enter__(self) -> StripedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------

    def _parts(self, keys: np.ndarray) -> list[Part]:
        """The roots that a batch goes to. The order of the call, head first, is kept on each."""
        homes = self._placement.homes(keys)
        parts = [(store, np.flatnonzero(homes == number)) for number, store in enumerate(self.stores)]
        return [(store, rows) for store, rows in parts if rows.size]

    def _start(self, start: Callable[[Part, bool], Task], keys: np.ndarray, background: bool) -> Task:
        parts = self._parts(keys)
        tasks = JoinedTask(len(keys), self._failed)
        if background:
            for part in parts:
                with self._survived(part[0]):
                    tasks.join(part, start(part, True))
            return tasks
        for part, outcome in zip(parts, self._crew.run(lambda part: start(part, False), parts), strict=True):
            with self._survived(part[0]):
                tasks.join(part, _results([outcome])[0])
        return tasks

    @contextmanager
    def _survived(self, store: PosixStore) -> Iterator[None]:
        """Whatever one root raises, the others go on."""
        try:
            yield
        except Exception as error:
            self._failed(store, error)

    def _failed(self, store: PosixStore, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_SECONDS:
            self._logged_at = now
            logger.error("posix_store %s: failed: %s", store.root.path, error, exc_info=error)


class JoinedTask(Task):
    """The handle of a batch that went to several roots."""

    def __init__(self, count: int, failed: Callable[[PosixStore, Exception], None]) -> None:
        self._count = count
        self._failed = failed
        self._joined: list[tuple[Part, Task]] = []

    def join(self, part: Part, task: Task) -> None:
        """Add the task of one root. Rows that no root has a task for are `IO_ERROR`."""
        self._joined.append((part, task))

    def keep(self, buffers: object) -> Task:
        """Keep objects alive until the task is done; returns the task."""
        for _, task in self._joined:
            task.keep(buffers)
        return self

    def done(self) -> bool:
        return all(task.done() for _, task in self._joined)

    def status(self, timeout: float | None = None) -> np.ndarray:
        """uint8 (n,): a `Reason` for each block, in the order of the call. See `Task.status`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        status = np.full(self._count, Reason.IO_ERROR, np.uint8)
        for (store, rows), task in self._joined:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                status[rows] = task.status(left)
            except TimeoutError:
                raise
            except Exception as error:
                self._failed(store, error)
        return status


class SummedCounters:
    """The counters of all roots, added up. A block that is looked up is counted here, once for each call."""

    def __init__(self, counters: Sequence[Counters]) -> None:
        self.own = Counters()
        """Look-ups only: how much of a prefix counts as found is not known to a single root."""
        self._roots = tuple(counters)

    def snapshot(self) -> dict[str, Any]:
        """A copy in the form of `Counters.snapshot`; consistent for each root."""
        looked = self.own.snapshot()
        return _sum([counters.snapshot() for counters in self._roots]) | {
            name: looked[name] for name in ("lookups", "lookup_hits")
        }


def _added_up(roots: Sequence[StoreStats], counters: dict[str, Any], failed: dict[str, str]) -> StripedStats:
    values = _sum_of_fields(StoreStats, roots)
    read_only = [f"{stats.root}: {stats.read_only_because}" for stats in roots if stats.read_only_because]
    values |= {"read_only_because": "; ".join(read_only) or None, "counters": counters}
    return StripedStats(**values, roots=list(roots), failed=failed)


def _sum_of_fields(kind: type[Any], objects: Sequence[Any]) -> dict[str, Any]:
    return {item.name: _sum([getattr(each, item.name) for each in objects]) for item in fields(kind)}


def _sum(values: Sequence[Any]) -> Any:
    """Numbers and mappings added up, lists and (each once) texts put together. None counts for nothing."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _sum([value.get(name) for value in values]) for name in names}
    if isinstance(values[0], str):
        return ", ".join(dict.fromkeys(filter(None, values)))
    if isinstance(values[0], bool):
        return any(values)
    return list(chain.from_iterable(values)) if isinstance(values[0], list) else sum(values)


def _results(outcomes: Sequence[R | Exception]) -> list[R]:
    """The outcomes of a crew; raises the first exception among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
