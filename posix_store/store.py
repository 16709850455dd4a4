"""The block store: whole batches of named blocks in and out of memory, verified."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from posix_store.admission import admission_named
from posix_store.breaker import Breaker
from posix_store.buffers import addresses_of
from posix_store.capacity import NoSpace, SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.dumping import Dumper
from posix_store.engine import Engine
from posix_store.errors import Reason, StoreError, require_positive
from posix_store.eviction_stamp import EvictionWatch
from posix_store.evictor import Evictor
from posix_store.files import SegmentFiles
from posix_store.health import Health
from posix_store.ids import Ids, as_ids, as_shards
from posix_store.io_mode import IoMode
from posix_store.keeper import Keeper
from posix_store.loading import Loader
from posix_store.mount_type import may_be_shared
from posix_store.native import engine_named
from posix_store.policies import policy_named
from posix_store.recency import Recency
from posix_store.reports import StoreStats, VerifyReport, store_stats, verify_blocks
from posix_store.root import StoreRoot
from posix_store.segment import MAX_SHARDS, NAMESPACE_NAME, SegmentName
from posix_store.syscalls import Syscalls, close_quietly
from posix_store.task import Task
from posix_store.transfer import address_matrix
from posix_store.upkeep import Upkeep
from posix_store.wholeness import Wholeness
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

_ADMINISTRATION_SECONDS = 30.0

Shards = int | Sequence[int] | np.ndarray | None


class PosixStore:
    """Blocks of one namespace on a POSIX file system.

    A cache: a block may vanish at any time, and a block that is loaded has the bytes that were dumped
    under its id in this namespace (invariant I1). All methods may be called from any thread at once.
    After construction, bad data and sick file systems are results with a reason, not exceptions;
    `ValueError` is raised for arguments that no call could satisfy.

    The verbs are those of UCM's store interface V1.

    A store belongs to the process that opened it. A forked child cannot harm its parent's files, but it does
    not see what the parent stores after the fork: it should open a store of its own.

    Args:
        root: directory shared by all namespaces, processes and generations of processes.
        namespace: 32 hex digits that name everything which must match for bytes to be interchangeable.
        identity: the fields behind the namespace, written to `NAMESPACE.json` for people.
        capacity: bytes on disk for the whole root; None: what the root says, or half of the free space.
        min_free: bytes to leave free on the file system; None: 5 % of its size.
        segment_bytes: size at which a writer begins a new segment file.
        io_threads: threads that move one batch.
        verify: compare the CRC-32C of every block that is loaded. Always done on network file systems,
            where what another machine evicted may be noticed late.
        timeout: seconds for one batch; blocks whose turn comes later are counted as `timeout`.
        policy: what leaves first when the store is full; a name in `policies.POLICIES`.
        admission: which blocks are stored: `always`, or `second_touch`, when they are dumped again.
        ttl: seconds after which a block is not found any more, since it was stored; None: never.
        breaker_failures: loads (or dumps) in a row that fail or are slow before the disk is left alone.
        breaker_seconds: how long it is left alone, before one is tried.
        slow_seconds: what a transfer may take, unless it moves 10 MB a second or more.
        write_queue_bytes: bytes of blocks that may be waiting to be written; the newest go unstored.
        maintenance: a background thread makes room ahead, follows journals and collects garbage while the
            store is used. Without it dumps make room when they must.
        writable: False never writes anything, and needs a store to be there.
        engine: moves the bytes: `native` (C), `python`, `auto`: native if it was built, or an `Engine`.
            Closed with the store.
        io_mode: `buffered`, `direct` (around the page cache), or `auto`: direct on NVMe; see `IoMode`.
        page_cache: `keep` what was read and written there, or `drop` it.
        syscalls: for fault injection.

    Raises:
        StoreError: at construction only; says which setting, what it is, and what to do.
    """

    def __init__(
        self,
        root: str,
        namespace: str,
        *,
        identity: Mapping[str, Any] | None = None,
        capacity: int | None = None,
        min_free: int | None = None,
        segment_bytes: int = 1 << 30,
        io_threads: int = 2,
        verify: bool = True,
        timeout: float = 5.0,
        policy: str = "lru",
        admission: str = "always",
        ttl: float | None = None,
        breaker_failures: int = 5,
        breaker_seconds: float = 10.0,
        slow_seconds: float = 2.0,
        write_queue_bytes: int = 1 << 30,
        maintenance: bool = True,
        writable: bool = True,
        engine: Engine | str = "auto",
        io_mode: str = "buffered",
        page_cache: str = "keep",
        syscalls: Syscalls | None = None,
    ) -> None:
        if not NAMESPACE_NAME.fullmatch(namespace):
            raise StoreError(f"namespace = {namespace!r}: must be 32 lower-case hex digits")
        require_positive(
            int, capacity=capacity, segment_bytes=segment_bytes, io_threads=io_threads,
            breaker_failures=breaker_failures, write_queue_bytes=write_queue_bytes,
        )  # fmt: skip
        require_positive(
            float, timeout=timeout, ttl=ttl, breaker_seconds=breaker_seconds, slow_seconds=slow_seconds
        )
        if min_free is not None and min_free < 0:
            raise StoreError(f"min_free = {min_free}: must be 0 or more bytes")
        chosen, gate = policy_named(policy), admission_named(admission)
        calls = syscalls or Syscalls()
        self.namespace = namespace
        self.root = StoreRoot(root, capacity=capacity, create=writable, syscalls=calls)
        self.engine = engine_named(engine, calls, io_threads) if isinstance(engine, str) else engine
        self.counters = Counters()
        self.health = Health(
            self.root.path, breaker_failures, breaker_seconds, slow_seconds, write_queue_bytes
        )
        self.io_mode = IoMode(io_mode, page_cache, self.root)
        self._pid = os.getpid()
        self._timeout = timeout
        self._calls = calls
        self._loads = ThreadPoolExecutor(2, thread_name_prefix="posix-store-load")
        self._dumps = ThreadPoolExecutor(2, thread_name_prefix="posix-store-dump")
        self._catalog = Catalog(self.root, namespace, ttl)
        self._files = SegmentFiles(self._catalog, namespace, calls)
        self._space = SpaceKeeper(self.root, min_free, chunk=min(64 << 20, segment_bytes // 4))
        self._writer = SegmentWriter(
            self.root,
            namespace,
            identity,
            self._space,
            self._catalog,
            segment_bytes,
            self.engine.journal,
            self.io_mode.direct,
            self._serve,
        )
        self.evictor = Evictor(self.root, self._space, chosen, (namespace, self._catalog, self._writer))
        self._keeper: Keeper | None = None
        self._recency = Recency(self._catalog.index, self._writer, self._catalog.clock)
        self._loader = Loader(
            self._catalog, self._files, self._writer, self.engine, self._recency, self.counters,
            self._wholeness(verify), self.io_mode,
        )  # fmt: skip
        self._dumper = Dumper(
            self._catalog, self._writer, self._files, self._space, self.evictor, self._recency, gate,
            self.health.writes, self._make_room_ahead, self.engine, self.counters,
            self.root.read_only_because, self.io_mode,
        )  # fmt: skip
        self.upkeep = Upkeep(
            self.root, self._space, self._catalog, self._writer, self.evictor, self._recency, namespace, ttl,
            writes=self.root.read_only_because is None,
        )  # fmt: skip
        if maintenance:
            self._keeper = Keeper(self.upkeep.tick)
        self._served = self.root.serve(namespace)
        self._catalog.refresh(max_age=0, budget=float("inf"))

    def _serve(self) -> None:
        """Mark the namespace as in use once it is there."""
        with contextlib.suppress(OSError):
            if self._served is not None and self._calls.fstat(self._served).st_nlink:
                return
        stale, self._served = self._served, self.root.serve(self.namespace)
        if stale is not None:
            close_quietly(self._calls, stale)

    def _wholeness(self, verify: bool) -> Wholeness | None:
        """What makes sure of loads in the place of checksums; None: checksums do."""
        if verify:
            return None
        if may_be_shared(self.root.file_system):
            logger.warning(
                "posix_store %s: verify = False has no effect on %s, where evictions may be noticed late",
                self.root.path, self.root.file_system,
            )  # fmt: skip
            return None
        if self.root.read_only_because is None:
            self.evictor.stamp.make()
        return Wholeness(self._catalog, self._files, EvictionWatch(self.root), self._calls)

    def _make_room_ahead(self) -> None:
        if self._keeper is not None and os.getpid() == self._pid:
            self._keeper.nudge()

    def _is_used(self) -> None:
        if self._keeper is not None and os.getpid() == self._pid:
            self._keeper.used()

    # -- look-up ------------------------------------------------------------------------------------

    def lookup(self, ids: Ids) -> np.ndarray:
        """bool (n,): which blocks are stored, complete with all their shards.

        No system call for what is known. When something is missing, the journals of other writers are
        looked at once, unless that was done in the last 20 ms. While the disk is left alone (see
        `breaker_failures`) nothing is found.
        """
        keys = as_ids(ids)
        found = self._contains(keys)
        self.counters.looked_up(len(keys), int(found.sum()))
        return found

    def lookup_on_prefix(self, ids: Ids) -> int:
        """Index of the last block of the leading run of stored blocks; -1 when the first is missing."""
        keys = as_ids(ids)
        found = self._contains(keys)
        leading = len(keys) if found.all() else int(np.argmin(found))
        self.counters.looked_up(len(keys), leading)
        return leading - 1

    def _contains(self, keys: np.ndarray) -> np.ndarray:
        self._is_used()
        if not self.health.reads.allows():
            return np.zeros(len(keys), bool)
        return self._catalog.contains(keys)

    def prefetch(self, ids: Ids) -> None:
        """Ask the kernel to read blocks ahead into the page cache. Returns at once."""
        if self.health.reads.allows():
            self._loader.prefetch(as_ids(ids))

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
        """Load blocks, or one shard of each, into memory.

        Args:
            ids: n block ids.
            shards: shard index, one for all or one for each block; None for 0.
            addresses: int64 (n, k), where the k components of each block go. The memory must stay
                valid until the task is done; what a failed block leaves there is undefined.
            sizes: bytes of each component, int or int64 (k,).
            background: False runs the batch in the calling thread and returns a task that is done.
        """
        keys = as_ids(ids)
        which = as_shards(shards, len(keys))
        matrix, widths = address_matrix(addresses, sizes, len(keys))
        self._is_used()

        def load(deadline: float) -> np.ndarray:
            status = self._loader.load(keys, which, matrix, widths, deadline)
            if self._keeper is None:
                self._recency.settle()
                self._writer.flush()
            return status

        def run() -> np.ndarray:
            deadline = time.monotonic() + self._timeout
            return self.health.load(
                lambda: load(deadline), self.counters, len(keys), int(widths.sum()), deadline
            )

        def refuse() -> np.ndarray:
            status = np.full(len(keys), Reason.BREAKER, np.uint8)
            self.counters.loaded(status, int(widths.sum()))
            return status

        return self._start(run, refuse, self.health.reads, self._loads if background else None)

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
        """Store blocks, or one shard of each. What is stored already is not written again.

        Args:
            n_shards: shards that make up each block; it is found by `lookup` when all are stored.
            parents: n ids of the blocks before these in their chains, zeros where unknown.
            ancestors: ids of the blocks before the first, in the order of the chain. Not needed by a store
                on one root; `StripedStore` keeps chains on each root together by them.

        Other arguments are as for `load_data`; the memory must not change until the task is done.
        When the task says a block is stored, every process sees it and the death of this one cannot
        undo it. (After a power failure it may be a miss.)
        """
        keys = as_ids(ids)
        which = as_shards(shards, len(keys))
        if not 0 < n_shards <= MAX_SHARDS:
            raise ValueError(f"n_shards = {n_shards}: must be in 1..{MAX_SHARDS}")
        if shards is not None and which.size and int(which.max()) >= n_shards:
            raise ValueError(f"shard {int(which.max())} of {n_shards}")
        chain = np.zeros_like(keys) if parents is None else as_ids(parents)
        if len(chain) != len(keys):
            raise ValueError(f"{len(chain)} parents for {len(keys)} blocks")
        matrix, widths = address_matrix(addresses, sizes, len(keys))
        self._is_used()
        length = int(widths.sum())
        place = self.health.queue.admit(length, len(keys))
        rows = None
        if place.blocks < len(keys):  # what is stored already needs no place
            place.release()
            known = self._known(keys, n_shards)
            place = self.health.queue.admit(length, len(keys) - int(np.count_nonzero(known)))
            rows = np.flatnonzero(known | (np.cumsum(~known) <= place.blocks))

        def run() -> np.ndarray:
            deadline = time.monotonic() + self._timeout
            with place:
                if rows is None:
                    status = self._dumper.dump(keys, which, n_shards, chain, matrix, widths, deadline)
                else:
                    status = np.full(len(keys), Reason.QUEUE, np.uint8)
                    status[rows] = self._dumper.dump(
                        keys[rows], which[rows], n_shards, chain[rows], matrix[rows], widths, deadline
                    )
                    self.counters.dumped(status[status == Reason.QUEUE], 0, length)
            if self._keeper is None:
                self._recency.settle()
            return status

        def refuse() -> np.ndarray:
            status = np.where(self._known(keys, n_shards), Reason.OK, Reason.BREAKER).astype(np.uint8)
            with place:
                self.counters.dumped(status, 0, length)
            return status

        return self._start(run, refuse, self.health.writes, self._dumps if background else None)

    def _known(self, keys: np.ndarray, n_shards: int) -> np.ndarray:
        """bool (n,): which blocks of a dump are sure to be stored already."""
        return self._catalog.index.contains(keys) if n_shards == 1 else np.zeros(len(keys), bool)

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
            ids, shards, addresses, sizes, n_shards=n_shards, parents=parents, background=background
        ).keep(buffers)

    def check(self, task: Task) -> bool:
        """Is the task done?"""
        return task.done()

    def wait(self, task: Task, timeout: float | None = None) -> np.ndarray:
        """bool (n,): which blocks of a task were loaded, or are stored. Raises `TimeoutError`."""
        return task.results(timeout)

    def _start(
        self,
        work: Callable[[], np.ndarray],
        refuse: Callable[[], np.ndarray],
        breaker: Breaker,
        pool: ThreadPoolExecutor | None,
    ) -> Task:
        if pool is not None and os.getpid() == self._pid:
            # Not behind tasks that hang: they may have every thread of the pool.
            if breaker.allows():
                return Task(pool.submit(work))
            work = refuse
        return Task.of(work())

    # -- administration -----------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Blocks, bytes, capacity and counters, as this process sees them now. Makes a few system calls."""
        return store_stats(
            self.root, self.namespace, self._catalog, self.counters, self.evictor.total, self.health
        )

    def verify(
        self, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
    ) -> VerifyReport:
        """Read every block of the namespace and compare its checksum.

        Args:
            progress: told (blocks done, blocks in all) now and then.
            repair: record damaged blocks as gone and free their space. Without it nothing on disk changes.

        Raises `StoreError` when a repair is asked for and the store is read-only, or the repair cannot be
        written.
        """
        if repair:
            self._refuse_read_only("verify --repair")
        self._catalog.refresh(max_age=0, budget=float("inf"))
        report, damaged = verify_blocks(self._catalog, self._files, self.engine, progress)
        if repair and len(damaged):
            try:
                deadline = time.monotonic() + _ADMINISTRATION_SECONDS
                report.repaired = self.evictor.remove(self.namespace, damaged, deadline).blocks
            except (NoSpace, OSError) as error:
                raise StoreError(f"verify --repair: cannot be recorded: {error}") from error
        return report

    def _refuse_read_only(self, what: str) -> None:
        if self.root.read_only_because:
            raise StoreError(
                f"{what}: the store at {self.root.path} is read-only ({self.root.read_only_because})"
            )

    def clear(self) -> int:
        """Delete the segments of this namespace, of all writers; the number of blocks that went.

        Touches nothing else (invariant I7). Loads under way finish with correct bytes; dumps under way
        may be lost. Raises `StoreError` when the store is read-only.
        """
        self._refuse_read_only("clear")
        self._catalog.refresh(max_age=0, budget=float("inf"))
        blocks = len(self._catalog.index)
        self._writer.close()
        directory = self.root.namespace_path(self.namespace)
        try:
            names = self._calls.listdir(directory)
        except FileNotFoundError:
            return 0
        for name in {parsed[0] for parsed in map(SegmentName.parse, names) if parsed}:
            # A journal without its segment means nothing; the other way round, space would leak.
            if self._delete(os.path.join(directory, name.data)):
                self._catalog.forget(name)
                self._delete(os.path.join(directory, name.journal))
        self._files.close()
        return blocks - len(self._catalog.index)

    def _delete(self, path: str) -> bool:
        try:
            self._calls.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot delete %s: %s", path, error)
            return False
        return True

    def close(self) -> None:
        """Let go of files and threads. Not needed for correctness (invariant I9). Idempotent."""
        if os.getpid() == self._pid:
            if self._keeper is not None:
                self._keeper.close(timeout=1.0)
            for pool in (self._loads, self._dumps):
                pool.shutdown(wait=True)
            self.engine.close()
        self._writer.close()
        self.evictor.close()
        self._loader.close()
        self._files.close()
        served, self._served = self._served, None
        if served is not None:
            close_quietly(self._calls, served)

    def __enter__(self) -> PosixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
