"""Compiles the loop of `raw.c` when it is first needed, and calls it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from store_bench.memory import pointer

_HERE = Path(__file__).resolve().parent
_SOURCE = _HERE / "raw.c"
_INCLUDE = _HERE.parents[1] / "posix_store"
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread"]


class CannotRun(Exception):
    """This store cannot be measured here; the message says why."""


def compiled() -> Path:
    """The shared library, made with the C compiler unless that was done before from the same source.

    Raises `CannotRun` without a compiler or without the header of the checksum.
    """
    header = _INCLUDE / "_crc32c.h"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise CannotRun("there is no C compiler (cc)")
    if not header.exists():
        raise CannotRun(f"there is no {header}")
    content = _SOURCE.read_bytes() + header.read_bytes() + " ".join(_FLAGS).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ucm-sglang-bench"
    library = cache / f"raw-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "raw.so"
            command = [compiler, *_FLAGS, f"-I{_INCLUDE}", "-o", str(made), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotRun(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
            made.replace(library)
    return library


class RawLoop:
    """`raw_move` of `raw.c`, which runs without the GIL."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compiled()))
        self._move = library.raw_move
        self._move.argtypes = [ctypes.c_int] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 3
        library.raw_crc_kind.restype = ctypes.c_char_p
        self.crc_kind: str = library.raw_crc_kind().decode()

    def move(
        self,
        fd: int,
        block_bytes: int,
        offsets: np.ndarray,
        addresses: np.ndarray,
        sums: np.ndarray,
        *,
        writes: bool,
        checks: bool,
        threads: int,
        piece: int,
    ) -> None:
        """Read or write blocks: int64 (n,) offsets, ascending; uint64 (n,) addresses; uint32 (n,) checksums.

        piece: bytes of one call, at most.

        Raises `OSError`, with EBADMSG where a checksum differs.
        """
        error = self._move(
            fd, writes, checks, threads, piece, len(offsets), block_bytes,
            pointer(offsets), pointer(addresses), pointer(sums),
        )  # fmt: skip
        if error:
            raise OSError(error, os.strerror(error))
