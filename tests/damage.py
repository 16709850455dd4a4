"""Damage that happens to files, as values that hypothesis can draw and shrink.

Files are named by a number, taken modulo how many there are, and places by a position, modulo the size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

Damage = Callable[[list[Path]], None]


def pick(files: list[Path], number: int) -> Path:
    return files[number % len(files)]


@dataclass(frozen=True)
class Flip:
    file: int
    position: int
    mask: int

    def __call__(self, files: list[Path]) -> None:
        edit(
            pick(files, self.file), self.position, lambda old: bytes([old[0] ^ self.mask]) if old else b"", 1
        )


@dataclass(frozen=True)
class Zero:
    file: int
    position: int
    length: int

    def __call__(self, files: list[Path]) -> None:
        edit(pick(files, self.file), self.position, lambda old: bytes(len(old)), self.length)


@dataclass(frozen=True)
class Cut:
    file: int
    position: int

    def __call__(self, files: list[Path]) -> None:
        path = pick(files, self.file)
        if path.exists():
            os.truncate(path, self.position % (path.stat().st_size + 1))


@dataclass(frozen=True)
class Delete:
    file: int

    def __call__(self, files: list[Path]) -> None:
        pick(files, self.file).unlink(missing_ok=True)


@dataclass(frozen=True)
class Extend:
    file: int
    garbage: bytes

    def __call__(self, files: list[Path]) -> None:
        with pick(files, self.file).open("ab") as file:
            file.write(self.garbage)


@dataclass(frozen=True)
class Exchange:
    """Two files change names, as after a restore of the wrong backup."""

    one: int
    other: int

    def __call__(self, files: list[Path]) -> None:
        one, other = pick(files, self.one), pick(files, self.other)
        if one.exists() and other.exists() and one != other:
            aside = one.with_name("aside")
            one.rename(aside)
            other.rename(one)
            aside.rename(other)


@dataclass(frozen=True)
class Overwrite:
    """One file has the contents of another, written into it in place."""

    source: int
    target: int

    def __call__(self, files: list[Path]) -> None:
        source, target = pick(files, self.source), pick(files, self.target)
        if source.exists() and target.exists() and source != target:
            shutil.copyfile(source, target)


def edit(path: Path, position: int, change: Callable[[bytes], bytes], length: int) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(position % path.stat().st_size)
        old = file.read(length)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(change(old))


which = st.integers(0, 40)
# Headers and records are small beside the payload: most positions are drawn near them.
where = st.one_of(st.integers(0, 130), st.integers(0, 1500), st.integers(4000, 30_000))
damages = st.lists(
    st.one_of(
        st.builds(Flip, which, where, st.integers(1, 255)),
        st.builds(Zero, which, where, st.one_of(st.integers(1, 100), st.integers(1, 20_000))),
        st.builds(Cut, which, where),
        st.builds(Delete, which),
        st.builds(Extend, which, st.binary(min_size=1, max_size=300)),
        st.builds(Exchange, which, which),
        st.builds(Overwrite, which, which),
    ),
    min_size=1,
    max_size=3,
)


class damaged:
    """A byte of a file, flipped for the body of the `with`."""

    def __init__(self, path: Path, at: int, mask: int) -> None:
        self.path, self.at, self.mask = path, at, mask

    def __enter__(self) -> None:
        edit(self.path, self.at, lambda old: bytes([old[0] ^ self.mask]), 1)

    def __exit__(self, *_: object) -> None:
        self.__enter__()
