"""Several instances of the store on one directory, as if processes, against the reference in memory.

Must hold 5 and 6, invariants I1 and I2: whatever the order of dumps, shards, clears, evictions, restarts and
kills, no wrong byte is ever returned, and what was reported stored and neither cleared nor evicted is loaded
by every instance. What was evicted is gone for all, and no block leaves before those behind it in its chain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
)
from memory_store import MemoryDisk, MemoryStore
from store_contract import make_id, payload

from posix_store import PosixStore, Reason, StoreError, Syscalls, compaction

NAMESPACE = "fedcba9876543210" * 2
WITHIN = 0.1
"""Seconds after which what one process stored is seen by every other (must hold 6)."""

SHARDS = {name: (1, 1, 2, 3)[name % 4] for name in range(16)}
"""Blocks by name, and the number of shards of each."""
LENGTHS = {name: (100, 5000)[name % 2] for name in SHARDS}
PARENTS = {name: name - 1 for name in SHARDS if name % 8}
"""Two chains of eight blocks."""

names = st.sampled_from(sorted(SHARDS))


class MortalSyscalls(Syscalls):
    """Dies like a process: every descriptor is closed, locks go with them, and nothing is called again."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._dead = False

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        fd = super().open(path, flags, mode)
        self._held.add(fd)
        return fd

    def close(self, fd: int) -> None:
        assert not self._dead, "a dead process closes nothing"
        self._held.discard(fd)
        super().close(fd)

    def kill(self) -> None:
        self._dead = True
        for fd in self._held:
            os.close(fd)


@dataclass(eq=False)
class Process:
    """One instance: the store, its calls, and what the reference says it must know."""

    store: PosixStore
    calls: MortalSyscalls
    reference: MemoryStore
    generation: int
    writable: bool
    may_be_stale: bool = False
    """Another instance has cleared or evicted since this one looked: it may take for stored what is gone."""


@dataclass
class Versions:
    """All bytes that were ever dumped, by block and shard. Every writer has rounding of its own."""

    known: dict[tuple[int, int], dict[bytes, int]] = field(default_factory=dict)

    def make(self, name: int, shard: int, generation: int) -> bytes:
        data = payload((name, generation), LENGTHS[name], shard)
        self.known.setdefault((name, shard), {})[data] = generation
        return data


