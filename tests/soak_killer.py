"""The random killer of the soak: what processes, operators, other tenants and clocks do to a store."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from soak_blocks import FLIP, Space
from soak_board import Board
from soak_disk import Disk

WEIGHTS = {
    "kill": 5.0,
    "stop": 4.0,
    "leave": 1.0,
    "delete": 2.0,
    "delete_namespace": 0.15,
    "fill": 0.8,
    "clock": 1.0,
    "corrupt": 2.0,
    "truncate": 1.0,
    "clear": 0.3,
    "audit": 0.5,
}
STOP_SECONDS = (1.0, 4.0)
FILL_SECONDS = (1.0, 4.0)
CLOCK_CYCLE = 180.0
"""Clocks jump in the second half of each such number of seconds only, so that both weathers are seen."""


class Victim(Protocol):
    """A child as the killer sees it."""

    slot: int
    protected: bool
    """Lives as long as the soak, so that leaks show; it is stopped but never killed."""

    def alive(self) -> bool: ...

    def signal(self, number: int) -> None: ...

    def killed(self) -> None:
        """Its death is not its own fault."""


@dataclass(order=True)
class _Later:
    when: float
    number: int
    undo: Callable[[], None] = field(compare=False)


class Killer:
    """Does one random thing after another. Call `tick` often and `finish` at the end."""

    def __init__(
        self,
        board: Board,
        root: Path,
        disk: Disk,
        spaces: list[Space],
        victims: list[Victim],
        operate: Callable[[str, Space], Callable[[], bool]],
        seed: int,
        every: float,
        without: tuple[str, ...] = (),
    ) -> None:
        """Args:
        operate: starts an operator's command on a namespace and returns "is it running?".
        every: mean seconds between two acts.
        """
        self._board, self._root, self._disk, self._spaces = board, root, disk, spaces
        self._victims, self._operate = victims, operate
        self._random = random.Random(seed)
        self._every = every
        self._next = time.monotonic() + every
        self._later: list[_Later] = []
        self._numbers = itertools.count()
        self._stopped: dict[int, float] = {}
        self._clearing: list[tuple[Space, Callable[[], bool]]] = []
        self._began = time.monotonic()
        self._jumped = False
        absent = {*without, *(() if disk.own else ("fill",))}
        self._weights = {name: weight for name, weight in WEIGHTS.items() if name not in absent}
        self.done: Counter[str] = Counter()
        self.flips: list[tuple[str, int]] = []
        """(segment file, offset) of every byte that was corrupted."""

    def tick(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0].when <= now:
            heapq.heappop(self._later).undo()
        if self._disk.filled:
            self._board.disturb()
        self._clearing = [
            (space, running) for space, running in self._clearing if self._still(space, running)
        ]
        if now >= self._next:
            self._next = now + self._random.expovariate(1 / self._every)
            self.act(self._random.choices(list(self._weights), list(self._weights.values()))[0])
        if self._calm_half():
            self._jumped = False
            if self._board.clock_offset():
                self._board.set_clock(0.0)
        elif not self._jumped:
            self.act("clock")

    def finish(self) -> None:
        """Undo everything that can be undone."""
        while self._later:
            heapq.heappop(self._later).undo()
        self._board.set_clock(0.0)

    def act(self, name: str) -> None:
        """Do one thing now, if there is something to do it to."""
        if name == "clock" and self._calm_half():
            return
        what = getattr(self, f"_{name}")()
        if what:
            self.done[name] += 1
            now = time.monotonic()
            with (self._board.directory / "history.log").open("a") as history:
                history.write(f"{now - self._began:.2f} s ({now:.2f}) {name} {what}\n")

    def _calm_half(self) -> bool:
        return (time.monotonic() - self._began) % CLOCK_CYCLE < CLOCK_CYCLE / 2

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._later, _Later(time.monotonic() + seconds, next(self._numbers), undo))

    def _still(self, space: Space, running: Callable[[], bool]) -> bool:
        self._board.disturb(space.number)
        return running()

    # -- processes -----------------------------------------------------------------------------------

    def _kill(self) -> str:
        victim = self._victim(mortal=True)
        if victim is None:
            return ""
        victim.killed()
        victim.signal(signal.SIGKILL)
        return str(victim.slot)

    def _leave(self) -> str:
        victim = self._victim(mortal=True)
        if victim is None:
            return ""
        rows = self._board.rows
        rows["leave"][victim.slot] = rows["generation"][victim.slot]
        return str(victim.slot)

    def _stop(self) -> str:
        victim = self._victim(mortal=False)
        if victim is None or victim.slot in self._stopped:
            return ""
        seconds = self._random.uniform(*STOP_SECONDS)
        generation = int(self._board.rows["generation"][victim.slot])
        self._stopped[victim.slot] = time.monotonic()
        victim.signal(signal.SIGSTOP)
        self._after(seconds, lambda: self._go_on(victim, generation))
        return f"{victim.slot} {seconds:.1f} s"

    def _go_on(self, victim: Victim, generation: int) -> None:
        since = self._stopped.pop(victim.slot)
        if int(self._board.rows["generation"][victim.slot]) == generation:
            self._board.rows["stopped"][victim.slot] += time.monotonic() - since
            victim.signal(signal.SIGCONT)

    def stopped(self, slot: int) -> bool:
        return slot in self._stopped

    def _victim(self, mortal: bool) -> Victim | None:
        candidates = [v for v in self._victims if v.alive() and not (mortal and v.protected)]
        return self._random.choice(candidates) if candidates else None

    # -- operators -----------------------------------------------------------------------------------

    def _delete(self) -> str:
        path, space = self._some_file(".seg")
        if path is None or space is None:
            return ""
        which = self._random.choice(([".seg"], [".idx"], [".seg", ".idx"]))
        self._board.disturb(space.number)
        for suffix in which:
            path.with_suffix(suffix).unlink(missing_ok=True)
        self._board.disturb(space.number)
        return f"{path.name} {' '.join(which)}"

    def _delete_namespace(self) -> str:
        space = self._random.choice(self._spaces)
        self._board.disturb(space.number)
        shutil.rmtree(self._root / space.name, ignore_errors=True)
        self._board.disturb(space.number)
        return space.name

    def _clear(self) -> str:
        return self._command("clear")

    def _audit(self) -> str:
        return self._command("audit")

    def _command(self, name: str) -> str:
        space = self._random.choice(self._spaces)
        if name == "clear":
            self._board.disturb(space.number)
        running = self._operate(name, space)
        if name == "clear":
            self._clearing.append((space, running))
        return space.name

    # -- damage --------------------------------------------------------------------------------------

    def _corrupt(self) -> str:
        path, space = self._some_file(".seg")
        if path is None or space is None:
            return ""
        with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= 4096:
                return ""
            offset = self._random.randrange(4096, size)
            (byte,) = os.pread(file.fileno(), 1, offset)
            if not _is_data(file.fileno(), offset):
                return ""  # writing to a hole would allocate space on the store's behalf
            self.flips.append((path.name, offset))
            self._board.disturb(space.number)
            os.pwrite(file.fileno(), bytes([byte ^ FLIP]), offset)
            self._board.disturb(space.number)
            return f"{path.name} at {offset}"
        return ""

    def _truncate(self) -> str:
        path, space = self._some_file(".idx")
        if path is None or space is None:
            return ""
        with contextlib.suppress(OSError):
            length = self._random.randrange(path.stat().st_size + 1)
            if self._random.random() < 0.5:
                length = length // 64 * 64
            self._board.disturb(space.number)
            os.truncate(path, length)
            self._board.disturb(space.number)
            return f"{path.name} to {length}"
        return ""

    def _some_file(self, suffix: str) -> tuple[Path | None, Space | None]:
        space = self._random.choice(self._spaces)
        files = sorted((self._root / space.name).glob(f"*{suffix}"))
        return (self._random.choice(files), space) if files else (None, None)

    # -- the machine ---------------------------------------------------------------------------------

    def _fill(self) -> str:
        if self._disk.filled:
            return ""
        self._board.disturb()
        self._disk.fill()
        seconds = self._random.uniform(*FILL_SECONDS)
        self._after(seconds, self._drain)
        return f"{seconds:.1f} s"

    def _drain(self) -> None:
        self._disk.free()
        self._board.disturb()

    def _clock(self) -> str:
        self._jumped = True
        self._board.set_clock(self._random.uniform(-3600, 3600))
        return f"{self._board.clock_offset():+.0f} s"


def _is_data(fd: int, offset: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) == offset
    except OSError:
        return False
