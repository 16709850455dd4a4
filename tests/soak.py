"""The soak: writers, readers and a random killer on one small store, for as long as you like.

    python tests/soak.py --minutes 20 --seed 1 --dir /dev/shm/soak [--json FILE]

Four writers and two readers in two namespaces read and write popular and fresh chains, far more than fits.
A killer kills and stops them, deletes and damages files, fills the disk and turns clocks (soak_killer.py).
Every byte that is loaded is compared with an oracle (soak_blocks.py); what dumps report as stored is logged,
and whether it is found shortly after is counted; capacity is watched from outside (soak_disk.py). One line is
printed every 10 s and a verdict at the end; the exit status is 1 when a check failed. Defends issue 3, must
hold 1.

One writer and one reader are never killed, so that leaks of descriptors and memory have time to show. Readers
of every other generation do not verify checksums, and must get right bytes all the same. Only bytes that the
killer flipped are then no fault of the store; they are recognised by the flip.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from soak_blocks import Space
from soak_board import CALLS, CALM, JUMPED, Board
from soak_child import ChildSpec
from soak_disk import CapacityWatch, Disk, tree_blocks
from soak_killer import Killer
from soak_processes import Child, Processor, Vitals
from soak_verdict import Verdict, judge

from posix_store import Reason
from posix_store.root import StoreRoot

MIB = 1 << 20
WINDOW = 10.0
SILENCE = 40.0
"""Seconds without a sign of life after which a child that is not stopped counts as stuck."""


WRITTEN = 10
"""Capacities that must be written at least."""
MANY_FAILURES = 30
"""So many are enough to see what is wrong: the soak ends early."""


@dataclass(frozen=True)
class Settings:
    """A soak. Sizes in bytes."""

    minutes: float = 20.0
    seed: int = 0
    directory: Path | None = None
    """Made here and removed afterwards; None: a temporary one in memory."""
    capacity: int = 256 * MIB
    min_free: int = 16 * MIB
    disk: str = "auto"
    every: float = 1.2
    """Mean seconds between two acts of the killer."""
    pace: float = 0.002
    """Mean seconds that a process rests after each request."""
    without: tuple[str, ...] = ()
    """Acts that the killer leaves out."""
    keep: bool = False
    """Leave the directory with all logs."""


class Soak:
    """One run. `run` returns the verdict."""

    def __init__(self, settings: Settings, out: TextIO) -> None:
        self.settings, self._out = settings, out
        self.random = random.Random(settings.seed)
        self.failures: list[str] = []
        self.spaces = _spaces(self.random)
        made = settings.directory or Path(tempfile.mkdtemp(prefix="soak-", dir=_memory()))
        self.directory = made
        self.logs = made / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        size = settings.capacity + settings.capacity // 8 + 2 * settings.min_free
        self.disk = Disk(made / "disk", settings.disk, size)
        self.root = self.disk.path / "store"
        plan = [
            (0, "writer", True, 1), (0, "writer", False, 2), (1, "writer", False, 1), (1, "writer", False, 2),
            (0, "reader", False, 1), (1, "reader", True, 1),
        ]  # fmt: skip
        self.slots = len(plan) + 1
        self.board = Board(self.logs, self.slots, create=True)
        self.children: list[Child] = []
        for slot, (space, role, protected, threads) in enumerate(plan):
            self.children.append(Child(self, slot, self.spaces[space], role, protected, threads))
        extent = max(space.block_bytes * space.batch for space in self.spaces)
        self.limit = settings.capacity + max(settings.capacity // 100, extent)
        self.watch = CapacityWatch(self.root, self.disk, self.limit)
        self.vitals: dict[tuple[int, int], Vitals] = {}
        self.windows: list[dict[str, float]] = []
        self._processor = Processor()
        self._commands: list[tuple[str, subprocess.Popen[bytes], float]] = []
        self.killer = Killer(
            self.board, self.root, self.disk, self.spaces, list(self.children), self._operate,
            settings.seed, settings.every, settings.without,
        )  # fmt: skip

    # -- processes -----------------------------------------------------------------------------------

    def spawn(self, spec: ChildSpec, log: Path) -> subprocess.Popen[bytes]:
        here = Path(__file__).resolve().parent
        environment = {**os.environ, "PYTHONPATH": str(here.parent), "MALLOC_ARENA_MAX": "4"}
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, str(here / "soak_child.py"), spec.encode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def spec_of_operator(self, role: str, space: Space, verify: bool = True) -> ChildSpec:
        settings = self.settings
        return ChildSpec(
            role, str(self.logs), str(self.root), self.slots - 1, self.slots, 0,
            self.random.randrange(1 << 40), space, settings.capacity, settings.min_free, verify,
        )  # fmt: skip

    def _operate(self, role: str, space: Space) -> Callable[[], bool]:
        process = self.spawn(self.spec_of_operator(role, space), self.logs / "operators.log")
        self._commands.append((role, process, time.monotonic()))
        return lambda: process.poll() is None

    def _tend_commands(self, patience: float = 60.0) -> None:
        left = []
        for role, process, since in self._commands:
            if process.poll() is None:
                if time.monotonic() - since > patience:
                    process.kill()
                    process.wait()
                    self.failures.append(f"{role} did not end within {patience:.0f} s")
                else:
                    left.append((role, process, since))
            elif process.returncode:
                tail = (self.logs / "operators.log").read_text(errors="replace")[-3000:]
                self.failures.append(f"{role} ended with status {process.returncode}:\n{tail}")
        self._commands = left

    def _tend(self) -> None:
        for child in self.children:
            child.tend()
            silent = time.monotonic() - float(self.board.rows["heartbeat"][child.slot])
            if child.alive() and silent > SILENCE and not self.killer.stopped(child.slot):
                child.signal(signal.SIGUSR1)
                time.sleep(1)
                tail = child.log.read_text(errors="replace")[-3000:]
                self.failures.append(f"{child.role} {child.slot} has been silent for {silent:.0f} s:\n{tail}")
                child.killed()
                child.signal(signal.SIGKILL)
        self._tend_commands()

    def _look_at_vitals(self) -> None:
        for child in self.children:
            if child.alive() and not self.killer.stopped(child.slot):
                key = (child.slot, child.generation)
                vitals = self.vitals.setdefault(key, Vitals(child.protected))
                vitals.look(child.pid, time.monotonic() - child.started)

    # -- the run -------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        try:
            self._say(self._headline())
            began = time.monotonic()
            self.board.head["started"][0] = began
            self.board.disturb()
            StoreRoot(str(self.root), capacity=self.settings.capacity)
            self.watch.start()
            self._soak(began)
            self._stop()
            verdict = judge(self)
            self._say(verdict.text())
            return verdict
        finally:
            self.close()

    def _soak(self, began: float) -> None:
        seconds = self.settings.minutes * 60
        next_window, next_look = began + WINDOW, began
        before = self._totals()
        while self._goes_on(time.monotonic() - began, seconds):
            self._tend()
            self.killer.tick()
            now = time.monotonic()
            if now >= next_look:
                self._look_at_vitals()
                next_look = now + 2
            if now >= next_window:
                before = self._window(now - began, before)
                next_window += WINDOW
            time.sleep(0.02)

    def _goes_on(self, elapsed: float, seconds: float) -> bool:
        """For the time asked for; on a busy machine up to three times as long, until enough is written."""
        enough = self.board.written() >= WRITTEN * self.settings.capacity
        return len(self.failures) < MANY_FAILURES and elapsed < (seconds if enough else 3 * seconds)

    def _stop(self) -> None:
        self.killer.finish()
        self.board.head["stop"][0] = 1
        for child in self.children:
            if not child.end(30):
                self.failures.append(f"{child.role} {child.slot} did not stop within 30 s; see its log")
        deadline = time.monotonic() + 60
        while self._commands and time.monotonic() < deadline:
            self._tend_commands()
            time.sleep(0.1)
        self.watch.stop()

    def close(self) -> None:
        """Leave nothing behind: no process, no mount, no file."""
        with contextlib.suppress(RuntimeError):
            self.watch.stop()
        for child in self.children:
            child.killed()
            child.signal(signal.SIGKILL)
            child.end(10)
        for _, process, _ in self._commands:
            process.kill()
            process.wait()
        if self.settings.keep:
            self._say(f"kept: {self.directory}")
            return
        self.disk.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- what is printed -----------------------------------------------------------------------------

    def _totals(self) -> dict[str, int]:
        fields = ("written_bytes", "loaded_bytes", "lookups", "hits", "requests", "wrong")
        return {name: self.board.total(name) for name in fields}

    def _window(self, at: float, before: dict[str, int]) -> dict[str, int]:
        now = self._totals()
        step = {name: now[name] - before[name] for name in now}
        moved = step["written_bytes"] + step["loaded_bytes"]
        used, left = self._processor.since_last([child.pid for child in self.children if child.alive()])
        self.windows.append({"at": at, "moved": moved, "left": left, "used": used, **step})
        evicted = now["written_bytes"] - self.watch.now
        acts = " ".join(f"{name} {count}" for name, count in sorted(self.killer.done.items()))
        written, loaded = (step[f"{name}_bytes"] / MIB / WINDOW for name in ("written", "loaded"))
        share, peak = (size / self.settings.capacity for size in (self.watch.now, self.watch.peak_tree))
        self._say(
            f"{at:5.0f} s  written {_gib(now['written_bytes'])} (+{written:.0f} MiB/s)"
            f"  loaded {_gib(now['loaded_bytes'])} (+{loaded:.0f} MiB/s)"
            f"  hits {100 * step['hits'] / max(1, step['lookups']):.0f} %  gone {_gib(max(0, evicted))}"
            f"  processor {100 * left:.0f} %  disk {share:.3f} (peak {peak:.3f})"
            f"  wrong {now['wrong']}  failures {len(self.failures)}  {acts}"
        )
        return now

    def _headline(self) -> str:
        settings = self.settings
        spaces = "; ".join(
            f"{space.policy}: {space.block_bytes} B x {space.batch}, chains of up to {space.longest}, "
            f"segments of {space.segment_bytes >> 20} MiB"
            for space in self.spaces
        )
        return (
            f"soak of {settings.minutes:g} min, seed {settings.seed}, capacity "
            f"{settings.capacity / MIB:.0f} MiB on {self.disk.kind} ({self.directory}); {spaces}"
        )

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def numbers(self) -> dict[str, Any]:
        """What was counted, for the verdict."""
        rows, watch = self.board.rows, self.watch
        by_reason: dict[str, dict[str, int]] = defaultdict(dict)
        for name in ("misses", "unstored"):
            for reason in Reason:
                count = int(rows[name][:, reason].sum())
                if count:
                    by_reason[name][reason.name.lower()] = count
        simple = (
            "requests", "dumped_blocks", "written_blocks", "written_bytes", "already_stored", "loaded_blocks",
            "loaded_bytes", "compared_bytes", "lookups", "hits", "wrong", "flipped",
        )  # fmt: skip
        return {
            **{name: self.board.total(name) for name in simple},
            **by_reason,
            "capacity": self.settings.capacity,
            "limit": self.limit,
            "peak_tree": watch.peak_tree,
            "peak_disk": watch.peak_disk,
            "disk_samples_over_limit": [watch.disk_over, watch.disk_samples],
            "tree_samples": watch.samples,
            "unsettled_samples": watch.unsettled,
            "recent_calm": [int(rows[name][:, CALM].sum()) for name in ("recent_found", "recent_asked")],
            "recent_jumped": [int(rows[name][:, JUMPED].sum()) for name in ("recent_found", "recent_asked")],
            "slowest_seconds": dict(zip(CALLS, rows["slowest"].max(axis=0).round(3).tolist(), strict=True)),
            "acts": dict(self.killer.done),
            "generations": {f"{c.role} {c.slot}": c.generation for c in self.children},
            "mib_per_second_by_window": [round(w["moved"] / MIB / WINDOW, 1) for w in self.windows],
            "mib_per_processor_second": [round(w["moved"] / MIB / w["used"], 1) for w in self.windows],
            "files_at_end": len(tree_blocks(self.root)),
        }  # fmt: skip


def _spaces(choose: random.Random) -> list[Space]:
    """Large pages in one namespace and small ones in the other, of sizes even and odd."""
    large = choose.choice((65536, 100_001, 131072, 262144))
    small = choose.choice((1023, 1024, 4096, 4999, 10_007))
    return [
        Space(0, large, max(2, (2 << 20) // large), max(8, (4 << 20) // large), "lru", 8 << 20),
        Space(1, small, min(64, max(8, (512 << 10) // small)), min(160, (1 << 20) // small), "fifo", 2 << 20),
    ]


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def run(settings: Settings, out: TextIO = sys.stdout) -> Verdict:
    """One soak from beginning to end. Nothing is left behind, unless `settings.keep`."""
    return Soak(settings, out).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int(np.random.default_rng().integers(1 << 30)))
    parser.add_argument("--dir", type=Path, help="made and removed; without it, a temporary one in memory")
    parser.add_argument("--capacity", type=int, default=256, metavar="MIB")
    parser.add_argument("--disk", choices=("auto", "tmpfs", "ext4", "xfs", "plain"), default="auto")
    parser.add_argument(
        "--every", type=float, default=1.2, help="mean seconds between two acts of the killer"
    )
    parser.add_argument("--without", action="append", default=[], metavar="ACT", help="an act to leave out")
    parser.add_argument("--json", type=Path, help="write the verdict here")
    parser.add_argument("--keep", action="store_true", help="keep the store and all logs")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    verdict = run(
        Settings(
            minutes=chosen.minutes,
            seed=chosen.seed,
            directory=chosen.dir,
            capacity=chosen.capacity * MIB,
            disk=chosen.disk,
            every=chosen.every,
            without=tuple(chosen.without),
            keep=chosen.keep,
        )
    )
    if chosen.json:
        chosen.json.write_text(json.dumps(verdict.to_dict(), indent=1) + "\n")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
