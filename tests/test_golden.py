"""The format of version 1 for ever: a committed store, an independent reader, fixed bytes (must hold 10)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mini_reader
import pytest
from golden.make_store_v1 import ALPHA, BETA, NAMESPACE, make, name, payload
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_contract import dump_bytes, make_id
from store_contract import payload as content

from posix_store import PosixStore, Reason, StoreError

GOLDEN = Path(__file__).parent / "golden" / "store_v1"

SHAPES = {1: (100, 1), 2: (100, 1), 3: (100, 1), 4: (80, 2), 5: (80, 2), 6: (50, 1), 7: (44, 2), 8: (5000, 1),
          9: (60, 2), 10: (30, 1), 11: (30, 1), 12: (30, 1)}  # fmt: skip
"""Length and number of shards of every block that was ever written, readable or not."""

EXPECTED = {
    name(number): [payload(number, SHAPES[number][0], shard) for shard in range(SHAPES[number][1])]
    for number in (1, 2, 3, 4, 5, 7, 8)
}
"""6 is evicted, 9 has a shard of each of two writers, 10 to 12 stand in a torn append."""

Contents = dict[bytes, list[bytes | None]]


def read_by_the_code(root: Path) -> Contents:
    """Every block of SHAPES through PosixStore: its shards, None where one is a miss.

    A new process for each: one that finds a damaged file forgets all that is in it, and more.
    """
    found: Contents = {}
    for number, (length, n_shards) in SHAPES.items():
        buffers = [bytearray(length) for _ in range(n_shards)]
        with PosixStore(str(root), NAMESPACE, writable=False) as store:
            task = store.load([name(number)] * n_shards, range(n_shards), buffers, background=False)
        shards = [bytes(buffer) if ok else None for buffer, ok in zip(buffers, task.results(), strict=True)]
        if any(shard is not None for shard in shards):
            found[name(number)] = shards
    return found


def read_by_the_page(root: Path) -> Contents:
    """The same through the reader that knows only docs/FORMAT.md; a shard of another length is a miss too."""
    lengths = {name(number): length for number, (length, _) in SHAPES.items()}
    found = {
        block: [shard if shard is not None and len(shard) == lengths[block] else None for shard in shards]
        for block, shards in mini_reader.read_store(root, NAMESPACE).items()
    }
    return {block: shards for block, shards in found.items() if any(shard is not None for shard in shards)}


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_the_code_reads_the_golden_store() -> None:
    """A store that an older version wrote is read as it was, without a byte of it being written."""
    before = snapshot(GOLDEN)
    assert read_by_the_code(GOLDEN) == EXPECTED
    with PosixStore(str(GOLDEN), NAMESPACE, writable=False) as store:
        assert store.verify().ok
        stats = store.stats()
        assert (stats.blocks, stats.incomplete_blocks, stats.capacity) == (7, 2, 1 << 30)
        assert store.lookup_on_prefix([name(1), name(2), name(3), name(4), name(8), name(6)]) == 4
    assert snapshot(GOLDEN) == before


def test_the_independent_reader_reads_the_golden_store() -> None:
    """docs/FORMAT.md is enough."""
    assert mini_reader.read_store(GOLDEN, NAMESPACE) == EXPECTED


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


def test_the_code_writes_what_it_always_wrote(tmp_path: Path) -> None:
    """The encoders give the committed bytes; whoever changes them needs a new format version."""
    make(tmp_path / "store")
    made = {
        path.relative_to(tmp_path / "store"): data for path, (_, data) in snapshot(tmp_path / "store").items()
    }
    assert made == {path.relative_to(GOLDEN): data for path, (_, data) in snapshot(GOLDEN).items()}


FIXED = {
    # The header of a segment.
    (f"{ALPHA}-000000.seg", 0): (
        "55434d505353454701000000756964206f6620616c7068612030303000112233"
        "445566778899aabbccddeeff00002a36fe9c97170000000000000000d7f95417"
    ),
    # The header of its journal.
    (f"{ALPHA}-000000.idx", 0): (
        "55434d505349445801000000756964206f6620616c7068612030303000112233"
        "445566778899aabbccddeeff00002a36fe9c97170000000000000000e2f3b37c"
    ),
    # A PUT with a parent, second of three.
    (f"{ALPHA}-000000.idx", 128): (
        "676f6c64656e20626c6f636b20303032676f6c64656e20626c6f636b20303031"
        "641000000000000064000000ec54c34f000000000100010000f1536519606f8d"
    ),
    # A PUT of one shard of two.
    (f"{ALPHA}-000000.idx", 256): (
        "676f6c64656e20626c6f636b20303034676f6c64656e20626c6f636b20303033"
        "002000000000000050000000857ecb77010001000100020000f153658bbf0f06"
    ),
    # An EVICT.
    (f"{BETA}-000000.idx", 256): (
        "676f6c64656e20626c6f636b20303036756964206f6620616c70686120303030"
        "0030000000000000000000000000000000000000020000003cf1536580d5b7a9"
    ),
    # A SEAL.
    (f"{ALPHA}-000000.idx", 640): (
        "0000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000300000078f15365f7e00b3a"
    ),
}


@pytest.mark.parametrize(
    ("place", "expected"), FIXED.items(), ids=[f"{f[:5]}{f[-4:]}@{at}" for f, at in FIXED]
)
def test_headers_and_records_have_fixed_bytes(place: tuple[str, int], expected: str) -> None:
    """Written down here too, so that the golden store cannot quietly be made anew."""
    file, at = place
    assert (GOLDEN / NAMESPACE / file).read_bytes()[at : at + 64].hex() == expected


def test_settings_have_fixed_bytes() -> None:
    """STORE.json, whose checksum rule holds in every version; and the checksum itself."""
    text = '{\n "format": 1,\n "capacity": 1073741824,\n "created": 1700000000,\n "crc32c": 1934573183\n}\n'
    assert (GOLDEN / "STORE.json").read_text() == text
    assert mini_reader.crc32c(b"123456789") == 0xE3069283
    assert mini_reader.crc32c(b'{"format": 1, "capacity": 1073741824, "created": 1700000000}') == 1934573183


@settings(max_examples=80)
@example(file=1, position=576, mask=1)
@given(
    file=st.integers(0, 20),
    position=st.one_of(st.integers(0, 800), st.integers(0, 30_000)),
    mask=st.integers(0, 255),
)
def test_both_readers_agree_on_a_damaged_store(file: int, position: int, mask: int) -> None:
    """A flipped byte (mask 0: the file cut there) costs the same blocks in both, and none is ever wrong."""
    with_copy = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    root = with_copy / f"golden-{os.getpid()}"
    shutil.copytree(GOLDEN, root)
    try:
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        path = paths[file % len(paths)]
        data = bytearray(path.read_bytes())
        at = position % len(data)
        if mask:
            data[at] ^= mask
        else:
            del data[at:]
        path.write_bytes(data)
        by_the_code = read_by_the_code(root)
        assert by_the_code == read_by_the_page(root)
        for number, (length, n_shards) in SHAPES.items():
            for shard, found in enumerate(by_the_code.get(name(number), [None] * n_shards)):
                assert found in (None, payload(number, length, shard))
    finally:
        shutil.rmtree(root)


def test_what_the_store_writes_now_is_what_the_page_says(tmp_path: Path) -> None:
    """Blocks, shards, two writers, several segments, a repaired block, an unsealed writer: all is read."""
    options = {"capacity": 64 << 20, "min_free": 0, "segment_bytes": 24 << 10}
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
