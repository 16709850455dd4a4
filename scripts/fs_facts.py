"""What a file system does, measured: on one mount, or between two mounts of it as on two machines.

    python scripts/fs_facts.py MOUNT [OTHER_MOUNT] [--json]

Works in new directories below the mounts, which it removes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from posix_store.abilities import Abilities, probe
from posix_store.root import StoreRoot
from posix_store.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, Syscalls

PATIENCE = 30.0
"""Seconds to wait for one machine to see what another has done."""
ROUNDS = 3
KIB = 1 << 10
_HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""
calls = Syscalls()


def probed(mount: Path) -> Abilities:
    """What the store's own probe says."""
    path = mount / f"facts-{secrets.token_hex(4)}"
    try:
        return probe(StoreRoot(str(path), capacity=1 << 20))
    finally:
        shutil.rmtree(path, ignore_errors=True)


class TwoMachines:
    """One directory as two mounts show it: `here` does things, `there` looks."""

    def __init__(self, here: Path, there: Path) -> None:
        self._names = iter(range(1000))
        self.here, self.there = here, there

    def new(self, data: bytes = b"") -> tuple[str, str]:
        """A new file, by its path in each mount."""
        name = f"f{next(self._names)}"
        (self.here / name).write_bytes(data)
        here, there = str(self.here / name), str(self.there / name)
        if seen_after(lambda: os.path.exists(there)) is None:
            raise OSError(f"{there} was not seen within {PATIENCE} s")
        return here, there

    def facts(self) -> Iterator[tuple[str, Any]]:
        yield "new name in a listing", median_of(self.listing)
        yield "removed name out of a listing", median_of(self.removed)
        yield "appended bytes read through an open descriptor", median_of(self.appended)
        yield "size by path after an append", median_of(self.size)
        yield "size by path with statx(FORCE_SYNC)", median_of(lambda: self.size(forced_size))
        yield "replaced file read by path", median_of(self.replaced)
        yield "flock on a file excludes the other machine", answer(self.locks_file)
        yield "flock on a directory excludes the other machine", answer(self.locks_directory)
        yield "flock freed after SIGKILL of its holder", answer(self.lock_of_the_killed)
        yield "preallocation in st_blocks of the other machine", answer(self.promise)
        yield "hole read as zeros by the other machine (cached before)", answer(self.hole)
        yield "bytes of a deleted file readable through the other's descriptor", answer(self.deleted)
        yield "link count of a file the other machine has deleted", answer(self.link_count)

    def listing(self) -> float | None:
        os.listdir(self.there)
        name = f"f{next(self._names)}"
        (self.here / name).touch()
        return seen_after(lambda: name in os.listdir(self.there))

    def removed(self) -> float | None:
        here, there = self.new()
        if seen_after(lambda: os.path.basename(there) in os.listdir(self.there)) is None:
            return None
        os.unlink(here)
        return seen_after(lambda: os.path.basename(there) not in os.listdir(self.there))

    def appended(self) -> float | None:
        here, there = self.new(b"a" * 64)
        with open(here, "r+b", buffering=0) as writer, open(there, "rb", buffering=0) as reader:
            os.pread(reader.fileno(), 4096, 0)
            os.pwrite(writer.fileno(), b"b" * 64, 64)
            return seen_after(lambda: os.pread(reader.fileno(), 64, 64) == b"b" * 64)

    def size(self, size_of: Callable[[str], int] = os.path.getsize) -> float | None:
        here, there = self.new(b"a" * 64)
        with open(here, "r+b", buffering=0) as writer:
            size_of(there)
            os.pwrite(writer.fileno(), b"b" * 64, 64)
            return seen_after(lambda: size_of(there) == 128)

    def replaced(self) -> float | None:
        here, there = self.new(b"old")
        Path(there).read_bytes()
        Path(here + ".new").write_bytes(b"other")
        os.replace(here + ".new", here)
        return seen_after(lambda: Path(there).read_bytes() == b"other")

    def locks_file(self) -> bool:
        here, there = self.new()
        with opened(here, os.O_RDWR) as mine, opened(there, os.O_RDWR) as theirs:
            return excludes(mine, theirs)

    def locks_directory(self) -> bool:
        flags = os.O_RDONLY | os.O_DIRECTORY
        with opened(str(self.here), flags) as mine, opened(str(self.there), flags) as theirs:
            return excludes(mine, theirs)

    def lock_of_the_killed(self) -> float | str | None:
        here, there = self.new()
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, here], stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            with opened(there, os.O_RDWR) as fd:
                if can_lock(fd):
                    return "it was never held there"
                holder.kill()
                holder.wait()
                return seen_after(lambda: can_lock(fd))
        finally:
            holder.kill()
            holder.wait()

    def promise(self) -> str:
        here, there = self.new(b"a" * 4096)
        with opened(here, os.O_RDWR) as fd:
            calls.fallocate(fd, FALLOC_KEEP_SIZE, 0, 256 * KIB)
            time.sleep(2)
            blocks = os.stat(there).st_blocks * 512
        return f"{blocks >> 10} of 256 KiB after 2 s"

    def hole(self) -> float | str | None:
        here, there = self.new(secrets.token_bytes(256 * KIB))
        with opened(here, os.O_RDWR) as mine, opened(there, os.O_RDONLY) as theirs:
            os.pread(theirs, 256 * KIB, 0)
            calls.fallocate(mine, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, 64 * KIB, 64 * KIB)
            return seen_after(lambda: os.pread(theirs, 64 * KIB, 64 * KIB) == bytes(64 * KIB)) or "never"

    def deleted(self) -> str:
        data = secrets.token_bytes(256 * KIB)
        here, there = self.new(data)
        with opened(there, os.O_RDONLY) as theirs:
            os.pread(theirs, 1, 0)
            os.unlink(here)
            os.posix_fadvise(theirs, 0, 0, os.POSIX_FADV_DONTNEED)
            at_once = os.pread(theirs, len(data), 0) == data
            time.sleep(1.5)
            return f"{at_once}; after 1.5 s {os.pread(theirs, len(data), 0) == data}"

    def link_count(self) -> float | str | None:
        here, there = self.new(b"a")
        with opened(here, os.O_RDWR) as mine:
            os.fstat(mine)
            os.unlink(there)
            return seen_after(lambda: os.fstat(mine).st_nlink == 0) or "never 0"


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def can_lock(fd: int) -> bool:
    """Lock for a moment."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def excludes(mine: int, theirs: int) -> bool:
    fcntl.flock(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return not can_lock(theirs)


def forced_size(path: str) -> int:
    """Size that the server is asked for, past the kernel's cache of attributes."""
    done = subprocess.run(
        ["stat", "--cached=never", "--format=%s", path], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def seen_after(condition: Callable[[], bool]) -> float | None:
    """Seconds until something is seen; None when it is not within `PATIENCE`."""
    began = time.perf_counter()
    while time.perf_counter() - began < PATIENCE:
        with contextlib.suppress(FileNotFoundError):
            if condition():
                return time.perf_counter() - began
        time.sleep(0.0005)
    return None


def median_of(measurement: Callable[[], float | None]) -> float | str:
    try:
        times = [measurement() for _ in range(ROUNDS)]
    except OSError as error:
        return f"error: {error}"
    known = [seconds for seconds in times if seconds is not None]
    return statistics.median(known) if len(known) == ROUNDS else f"not within {PATIENCE:.0f} s"


def answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except OSError as error:
        return f"no: {error.strerror or error}"


def between(mount: Path, other: Path) -> dict[str, Any]:
    """Every fact about two mounts of one file system."""
    name = f"facts-{secrets.token_hex(4)}"
    (mount / name).mkdir()
    try:
        if seen_after((other / name).is_dir) is None:
            raise SystemExit(f"{mount} and {other} do not show the same directory")
        return dict(TwoMachines(mount / name, other / name).facts())
    finally:
        shutil.rmtree(mount / name, ignore_errors=True)


def written(value: Any) -> str:
    return f"{1e3 * value:.1f} ms" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mount", type=Path)
    parser.add_argument(
        "other", type=Path, nargs="?", help="the same file system as another client mounts it"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = probed(options.mount)
    facts = between(options.mount, options.other) if options.other else {}
    if options.json:
        print(json.dumps({"probe": found.to_dict(), "between": facts}, indent=1))
        return
    print(found.describe())
    for text in (*(f"{name}: {why}" for name, why in found.errors.items()), *found.consequences()):
        print(f"  {text}")
    for name, value in facts.items():
        print(f"{name:64} {written(value)}")


if __name__ == "__main__":
    main()
