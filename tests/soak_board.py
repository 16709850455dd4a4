"""What the processes of a soak share: numbers in a file mapped into all of them, and logs they append to.

Nothing here waits for anybody: a process may be killed or stopped at any instruction, and what it has counted
so far stands.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

REASONS = 16
MAX_SPACES = 4
CALM, JUMPED = 0, 1

HEAD = np.dtype(
    [
        ("stop", "u8"),
        ("clock_offset", "f8"),
        ("clock_changed", "f8"),
        ("started", "f8"),
        ("disturbed", "f8", MAX_SPACES),
    ]
)
ROW = np.dtype(
    [
        ("generation", "u8"),
        ("leave", "u8"),
        ("heartbeat", "f8"),
        ("stopped", "f8"),
        ("requests", "u8"),
        ("dumped_blocks", "u8"),
        ("written_blocks", "u8"),
        ("written_bytes", "u8"),
        ("already_stored", "u8"),
        ("loaded_blocks", "u8"),
        ("loaded_bytes", "u8"),
        ("lookups", "u8"),
        ("hits", "u8"),
        ("evicted_bytes", "u8"),
        ("wrong", "u8"),
        ("flipped", "u8"),
        ("compared_bytes", "u8"),
        ("recent_asked", "u8", 2),
        ("recent_found", "u8", 2),
        ("slowest", "f8", 4),
        ("misses", "u8", REASONS),
        ("unstored", "u8", REASONS),
    ]
)
CALLS = ("open", "lookup", "load", "dump")
"""What `slowest` is of: seconds, without those for which the process was stopped."""

STORED = np.dtype(
    [
        ("began", "f8"),
        ("ended", "f8"),
        ("written", "u8"),
        ("chain", "u8"),
        ("first", "u4"),
        ("count", "u4"),
        ("mask", "u8"),
    ]
)
"""A dump: when it began and ended (monotonic), bytes written by all before it, and which of `count` blocks
from position `first` of a chain were reported stored (a bit each)."""


class Board:
    """Numbers of one soak, shared by all its processes. `head` and `rows` are mapped: read and write them."""

    def __init__(self, directory: Path, slots: int, create: bool = False) -> None:
        self.directory = directory
        path = directory / "board"
        if create:
            path.write_bytes(bytes(HEAD.itemsize + slots * ROW.itemsize))
        mapped = np.memmap(path, np.uint8, "r+")
        self.head = mapped[: HEAD.itemsize].view(HEAD)
        self.rows = mapped[HEAD.itemsize :].view(ROW)

    @property
    def stopping(self) -> bool:
        return bool(self.head["stop"][0])

    def clock_offset(self) -> float:
        return float(self.head["clock_offset"][0])

    def set_clock(self, offset: float) -> None:
        self.head["clock_offset"][0] = offset
        self.head["clock_changed"][0] = time.monotonic()

    def weather(self) -> int:
        """`JUMPED` when clocks are wrong or were not long ago, else `CALM`."""
        recently = time.monotonic() - self.head["clock_changed"][0] < 30 and self.head["clock_changed"][0] > 0
        return JUMPED if recently or self.clock_offset() else CALM

    def disturb(self, space: int | None = None) -> None:
        """Note that something took blocks away now, from one namespace or from all."""
        which = slice(None) if space is None else space
        self.head["disturbed"][0, which] = time.monotonic()

    def disturbed_at(self, space: int) -> float:
        return float(self.head["disturbed"][0, space])

    def written(self) -> int:
        """Bytes that all processes have written since the start."""
        return int(self.rows["written_bytes"].sum())

    def total(self, field: str) -> int:
        return int(self.rows[field].sum())

    def stored_path(self, slot: int) -> Path:
        return self.directory / f"stored-{slot}.bin"


class StoredLog:
    """Appends what dumps reported as stored, one record for each dump. Thread-safe."""

    def __init__(self, board: Board, slot: int) -> None:
        self._fd = os.open(board.stored_path(slot), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, began: float, written: int, chain: int, first: int, stored: np.ndarray) -> None:
        """Args: `stored`: bool (count,), at most 64."""
        mask = sum(1 << i for i in np.flatnonzero(stored).tolist())
        record = np.array([(began, time.monotonic(), written, chain, first, len(stored), mask)], STORED)
        os.write(self._fd, record.tobytes())


class StoredTail:
    """What a writer reported as stored lately."""

    def __init__(self, board: Board, slot: int) -> None:
        self._path = board.stored_path(slot)

    def last(self, count: int) -> np.ndarray:
        """The last `count` records, `STORED` (n,), oldest first."""
        try:
            with self._path.open("rb") as file:
                whole = os.fstat(file.fileno()).st_size // STORED.itemsize
                file.seek(max(0, whole - count) * STORED.itemsize)
                data = file.read(min(count, whole) * STORED.itemsize)
        except FileNotFoundError:
            data = b""
        return np.frombuffer(data, STORED, len(data) // STORED.itemsize)

    def everything(self) -> np.ndarray:
        return self.last(1 << 40)
