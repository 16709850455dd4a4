"""The probe of a file system: judged by effects, never an exception, nothing left behind."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultySyscalls
from storekit import contents, memory_directory, open_descriptors, tree

from posix_store import StoreError, Syscalls
from posix_store.abilities import Abilities, probe
from posix_store.root import StoreRoot
from posix_store.syscalls import FALLOC_PUNCH_HOLE

FOREVER = float("inf")
ABILITIES = (
    "preallocation", "allocation_counted", "punching", "direct_io", "flock", "flock_directory",
    "exclusive_create", "replace", "append_visible",
)  # fmt: skip


@pytest.fixture
def path() -> Iterator[Path]:
    with memory_directory() as directory:
        StoreRoot(str(directory / "store"), capacity=1 << 20)
        yield directory / "store"


def probed(path: Path, calls: Syscalls) -> Abilities:
    """What the probe says; the root is as before."""
    before, open_before = contents(path), open_descriptors()
    found = probe(StoreRoot(str(path), syscalls=calls))
    assert contents(path) == before
    assert open_descriptors() == open_before
    for name in ABILITIES:
        assert getattr(found, name) is True or found.errors.get(name), f"{name}: no reason is given"
    return found


def test_all_is_well_in_memory(path: Path) -> None:
    found = probed(path, Syscalls())
    assert [getattr(found, name) for name in ABILITIES] == [True] * len(ABILITIES), found.errors
    assert found.errors == {} and found.consequences() == []
    assert found.describe().startswith(f"{found.file_system}; has: preallocation")


@pytest.mark.parametrize("error", [errno.EIO, errno.EOPNOTSUPP, errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_any_call_may_fail(path: Path, error: int) -> None:
    """I3: whichever call fails, once or from then on, the probe answers, and removes what it can."""
    calls = FaultySyscalls()
    root = StoreRoot(str(path), syscalls=calls)
    before = calls.calls
    probe(root)
    total = calls.calls - before
    assert total > 40
    open_before = open_descriptors()
    for nth in range(1, total + 1):
        for times in (1, FOREVER):
            calls.faults = [Fault(nth, times=times, error=error)]
            found = probe(root)
            calls.faults = []
            for name in ABILITIES:
                assert getattr(found, name) is True or found.errors.get(name), f"call {nth}: {name}"
            for name in set(os.listdir(path)) - {"STORE.json"}:
                assert name.startswith(".STORE.json."), "a name that the store does not know as its own"
                (path / name).unlink()
    assert open_descriptors() == open_before


@pytest.mark.parametrize(
    ("kind", "error", "name", "value"),
    [
        ("fallocate", errno.EOPNOTSUPP, "preallocation", False),
        ("fallocate", errno.ENOSPC, "preallocation", None),
        ("flock", errno.ENOLCK, "flock", False),
        ("flock", errno.EIO, "flock_directory", None),
        ("preadv", errno.EINVAL, "direct_io", False),
        ("rename", errno.ENOSYS, "replace", False),
    ],
)
def test_refusals(path: Path, kind: str, error: int, name: str, value: bool | None) -> None:
    """What a file system does not know is False; what it could not do just now is None."""
    found = probed(path, FaultySyscalls(Fault(kinds=[kind], times=FOREVER, error=error)))
    assert getattr(found, name) is value
    assert found.errors[name] == os.strerror(error)
    assert bool(found.consequences()) == (value is False)
    assert ("lacks" if value is False else "unknown") in found.describe()


class Liar(Syscalls):
    """A file system that accepts calls and does nothing of the kind."""

    def __init__(self, *lies: str) -> None:
        self.lies = lies

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        lie = "punch" if mode & FALLOC_PUNCH_HOLE else "preallocate"
        if lie not in self.lies:
            super().fallocate(fd, mode, offset, length)

    def flock(self, fd: int, operation: int) -> None:
        if "flock" not in self.lies or operation == fcntl.LOCK_UN:
            super().flock(fd, operation)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return super().open(path, flags & ~os.O_EXCL if "create" in self.lies else flags, mode)

    def rename(self, source: str, target: str) -> None:
        if "rename" not in self.lies:
            super().rename(source, target)


@pytest.mark.parametrize(
    ("lie", "names"),
    [
        ("preallocate", {"allocation_counted"}),
        ("punch", {"punching"}),
        ("flock", {"flock", "flock_directory"}),
        ("create", {"exclusive_create"}),
        ("rename", {"replace"}),
    ],
)
def test_lies(path: Path, lie: str, names: set[str]) -> None:
    """An ability that has no effect is not there, whatever the call returned: GlusterFS counts no promise."""
    found = probed(path, Liar(lie))
    assert {name for name in ABILITIES if getattr(found, name) is False} == names
    assert found.consequences()


class Slow(Syscalls):
    """Sizes by path are as they were at the first look, as long as an attribute cache keeps them."""

    looks = 0

    def stat(self, path: str) -> os.stat_result:
        true = super().stat(path)
        self.looks += ".probe-" in path
        return with_size(true, true.st_size - 512) if 1 < self.looks < 5 and ".probe-" in path else true


def with_size(status: os.stat_result, size: int) -> os.stat_result:
    fields: list[Any] = list(status)
    fields[6] = size
    return os.stat_result(fields)


def test_sizes_that_are_seen_late(path: Path) -> None:
    """An attribute cache is measured, and its consequence is said."""
    found = probed(path, Slow())
    assert found.attribute_seconds is not None and 0 < found.attribute_seconds < 1
    assert any("late" in text for text in found.consequences())


def test_a_root_that_is_read_only(path: Path) -> None:
    """Nothing is written, and every ability says why it is not known."""
    before = tree(path)
    found = probe(StoreRoot(str(path), create=False))
    assert tree(path) == before
    assert {getattr(found, name) for name in ABILITIES} == {None}
    assert found.errors["punching"] == "opened read-only"
    assert found.file_system and found.metadata_seconds


def test_a_root_that_vanishes(path: Path) -> None:
    root = StoreRoot(str(path))
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()
    found = probe(root)
    assert found.file_system is None
    assert found.errors["flock"] == os.strerror(errno.ENOENT)
    with pytest.raises(StoreError):
        StoreRoot(str(path), create=False)


def test_leftovers_of_a_killed_probe_are_the_stores_own(path: Path) -> None:
    """I7: a store opens beside them; they go with other old temporaries."""
    (path / ".STORE.json.probe-0123456789abcdef").write_bytes(b"x")
    (path / "STORE.json").unlink()
    StoreRoot(str(path))
