"""Small file systems of several kinds, mounted for tests: images on a loop device, or in memory.

Each lies in a directory of its own under /dev/shm, whose name has the process id; what a killed run left
mounted is taken down by the next.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "ucm-fs-"
_MIB = 1 << 20


class CannotMount(Exception):
    """This machine cannot mount that kind; says what is missing."""


@dataclass(frozen=True)
class Kind:
    """How to make one kind of file system; `size` in bytes is close to the least that mkfs takes."""

    name: str
    size: int
    mkfs: tuple[str, ...] = ()
    package: str = ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "ext4", 64 * _MIB, ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1"), "e2fsprogs"
        ),
        Kind("xfs", 300 * _MIB, ("mkfs.xfs", "-q", "-f"), "xfsprogs"),
        Kind("btrfs", 128 * _MIB, ("mkfs.btrfs", "-q", "-f", "--mixed"), "btrfs-progs"),
        Kind("tmpfs", 64 * _MIB),
        Kind("overlay", 64 * _MIB),
    )
}


@contextlib.contextmanager
def mounted(kind: Kind) -> Iterator[Path]:
    """A new, empty file system, for the body of the `with`. Nothing of it is left afterwards.

    Raises:
        CannotMount: this process or machine cannot have one.
    """
    _check(kind)
    _sweep()
    home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY))
    point = home / "mounted"
    point.mkdir()
    try:
        if kind.mkfs:
            image = home / "image"
            with image.open("wb") as file:
                file.truncate(kind.size)
            _run(*kind.mkfs, str(image))
            _run("mount", "-o", "loop", str(image), str(point))
        elif kind.name == "tmpfs":
            _mount_memory(kind, point)
        else:
            _mount_overlay(kind, home, point)
        yield point
    finally:
        _take_down(home)


def used_bytes(path: Path) -> int:
    """Bytes in use on a file system that is ours alone, by its own count, with all that is pending done."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # Some file systems free the space of what was deleted only when they commit.
        subprocess.run(["sync", "-f", str(path)], check=True)
        disk = os.fstatvfs(fd)
    finally:
        os.close(fd)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _check(kind: Kind) -> None:
    if os.geteuid() != 0:
        raise CannotMount(f"{kind.name}: only root can mount")
    if not os.access(MEMORY, os.W_OK):
        raise CannotMount(f"{kind.name}: there is no {MEMORY} for its image")
    for program, package in ((kind.mkfs[:1], kind.package), (("mount",), "mount")):
        if program and not shutil.which(program[0]):
            raise CannotMount(f"{kind.name}: no {program[0]} (apt-get install {package})")


def _mount_memory(kind: Kind, point: Path) -> None:
    _run("mount", "-t", "tmpfs", "-o", f"size={kind.size}", "tmpfs", str(point))


def _mount_overlay(kind: Kind, home: Path, point: Path) -> None:
    """The upper directory in memory, as in a container: all that the store writes lies there."""
    memory = home / "memory"
    memory.mkdir()
    _mount_memory(kind, memory)
    for name in ("lower", "upper", "work"):
        (memory / name).mkdir()
    where = f"lowerdir={memory}/lower,upperdir={memory}/upper,workdir={memory}/work"
    _run("mount", "-t", "overlay", "-o", where, "overlay", str(point))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise CannotMount(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def _take_down(home: Path) -> None:
    for point in (home / "mounted", home / "memory"):
        while os.path.ismount(point):
            # The loop device that `mount` has set up goes with the mount, or with its last user.
            if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
                subprocess.run(["umount", "-l", str(point)], capture_output=True, check=True)
    shutil.rmtree(home, ignore_errors=True)


def _sweep() -> None:
    """Take down what runs that are dead by now have left."""
    for home in MEMORY.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", home.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _take_down(home)
