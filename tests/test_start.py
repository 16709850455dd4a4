"""Issue 2, must hold 4, and invariants I3, I4, I7: what a store does with the directory it is given.

Either a clear error at construction, with the key, its value and what to do, and everything left as it was;
or a store that serves what it can and counts the rest.
"""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import CHANGES, Fault, FaultySyscalls
from storekit import NAMESPACE, contents, dump, ids_of, load, memory_directory, open_store, tree
from workers import Worker, as_another_user

from posix_store import Reason, StoreError
from posix_store.pins import write_pins

LENGTH = 5000
BLOCKS = ids_of(1, 6)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, or changes the user")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


@pytest.fixture
def filled(root: Path) -> Path:
    """A store that holds `BLOCKS`."""
    with open_store(root) as store:
        assert (dump(store, BLOCKS, LENGTH) == Reason.OK).all()
    return root


@contextlib.contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    """Something mounted at a directory, or the test is skipped, saying why."""
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@contextlib.contextmanager
def refused(root: Path, *words: str) -> Iterator[None]:
    """Construction fails with the path and these words in the message; the tree is left as it was."""
    before = tree(root.parent)
    with pytest.raises(StoreError) as caught:
        yield
    for word in (f"path = {root}", *words):
        assert word in str(caught.value)
    assert "; " in str(caught.value), f"says no fix: {caught.value}"
    assert tree(root.parent) == before, "a refused directory was touched"


def test_the_path_is_a_file(root: Path) -> None:
    """Must hold 4."""
    root.write_bytes(b"precious")
    with refused(root, "is not a directory", "name a directory"):
        open_store(root)
    assert root.read_bytes() == b"precious"


def test_a_parent_is_a_file(root: Path) -> None:
    """Must hold 4."""
    root.write_bytes(b"precious")
    with pytest.raises(StoreError, match=f"path = {root}/deeper: .*; .*name another directory"):
        open_store(root / "deeper")
    assert root.read_bytes() == b"precious"


