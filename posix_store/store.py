"""The block store: whole batches of named blocks in and out of memory, verified."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from posix_store.buffers import addresses_of
from posix_store.capacity import SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.counters import Counters
from posix_store.dumping import Dumper
from posix_store.engine import Engine, PythonEngine
from posix_store.errors import StoreError
from posix_store.files import SegmentFiles
from posix_store.ids import Ids, as_ids, as_shards
from posix_store.loading import Loader
from posix_store.reports import StoreStats, VerifyReport, store_stats, verify_blocks
from posix_store.root import StoreRoot
from posix_store.segment import NAMESPACE_NAME, SegmentName
from posix_store.syscalls import Syscalls
from posix_store.task import Task
from posix_store.transfer import component_sizes
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

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
        verify: compare the CRC-32C of every block that is loaded.
        timeout: seconds for one batch; blocks whose turn comes later are counted as `timeout`.
        writable: False never writes anything, and needs a store to be there.
        engine: moves the bytes; None: the pure-Python engine. Closed with the store.
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
        writable: bool = True,
        engine: Engine | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        if not NAMESPACE_NAME.fullmatch(namespace):
            raise StoreError(f"namespace = {namespace!r}: must be 32 lower-case hex digits")
        _positive(int, capacity=capacity, segment_bytes=segment_bytes, io_threads=io_threads)
        _positive(float, timeout=timeout)
        if min_free is not None and min_free < 0:
            raise StoreError(f"min_free = {min_free}: must be 0 or more bytes")
        calls = syscalls or Syscalls()
        self.namespace = namespace
        self.root = StoreRoot(root, capacity=capacity, create=writable, syscalls=calls)
        self.engine = engine or PythonEngine(calls, io_threads)
        self.counters = Counters()
        self._pid = os.getpid()
        self._timeout = timeout
        self._calls = calls
        self._tasks = ThreadPoolExecutor(2, thread_name_prefix="posix-store-task")
        self._catalog = Catalog(self.root, namespace)
        self._files = SegmentFiles(self._catalog, namespace, calls)
        self._space = SpaceKeeper(self.root, min_free, chunk=min(64 << 20, segment_bytes // 4))
        self._writer = SegmentWriter(
            self.root, namespace, identity or {}, self._space, self._catalog, segment_bytes
        )
        self._loader = Loader(
            self._catalog, self._files, self._writer, self.engine, self.counters, io_threads, verify
        )
        self._dumper = Dumper(
            self._catalog, self._writer, self.engine, self.counters, io_threads, self.root.read_only_because
        )
        self._catalog.refresh(max_age=0, budget=float("inf"))

    # -- look-up ------------------------------------------------------------------------------------

    def lookup(self, ids: Ids) -> np.ndarray:
        """bool (n,): which blocks are stored, complete with all their shards.

        No system call for what is known. When something is missing, the journals of other writers are
        looked at once, unless that was done in the last 20 ms.
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
        found = self._catalog.index.contains(keys)
        if not found.all() and self._catalog.refresh():
            found = self._catalog.index.contains(keys)
        return found

    def prefetch(self, ids: Ids) -> None:
        """Ask the kernel to read blocks ahead into the page cache. Returns at once."""
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
        keys, which = as_ids(ids), as_shards(shards, len(as_ids(ids)))
        matrix, widths = _matrix(addresses, sizes, len(keys))
        return self._start(
            lambda: self._loader.load(keys, which, matrix, widths, self._deadline()), background
        )

    def dump_data(
        self,
        ids: Ids,
        shards: Shards,
        addresses: np.ndarray,
        sizes: int | np.ndarray,
        *,
        n_shards: int = 1,
        parents: Ids | None = None,
        background: bool = True,
    ) -> Task:
        """Store blocks, or one shard of each. What is stored already is not written again.

        Args:
            n_shards: shards that make up each block; it is found by `lookup` when all are stored.
            parents: n ids of the blocks before these in their chains, zeros where unknown.

        Other arguments are as for `load_data`; the memory must not change until the task is done.
        When the task says a block is stored, every process sees it and the death of this one cannot
        undo it. (After a power failure it may be a miss.)
        """
        keys = as_ids(ids)
        which = as_shards(shards, len(keys))
        as_shards(n_shards - 1, 1)
        if which.size and int(which.max()) >= n_shards:
            raise ValueError(f"shard {int(which.max())} of {n_shards}")
        chain = np.zeros_like(keys) if parents is None else as_ids(parents)
        if len(chain) != len(keys):
            raise ValueError(f"{len(chain)} parents for {len(keys)} blocks")
        matrix, widths = _matrix(addresses, sizes, len(keys))
        return self._start(
            lambda: self._dumper.dump(keys, which, n_shards, chain, matrix, widths, self._deadline()),
            background,
        )

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

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _start(self, work: Callable[[], np.ndarray], background: bool) -> Task:
        if background and os.getpid() == self._pid:
            return Task(self._tasks.submit(work))
        future: Future[np.ndarray] = Future()
        future.set_result(work())
        return Task(future)

    # -- administration -----------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Blocks, bytes, capacity and counters, as this process sees them now. Makes a few system calls."""
        return store_stats(self.root, self.namespace, self._catalog, self.counters)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every block of the namespace and compare its checksum. Changes nothing on disk.

        Args:
            progress: told (blocks done, blocks in all) now and then.
        """
        self._catalog.refresh(max_age=0, budget=float("inf"))
        return verify_blocks(self._catalog, self._files, self.engine, progress)

    def clear(self) -> int:
        """Delete the segments of this namespace, of all writers; the number of blocks that went.

        Touches nothing else (invariant I7). Loads under way finish with correct bytes; dumps under way
        may be lost. Raises `StoreError` when the store is read-only.
        """
        if self.root.read_only_because:
            raise StoreError(
                f"clear: the store at {self.root.path} is read-only ({self.root.read_only_because})"
            )
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
            self._tasks.shutdown(wait=True)
            self.engine.close()
        self._writer.close()
        self._files.close()

    def __enter__(self) -> PosixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _positive(kind: type, **settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not (isinstance(value, int | kind) and 0 < value < float("inf")):
            raise StoreError(f"{name} = {value!r}: must be a {kind.__name__} of more than 0")


def _matrix(addresses: np.ndarray, sizes: int | np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    matrix = np.asarray(addresses, np.int64)
    if matrix.ndim == 1:
        matrix = matrix.reshape(-1, 1)
    if matrix.ndim != 2 or len(matrix) != count:
        raise ValueError(
            f"addresses of shape {matrix.shape} for {count} blocks; (blocks, components) is expected"
        )
    if matrix.size and matrix.min() <= 0:
        raise ValueError("an address is not positive")
    return matrix, component_sizes(sizes, matrix)
