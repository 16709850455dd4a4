"""The processes of a soak: started again when they end, and watched for what they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from soak_blocks import Space
from soak_child import ChildSpec

if TYPE_CHECKING:
    from soak import Soak


class Child:
    """A place for a process that is started again, with a new seed, when it has ended."""

    def __init__(self, soak: Soak, slot: int, space: Space, role: str, protected: bool, threads: int) -> None:
        self.slot, self.space, self.role, self.protected = slot, space, role, protected
        self._threads = threads
        self._soak = soak
        self._process: subprocess.Popen[bytes] | None = None
        self._expected = False
        self._start_at = 0.0
        self.generation = 0
        self.started = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        if self._process is not None and self.alive():
            self._process.send_signal(number)

    def killed(self) -> None:
        self._expected = True

    def tend(self) -> None:
        """Note how the process ended, if it did, and start the next one when it is time."""
        if self.alive() or time.monotonic() < self._start_at:
            return
        if self._process is not None:
            self._ended()
            return
        self.generation += 1
        rows = self._soak.board.rows
        rows["generation"][self.slot] = self.generation
        rows["heartbeat"][self.slot] = self.started = time.monotonic()
        self._expected = False
        self._process = self._soak.spawn(self._spec(), self.log)

    @property
    def log(self) -> Path:
        return self._soak.logs / f"child-{self.slot}.log"

    def _ended(self) -> None:
        assert self._process is not None
        status = self._process.returncode
        if status != 0 and not (status == -signal.SIGKILL and self._expected):
            tail = self.log.read_text(errors="replace")[-3000:]
            self._soak.failures.append(f"{self.role} {self.slot} ended with status {status}:\n{tail}")
        self._process = None
        self._start_at = time.monotonic() + self._soak.random.uniform(0, 1)

    def _spec(self) -> ChildSpec:
        settings = self._soak.settings
        return ChildSpec(
            role=self.role,
            directory=str(self._soak.logs),
            root=str(self._soak.root),
            slot=self.slot,
            slots=self._soak.slots,
            generation=self.generation,
            seed=self._soak.random.randrange(1 << 40),
            space=self.space,
            capacity=settings.capacity,
            min_free=settings.min_free,
            verify=self.role != "reader" or (self.generation + self.slot) % 2 == 0,
            threads=self._threads,
            orderly=self.generation % 2 == 0,
            writers=tuple(
                c.slot for c in self._soak.children if c.space == self.space and c.role == "writer"
            ),
            pace=settings.pace,
        )

    def end(self, timeout: float) -> bool:
        """Wait for the process to end by itself; False when it had to be killed."""
        if self._process is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        late = self.alive()
        if late:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            self._process.kill()
            self._process.wait()
        self._ended()
        return not late


@dataclass
class Vitals:
    """Descriptors and memory of one process over its life."""

    protected: bool
    ages: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    deleted_since: dict[str, float] = field(default_factory=dict)
    longest_deleted: tuple[float, str] = (0.0, "")
    """Seconds for which a deleted segment or journal was held open, at most, and which."""

    def look(self, pid: int, age: float) -> None:
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/fd")
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            held = {}
            for name in names:
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.endswith((".seg (deleted)", ".idx (deleted)")):
                        key = f"{name} {target}"
                        held[key] = self.deleted_since.get(key, age)
            self.ages.append(age)
            self.resident.append(resident)
            self.descriptors.append(len(names))
            self.deleted_since = held
            now = [(age - since, key) for key, since in held.items()]
            self.longest_deleted = max([self.longest_deleted, *now])


class Processor:
    """How much of the machine's processors the soak uses, and others leave to it."""

    def __init__(self) -> None:
        self._before = self._read([])

    def since_last(self, pids: list[int]) -> tuple[float, float]:
        """Seconds that these processes used, and the share (0 to 1) that nobody else used."""
        now = self._read(pids)
        total, idle, ours = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        left = (idle + max(0.0, ours)) / total if total > 0 else 1.0
        return max(0.01, ours), min(1.0, max(0.01, left))

    def _read(self, pids: list[int]) -> tuple[float, float, float]:
        """Seconds in all, idle, and used by this process, its children that ended, and those named."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        for pid in pids:
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                ours += (int(after_name[11]) + int(after_name[12])) / tick
        return sum(fields) / tick, (fields[3] + fields[4]) / tick, ours
