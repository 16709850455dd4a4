"""What tests of a whole store share: blocks whose bytes follow from their ids, checks, places on disk."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posix_store import PosixStore, Reason

NAMESPACE = "0123456789abcdef" * 2
PAGE = 4096


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory where there is /dev/shm, else a temporary one; gone afterwards."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="store-test-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def open_store(root: Path | str, **options: Any) -> PosixStore:
    """A store with a small capacity and no floor of free space, so that tests do not depend on the disk.

    Segments are small, since writers reserve by them, and reserving takes time in memory.
    """
    options = {"capacity": 64 << 20, "min_free": 0, "segment_bytes": 1 << 20, "maintenance": False, **options}
    return PosixStore(str(root), options.pop("namespace", NAMESPACE), **options)


def ids_of(seed: int, count: int) -> np.ndarray:
    """uint8 (count, 16): ids that differ from those of every other seed."""
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def payloads(ids: np.ndarray, length: int, shard: int = 0) -> np.ndarray:
    """uint8 (n, length): the only right bytes of the blocks of these ids (uint8 (n, 16))."""
    at = np.arange(length)
    return np.ascontiguousarray(ids[:, at % 16] + (at // 16 * 31 + 7 * shard).astype(np.uint8))


def dump(store: PosixStore, ids: np.ndarray, length: int, shard: int = 0, n_shards: int = 1) -> np.ndarray:
    """Dump the right bytes in the calling thread; uint8 (n,) of `Reason`."""
    rows = list(payloads(ids, length, shard))
    return store.dump(ids, shard, rows, n_shards=n_shards, background=False).status()


def load(store: PosixStore, ids: np.ndarray, length: int, shard: int = 0) -> np.ndarray:
    """Load in the calling thread; uint8 (n,) of `Reason`. What is reported loaded has the right bytes."""
    rows = np.full((len(ids), length), 0xA5, np.uint8)
    status = store.load(ids, shard, list(rows), background=False).status()
    loaded = status == Reason.OK
    assert (rows[loaded] == payloads(ids[loaded], length, shard)).all(), (
        "loaded bytes are not the dumped ones"
    )
    return status


def assert_counters_add_up(store: PosixStore) -> None:
    """Every block that was asked for is counted once, with an outcome."""
    counts = store.counters.snapshot()
    assert counts["load_blocks"] == counts["loaded_blocks"] + sum(counts["misses"].values()), counts
    stored = counts["written_blocks"] + counts["already_stored_blocks"]
    assert counts["dump_blocks"] == stored + sum(counts["unstored"].values()), counts
    assert min(counts["already_stored_blocks"], counts["written_blocks"]) >= 0, counts
    assert 0 <= counts["lookup_hits"] <= counts["lookups"], counts


def assert_no_lock_is_held(root: Path) -> None:
    """Nobody holds the store lock or the lock of a writer on its files."""
    for path in [root / "STORE.lock", *root.glob("*/*.seg"), *root.glob("*/*.idx")]:
        if not path.exists():
            continue
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_descriptors() -> dict[int, str]:
    """This process's open descriptors and what they are open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def held_open(root: Path) -> list[str]:
    """What this process has open under a root."""
    return [target for target in open_descriptors().values() if target.startswith(str(root))]


def allocated(root: Path | str) -> int:
    """Bytes of the blocks that the file system has allocated to a tree. Not the code under test's own sum."""
    total = 0
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total


def tree(root: Path | str) -> dict[str, tuple[int, ...]]:
    """Mode, owner, size, inode and times of every file and directory under a root, by path."""
    found = {}
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            status = os.lstat(path)
            found[path] = (
                status.st_mode, status.st_uid, status.st_size, status.st_ino,
                status.st_mtime_ns, status.st_ctime_ns,
            )  # fmt: skip
    return found


def contents(root: Path | str) -> dict[str, bytes]:
    """Bytes of every file under a root, by path."""
    return {str(path): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}
