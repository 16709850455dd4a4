"""What a soak must show when it is over: checks of what was counted, and of the store that is left."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from soak_blocks import Space
from soak_board import CALM, JUMPED, StoredTail
from soak_child import Client, Tally, open_store
from soak_disk import lonely_files, stray_files, tree_blocks

from posix_store import PosixStore
from posix_store.reports import VerifyReport

if TYPE_CHECKING:
    from soak import Soak

MIB = 1 << 20
MOST_DESCRIPTORS = 200
"""Of a process: the store keeps up to 128 segments open, Python and the locks need some."""
DELETED_SECONDS = 15.0
"""For so long a file that is deleted may be held open."""
MOST_GROWTH = 16 * MIB
"""Of a process's memory, from the first third of its life (after a warm-up) to the last."""
WARM_UP = 0.15
"""Part of a run, or of a life, that does not count."""
UNDISTURBED = 0.7
"""Share of the processors that others must leave for throughput to be judged."""
TEMPORARY_SECONDS = 3600.0
FOUND_CALM, FOUND_JUMPED = 0.98, 0.90
"""Of the blocks reported as stored, the share that must be found soon after, when nothing took them away."""
SLOWEST = 15.0
"""Seconds for a call of the store: its own deadline is 5 s, and two cores serve seven busy processes."""
SMALL = 64 << 10
"""Bytes that a cleared store may occupy."""


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass
class Verdict:
    """The outcome of a soak."""

    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def add(self, name: str, ok: bool, detail: object = "") -> None:
        self.checks.append(Check(name, bool(ok), str(detail)))

    def failed(self) -> list[str]:
        return [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]

    def text(self) -> str:
        lines = [f"  {'ok    ' if c.ok else 'FAILED'} {c.name}: {c.detail}" for c in self.checks]
        lines += [f"  {name} = {value}" for name, value in self.numbers.items()]
        return "\n".join(["verdict:", *lines, f"soak: {'PASS' if self.ok else 'FAIL'}"])

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks], **self.numbers}


def judge(soak: Soak) -> Verdict:
    """All checks, on a soak whose processes have ended."""
    verdict = Verdict()
    _processes(soak, verdict)
    _capacity(soak, verdict)
    _vitals(soak, verdict)
    _throughput(soak, verdict)
    for name, step in (("what is left", _what_is_left), ("reopening", _reopened), ("clearing", _cleared)):
        try:
            step(soak, verdict)
        except Exception as error:
            verdict.add(name, False, f"raised {error!r}")
    # Last: the checks of what is left compare bytes too.
    _bytes(soak, verdict)
    verdict.numbers = {**soak.numbers(), **verdict.numbers}
    return verdict


def _processes(soak: Soak, verdict: Verdict) -> None:
    detail = f"{len(soak.failures)}, such as\n" + "\n".join(soak.failures[:3]) if soak.failures else "none"
    verdict.add("no process failed or hung", not soak.failures, detail)
    shouts = list(_shouts(soak.logs))
    verdict.add("no traceback and no error in any log", not shouts, "\n".join(shouts[:3]) or "none")
    slowest = soak.board.rows["slowest"].max()
    verdict.add("calls are bounded in time", slowest <= SLOWEST, f"slowest {slowest:.2f} s")


def _shouts(logs: Path) -> Iterator[str]:
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if "Traceback" in line or re.search(r" (ERROR|CRITICAL) ", line):
                yield f"{path.name}: " + " / ".join(lines[number : number + 12])


def _bytes(soak: Soak, verdict: Verdict) -> None:
    rows = soak.board.rows
    wrong, compared = soak.board.total("wrong"), soak.board.total("compared_bytes")
    examples = _tail(soak.logs / "wrong.jsonl", 3)
    verdict.add(
        "zero wrong bytes", not wrong, f"{wrong} wrong blocks in {compared} bytes compared {examples}"
    )
    written, wanted = soak.board.total("written_bytes"), 10 * soak.settings.capacity
    verdict.add("ten times the capacity was written", written >= wanted, f"{written} of {wanted} bytes")
    for name, weather, least in (("calm", CALM, FOUND_CALM), ("clocks jump", JUMPED, FOUND_JUMPED)):
        asked, found = (
            int(rows["recent_asked"][:, weather].sum()),
            int(rows["recent_found"][:, weather].sum()),
        )
        share = found / max(1, asked)
        detail = f"{found} of {asked} found again ({100 * share:.2f} %)"
        verdict.add(f"what was reported as stored is kept, {name}", not asked or share >= least, detail)
    asked = int(rows["recent_asked"].sum())
    verdict.add("enough was asked for again", asked >= 1000, f"{asked} blocks")