FOREIGN = {
    "a file": ["notes.txt"],
    "hidden": [".git/config"],
    "another's hash directory": ["0123456789abcdef0123456789abcdef/data.bin"],
    "almost ours": [f"{NAMESPACE}/host-1-2-0000000a-000000.seg.bak"],
    "a file beside a namespace": [f"{NAMESPACE}/host-1-2-0000000a-000000.seg", "model.safetensors"],
    "upper-case namespace": [f"{NAMESPACE.upper()}/NAMESPACE.json"],
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("writable", [True, False])
def test_a_directory_of_somebody_else(root: Path, files: list[str], writable: bool) -> None:
    """Must hold 4, I7: refused, and untouched byte for byte."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.urandom(50))
    before = contents(root)
    with refused(root, "name an empty or a new directory"):
        open_store(root, writable=writable)
    assert contents(root) == before


def test_files_of_others_inside_a_store_survive(filled: Path) -> None:
    """I7: what others put beside our files later stays, also when the namespace is cleared."""
    strangers = [filled / "notes.txt", filled / NAMESPACE / "notes.txt", filled / NAMESPACE / "x.seg"]
    for path in strangers:
        path.write_bytes(b"precious")
    with open_store(filled) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        assert store.clear() == len(BLOCKS)
    assert [path.read_bytes() for path in strangers] == [b"precious"] * 3
    assert list(filled.glob("*/*-*.seg")) == []


def test_a_newer_format(filled: Path) -> None:
    """Must hold 4: a store of a later version is refused and left alone, whatever else its settings say."""
    path = filled / "STORE.json"
    settings = json.loads(path.read_text())
    path.write_text(newer_settings(settings))
    before = contents(filled)
    with refused(filled, "format 2", "upgrade"):
        open_store(filled)
    assert contents(filled) == before


def newer_settings(settings: dict[str, int]) -> str:
    """STORE.json as a later version would write it: one more format, one more key, a checksum over all."""
    from crc32c import crc32c

    fields = {"format": 2, **{key: settings[key] for key in ("capacity", "created")}, "compression": "zstd"}
    return json.dumps({**fields, "crc32c": crc32c(json.dumps(fields).encode())}, indent=1) + "\n"


def test_a_missing_directory_is_made(root: Path) -> None:
    """Must hold 4: with its parents."""
    deep = root / "a" / "b" / "c"
    with open_store(deep) as store:
        assert (dump(store, BLOCKS, LENGTH) == Reason.OK).all()
    assert (deep / "STORE.json").is_file()


@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
def test_no_store_to_read(root: Path, there: bool) -> None:
    """Must hold 4: a reader needs a store to be there, and makes none."""
    if there:
        root.mkdir()
    with refused(root, "no store here", "ucm-sglang init"):
        open_store(root, writable=False)


def test_a_reader_serves_and_stores_nothing(filled: Path) -> None:
    """I4: a store opened read-only serves hits; its dumps go unstored with a reason."""
    before = tree(filled)
    with open_store(filled, writable=False) as store:
        assert store.lookup(BLOCKS).all()
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        assert (dump(store, ids_of(2, 3), LENGTH) == Reason.READ_ONLY).all()
        assert store.counters.snapshot()["unstored"] == {"read_only": 3}
        assert store.verify().ok and store.stats().blocks == len(BLOCKS)
        with pytest.raises(StoreError, match="read-only"):
            store.clear()
    assert tree(filled) == before


def assert_serves_without_storing(root: Path, reasons: set[Reason], **options: object) -> None:
    """Hits are served, new blocks go unstored without an exception, and nothing is changed."""
    with open_store(root, **options) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        status = set(dump(store, ids_of(2, 3), LENGTH).tolist())
        assert status <= reasons, status
        assert not store.lookup(ids_of(2, 3)).any()
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()


@pytest.mark.parametrize("capacity", [64 << 20, 32 << 20, None], ids=["same", "changed", "unset"])
def test_a_file_system_that_turned_read_only(filled: Path, capacity: int | None) -> None:
    """Must hold 4, I4: EROFS on every change; whatever the capacity asked for."""
    before = tree(filled)
    kinds = {*CHANGES, "open for writing"}
    calls = FaultySyscalls(Fault(kinds=kinds, times=float("inf"), error=errno.EROFS))
    assert_serves_without_storing(filled, {Reason.READ_ONLY}, capacity=capacity, syscalls=calls)
    assert tree(filled) == before


@as_root
@pytest.mark.parametrize("capacity", [64 << 20, 32 << 20], ids=["same", "changed"])
def test_a_read_only_mount(filled: Path, capacity: int) -> None:
    """Must hold 4, I4: a true one, over a store that holds blocks."""
    with mounted("--bind", str(filled), at=filled):
        remount = ["mount", "-o", "remount,ro,bind", str(filled)]
        if subprocess.run(remount, capture_output=True, check=False).returncode:
            pytest.skip("no read-only bind mounts here")
        assert_serves_without_storing(filled, {Reason.READ_ONLY}, capacity=capacity)


@as_root
def test_an_empty_read_only_mount(root: Path) -> None:
    """Must hold 4: no store can be made there; said at construction."""
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", at=root), refused(root, "Read-only file system"):
        open_store(root)


@as_root
@pytest.mark.parametrize(
    ("mode", "outcome"),
    [(0o755, "serves"), (0o700, "Permission denied"), (0o711, "Permission denied")],
    ids=["readable", "closed", "not listable"],
)
def test_a_directory_of_another_user(filled: Path, mode: int, outcome: str) -> None:
    """Must hold 4, I4: what may be read is served; what may not is a clear error that names user and mode."""
    filled.parent.chmod(0o755)
    filled.chmod(mode)
    before = tree(filled)
    with Worker(as_another_user, str(filled), BLOCKS, LENGTH, 32 << 20) as worker:
        report = worker.receive()
    assert tree(filled) == before
    if outcome == "serves":
        assert report == {"loaded": len(BLOCKS), "stored": 0}
    else:
        assert f"path = {filled}" in report and outcome in report
        assert "65534" in report and f"mode {mode:o}" in report and "access" in report


@as_root
def test_no_permission_to_make_the_directory(root: Path) -> None:
    """Must hold 4: said at construction, and nothing is made."""
    root.parent.chmod(0o755)
    with Worker(as_another_user, str(root), BLOCKS, LENGTH, None) as worker:
        report = worker.receive()
    assert f"path = {root}" in report and "Permission denied" in report
    assert not root.exists()


@as_root
def test_a_disk_that_is_full_from_the_start(root: Path) -> None:
    """Must hold 4: a store cannot even be made; the message says so, and nothing is left behind."""
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", at=root):
        where = root / "store"
        fill(root / "others")
        with pytest.raises(StoreError, match=f"path = {where}: No space left on device.*free some space"):
            open_store(where)
        assert [path.name for path in where.rglob("*")] == []


@as_root
def test_a_disk_that_fills_up(root: Path) -> None:
    """Must hold 4, I4: what cannot fit goes unstored as `full`, pins are served, and space made is used."""
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=root):
        where = root / "store"
        more = ids_of(3, 60)
        with open_store(where) as store:
            assert (dump(store, BLOCKS, LENGTH) == Reason.OK).all()
            write_pins(store.root, store.namespace, np.concatenate([BLOCKS, more]))
            fill(root / "others")
            status = dump(store, more, LENGTH)
            assert set(status.tolist()) <= {Reason.OK, Reason.FULL} and status[-1] == Reason.FULL
            assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        fill(root / "more of others")  # what the store had reserved and gave back
        assert_serves_without_storing(where, {Reason.FULL}, capacity=32 << 20)
        (root / "others").unlink()
        with open_store(where) as store:
            assert (dump(store, more, LENGTH) == Reason.OK).all()
            assert (load(store, more, LENGTH) == Reason.OK).all()
            assert store.verify().ok


@as_root
def test_a_disk_that_others_fill_up(root: Path) -> None:
    """Must hold 4, I4: on a disk without a free page the store makes room for new blocks of its own."""
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=root):
        with open_store(root / "store", segment_bytes=64 << 10) as store:
            for seed in range(10, 20):
                assert (dump(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
            fill(root / "others")
            for seed in range(20, 30):
                assert (dump(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
                assert (load(store, ids_of(seed, 8), LENGTH) == Reason.OK).all()
            assert store.verify().ok
        with open_store(root / "store") as store:
            assert (load(store, ids_of(29, 8), LENGTH) == Reason.OK).all()
            assert store.verify().ok


def fill(path: Path) -> None:
    """Take all the free space of a file system."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_by_injection(filled: Path) -> None:
    """Must hold 4, I4: the same where nothing can be mounted."""
    kinds = {"fallocate", "pwrite", "pwritev", "mkdir"}
    calls = FaultySyscalls(Fault(kinds=kinds, times=float("inf"), error=errno.ENOSPC))
    assert_serves_without_storing(filled, {Reason.FULL}, capacity=32 << 20, syscalls=calls)
    with pytest.raises(StoreError, match=r"No space left on device.*free some space"):
        open_store(filled.with_name("other"), syscalls=calls)


DAMAGED = {
    "empty": b"",
    "cut": b'{\n "format": 1,\n "capac',
    "zeros": bytes(120),
    "not UTF-8": b"\xff\xfe\x00",
    "not an object": b"[1, 2]",
    "no fields": b"{}",
    "edited by hand": b'{"format": 1, "capacity": 1000000, "created": 5, "crc32c": 7}',
    "of text": b'{"format": "1", "capacity": "64MiB", "created": "now"}',
    "nested without end": b"[" * 100_000,
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_settings(filled: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Must hold 4: STORE.json is rebuilt with the configured capacity, the log says so, no block is lost."""
    (filled / "STORE.json").write_bytes(data)
    assert_reader_serves(filled)
    assert (filled / "STORE.json").read_bytes() == data, "a reader wrote"
    with open_store(filled, capacity=7 << 20) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        assert (dump(store, ids_of(2, 3), LENGTH) == Reason.OK).all()
    assert "STORE.json is damaged" in caplog.text
    assert json.loads((filled / "STORE.json").read_text())["capacity"] == 7 << 20
    with open_store(filled, capacity=None) as store:
        assert store.stats().capacity == 7 << 20


def test_lost_settings(filled: Path) -> None:
    """Must hold 4: without STORE.json a directory with nothing but our files is still ours."""
    (filled / "STORE.json").unlink()
    assert_reader_serves(filled)
    assert not (filled / "STORE.json").exists(), "a reader wrote"
    with open_store(filled, capacity=7 << 20) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
    assert json.loads((filled / "STORE.json").read_text())["capacity"] == 7 << 20


def assert_reader_serves(root: Path) -> None:
    with open_store(root, writable=False) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()


def test_settings_damaged_while_open(filled: Path) -> None:
    """Must hold 4, I3: a process that runs keeps the capacity it knows."""
    with open_store(filled, segment_bytes=1) as store:
        for number, data in enumerate(DAMAGED.values()):
            (filled / "STORE.json").write_bytes(data)
            assert (dump(store, ids_of(100 + number, 1), LENGTH) == Reason.OK).all()
            assert store.stats().capacity == 64 << 20
        (filled / "STORE.json").unlink()
        assert (dump(store, ids_of(200, 1), LENGTH) == Reason.OK).all()
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()


def test_the_directory_vanishes_while_open(filled: Path) -> None:
    """Must hold 4, I3: an operator moves the whole store: misses and unstored blocks, no exception."""
    with open_store(filled) as store:
        dump(store, ids_of(2, 2), LENGTH)
        filled.rename(filled.with_name("moved"))
        new = dump(store, ids_of(3, 2), LENGTH)
        assert store.lookup(ids_of(3, 2)).tolist() == (new == Reason.OK).tolist()
        load(store, BLOCKS, LENGTH)
        store.lookup(ids_of(4, 2))
    with open_store(filled.with_name("moved")) as store:
        assert (load(store, BLOCKS, LENGTH) == Reason.OK).all()
        assert store.verify().ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, ["capacity = 0", "more than 0"]),
        ({"capacity": -5}, ["capacity = -5", "more than 0"]),
        ({"segment_bytes": 0}, ["segment_bytes = 0"]),
        ({"io_threads": 0}, ["io_threads = 0"]),
        ({"timeout": -1.0}, ["timeout = -1.0"]),
        ({"min_free": -1}, ["min_free = -1"]),
        ({"namespace": "xyz"}, ["namespace = 'xyz'", "32"]),
        ({"namespace": NAMESPACE.upper()}, ["lower-case"]),
        ({"namespace": NAMESPACE + "\n"}, ["32"]),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be(root: Path, options: dict[str, object], words: list[str]) -> None:
    """I3: configuration errors fail construction with the key, the value and the fix; nothing is made."""
    with pytest.raises(StoreError) as caught:
        open_store(root, **options)
    for word in words:
        assert word in str(caught.value)
    assert not root.exists()
