"""Any damage to any file of a store is a counted miss, and the store goes on (must hold 4, invariant I1).

Files are flipped, zeroed, cut, deleted, extended, overwritten and exchanged, between two starts and under
processes that have them open. Whatever is loaded has the bytes that were dumped, in its own namespace.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from crc32c import crc32c
from damage import Damage, damaged, damages, edit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_contract import make_id, payload

from posix_store import PosixStore, Reason, StoreError
from posix_store.segment import JOURNAL_MAGIC, encode_header

HERE, ELSEWHERE = "a" * 32, "b" * 32
OLD, LIVE = range(10), range(10, 14)
"""Blocks of writers that are gone, and blocks that the process under test has stored itself."""

MISSES = {Reason.ABSENT, Reason.NAMESPACE, Reason.LENGTH, Reason.CHECKSUM, Reason.IO_ERROR, Reason.EVICTED}
"""What damage may be counted as. Time-outs and a full disk would hide it."""


@dataclass(frozen=True)
class Block:
    name: int

    @property
    def length(self) -> int:
        return 300 if self.name % 2 else 5000

    @property
    def n_shards(self) -> int:
        return 2 if self.name % 5 == 3 else 1

    def bytes_in(self, namespace: str, shard: int) -> bytes:
        """The same ids have other bytes in each namespace, so that an exchange of files would show."""
        return payload((namespace, self.name), self.length, shard)


Row = tuple[Block, int]


def rows_of(names: Iterator[int] | range | set[int]) -> list[Row]:
    return [(Block(name), shard) for name in names for shard in range(Block(name).n_shards)]


def grouped(rows: list[Row]) -> list[list[Row]]:
    """Rows that may go in one call."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for block, shard in rows:
        groups.setdefault((block.length, block.n_shards), []).append((block, shard))
    return list(groups.values())


def open_store(root: Path, namespace: str = HERE, writable: bool = True) -> PosixStore:
    return PosixStore(
        str(root), namespace, identity={"model": namespace[0]}, capacity=64 << 20, min_free=0,
        segment_bytes=256 << 10, io_threads=1, timeout=60, writable=writable,
    )  # fmt: skip


def dump(store: PosixStore, rows: list[Row]) -> None:
    """Store blocks; every one of them must be accepted."""
    for group in grouped(rows):
        ids, shards = [make_id(block.name) for block, _ in group], [shard for _, shard in group]
        data = [block.bytes_in(store.namespace, shard) for block, shard in group]
        task = store.dump(ids, shards, data, n_shards=group[0][0].n_shards, background=False)
        assert task.results().all(), f"a damaged store refuses a dump: {task.status()}"


def load(store: PosixStore, rows: list[Row]) -> set[int]:
    """Load blocks, and check bytes, reasons and counters; the names of those that were not loaded."""
    missed = set()
    for group in grouped(rows):
        ids, shards = [make_id(block.name) for block, _ in group], [shard for _, shard in group]
        buffers = [bytearray(group[0][0].length) for _ in group]
        status = store.load(ids, shards, buffers, background=False).status()
        for (block, shard), code, buffer in zip(group, status.tolist(), buffers, strict=True):
            if code == Reason.OK:
                assert bytes(buffer) == block.bytes_in(store.namespace, shard), f"wrong bytes for {block}"
            else:
                assert Reason(code) in MISSES
                missed.add(block.name)
    counted = store.stats().counters
    assert counted["load_blocks"] == counted["loaded_blocks"] + sum(counted["misses"].values())
    assert counted["lookups"] >= counted["lookup_hits"]
    return missed


def restore(store: PosixStore, rows: list[Row]) -> None:
    """What an engine does: load, compute what was missed, dump it, and find it the next time.

    A deleted file may serve until the process notices, so more may be missed in a second round; but
    nothing twice.
    """
    again: set[int] = set()
    while missed := load(store, rows):
        assert not missed & again, "what was dumped again is not served"
        dump(store, [row for row in rows if row[0].name in missed])
        again |= missed
    assert store.lookup([make_id(block.name) for block, _ in rows]).all()


# -- the store that is damaged ----------------------------------------------------------------------


