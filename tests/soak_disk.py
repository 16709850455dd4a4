"""The soak's disk: a small file system of its own where possible, who fills it, and who watches it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler-of-others"


class Disk:
    """Where the store of a soak lives.

    Args:
        directory: where to mount; made here.
        kind: `tmpfs`, `ext4` or `xfs` (a loop image), `plain` for a directory without a disk of its own,
            `auto` for the one that fits where `directory` lies and what this user may do.
        bytes: size of the file system.
    """

    def __init__(self, directory: Path, kind: str, size: int) -> None:
        self.path = directory
        self.size = size
        directory.mkdir(parents=True, exist_ok=True)
        self._image = directory.with_suffix(".img")
        wanted = ("tmpfs" if _is_in_memory(directory) else "ext4") if kind == "auto" else kind
        self.kind = wanted if wanted == "plain" or self._mount(wanted) else "plain"
        if self.kind != wanted and kind != "auto":
            raise RuntimeError(f"cannot mount a {kind} of {size} bytes on {directory}")
        self._empty = self._used()
        self._filler = directory / FILLER
        self.filled = False

    @property
    def own(self) -> bool:
        """A file system of the soak's own: it can be filled, and what is used on it is the store's."""
        return self.kind != "plain"

    def _mount(self, kind: str) -> bool:
        if kind == "tmpfs":
            commands = [["mount", "-t", "tmpfs", "-o", f"size={self.size}", "soak", str(self.path)]]
        else:
            with self._image.open("wb") as image:
                image.truncate(max(self.size, 320 << 20 if kind == "xfs" else 0))
            options = ["-q", "-F", "-m", "0"] if kind == "ext4" else ["-q", "-f"]
            commands = [
                [f"mkfs.{kind}", *options, str(self._image)],
                ["mount", "-o", "loop", str(self._image), str(self.path)],
            ]
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self._image.unlink(missing_ok=True)
            return False
        return True

    def _used(self) -> int:
        disk = os.statvfs(self.path)
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def used(self) -> int | None:
        """Bytes of disk in use, deleted files that are still open included; None when others use it too."""
        if not self.own or self.filled or self._filler.exists():
            return None
        used = self._used() - self._empty
        return None if self.filled else used

    def fill(self) -> None:
        """Take all that is free, as somebody else's files would."""
        self.filled = True
        with self._filler.open("wb") as file:
            end, step = 0, 64 << 20
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), end, step)
                    end += step
                except OSError:
                    step //= 2

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
        self.filled = False

    def close(self) -> None:
        """Unmount; everything on it is gone."""
        if self.own:
            for _ in range(50):
                if (
                    subprocess.run(["umount", str(self.path)], capture_output=True, check=False).returncode
                    == 0
                ):
                    break
                time.sleep(0.2)
        self._image.unlink(missing_ok=True)


def _is_in_memory(directory: Path) -> bool:
    """Does the directory lie on a tmpfs?"""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, what = line.split()[:3]
        if str(directory.resolve()).startswith(where) and len(where) >= len(best):
            best, kind = where, what
    return kind == "tmpfs"


def tree_blocks(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and allocated bytes of everything in a tree, by path. What vanishes meanwhile is left out."""
    found: dict[str, tuple[int, int]] = {}
    for path in _walk(str(root)):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            found[path] = (status.st_ino, status.st_blocks * 512)
    return found


def _walk(path: str) -> Iterator[str]:
    yield path
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path)
                else:
                    yield entry.path
    except (FileNotFoundError, NotADirectoryError):
        return


class CapacityWatch(threading.Thread):
    """Looks from outside, as often as it can, whether the store keeps within its capacity.

    Adding up a tree takes time, in which one file may shrink and another grow, so that the sum may be of no
    instant. What seems too much counts only if a second look finds every single file unchanged.
    """

    def __init__(self, root: Path, disk: Disk, limit: int, pause: float = 0.01) -> None:
        super().__init__(name="capacity-watch", daemon=True)
        self._root, self._disk, self._limit, self._pause = root, disk, limit, pause
        self._ended = threading.Event()
        self.now = 0
        self.peak_tree = 0
        """Most that a tree sum has shown within the limit, or that was confirmed above it."""
        self.peak_disk = 0
        """Most that the file system has reported as used, deleted files that are open included."""
        self.samples = 0
        self.disk_samples = 0
        self.disk_over = 0
        self.unsettled = 0
        """Sums above the limit that no second look confirmed."""
        self.exceeded: list[dict[str, float]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(self._pause):
                self._look_at_disk()
                self._look_at_tree()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _look_at_disk(self) -> None:
        used = self._disk.used()
        if used is not None:
            self.disk_samples += 1
            self.disk_over += used > self._limit
            self.peak_disk = max(self.peak_disk, used)

    def _look_at_tree(self) -> None:
        self.samples += 1
        seen = tree_blocks(self._root)
        total = _total(seen)
        for _ in range(40):
            if total <= self._limit:
                break
            again = tree_blocks(self._root)
            if again == seen:
                self.exceeded.append({"at": time.monotonic(), "bytes": total})
                break
            seen, total = again, _total(again)
        else:
            self.unsettled += 1
            return
        self.now = total
        self.peak_tree = max(self.peak_tree, total)


def _total(seen: dict[str, tuple[int, int]]) -> int:
    return sum(blocks for _, blocks in {inode: (inode, blocks) for inode, blocks in seen.values()}.values())


_STEM = r"[a-z0-9_.]{1,40}-\d{1,10}-[0-9a-f]{1,12}-[0-9a-f]{8}-\d{6}"
_ROOT_NAMES = re.compile(r"STORE\.json|[A-Z]+\.lock|[0-9a-f]{32}")
_NAMESPACE_NAMES = re.compile(rf"NAMESPACE\.json|PINS\.json|[A-Z]+\.lock|{_STEM}\.(seg|idx)")
_TEMPORARY = re.compile(rf"\.(STORE\.json|NAMESPACE\.json|PINS\.json|{_STEM}\.idx)\.[0-9a-f]+")


def stray_files(root: Path, allowance: float) -> list[str]:
    """Files that no rule of the format explains, temporaries older than `allowance` seconds among them."""
    strays = []
    for path in map(Path, _walk(str(root))):
        if path == root:
            continue
        depth = len(path.relative_to(root).parts)
        names = _ROOT_NAMES if depth == 1 else _NAMESPACE_NAMES
        if depth <= 2 and names.fullmatch(path.name):
            continue
        try:
            young = time.time() - path.stat().st_mtime <= allowance
        except FileNotFoundError:
            continue
        if not (depth <= 2 and _TEMPORARY.fullmatch(path.name) and young):
            strays.append(str(path.relative_to(root)))
    return strays


def lonely_files(root: Path) -> list[str]:
    """Journals without a segment, and segments without a journal."""
    names = {str(path) for path in root.glob("*/*") if path.suffix in (".seg", ".idx")}
    other = {".seg": ".idx", ".idx": ".seg"}
    return sorted(name for name in names if name[:-4] + other[name[-4:]] not in names)
