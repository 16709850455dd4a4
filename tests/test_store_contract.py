"""PosixStore and the reference in memory, put through the contract of every store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_store import MemoryStore
from store_contract import StoreContract, dump_bytes, load_bytes, make_ids, payload

from posix_store import PosixStore, Reason

NAMESPACE = "0123456789abcdef" * 2


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory in memory where there is one: these tests are of the code, not of the disk."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="store-contract-", dir=shm if shm.is_dir() else None))
    yield path / "store"
    shutil.rmtree(path)


class TestMemoryStore(StoreContract):
    """The reference itself is held to the contract, or it proves nothing."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    def reopen(self, store: MemoryStore) -> MemoryStore:
        store.close()
        return MemoryStore(store.disk)


class TestPosixStore(StoreContract):
    options: dict[str, Any] = {"segment_bytes": 4 << 20}  # noqa: RUF012

    def make(self, path: Path | str) -> PosixStore:
        return PosixStore(str(path), NAMESPACE, capacity=1 << 30, min_free=0, timeout=60, **self.options)

    @pytest.fixture
    def store(self, root: Path) -> Iterator[PosixStore]:
        self._opened = [self.make(root)]
        yield self._opened[0]
        for store in self._opened:
            store.close()

    def reopen(self, store: PosixStore) -> PosixStore:
        store.close()
        self._opened.append(self.make(store.root.path))
        return self._opened[-1]

    def test_counters_add_up(self, store: PosixStore) -> None:
        """Everything asked for is accounted for once, duplicates and misses included."""
        ids = make_ids(0, 1, 0)
        dump_bytes(store, ids, [payload(i, 100) for i in (0, 1, 0)])
        dump_bytes(store, make_ids(1, 2), [payload(i, 100) for i in (1, 2)])
        load_bytes(store, make_ids(0, 1, 7, 0), 100)
        load_bytes(store, make_ids(0), 99)
        store.lookup(make_ids(0, 7))
        store.lookup_on_prefix(make_ids(0, 1, 7, 2))
        counted = store.stats().counters
        assert (counted["dump_blocks"], counted["written_blocks"], counted["already_stored_blocks"]) == (
            5,
            3,
            2,
        )
        assert (counted["load_blocks"], counted["loaded_blocks"]) == (5, 3)
        assert counted["misses"] == {"absent": 1, "length": 1} and counted["unstored"] == {}
        assert (counted["written_bytes"], counted["loaded_bytes"]) == (300, 300)
        assert (counted["lookups"], counted["lookup_hits"]) == (6, 3)
        stats = store.stats()
        assert (stats.blocks, stats.payload_bytes, stats.incomplete_blocks) == (3, 300, 0)

    def test_a_block_the_format_cannot_hold_is_refused(self, store: PosixStore) -> None:
        """A record's length has 32 bits: 4 GiB and more is a ValueError at the call, not a wrapped length."""
        memory = np.zeros(1, np.uint8)
        at = np.array([[memory.ctypes.data] * 2])
        for call in (store.dump_data, store.load_data):
            for sizes in (1 << 31, [1 << 32, 1]):
                with pytest.raises(ValueError):
                    call(make_ids(0), None, at, sizes)

    def test_what_cannot_be_stored_is_said_of_every_duplicate(self, store: PosixStore) -> None:
        """A block that a batch names twice fails twice, and is counted twice."""
        dump_bytes(store, make_ids(0), [payload(0, 100)])
        with PosixStore(store.root.path, NAMESPACE, writable=False) as reader:
            names = [1, 0, 1, 1]
            task = reader.dump(make_ids(*names), None, [payload(i, 100) for i in names], background=False)
            assert task.status().tolist() == [Reason.READ_ONLY, Reason.OK, Reason.READ_ONLY, Reason.READ_ONLY]
            counted = reader.stats().counters
            assert counted["unstored"] == {"read_only": 3}
            assert (counted["dump_blocks"], counted["already_stored_blocks"]) == (4, 1)

    def test_verify_finds_everything_in_order(self, store: PosixStore) -> None:
        """`verify` reads every block and shard, and calls whole blocks whole."""
        dump_bytes(store, make_ids(0, 1), [payload(i, 5000) for i in range(2)])
        dump_bytes(store, make_ids(2, 2), [payload(2, 70, i) for i in range(2)], shards=[0, 1], n_shards=2)
        report = store.verify()
        assert report.ok and (report.blocks, report.bytes) == (4, 2 * 5000 + 2 * 70)

    def test_a_store_without_checksums_on_load_serves_the_same(self, store: PosixStore) -> None:
        """`verify=False` changes what is checked, not what is returned."""
        dump_bytes(store, make_ids(0), [payload(0, 5000)])
        with PosixStore(store.root.path, NAMESPACE, verify=False) as other:
            assert load_bytes(other, make_ids(0), 5000) == ([Reason.OK], [payload(0, 5000)])


class TestPosixStoreWithTinySegments(TestPosixStore):
    """Each batch begins a new segment, so blocks, shards and batches lie across many files."""

    options: dict[str, Any] = {"segment_bytes": 16 << 10, "io_threads": 4}  # noqa: RUF012
