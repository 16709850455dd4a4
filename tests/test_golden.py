"""The format of version 1 for ever: a committed store, an independent reader, fixed bytes (must hold 10)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mini_reader
import pytest
from golden.make_store_v1 import ALPHA, BETA, NAMESPACE, make, make_evicted, name, payload
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_contract import dump_bytes, make_id
from store_contract import payload as content

from posix_store import PosixStore, Reason, StoreError, compaction
from posix_store.pins import read_pin_list
from posix_store.root import StoreRoot

GOLDEN = Path(__file__).parent / "golden" / "store_v1"
EVICTED = GOLDEN.with_name("store_v1_evicted")
"""Holes, records of uses, journals that were rewritten, pins."""

Shapes = dict[int, tuple[int, int]]
SHAPES: Shapes = {
    1: (100, 1), 2: (100, 1), 3: (100, 1), 4: (80, 2), 5: (80, 2), 6: (50, 1), 7: (44, 2), 8: (5000, 1),
    9: (60, 2), 10: (30, 1), 11: (30, 1), 12: (30, 1),
}  # fmt: skip
"""Length and number of shards of every block that was ever written, readable or not."""

EXPECTED = {
    name(number): [payload(number, SHAPES[number][0], shard) for shard in range(SHAPES[number][1])]
    for number in (1, 2, 3, 4, 5, 7, 8)
}
"""6 is evicted, 9 has a shard of each of two writers, 10 to 12 stand in a torn append."""

EVICTED_SHAPES: Shapes = {**dict.fromkeys(range(21, 30), (4096, 1)), 25: (60, 2)}
EVICTED_EXPECTED = {
    name(number): [
        payload(number, EVICTED_SHAPES[number][0], shard) for shard in range(EVICTED_SHAPES[number][1])
    ]
    for number in (21, 22, 24, 25, 26, 27, 29)
}
"""23 is a hole that no record names any more, 28 one that an eviction in a rewritten journal names."""

STORES = {"plain": (GOLDEN, SHAPES, EXPECTED), "evicted": (EVICTED, EVICTED_SHAPES, EVICTED_EXPECTED)}
in_every_store = pytest.mark.parametrize(("golden", "shapes", "expected"), STORES.values(), ids=STORES)

Contents = dict[bytes, list[bytes | None]]


def read_by_the_code(root: Path, shapes: Shapes = SHAPES) -> Contents:
    """Every block of `shapes` through PosixStore: its shards, None where one is a miss.

    A new process for each: one that finds a damaged file forgets all that is in it, and more.
    """
    found: Contents = {}
    for number, (length, n_shards) in shapes.items():
        buffers = [bytearray(length) for _ in range(n_shards)]
        with PosixStore(str(root), NAMESPACE, writable=False, maintenance=False) as store:
            task = store.load([name(number)] * n_shards, range(n_shards), buffers, background=False)
        shards = [bytes(buffer) if ok else None for buffer, ok in zip(buffers, task.results(), strict=True)]
        if any(shard is not None for shard in shards):
            found[name(number)] = shards
    return found


def read_by_the_page(root: Path, shapes: Shapes = SHAPES) -> Contents:
    """The same through the reader that knows only docs/FORMAT.md; a shard of another length is a miss too."""
    lengths = {name(number): length for number, (length, _) in shapes.items()}
    found = {
        block: [shard if shard is not None and len(shard) == lengths[block] else None for shard in shards]
        for block, shards in mini_reader.read_store(root, NAMESPACE).items()
    }
    return {block: shards for block, shards in found.items() if any(shard is not None for shard in shards)}


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


@in_every_store
def test_the_code_reads_the_golden_stores(golden: Path, shapes: Shapes, expected: Contents) -> None:
    """A store that an older version wrote is read as it was, without a byte of it being written."""
    before = snapshot(golden)
    assert read_by_the_code(golden, shapes) == expected
    with PosixStore(str(golden), NAMESPACE, writable=False, verify=False) as store:
        there = [bool(store.lookup([name(number)])[0]) for number in shapes]
        assert there == [name(number) in expected for number in shapes]
        assert store.verify().ok
        assert store.stats().blocks == len(expected)
    assert snapshot(golden) == before


def test_numbers_of_the_golden_store() -> None:
    """What an operator is told of it."""
    before = snapshot(GOLDEN)
    with PosixStore(str(GOLDEN), NAMESPACE, writable=False) as store:
        stats = store.stats()
        assert (stats.blocks, stats.incomplete_blocks, stats.capacity) == (7, 2, 1 << 30)
        assert store.lookup_on_prefix([name(1), name(2), name(3), name(4), name(8), name(6)]) == 4
    assert snapshot(GOLDEN) == before


@in_every_store
def test_the_independent_reader_reads_the_golden_stores(
    golden: Path, shapes: Shapes, expected: Contents
) -> None:
    """docs/FORMAT.md is enough; what it does not need of a store that evicts, it skips."""
    assert mini_reader.read_store(golden, NAMESPACE) == expected


def test_the_code_works_on_in_the_golden_store_with_evictions(tmp_path: Path) -> None:
    """Pins are known, uses decide who leaves (23 and 28 are gone already), both readers agree."""
    root = tmp_path / "store"
    shutil.copytree(EVICTED, root)
    assert [pin.id for pin in read_pin_list(StoreRoot(str(root), create=False), NAMESPACE)] == [name(24)]
    left = dict(EVICTED_EXPECTED)
    # 21, 22 and 24 are pinned. 29 hangs on 28, which is gone; 27 was used last, and 26 stands before it.
    for number in (29, 25, 27, 26):
        with PosixStore(str(root), NAMESPACE, min_free=0, maintenance=False) as store:
            report = store.evictor.evict(1, time.monotonic() + 5, namespaces=[NAMESPACE])
            assert report.blocks == 1
            del left[name(number)]
            assert [name(n) in left for n in EVICTED_SHAPES] == [
                bool(store.lookup([name(n)])[0]) for n in EVICTED_SHAPES
            ], f"not {number} went"
        assert mini_reader.read_store(root, NAMESPACE) == left
        assert read_by_the_code(root, EVICTED_SHAPES) == left
    with PosixStore(str(root), NAMESPACE, min_free=0, maintenance=False) as store:
        report = store.evictor.evict(1 << 30, time.monotonic() + 5)
        assert report.blocks == 0, "what is pinned stays"
        assert store.verify().ok


def test_the_independent_reader_needs_nothing() -> None:
    """It runs without site-packages and without this repository, and imports only the standard library."""
    source = Path(mini_reader.__file__)
    result = subprocess.run(
        [sys.executable, "-I", "-S", source, GOLDEN, NAMESPACE], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[0] == f"{name(1).hex()} [100]"
    imported = {
        alias.split(".")[0]
        for node in ast.walk(ast.parse(source.read_text()))
        for alias in (
            [node.module or ""] if isinstance(node, ast.ImportFrom)
            else [item.name for item in node.names] if isinstance(node, ast.Import)
            else []
        )
    }  # fmt: skip
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize(("golden", "make"), [(GOLDEN, make), (EVICTED, make_evicted)], ids=STORES)
def test_the_code_writes_what_it_always_wrote(
    tmp_path: Path, golden: Path, make: Callable[[Path], None]
) -> None:
    """The encoders give the committed bytes; whoever changes them needs a new format version."""
    make(tmp_path / "store")
    made = {
        path.relative_to(tmp_path / "store"): data for path, (_, data) in snapshot(tmp_path / "store").items()
    }
    assert made == {path.relative_to(golden): data for path, (_, data) in snapshot(golden).items()}


FIXED = {
    # The header of a segment.
    (GOLDEN, f"{ALPHA}-000000.seg", 0): (
        "55434d505353454701000000756964206f6620616c7068612030303000112233"
        "445566778899aabbccddeeff00002a36fe9c97170000000000000000d7f95417"
    ),
    # The header of its journal.
    (GOLDEN, f"{ALPHA}-000000.idx", 0): (
        "55434d505349445801000000756964206f6620616c7068612030303000112233"
        "445566778899aabbccddeeff00002a36fe9c97170000000000000000e2f3b37c"
    ),
    # A PUT with a parent, second of three.
    (GOLDEN, f"{ALPHA}-000000.idx", 128): (
        "676f6c64656e20626c6f636b20303032676f6c64656e20626c6f636b20303031"
        "641000000000000064000000ec54c34f000000000100010000f1536519606f8d"
    ),
    # A PUT of one shard of two.
    (GOLDEN, f"{ALPHA}-000000.idx", 256): (
        "676f6c64656e20626c6f636b20303034676f6c64656e20626c6f636b20303033"
        "002000000000000050000000857ecb77010001000100020000f153658bbf0f06"
    ),
    # An EVICT.
    (GOLDEN, f"{BETA}-000000.idx", 256): (
        "676f6c64656e20626c6f636b20303036756964206f6620616c70686120303030"
        "0030000000000000000000000000000000000000020000003cf1536580d5b7a9"
    ),
    # A SEAL.
    (GOLDEN, f"{ALPHA}-000000.idx", 640): (
        "0000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000300000078f15365f7e00b3a"
    ),
    # The header of a journal that was rewritten twice: its generation stands in bytes 52 to 59.
    (EVICTED, f"{ALPHA}-000000.idx", 0): (
        "55434d505349445801000000756964206f6620616c7068612031303000112233"
        "445566778899aabbccddeeff00002a36fe9c971702000000000000008f9f0dcf"
    ),
    # A TOUCH.
    (EVICTED, f"{BETA}-000000.idx", 64): (
        "676f6c64656e20626c6f636b2030323200000000000000000000000000000000"
        "0000000000000000000000000000000000000000040001001ef15365d83b9f75"
    ),
    # An EVICT that was carried over into a rewritten journal.
    (EVICTED, f"{ALPHA}-000000.idx", 384): (
        "676f6c64656e20626c6f636b20303238756964206f662067616d6d6120313030"
        "0010000000000000000000000000000000000000020000005af153651b26c542"
    ),
}


@pytest.mark.parametrize(
    ("place", "expected"), FIXED.items(), ids=[f"{s.name}-{f[:5]}{f[-4:]}@{at}" for s, f, at in FIXED]
)
def test_headers_and_records_have_fixed_bytes(place: tuple[Path, str, int], expected: str) -> None:
    """Written down here too, so that the golden stores cannot quietly be made anew."""
    golden, file, at = place
    assert (golden / NAMESPACE / file).read_bytes()[at : at + 64].hex() == expected


def test_settings_have_fixed_bytes() -> None:
    """STORE.json, whose checksum rule holds in every version; and the checksum itself."""
    text = '{\n "format": 1,\n "capacity": 1073741824,\n "created": 1700000000,\n "crc32c": 1934573183\n}\n'
    assert (GOLDEN / "STORE.json").read_text() == text
    assert mini_reader.crc32c(b"123456789") == 0xE3069283
    assert mini_reader.crc32c(b'{"format": 1, "capacity": 1073741824, "created": 1700000000}') == 1934573183


@settings(max_examples=80)
@example(store="plain", file=1, position=576, mask=1)
@example(store="evicted", file=3, position=54, mask=1)
@given(
    store=st.sampled_from(sorted(STORES)),
    file=st.integers(0, 20),
    position=st.one_of(st.integers(0, 800), st.integers(0, 30_000)),
    mask=st.integers(0, 255),
)
def test_both_readers_agree_on_a_damaged_store(store: str, file: int, position: int, mask: int) -> None:
    """A flipped byte (mask 0: the file cut there) costs the same blocks in both, and none is ever wrong."""
    golden, shapes, _ = STORES[store]
    with_copy = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    root = with_copy / f"golden-{os.getpid()}"
    shutil.copytree(golden, root)
    try:
        paths = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
        path = paths[file % len(paths)]
        data = bytearray(path.read_bytes())
        at = position % len(data)
        if mask:
            data[at] ^= mask
        else:
            del data[at:]
        path.write_bytes(data)
        by_the_code = read_by_the_code(root, shapes)
        assert by_the_code == read_by_the_page(root, shapes)
        for number, (length, n_shards) in shapes.items():
            for shard, found in enumerate(by_the_code.get(name(number), [None] * n_shards)):
                assert found in (None, payload(number, length, shard))
    finally:
        shutil.rmtree(root)


def test_what_the_store_writes_now_is_what_the_page_says(tmp_path: Path) -> None:
    """Blocks, shards, two writers, several segments, a repaired block, an unsealed writer: all is read."""
    options = {"capacity": 64 << 20, "min_free": 0, "segment_bytes": 24 << 10, "maintenance": False}
    root = tmp_path / "store"
    expected: Contents = {}
    stores = [PosixStore(str(root), NAMESPACE, **options) for _ in range(2)]
    for number in range(12):
        length, n_shards = (5000, 100, 3000)[number % 3], 1 + number % 3
        ids = [make_id(number)] * n_shards
        shards = [content(number, length, shard) for shard in range(n_shards)]
        order = range(n_shards)[:: 1 if number % 2 else -1]
        for shard in order:
            assert all(
                dump_bytes(stores[number % 2], ids[:1], [shards[shard]], shards=shard, n_shards=n_shards)
            )
        expected[make_id(number)] = list(shards)
    dump_bytes(stores[0], [make_id("half")], [b"x"], shards=1, n_shards=2)
    assert mini_reader.read_store(root, NAMESPACE) == expected

    # A block found damaged leaves an EVICT behind; stored again, it is whole again.
    place = mini_reader.blocks(root, NAMESPACE)[make_id(2)][1]
    with place[0].path.open("r+b") as file:
        file.seek(place[1].offset)
        file.write(b"damage")
    assert mini_reader.read_store(root, NAMESPACE)[make_id(2)][1] is None
    status = stores[0].load([make_id(2)], 1, [bytearray(3000)], background=False).status()
    assert status.tolist() == [Reason.CHECKSUM]
    del expected[make_id(2)]
    assert mini_reader.read_store(root, NAMESPACE) == expected
    shards = [content("again", 3000, shard) for shard in range(3)]
    dump_bytes(stores[0], [make_id(2)] * 3, shards, shards=[0, 1, 2], n_shards=3)
    expected[make_id(2)] = list(shards)
    assert mini_reader.read_store(root, NAMESPACE) == expected

    # One writer ends as it should, and the other is still there: sealed or not, all is read.
    stores[0].close()
    assert mini_reader.read_store(root, NAMESPACE) == expected
    stores[1].clear()
    assert mini_reader.read_store(root, NAMESPACE) == {}
    stores[1].close()


def test_a_store_that_evicts_is_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions by two writers, uses, holes, deleted segments, rewritten journals: all readers agree."""
    monkeypatch.setattr(compaction, "LEAST_BYTES", 0)
    options = {"capacity": 120 * 4096, "min_free": 0, "segment_bytes": 40 << 10, "maintenance": False}
    root = tmp_path / "store"
    stores = [PosixStore(str(root), NAMESPACE, **options) for _ in range(2)]
    written: Contents = {}
    for number in range(90):
        store = stores[number // 4 % 2]
        length, n_shards = (5000, 100, 3000)[number % 3], 1 + number % 2
        shards = [content(number, length, shard) for shard in range(n_shards)]
        for shard in range(n_shards):
            assert dump_bytes(store, [make_id(number)], [shards[shard]], shards=shard, n_shards=n_shards) == [
                True
            ]
        written[make_id(number)] = list(shards)
        if number % 7 == 0:  # used by both, so it stays for long
            for each in stores:
                each.load([make_id(0)], 0, [bytearray(5000)], background=False)
    assert sum(store.evictor.total.blocks for store in stores) > 20
    for tidied in (False, True):
        if tidied:
            stores[0].close()
            stores[1].evictor.tidy(time.monotonic() + 10)
            generations = [
                int.from_bytes(path.read_bytes()[52:60], "little") for path in root.glob("*/*.idx")
            ]
            assert max(generations) >= 1, "no journal was rewritten"
        with PosixStore(str(root), NAMESPACE, writable=False) as fresh:
            there = {block for block in written if fresh.lookup([block])[0]}
            assert fresh.verify().ok and fresh.stats().blocks == len(there)
        assert there == {block for block in written if stores[1].lookup([block])[0]}
        assert mini_reader.read_store(root, NAMESPACE) == {block: written[block] for block in there}
    assert make_id(0) in there and make_id(1) not in there
    stores[1].close()


@pytest.mark.parametrize("intact", [True, False])
def test_a_newer_store_is_refused_and_a_damaged_one_is_not(tmp_path: Path, intact: bool) -> None:
    """Format 2 with its checksum right is a newer store; the same with it wrong is damage (must hold 4)."""
    shutil.copytree(GOLDEN, tmp_path / "store")
    fields = '{"format": 2, "capacity": "in other units", "created": 1700000000}'
    checksum = mini_reader.crc32c(fields.encode()) ^ (not intact)
    (tmp_path / "store" / "STORE.json").write_text(f'{fields[:-1]}, "crc32c": {checksum}}}')
    if not intact:
        assert read_by_the_code(tmp_path / "store") == read_by_the_page(tmp_path / "store") == EXPECTED
        return
    with pytest.raises(StoreError, match="format 2"):
        PosixStore(str(tmp_path / "store"), NAMESPACE)
    with pytest.raises(mini_reader.NotReadable):
        mini_reader.read_store(tmp_path / "store", NAMESPACE)
