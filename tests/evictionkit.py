"""What the tests of faults and of deaths during eviction share: a ledger, and what must hold afterwards.

The ledger follows a store with `mini_reader`, which knows nothing but the format: what was stored, what was
evicted, and what went with a whole segment. So it can tell which blocks must be found afterwards, and which
must never be found again. The lives that it follows are in `evictionlives`.
"""

import errno
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mini_reader
import numpy as np
import pytest
from crc32c import crc32c
from faults import Fault, FaultySyscalls
from storekit import (
    NAMESPACE,
    PAGE,
    allocated,
    assert_counters_add_up,
    assert_no_lock_is_held,
    ids_of,
    load,
    open_store,
    payloads,
)

from posix_store import PosixStore, Reason, catalog, clock, compaction, dumping, evictor, freeing, upkeep
from posix_store.pins import update_pins
from posix_store.syscalls import FALLOC_PUNCH_HOLE

OTHER = "fedcba9876543210" * 2
NAMESPACES = (NAMESPACE, OTHER)
LENGTH = 9000
"""Bytes of a block: no multiple of 4 KiB or 16, and enough for a hole in the middle of an extent."""
CAPACITY = 64 * PAGE
SEGMENT = 64 << 10
BATCH = 3
LEFT_EMPTY = 10 * PAGE
"""Bytes that a root of two namespaces may take when all blocks have been evicted."""
Place = tuple[bytes, int]
"""The uid of a segment and an offset in it."""


# -- time ---------------------------------------------------------------------------------------------------


class Times:
    """Time as a store sees it: it looks at the directory only when told, and the calendar can jump."""

    def __init__(self) -> None:
        self.looks = 1000.0
        self.ahead = 0.0

    def pass_by(self, seconds: float) -> None:
        self.looks += seconds
        self.ahead += seconds

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give these times to the store's modules, and let nothing depend on how fast the machine is."""
        looks = ModuleType("time")
        looks.monotonic = lambda: self.looks  # type: ignore[attr-defined]
        wall = ModuleType("time")
        wall.time = lambda: time.time() + self.ahead  # type: ignore[attr-defined]
        wall.monotonic = time.monotonic  # type: ignore[attr-defined]
        patch.setattr(catalog, "time", looks)
        for module in (clock, dumping, evictor, freeing):
            patch.setattr(module, "time", wall)
        patch.setattr(dumping, "MOST_WAIT", 60.0)
        patch.setattr(upkeep, "ROUND_SECONDS", 60.0)
        patch.setattr(compaction, "LEAST_BYTES", 128)
        # The independent one is in Python, and there are thousands of records to read.
        patch.setattr(mini_reader, "crc32c", crc32c)