class StoreMachine(RuleBasedStateMachine):
    processes = Bundle("processes")

    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.top = Path(tempfile.mkdtemp(prefix="store-model-", dir=shm if shm.is_dir() else None))
        self.disk = MemoryDisk()
        self.versions = Versions()
        self.running: list[Process] = []
        self.generation = 0
        # Journals are rewritten however small they are.
        self.patch = mock.patch.object(compaction, "LEAST_BYTES", 0)
        self.patch.start()

    def teardown(self) -> None:
        try:
            self.everybody_has_everything()
            late = self._start(writable=False)
            self._must_have(late, set(self.disk.blocks))
        finally:
            for process in self.running:
                process.store.close()
            self.patch.stop()
            shutil.rmtree(self.top)

    # -- life of processes --------------------------------------------------------------------------

    @initialize(target=processes)
    def first(self) -> Process:
        return self._start(writable=True)

    @rule(target=processes, writable=st.sampled_from([True, True, False]))
    def start(self, writable: bool) -> Process:
        return self._start(writable)

    def _start(self, writable: bool) -> Process:
        """Every other one does not compare checksums: it must not take a hole for a block."""
        calls = MortalSyscalls()
        self.generation += 1
        store = PosixStore(
            str(self.top / "store"), NAMESPACE, capacity=64 << 20, min_free=0, segment_bytes=32 << 10,
            io_threads=1, timeout=60, maintenance=False, verify=self.generation % 2 == 0, writable=writable,
            syscalls=calls,
        )  # fmt: skip
        process = Process(store, calls, MemoryStore(self.disk), self.generation, writable)
        self.running.append(process)
        return process

    @rule(process=consumes(processes))
    def close(self, process: Process) -> None:
        process.store.close()
        self.running.remove(process)

    @rule(process=consumes(processes))
    def kill(self, process: Process) -> None:
        """Must hold 5, between two calls: nothing is sealed, nothing is given back, locks are gone."""
        process.calls.kill()
        self.running.remove(process)

    @rule(target=processes, process=consumes(processes), writable=st.booleans(), kill=st.booleans())
    def restart(self, process: Process, writable: bool, kill: bool) -> Process:
        (self.kill if kill else self.close)(process)
        return self._start(writable)

    # -- dumps --------------------------------------------------------------------------------------

    @rule(process=processes, blocks=st.lists(names, max_size=6))
    def dump(self, process: Process, blocks: list[int]) -> None:
        """All shards of some blocks, in one call for each number of shards; a block may be named twice."""
        for n_shards in (1, 2, 3):
            rows = [(b, shard) for b in blocks if SHARDS[b] == n_shards for shard in range(n_shards)]
            for length in set(LENGTHS.values()):
                self._dump(process, [row for row in rows if LENGTHS[row[0]] == length], n_shards)

    @rule(process=processes, blocks=st.lists(names, max_size=6), shard=st.integers(0, 2))
    def dump_one_shard(self, process: Process, blocks: list[int], shard: int) -> None:
        """One shard of some blocks: the others come from other calls, or never."""
        for n_shards in (2, 3):
            for length in set(LENGTHS.values()):
                rows = [
                    (b, shard)
                    for b in blocks
                    if SHARDS[b] == n_shards and shard < n_shards and LENGTHS[b] == length
                ]
                self._dump(process, rows, n_shards)

    def _dump(self, process: Process, rows: list[tuple[int, int]], n_shards: int) -> None:
        ids, shards = [make_id(name) for name, _ in rows], [shard for _, shard in rows]
        data = [self.versions.make(name, shard, process.generation) for name, shard in rows]
        parents = [make_id(PARENTS[name]) if name in PARENTS else bytes(16) for name, _ in rows]
        status = process.store.dump(
            ids, shards, data, n_shards=n_shards, parents=parents, background=False
        ).status()
        if not process.writable:
            known = process.store.lookup(ids).tolist()
            assert status.tolist() == [Reason.OK if hit else Reason.READ_ONLY for hit in known]
            return
        assert (status == Reason.OK).all()
        if process.may_be_stale:
            self._dumped_by_a_stale_process(process, ids, data, n_shards)
        else:
            process.reference.dump(ids, shards, data, n_shards=n_shards)

    def _dumped_by_a_stale_process(
        self, process: Process, ids: list[bytes], data: list[bytes], n_shards: int
    ) -> None:
        """It may have skipped what it took for stored; of whole blocks, what it has after a look counts."""
        self._look(process)
        if n_shards == 1:
            seen = process.store.lookup(ids).tolist()
            kept = [row for row, hit in enumerate(seen) if hit]
            process.reference.dump([ids[row] for row in kept], None, [data[row] for row in kept])

    # -- loads --------------------------------------------------------------------------------------

    @rule(process=processes, blocks=st.lists(names, max_size=8))
    def load(self, process: Process, blocks: list[int]) -> None:
        """At any moment: a block is whole and of one writer, or it is a miss."""
        for name in blocks:
            self._load(process, name)

    def _load(self, process: Process, name: int) -> bool:
        n_shards = SHARDS[name]
        ids, shards = [make_id(name)] * n_shards, list(range(n_shards))
        buffers = [bytearray(LENGTHS[name]) for _ in shards]
        status = process.store.load(ids, shards, buffers, background=False).status()
        writers = set()
        for shard in shards:
            if status[shard] == Reason.OK:
                written = self.versions.known[name, shard]
                assert bytes(buffers[shard]) in written, "bytes that nobody has dumped under this id"
                writers.add(written[bytes(buffers[shard])])
            else:
                assert status[shard] in (Reason.ABSENT, Reason.EVICTED)
        assert len(writers) <= 1, "a block put together from the shards of two writers"
        return bool((status == Reason.OK).all())

    @rule(process=processes, block=names)
    def load_wrong_length(self, process: Process, block: int) -> None:
        buffer = bytearray(LENGTHS[block] + 1)
        status = process.store.load([make_id(block)], None, [buffer], background=False).status()
        assert status[0] in (Reason.ABSENT, Reason.LENGTH)

    @rule(process=processes, blocks=st.lists(names, max_size=8))
    def lookup(self, process: Process, blocks: list[int]) -> None:
        """Nothing is found that was never stored, and the two look-ups agree."""
        ids = [make_id(name) for name in blocks]
        found = process.store.lookup(ids).tolist()
        for name, hit in zip(blocks, found, strict=True):
            assert not hit or (name, SHARDS[name] - 1) in self.versions.known
        if not process.may_be_stale:
            assert process.store.lookup_on_prefix(ids) >= [*found, False].index(False) - 1

    # -- clear --------------------------------------------------------------------------------------

    @rule(process=processes)
    def clear(self, process: Process) -> None:
        """All instances' blocks go, the incomplete ones too; only the one that cleared knows at once."""
        if not process.writable:
            with contextlib.suppress(StoreError):
                process.store.clear()
                raise AssertionError("a read-only instance has cleared the store")
            return
        process.store.clear()
        process.reference.clear()
        for other in self.running:
            if other is not process:
                other.may_be_stale = True
                other.reference = MemoryStore(self.disk)
        assert not process.store.lookup([make_id(name) for name in SHARDS]).any()

    # -- evictions ----------------------------------------------------------------------------------

    @rule(process=processes, amount=st.sampled_from([1, 6000, 20_000, 1 << 30]))
    def evict(self, process: Process, amount: int) -> None:
        """What goes is gone for all, whoever stored it; and nothing goes that something else hangs on."""
        if not process.writable:
            return
        self._look(process)
        before = self._found_by(process)
        report = process.store.evictor.evict(amount, time.monotonic() + 60)
        left = self._found_by(process)
        assert left <= before and report.blocks == len(before - left)
        assert amount < 1 << 30 or not left
        cut = {name for name in left if PARENTS.get(name) in before - left}
        assert not cut, f"{cut} hang on blocks that were evicted"
        self._gone(process, before - left)
        if report.segments:
            for other in self.running:
                other.reference.forget_shards()

    @rule(process=processes)
    def tidy(self, process: Process) -> None:
        """Garbage is collected, segments are deleted, journals are rewritten: no block is lost by it."""
        if process.writable:
            self._look(process)
            before = self._found_by(process)
            process.store.evictor.tidy(time.monotonic() + 60)
            assert self._found_by(process) == before

    def _found_by(self, process: Process) -> set[int]:
        found = process.store.lookup([make_id(name) for name in SHARDS]).tolist()
        return {name for name, hit in zip(SHARDS, found, strict=True) if hit}

    def _gone(self, process: Process, gone: set[int]) -> None:
        for name in gone:
            self.disk.blocks.pop(make_id(name), None)
        for other in self.running:
            other.may_be_stale |= other is not process and bool(gone)

    # -- what must be there -------------------------------------------------------------------------

    @rule(target=processes)
    @precondition(lambda self: self.running)
    def everybody_has_everything(self) -> object:
        """Must hold 6: within 100 ms of a miss, every instance loads what any of them reported stored."""
        for process in self.running:
            self._look(process)
        for process in self.running:
            self._must_have(process, set(self.disk.blocks))
        return multiple()

    def _look(self, process: Process) -> None:
        """A miss that is old enough makes an instance look at the directory."""
        time.sleep(0.021)
        process.store.lookup([make_id("never stored")])
        process.may_be_stale = False

    def _must_have(self, process: Process, blocks: set[bytes]) -> None:
        deadline = time.monotonic() + WITHIN
        wanted = [name for name in SHARDS if make_id(name) in blocks]
        ids = [make_id(name) for name in wanted]
        while not process.store.lookup(ids).all():
            assert time.monotonic() < deadline, f"not seen: {wanted}"
            time.sleep(0.005)
        assert all(self._load(process, name) for name in wanted), "found, but not loaded"
        counted = process.store.counters.snapshot()
        assert counted["load_blocks"] == counted["loaded_blocks"] + sum(counted["misses"].values())


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=45, stateful_step_count=25)
