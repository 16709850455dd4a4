"""All stores of a case take turns, in an order that moves on by one from round to round."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from store_bench.cases import Case
from store_bench.geometries import size_text
from store_bench.process import ChildProcess, Failed
from store_bench.registry import REGISTRY, Entry, how_to_make, interpreter

_EVICTING = ("ours-native", "ours-python", "hicache-file")
_OPENING = ("ours-native", "ours-python", "hicache-file", "ucm-posix")
_WITHOUT_LOOKUP = ("raw", "raw-crc", "raw-unallocated")


@dataclass(frozen=True)
class Participant:
    """A store with one setting of `verify`, in a child process of its own."""

    name: str
    verify: bool

    @property
    def entry(self) -> Entry:
        return REGISTRY[self.name]

    def takes_part_in(self, case: Case) -> bool:
        store, kind = self.entry.store, case.kind
        if case.hog and store == "raw-unallocated":
            return False
        if kind == "lookup":
            return store not in _WITHOUT_LOOKUP and self.verify == self.entry.verifies[0]
        if kind == "open":
            return store in _OPENING and self.verify == self.entry.verifies[0]
        if kind == "evict":
            return store in _EVICTING and self.verify == self.entry.verifies[0]
        return True


@dataclass
class Measured:
    """Median seconds of each round of a participant in a case, by operation, in one of its ways."""

    case: Case
    participant: Participant
    way: str = ""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    hog_rates: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    preallocated: str = ""

    def add(self, answer: dict[str, Any]) -> None:
        for operation, samples in answer["samples"].items():
            self.rounds.setdefault(operation, []).append(statistics.median(samples))
            self.calls[operation] = self.calls.get(operation, 0) + len(samples)
        for operation, rate in answer["hog_rates"].items():
            self.hog_rates.setdefault(operation, []).append(rate)


@dataclass
class Entrant:
    """A participant in a case: what it said when it was opened, and what was measured in each way."""

    case: Case
    participant: Participant
    ways: dict[str, Measured] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    preallocated: str = ""

    def add(self, answer: dict[str, Any]) -> None:
        for way, result in answer["ways"].items():
            if way not in self.ways:
                facts = {**self.facts, "way": way} if way else self.facts
                self.ways[way] = Measured(
                    self.case, self.participant, way, facts=facts, preallocated=self.preallocated
                )
            self.ways[way].add(result)


@dataclass
class Unavailable:
    """Something that could not be measured, and why."""

    store: str
    what: str
    reason: str


def participants(stores: Sequence[str], verify: str) -> list[Participant]:
    """verify: on, off or both, for stores that have the choice."""
    wanted = {"on": (True,), "off": (False,), "both": (True, False)}[verify]
    found = []
    for name, entry in REGISTRY.items():
        if entry.store in stores:
            settings = [s for s in entry.verifies if s in wanted or len(entry.verifies) == 1]
            found += [Participant(name, setting) for setting in settings]
    return found


class Runner:
    """Runs cases one after the other; keeps the children between them, because imports take long.

    directories: of each medium; everything there is under one folder that is deleted in the end.
    """

    def __init__(
        self,
        wanted: Sequence[Participant],
        environments: Path,
        directories: dict[str, Path],
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self.unavailable: list[Unavailable] = []
        self.wrong_bytes: list[Unavailable] = []
        self._directories = directories
        self._logs, self._environments, self._say = logs, environments, say
        self._children: dict[Participant, ChildProcess] = {}
        logs.mkdir(parents=True, exist_ok=True)
        for participant in wanted:
            self._start(participant)

    def _start(self, participant: Participant) -> None:
        entry = participant.entry
        python = interpreter(entry, self._environments)
        if python is None:
            reason = f"its environment is not there; {how_to_make(entry)} makes it"
            self._note(participant, "everything", reason)
            return
        self._children[participant] = ChildProcess(
            participant.name, python, self._logs / f"{participant.name}.log"
        )

    def _note(self, participant: Participant, what: str, reason: str) -> None:
        missing = Unavailable(_label(participant), what, reason)
        if missing not in self.unavailable:
            self.unavailable.append(missing)
            self._say(f"{missing.store}: cannot run ({what}): {reason}")

    def run(self, case: Case, rounds: int) -> list[Measured]:
        """Measure one case with everything that can run it."""
        measured = {p: Entrant(case, p) for p in self._children if p.takes_part_in(case)}
        # All at once: the first time, this is where each child imports what it needs.
        self._each(measured, self._send_open)
        self._each(measured, self._opened)
        for number in range(rounds):
            order = list(measured)
            first = number % max(1, len(order))
            request = {"do": "turn", "plan": case.plan(seed=number, check=number == 0)}
            self._each(measured, partial(self._turn, request), order[first:] + order[:first])
        # All at once: UCM needs 2 s to stop a thread.
        self._each(measured, self._send_close)
        self._each(measured, self._closed)
        return [way for entrant in measured.values() for way in entrant.ways.values()]

    def _send_open(self, participant: Participant, entrant: Entrant) -> None:
        case = entrant.case
        folder = self._directories[case.medium] / f"{participant.name}-{int(participant.verify)}"
        shutil.rmtree(folder, ignore_errors=True)
        spec = {
            "directory": str(folder), "block_bytes": case.block_bytes, "batch": case.batch,
            "io_mode": case.io_mode, "verify": participant.verify, "capacity": case.capacity,
            "reserve": case.reserve, "mla": case.mla,
        }  # fmt: skip
        self._children[participant].send({"do": "open", "spec": spec})

    def _opened(self, participant: Participant, entrant: Entrant) -> None:
        answer = self._children[participant].receive(timeout=300.0)
        entrant.facts, entrant.preallocated = answer["facts"], answer["preallocated"]

    def _turn(self, request: dict[str, Any], participant: Participant, entrant: Entrant) -> None:
        entrant.add(self._children[participant].ask(request))

    def _send_close(self, participant: Participant, _: Entrant) -> None:
        self._children[participant].send({"do": "close"})

    def _closed(self, participant: Participant, _: Entrant) -> None:
        self._children[participant].receive(timeout=60.0)

    def _each(
        self,
        measured: dict[Participant, Entrant],
        action: Callable[[Participant, Entrant], None],
        order: Sequence[Participant] | None = None,
    ) -> None:
        """Do it for each; a participant that fails leaves the case."""
        for participant in order or list(measured):
            try:
                action(participant, measured[participant])
            except Failed as failure:
                self._failed(participant, measured.pop(participant).case, failure)

    def _failed(self, participant: Participant, case: Case, failure: Failed) -> None:
        what = describe(case)
        if failure.kind == "wrong bytes":
            self.wrong_bytes.append(Unavailable(_label(participant), what, failure.reason))
        if failure.kind == "cannot run" and "import of" in failure.reason:
            what = "everything"
        self._note(participant, what, failure.reason)
        if failure.kind == "died":
            self._children.pop(participant).close()
            self._start(participant)
        elif what == "everything":
            self._children.pop(participant).close()

    def close(self) -> None:
        for child in self._children.values():
            child.close()
        self._children.clear()
        for directory in set(self._directories.values()):
            shutil.rmtree(directory, ignore_errors=True)


def _label(participant: Participant) -> str:
    choice = len(participant.entry.verifies) > 1
    return participant.entry.store + (f" verify={'on' if participant.verify else 'off'}" if choice else "")


def describe(case: Case) -> str:
    hog = ", hog" if case.hog else ""
    return f"{case.kind} {size_text(case.block_bytes)} x {case.batch} on {case.medium}{hog}"


def run_cases(
    runner: Runner, cases: Sequence[Case], rounds: int, say: Callable[[str], None]
) -> Iterator[Measured]:
    for number, case in enumerate(cases, 1):
        started = time.monotonic()
        yield from runner.run(case, rounds)
        say(f"[{number}/{len(cases)}] {describe(case)}: {time.monotonic() - started:.1f} s")