def in_memory() -> Path | None:
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Two writers here, one sealed and one killed; blocks 4 and 5 twice, half a block, another namespace."""
    top = Path(tempfile.mkdtemp(prefix="store-damage-", dir=in_memory()))
    root = top / "made"
    first = open_store(root)
    dump(first, rows_of(range(4, 10)))
    first.close()
    rename_writers(root / HERE, "z-first-host")
    (root / HERE / "kept").mkdir()
    for file in (root / HERE).glob("z-first*"):
        file.rename(root / HERE / "kept" / file.name)
    second = open_store(root)
    dump(second, rows_of(range(6)))
    second.dump([make_id("half")], 0, [b"x" * 100], n_shards=2, background=False)
    for file in (root / HERE / "kept").iterdir():
        file.rename(root / HERE / file.name)
    (root / HERE / "kept").rmdir()
    foreign = open_store(root, ELSEWHERE)
    dump(foreign, rows_of(OLD))
    shutil.copytree(root, top / "template")
    second.close()
    foreign.close()
    with open_store(top / "template", writable=False) as store:
        assert load(store, rows_of(OLD)) == set()
    yield top / "template"
    shutil.rmtree(top)


def rename_writers(directory: Path, host: str) -> None:
    """Names are the host's, and do not say who was first in any order that sorting knows."""
    for file in directory.glob("*.seg"):
        stem = file.stem.split("-", 1)[1]
        for kind in ("seg", "idx"):
            file.with_suffix("." + kind).rename(directory / f"{host.replace('-', '_')}-{stem}.{kind}")


@pytest.fixture(scope="module")
def workplace() -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="store-damage-", dir=in_memory()))
    yield top
    shutil.rmtree(top)


def fresh_copy(template: Path, workplace: Path) -> Path:
    root = Path(tempfile.mkdtemp(dir=workplace)) / "store"
    shutil.copytree(template, root)
    return root


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@settings(max_examples=120)
@given(harm=damages)
def test_damage_between_two_starts(template: Path, workplace: Path, harm: list[Damage]) -> None:
    """The next start serves what is whole, takes the rest again, and keeps it over another start."""
    root = fresh_copy(template, workplace)
    files = files_of(root)
    for damage in harm:
        damage(files)
    with open_store(root, writable=False) as reader:
        load(reader, rows_of(OLD))
    with open_store(root, ELSEWHERE) as foreign, open_store(root) as store:
        load(foreign, rows_of(OLD))
        restore(store, rows_of(OLD))
    with open_store(root) as store:
        assert load(store, rows_of(OLD)) == set(), "what was dumped again is lost with the next start"
        assert not store.verify().bad
    shutil.rmtree(root.parent)


@settings(max_examples=120)
@given(harm=damages, loaded_before=st.booleans(), reader_writes=st.booleans(), lock_deleted=st.booleans())
def test_damage_under_open_stores(
    template: Path,
    workplace: Path,
    harm: list[Damage],
    loaded_before: bool,
    reader_writes: bool,
    lock_deleted: bool,
) -> None:
    """Also of the files that a process is writing: it goes on, and so do the others and the next start.

    A process cannot know that the header of its own journal was destroyed, so what it stored after that
    may be gone with the next start, as misses. What the next one stores is kept.
    """
    root, everything = fresh_copy(template, workplace), rows_of({*OLD, *LIVE})
    store = open_store(root)
    dump(store, rows_of(LIVE))
    reader = open_store(root, writable=reader_writes)
    if loaded_before:
        assert load(store, everything) == load(reader, everything) == set()
    # STORE.lock has no contents. It may go, but not be exchanged: its new file might be locked by a writer.
    lock = root / "STORE.lock"
    files = [path for path in files_of(root) if path != lock]
    if lock_deleted:
        lock.unlink()
    for damage in harm:
        damage(files)
    load(reader, everything)
    restore(store, everything)
    load(reader, everything)
    if reader_writes:
        restore(reader, everything)
    reader.close()
    store.close()
    with open_store(root) as store:
        restore(store, everything)
    with open_store(root) as store:
        assert load(store, everything) == set(), "what was dumped again is lost with the next start"
    shutil.rmtree(root.parent)


# -- every single byte ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(workplace: Path) -> Path:
    """One namespace, one sealed segment, four batches: a store small enough for every byte of it."""
    root = workplace / "small"
    with open_store(root) as store:
        for names in (range(2), range(2, 4), range(4, 6)):
            dump(store, rows_of(names))
    return root