def _tail(path: Path, count: int) -> list[str]:
    return path.read_text().splitlines()[:count] if path.exists() else []


def _capacity(soak: Soak, verdict: Verdict) -> None:
    watch = soak.watch
    most = max([int(one["bytes"]) for one in watch.exceeded], default=0)
    verdict.add(
        "capacity is never exceeded",
        not watch.exceeded and watch.error is None,
        f"peak {watch.peak_tree} of capacity {soak.settings.capacity}, limit {soak.limit}; above it "
        f"{len(watch.exceeded)} times (most {most}) in {watch.samples} samples; error: {watch.error}",
    )


def _vitals(soak: Soak, verdict: Verdict) -> None:
    lives = list(soak.vitals.values())
    most = max((max(life.descriptors) for life in lives if life.descriptors), default=0)
    verdict.add("descriptors are bounded", most <= MOST_DESCRIPTORS, f"at most {most} in a process")
    held, which = max((life.longest_deleted for life in lives), default=(0.0, ""))
    verdict.add("no deleted file is held open", held <= DELETED_SECONDS, f"at most {held:.0f} s {which}")
    growth = {}
    for (slot, generation), life in soak.vitals.items():
        if life.ages and life.ages[-1] > (60 if life.protected else 120):
            first, last, slope = _growth(life.ages, life.resident)
            growth[f"{slot}.{generation}"] = (first, last, slope)
    worst = max(((last - first) for first, last, _ in growth.values()), default=0)
    detail = "; ".join(
        f"{name}: {first / MIB:.1f} to {last / MIB:.1f} MiB, {slope / MIB:+.2f} MiB/min"
        for name, (first, last, slope) in growth.items()
        if last - first > MOST_GROWTH / 4 or name.endswith(".1")
    )
    verdict.add("memory does not grow", worst <= MOST_GROWTH, detail)


