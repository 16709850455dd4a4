"""Throughput of dumps at capacity against below it, paired: the arms take turns in every round."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

from eviction_bench.workload import Arm, Piece, Spread, Workload

SETTLE_SECONDS = 0.3
"""Before each piece, so that the background thread of the arm before is done."""


class Dumps(Protocol):
    def prepare(self) -> None: ...
    def piece(self, batches: int) -> Piece: ...


@contextlib.contextmanager
def arms(directory: str, work: Workload) -> Iterator[dict[str, Dumps]]:
    """Below capacity, and at it with and without the background thread."""
    settings = {"below": (False, True), "full": (True, True), "full, no maintenance": (True, False)}
    with contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(Arm(directory, seed, work, full, maintenance))
            for seed, (name, (full, maintenance)) in enumerate(settings.items())
        }
        for arm in made.values():
            arm.fill()
        yield dict(made)


@contextlib.contextmanager
def two_writers(directory: str, work: Workload) -> Iterator[dict[str, Dumps]]:
    """Two processes that dump different blocks into one store, below its capacity and at it."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Dumps] = {}
        for seed, name in enumerate(("below", "full")):
            pair = _Pair(directory, 100 * (seed + 1), work, full=name == "full")
            stack.callback(pair.close)
            made[name] = pair
        yield made


def rounds(made: dict[str, Dumps], batches: int, count: int) -> dict[str, Any]:
    """Rates of each arm, and their ratios to `below` of the same round. The order of the arms rotates.

    One more round goes before, which does not count: memory is used for the first time there.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in made}
    names = list(made)
    for number in range(-1, count):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            made[name].prepare()
            time.sleep(SETTLE_SECONDS)
            piece = made[name].piece(batches)
            if number >= 0:
                pieces[name].append(piece)
    result: dict[str, Any] = {"rounds": count, "batches": batches}
    for name, of in pieces.items():
        pairs = list(zip(of, pieces["below"], strict=True))
        result[name] = {
            "rate": Spread.of([piece.rate for piece in of]),
            "ratio": Spread.of([piece.rate / below.rate for piece, below in pairs]),
            "ratio on disk": Spread.of(
                [piece.bytes / piece.on_disk * below.on_disk / below.bytes for piece, below in pairs]
            ),
            "cpu ratio": Spread.of(
                [piece.cpu / piece.bytes * below.bytes / below.cpu for piece, below in pairs]
            ),
            "unstored": sum(piece.unstored for piece in of),
        }
    return result


class _Pair:
    """Two writer processes in one store, told by pipes what to do."""

    def __init__(self, directory: str, seed: int, work: Workload, full: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        root = None
        for number in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_writer, args=(theirs, directory, root, seed + number, work, full), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
            root = ours.recv()
        self._all("fill")

    def _all(self, *order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]

    def prepare(self) -> None:
        # One after the other: both would clear the store.
        for pipe in self._pipes:
            pipe.send(("prepare",))
            pipe.recv()

    def piece(self, batches: int) -> Piece:
        """Both at once; the time of the slower one."""
        both = self._all("piece", batches)
        cpu, stored, unstored = (
            sum(getattr(each, what) for each in both) for what in ("cpu", "bytes", "unstored")
        )
        seconds, on_disk = (max(getattr(each, what) for each in both) for what in ("seconds", "on_disk"))
        return Piece(seconds, cpu, stored, unstored, on_disk)

    def close(self) -> None:
        # The first one owns the directory and deletes it, so it goes last.
        for pipe, process in reversed(list(zip(self._pipes, self._processes, strict=True))):
            with contextlib.suppress(OSError):
                pipe.send(("close",))
            process.join(20)


def _writer(
    pipe: Connection, directory: str, root: str | None, seed: int, work: Workload, full: bool
) -> None:
    make = Arm.beside(root, seed, work, full) if root else Arm(directory, seed, work, full)
    with make as arm:
        pipe.send(arm.root)
        while True:
            what, *arguments = pipe.recv()
            if what == "close":
                return
            pipe.send(getattr(arm, what)(*arguments))