# -- the ledger ---------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What became of the blocks of a root, as its journals say."""

    root: Path
    promised: dict[tuple[str, bytes], set[Place]] = field(default_factory=dict)
    """Blocks that a dump has reported as stored, and where they were then."""
    evicted: set[Place] = field(default_factory=set)
    recorded: dict[Place, set[bytes]] = field(default_factory=dict)
    """Evictions, and the segments in the journals of which they were."""
    dropped: set[Place] = field(default_factory=set)
    """Places of blocks that stood in a segment when it was deleted."""

    def standing(self, namespace: str) -> dict[bytes, set[Place]]:
        """The whole blocks of a namespace and where their shards are."""
        found = mini_reader.blocks(self.root, namespace)
        return {
            block: {(segment.uid, record.offset) for segment, record in places}
            for block, places in found.items()
        }

    def look(self) -> None:
        """Note what journals say is evicted. That they may stop to say so later does not undo it."""
        for namespace in NAMESPACES:
            for segment, records in mini_reader.journals(self.root / namespace, namespace):
                here = {(one.parent, one.offset) for one in records if one.kind == mini_reader.EVICT}
                for place in here:
                    self.recorded.setdefault(place, set()).add(segment.uid)
                self.evicted |= here

    def stored(self, namespace: str, ids: np.ndarray) -> None:
        """A dump has reported these blocks (uint8 (n, 16)) as stored."""
        self.look()
        standing = self.standing(namespace)
        for block in map(bytes, ids):
            places = self.promised.get((namespace, block), set())
            if block in standing:
                self.promised[namespace, block] = standing[block]
            else:  # the process that reported it may not have noticed yet that others evicted it
                assert places & (self.evicted | self.dropped), "reported as stored, and never was"

    def deleting(self, path: str) -> set[Place]:
        """A segment is about to be deleted: the places of the blocks that stand in it."""
        self.look()
        namespace = os.path.basename(os.path.dirname(path))
        uid = Path(path).read_bytes()[12:28]
        places = {p for at in self.standing(namespace).values() if uid in {u for u, _ in at} for p in at}
        self.dropped |= places
        return places

    @property
    def carried(self) -> bool:
        """Was an eviction recorded in more than one journal, one after the other?"""
        return any(len(journals) > 1 for journals in self.recorded.values())

    def merge(self, other: "Ledger") -> None:
        """Add what another process has noted."""
        self.promised |= other.promised
        self.evicted |= other.evicted
        self.dropped |= other.dropped

    def lost(self) -> list[tuple[str, bytes]]:
        """Blocks that were promised and are not there any more."""
        standing = {namespace: self.standing(namespace) for namespace in NAMESPACES}
        return [(namespace, block) for namespace, block in self.promised if block not in standing[namespace]]

    def check(self) -> None:
        """Nothing is lost that was not evicted, and nothing that was evicted has come back."""
        self.look()
        gone = self.evicted | self.dropped
        for namespace, block in self.lost():
            assert self.promised[namespace, block] & gone, f"{block.hex()} is lost"
        for namespace in NAMESPACES:
            for block, places in self.standing(namespace).items():
                assert not places & self.evicted, f"{block.hex()} has come back"


class Witness(FaultySyscalls):
    """System calls with faults, whose deletions and replacements are noted in a ledger.

    Args:
        punching: does the file system punch holes?
        telling: does it say where holes are?
    """

    def __init__(self, ledger: Ledger, *faults: Fault, punching: bool = True, telling: bool = True) -> None:
        super().__init__(*faults)
        self.ledger = ledger
        self.punching = punching
        self.telling = telling
        self.on_news: Callable[[Ledger], None] = lambda ledger: None
        self.freed: Counter[str] = Counter()
        """Holes punched, segments deleted and journals rewritten."""
        self.on_freeing: Callable[[], None] = lambda: None
        """Called after each hole that is punched and each segment that is deleted."""

    def unlink(self, path: str) -> None:
        if not path.endswith(".seg") or not os.path.exists(path):
            super().unlink(path)
            return
        places = self.ledger.deleting(path)
        self.on_news(self.ledger)
        try:
            with self._watched("unlink"):
                super().unlink(path)
        except OSError:
            self.ledger.dropped -= places
            raise

    def rename(self, source: str, target: str) -> None:
        if target.endswith(".idx"):
            self.ledger.look()
            self.on_news(self.ledger)
        super().rename(source, target)
        self.freed["compact"] += target.endswith(".idx")

    def seek_hole(self, fd: int, offset: int) -> int:
        if not self.telling:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek_hole(fd, offset)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        if not mode & FALLOC_PUNCH_HOLE:
            super().fallocate(fd, mode, offset, length)
            return
        if not self.punching:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        with self._watched("punch"):
            super().fallocate(fd, mode, offset, length)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        yield
        self.freed[what] += 1
        self.on_freeing()


# -- afterwards ---------------------------------------------------------------------------------------------