def test_every_flipped_byte(small: Path) -> None:
    """Each byte of the journal, the headers and the JSON files, and some of the payload, one at a time.

    A flip in a payload or in a record costs one block, unless the record ends the last batch; a flip in a
    JSON file costs nothing.
    """
    journal, data = sorted((small / HERE).glob("*-0*"))
    positions = [(path, at) for path in (journal, small / "STORE.json", small / HERE / "NAMESPACE.json")
                 for at in range(path.stat().st_size)]  # fmt: skip
    positions += [
        (data, at) for at in (*range(64), *range(64, 4096, 500), *range(4096, data.stat().st_size, 97))
    ]
    for path, at in positions:
        with damaged(path, at, 1 << at % 8), open_store(small, writable=False) as store:
            missed = load(store, rows_of(range(6)))
            limit = 6 if path == journal or at < 64 else 1
            assert len(missed) <= (0 if path.suffix == ".json" else limit), f"{path.name} at {at}: {missed}"


def test_every_bit_of_the_settings(small: Path) -> None:
    """Must hold 4: no flipped bit in STORE.json keeps the store from starting, `"format": 3` included."""
    path = small / "STORE.json"
    for at in range(path.stat().st_size):
        for bit in range(8):
            with damaged(path, at, 1 << bit), open_store(small, writable=False) as store:
                assert store.lookup([make_id(0)])[0]


def test_every_length_of_the_journal_and_the_segment(small: Path, workplace: Path) -> None:
    """Cut anywhere: whole batches at the start of the journal are served, if their bytes are there."""
    journal, data = sorted((small / HERE).glob("*-0*"))
    for path, step in ((journal, 7), (data, 331)):
        whole, lost = path.read_bytes(), 6
        for length in range(0, len(whole) + 1, step):
            path.write_bytes(whole[:length])
            with open_store(small, writable=False) as store:
                missed = len(load(store, rows_of(range(6))))
            assert missed <= lost, f"{path.name}: {length} bytes serve less than fewer did"
            lost = missed
        path.write_bytes(whole)
    with open_store(small, writable=False) as store:
        assert load(store, rows_of(range(6))) == set()