def _growth(ages: list[float], sizes: list[int]) -> tuple[float, float, float]:
    """Median of the first and the last third after a warm-up, and the slope per minute."""
    start = min(len(ages) - 1, max(1, int(len(ages) * WARM_UP)))
    kept, at = sizes[start:], ages[start:]
    third = max(1, len(kept) // 3)
    slope = float(np.polyfit(at, kept, 1)[0]) * 60 if len(kept) > 2 else 0.0
    return statistics.median(kept[:third]), statistics.median(kept[-third:]), slope


def _throughput(soak: Soak, verdict: Verdict) -> None:
    """Bytes moved in the last third against the first, by time and by what the processors worked for it."""
    windows = soak.windows[int(len(soak.windows) * WARM_UP) :]
    if len(windows) < 6:
        verdict.add("throughput is steady", True, f"too short to tell ({len(soak.windows)} windows)")
        return
    left = statistics.median(window["left"] for window in windows)
    for name, unit in (("throughput", 10.0), ("work for a byte", None)):
        speeds = [window["moved"] / MIB / (unit or window["used"]) for window in windows]
        third = len(speeds) // 3
        first, last = statistics.median(speeds[:third]), statistics.median(speeds[-third:])
        detail = f"first third {first:.0f}, last {last:.0f}, least {min(speeds):.0f} MiB a second"
        # Where other programs take the machine, time says nothing about the store.
        excused = unit is not None and left < UNDISTURBED
        detail += f" (others left {100 * left:.0f} % of the processors)" if unit else " of processor"
        verdict.add(f"{name} is steady", excused or last >= first / 2 > 0, detail)


# -- the store that is left ------------------------------------------------------------------------------


def _what_is_left(soak: Soak, verdict: Verdict) -> None:
    strays = stray_files(soak.root, TEMPORARY_SECONDS)
    verdict.add("no stray files", not strays, strays[:5] or "none")
    found = {space.number: _load_all(soak, space) for space in soak.spaces}
    verdict.add("what is left can be read", any(found.values()), f"blocks by namespace: {found}")


def _load_all(soak: Soak, space: Space) -> int:
    """Load what the logs know and the store still has, without verification: the bytes must be right."""
    total = 0
    with open_store(soak.spec_of_operator("reader", space, verify=False)) as store:
        tally = Tally(soak.board, soak.slots - 1)
        client = Client(soak.spec_of_operator("reader", space, verify=False), store, soak.board, tally, 1)
        for child in soak.children:
            if child.space != space or child.role != "writer":
                continue
            for record in StoredTail(soak.board, child.slot).last(20_000):
                chain, first, count = int(record["chain"]), int(record["first"]), int(record["count"])
                if store.lookup(space.ids(chain, first, count)).any():
                    total += int(client._load(chain, first, count).sum())
    return total


def _reopened(soak: Soak, verdict: Verdict) -> None:
    _make_temporaries_old(soak.root)
    for space in soak.spaces:
        with open_store(soak.spec_of_operator("writer", space)) as store:
            report = store.verify()
            strange = _not_the_killers(soak, space, report)
            detail = f"{report.blocks} blocks, bad {report.bad}, damaged records {report.damaged_records}"
            verdict.add(f"namespace {space.number} verifies", not strange, f"{detail} {strange[:3]}")
            verdict.add(f"namespace {space.number} works", *_works(soak, space, store))
    deadline = time.monotonic() + 10
    while (lonely := lonely_files(soak.root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    verdict.add("no journal without its segment, nor the reverse", not lonely, lonely[:5] or "none")
    strays = stray_files(soak.root, 60)
    verdict.add("old temporaries are gone", not strays, strays[:5] or "none")
    occupied = sum(blocks for _, blocks in tree_blocks(soak.root).values())
    verdict.add("the store is within its capacity", occupied <= soak.limit, f"{occupied} bytes")


def _make_temporaries_old(root: Path) -> None:
    for path in [*root.glob(".*"), *root.glob("*/.*")]:
        old = time.time() - 2 * TEMPORARY_SECONDS
        os.utime(path, (old, old))


def _not_the_killers(soak: Soak, space: Space, report: VerifyReport) -> list[str]:
    """Bad blocks that no act of the killer explains."""
    strange = []
    harmed = any(soak.killer.done[act] for act in ("delete", "delete_namespace", "truncate"))
    for example in report.examples:
        match = re.search(r"in (\S+) at (\d+):", example)
        assert match, example
        name, start = match[1], int(match[2])
        end = start + space.block_bytes
        flipped = any(name == file and start <= offset < end for file, offset in soak.killer.flips)
        # The journal that said a block was evicted is gone: the block seems to be there and is a hole.
        revived = harmed and _has_hole(soak.root / space.name / name, start)
        if not flipped and not revived:
            strange.append(example)
    return strange


def _has_hole(path: Path, start: int) -> bool:
    with path.open("rb") as file:
        return os.pread(file.fileno(), 512, start) == bytes(512)


def _works(soak: Soak, space: Space, store: PosixStore) -> tuple[bool, str]:
    """New blocks are stored and found, until all that dead writers left has been looked at."""
    spec = soak.spec_of_operator("writer", space)
    client = Client(spec, store, soak.board, Tally(soak.board, soak.slots - 1), 2)
    stored = found = 0
    rounds = 2 * space.segment_bytes // (space.block_bytes * space.batch) + 8
    for chain in range(1 << 62, (1 << 62) + rounds):
        count = min(space.batch, space.length(chain))
        kept = client._dump(chain, 0, count)
        stored += int(kept.sum())
        found += int((kept & client._load(chain, 0, count)).sum())
    return 0 < stored == found, f"{stored} blocks stored in {rounds} dumps, {found} loaded"


def _cleared(soak: Soak, verdict: Verdict) -> None:
    for space in soak.spaces:
        with open_store(soak.spec_of_operator("clear", space)) as store:
            store.clear()
    left = [path for path in soak.root.glob("*/*") if path.suffix in (".seg", ".idx")]
    occupied = sum(blocks for _, blocks in tree_blocks(soak.root).values())
    verdict.add("a cleared store is empty", not left and occupied <= SMALL, f"{occupied} bytes, {left[:3]}")
    used = soak.disk.used()
    leaked = used is not None and used > occupied + SMALL
    verdict.add("no space is leaked", not leaked, f"{used} bytes used on the disk, {occupied} by files")