@dataclass
class Remains:
    """A root and what stores have done there."""

    root: Path
    times: Times
    ledger: Ledger
    capacity: int = CAPACITY
    segment_bytes: int = SEGMENT
    punching: bool = True
    watched: bool = False
    """Has somebody the root open all the time?"""
    whole: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Ids of all blocks that anybody tried to store, by namespace."""
    sharded: list[np.ndarray] = field(default_factory=list)
    """The same for blocks in two shards, which are all in `NAMESPACE`."""

    def options(self, **others: Any) -> dict[str, Any]:
        """What a store in this root is opened with."""
        calls = Witness(self.ledger, punching=self.punching)
        return {
            "capacity": self.capacity, "segment_bytes": self.segment_bytes, "io_threads": 1, "timeout": 60.0,
            "syscalls": calls, **others,
        }  # fmt: skip

    @contextmanager
    def opened(self, namespace: str, **options: Any) -> Iterator[PosixStore]:
        """A new store, without faults."""
        self.times.pass_by(0.03)
        with open_store(self.root, **self.options(namespace=namespace, **options)) as store:
            yield store

    def check(self) -> None:
        """No lock is held, and everything is as the journals say, whether bytes are verified or not."""
        assert_locks_are_free(self.root, self.watched)
        assert allocated(self.root) <= self.capacity, "more than the capacity"
        self.ledger.check()
        for namespace in NAMESPACES:
            for verify in (True, False):
                with self.opened(namespace, verify=verify) as store:
                    self._check_contents(store)

    def _check_contents(self, store: PosixStore) -> None:
        standing = self.ledger.standing(store.namespace)
        every = np.concatenate(self.whole[store.namespace])
        there = np.array([bytes(block) in standing for block in every])
        assert (store.lookup(every) == there).all(), "look-ups differ from what the journals say"
        assert (load(store, every, LENGTH) == np.where(there, Reason.OK, Reason.ABSENT)).all()
        if store.namespace == NAMESPACE and self.sharded:
            every = np.concatenate(self.sharded)
            there = np.array([bytes(block) in standing for block in every])
            assert (store.lookup(every) == there).all(), "look-ups differ from what the journals say"
            for shard in range(2):
                assert (load(store, every[there], LENGTH, shard) == Reason.OK).all()
        report = store.verify()
        assert report.ok, report

    def store_more(self, seeds: range) -> None:
        """There is room for new blocks."""
        with self.opened(NAMESPACE) as store:
            for seed in seeds:
                fresh = ids_of(900_000 + seed, self.capacity // 4 // LENGTH)
                assert (dump_chain(store, fresh) == Reason.OK).all(), "there is no room any more"
                assert (load(store, fresh, LENGTH) == Reason.OK).all()
                assert allocated(self.root) <= self.capacity, "more than the capacity"
                self.whole[NAMESPACE].append(fresh)
                self.ledger.stored(NAMESPACE, fresh)
            assert_counters_add_up(store)

    def check_space(self) -> None:
        """As much can be stored as ever, and when all is evicted there is nothing left."""
        self.store_more(range(4))
        with self.opened(NAMESPACE) as store:
            update_pins(store.root, NAMESPACE, remove=None)
            store.evictor.evict(1 << 40, float("inf"))
        with self.opened(NAMESPACE) as store:
            store.evictor.tidy(float("inf"))
        left = allocated(self.root)
        assert left <= LEFT_EMPTY, f"{left} bytes in a store without blocks"
        assert_locks_are_free(self.root, self.watched)


def dump_chain(store: PosixStore, ids: np.ndarray, shard: int = 0, shards: int = 1) -> np.ndarray:
    """Dump the right bytes of a chain of blocks; uint8 (n,) of `Reason`."""
    parents = np.concatenate([np.zeros((1, 16), np.uint8), ids[:-1]])
    rows = list(payloads(ids, LENGTH, shard))
    return store.dump(ids, shard, rows, n_shards=shards, parents=parents, background=False).status()


def assert_locks_are_free(root: Path, watched: bool = False) -> None:
    """Nobody holds the locks of space, of evictions and of writers, or marks a namespace as served."""
    assert_no_lock_is_held(root)
    for path in [root / "EVICT.lock", *([] if watched else root.glob("*/SERVED.lock"))]:
        if path.exists():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
