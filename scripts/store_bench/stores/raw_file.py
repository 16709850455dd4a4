"""`raw`, `raw-crc` and `raw-unallocated`: the loop of `raw.c` over one file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from store_bench.raw import RawLoop
from store_bench.stores.base import CannotRun, Spec, StoreUnderTest

_ALIGNMENT = 4096
_THREADS = {"one thread": 1, "two threads": 2}
_LARGEST = "calls as large as may be"
_PIECES = {"calls of 256 KiB": 256 << 10, "calls of 4 MiB": 4 << 20, _LARGEST: 1 << 31}


class RawFile(StoreUnderTest):
    """One file; each dump goes to a part of it that was not written before in this turn.

    allocate: get the space of the whole turn with `fallocate` before, which is not timed. Offsets are those
    of packed blocks, or of blocks padded to 4 KiB where I/O is direct.
    """

    def __init__(self, spec: Spec, *, checks: bool, allocate: bool) -> None:
        super().__init__(spec)
        # In the page cache pieces that fit a core's cache may be best; a device wants large requests.
        piece = "calls of 4 MiB" if spec.io_mode == "direct" else "calls of 256 KiB"
        pieces = [piece] if checks else [piece, _LARGEST]
        threads = list(_THREADS) if allocate else ["one thread"]
        self.ways = tuple(f"{count}, {piece}" for count in threads for piece in pieces)
        self.use(self.ways[0])
        self.preallocated = "yes, before the clock starts" if allocate else "no"
        self._loop = RawLoop()
        self._checks, self._allocate = checks, allocate
        self._stride = spec.block_bytes
        if spec.io_mode == "direct":
            if spec.block_bytes % 512:
                raise CannotRun(f"blocks of {spec.block_bytes} bytes cannot be moved with O_DIRECT")
            self._stride = -(-spec.block_bytes // _ALIGNMENT) * _ALIGNMENT
        self._addresses = self.blocks.addresses[:, 0].astype(np.uint64)
        self._fd = -1

    def facts(self) -> dict[str, Any]:
        return {"crc": self._loop.crc_kind if self._checks else None}

    def use(self, way: str) -> None:
        threads, _, piece = way.partition(", ")
        self._threads, self._piece = _THREADS[threads], _PIECES[piece]

    def begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if self.spec.io_mode == "direct":
            flags |= os.O_DIRECT
        blocks = self.spec.reserve // self.spec.block_bytes + 1
        self._fd = os.open(self.directory / "raw", flags, 0o600)
        if self._allocate:
            os.posix_fallocate(self._fd, 0, blocks * self._stride)
        self._places: dict[bytes, tuple[int, int]] = {}
        self._sums = np.zeros(blocks, np.uint32)

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        numbers = np.arange(len(self._places), len(self._places) + len(ids))
        for number, block in zip(numbers.tolist(), ids, strict=True):
            self._places[block] = (number * self._stride, number)
        addresses = np.ascontiguousarray(self._addresses[first : first + len(ids)])
        return (numbers * self._stride).astype(np.int64), addresses, self._sums[numbers[0] : numbers[-1] + 1]

    def prepare_load(self, ids: list[bytes]) -> Any:
        places = np.array([self._places[block] for block in ids], np.int64)
        order = np.argsort(places[:, 0], kind="stable")
        offsets, numbers = (np.ascontiguousarray(column) for column in places[order].T)
        return offsets, np.ascontiguousarray(self._addresses[: len(ids)][order]), self._sums[numbers]

    def dump(self, prepared: Any) -> None:
        self._run(prepared, True)

    def load(self, prepared: Any) -> None:
        self._run(prepared, False)

    def _run(self, prepared: Any, writes: bool) -> None:
        offsets, addresses, sums = prepared
        self._loop.move(
            self._fd, self.spec.block_bytes, offsets, addresses, sums,
            writes=writes, checks=self._checks, threads=self._threads, piece=self._piece,
        )  # fmt: skip

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        super().end()