@settings(max_examples=40)
@given(contents=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
@example(b"")
@example(b"null")
@example(b"[" * 100_000)
@example(b'{"format": 9, "capacity": "1 TB", "created": 0, "crc32c": 0}')
@example(b'{"format": 1, "capacity": -5, "created": 0, "crc32c": 0}')
@example(b'{"format": "1"}')
@example(b'{"format": 1e999}')
@example(b"\xff\xfe{}")
def test_any_contents_of_the_json_files(template: Path, workplace: Path, contents: bytes) -> None:
    """STORE.json and NAMESPACE.json under an open store and at a start: noise, nesting, wrong types."""
    root = fresh_copy(template, workplace)
    with open_store(root) as store:
        for path in (root / "STORE.json", root / HERE / "NAMESPACE.json"):
            path.write_bytes(contents)
        dump(store, rows_of(LIVE))
        assert load(store, rows_of({*OLD, *LIVE})) == set()
    with open_store(root) as store:
        assert load(store, rows_of({*OLD, *LIVE})) == set()
        dump(store, [(Block(20), 0)])
        assert store.stats().capacity == 64 << 20
    shutil.rmtree(root.parent)


def test_a_newer_format_appears_under_an_open_store(template: Path, workplace: Path) -> None:
    """Somebody upgrades the store while it is open: its settings are not ours to read, nothing is raised."""
    root = fresh_copy(template, workplace)
    with open_store(root) as store:
        for fields in ('{"format": 2, "capacity": "1 TB"}', '{"format": 2}'):
            (root / "STORE.json").write_text(f'{fields[:-1]}, "crc32c": {crc32c(fields.encode())}}}')
            dump(store, rows_of(LIVE))
            assert load(store, rows_of({*OLD, *LIVE})) == set()
            assert store.stats().capacity == 64 << 20
    with pytest.raises(StoreError, match="format 2"):
        open_store(root)
    shutil.rmtree(root.parent)


def test_a_lost_record_joins_no_shards_of_two_copies(workplace: Path) -> None:
    """I2: a block that was damaged and stored again is one of its copies or a miss, never half of each."""
    root = workplace / "copies"
    block = make_id("stored twice")
    copies = {copy: [payload(copy, 70, shard) for shard in range(2)] for copy in ("old", "new")}
    with open_store(root) as store:
        for shard in (0, 1):
            store.dump([block], shard, [copies["old"][shard]], n_shards=2, background=False)
        journal, data = sorted((root / HERE).glob("*-0*"))
        # The second shard lies in the second extent; its damage is found, and the block goes.
        edit(data, 8192, lambda old: bytes(len(old)), 70)
        assert store.load([block], 1, [bytearray(70)], background=False).status()[0] == Reason.CHECKSUM
        for shard in (1, 0):
            task = store.dump([block], shard, [copies["new"][shard]], n_shards=2, background=False)
            assert task.results().all()
    with damaged(journal, 64 + 64 + 8, 1), open_store(root, writable=False) as reader:
        buffers = [bytearray(70), bytearray(70)]
        loaded = reader.load([block] * 2, [0, 1], buffers, background=False).results()
        found = [bytes(buffer) for buffer in buffers]
        assert not loaded.all() or found in copies.values(), "half of one copy and half of another"


@pytest.mark.parametrize("both", [True, False])
def test_files_of_another_namespace_moved_into_ours(template: Path, workplace: Path, both: bool) -> None:
    """I1: intact files, a segment with its own journal, in the wrong directory. Nothing of them is served."""
    root = fresh_copy(template, workplace)
    shutil.rmtree(root / HERE)
    shutil.copytree(root / ELSEWHERE, root / HERE)
    if not both:
        # The journal says it is ours, with its checksum right; the segment knows better.
        for journal in (root / HERE).glob("*.idx"):
            uid, created = journal.read_bytes()[12:28], int.from_bytes(journal.read_bytes()[44:52], "little")
            header = encode_header(JOURNAL_MAGIC, uid, bytes.fromhex(HERE), created)
            edit(journal, 0, lambda _, header=header: header, len(header))
    with open_store(root) as store:
        assert load(store, rows_of(OLD)) == set(OLD)
        counted = store.stats().counters["misses"]
        assert set(counted) == ({"absent"} if both else {"namespace", "absent"})
        restore(store, rows_of(OLD))
    with open_store(root) as store:
        assert load(store, rows_of(OLD)) == set()
    shutil.rmtree(root.parent)


def test_damage_found_before_the_first_dump_is_on_record_after_it(template: Path, workplace: Path) -> None:
    """A process that only loads writes nothing; when it stores something, others learn what it found."""
    root = fresh_copy(template, workplace)
    before = files_of(root)
    for data in (root / HERE).glob("*.seg"):
        edit(data, 4096, lambda old: bytes(len(old)), 1 << 20)
    with open_store(root) as store:
        assert load(store, rows_of(OLD)) == set(OLD)
        assert files_of(root) == before, "a load has written"
        dump(store, rows_of(LIVE))
        with open_store(root, writable=False) as reader:
            assert not reader.lookup([make_id(name) for name in OLD]).any()
            assert load(reader, rows_of(LIVE)) == set()
    shutil.rmtree(root.parent)


def test_files_of_another_namespace_written_over_ours_in_place(template: Path, workplace: Path) -> None:
    """I1: a backup of the wrong namespace restored over an open store, segment and journal both.

    The process has checked both headers long ago and its descriptors stay valid; the bytes behind them
    are intact, and another namespace's.
    """
    root = fresh_copy(template, workplace)
    with open_store(root, ELSEWHERE) as foreign:
        dump(foreign, [(Block(name), 0) for name in range(20, 80, 2) if Block(name).n_shards == 1])
    theirs = max((root / ELSEWHERE).glob("*.idx"), key=lambda path: path.stat().st_size)
    with open_store(root) as store:
        assert load(store, rows_of(OLD)) == set()
        for ours in (root / HERE).glob("*.idx"):
            for suffix in (".seg", ".idx"):
                shutil.copyfile(theirs.with_suffix(suffix), ours.with_suffix(suffix))
        time.sleep(0.03)
        names = {*OLD, *(name for name in range(20, 80, 2) if Block(name).n_shards == 1)}
        assert load(store, rows_of(names)) == names
        restore(store, rows_of(names))
    shutil.rmtree(root.parent)
