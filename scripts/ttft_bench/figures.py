"""Medians, spreads and ratios of what was measured, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from store_bench.statistics import Summary, summarise

from ttft_bench.backends import NAMES
from ttft_bench.samples import REFERENCE, Again, Cold, Samples

FILE = "file"

Sample = TypeVar("Sample", Again, Cold)


@dataclass(frozen=True)
class Figure:
    """One quantity of one backend, in seconds for each prompt, and as ratios.

    length: tokens, None for all lengths together; only ratios mean something then.
    ratios: by backend, of this one's seconds to those of that one for what was measured side by side.
    hit: tokens from storage for each prompt, None at 0 % hits.
    """

    what: str
    backend: str
    length: int | None
    seconds: Summary
    ratios: dict[str, Summary]
    hit: float | None

    def record(self) -> dict[str, Any]:
        """Flat, for JSON."""
        made: dict[str, Any] = {"what": self.what, "backend": self.backend, "length": self.length}
        summaries = {"seconds": self.seconds} | {f"to_{base}": one for base, one in self.ratios.items()}
        for name, summary in summaries.items():
            made |= {f"{name}_median": summary.median, f"{name}_spread": summary.spread}
        return made | {"runs": self.seconds.count, "hit_tokens": self.hit}


@dataclass(frozen=True)
class Verdict:
    what: str
    ours: float
    bound: float

    @property
    def word(self) -> str:
        return "met" if self.ours <= self.bound else "missed"


def figures(samples: Samples) -> list[Figure]:
    """All figures, for each length and backend; those at 0 % hits also for all lengths together.

    Raises ValueError or KeyError unless every backend was asked every prompt.
    """
    found = []
    lengths = list(dict.fromkeys(one.length for one in samples.cold))
    for length in lengths:
        again = [one for one in samples.again if one.length == length]
        found += [_figure("ttft", name, length, again, _first, _prompt) for name in NAMES]
        with_storage = [one for one in again if one.backend != REFERENCE]
        found += [_figure("wait", name, length, with_storage, _waited, _prompt) for name in NAMES[1:]]
    for among in (*lengths, None):
        cold = [one for one in samples.cold if among in (one.length, None)]
        for what, seconds in (("answered", _answered), ("stored", _stored)):
            found += [_figure(what, name, among, cold, seconds, _turn) for name in NAMES]
    return found


def verdicts(found: Iterable[Figure]) -> list[Verdict]:
    """Whether ours is at the least as good as it has to be; every verdict is one on medians."""
    by_key = {(one.what, one.backend, one.length): one for one in found}
    made = []
    for what, text in (("answered", "until answered"), ("stored", "until stored")):
        ours, file = by_key[what, "ours", None], by_key[what, "file", None]
        made.append(
            Verdict(
                f"write-through at 0 % hits, {text}: ratio to no storage <= that of `file`",
                ours.ratios[REFERENCE].median,
                file.ratios[REFERENCE].median,
            )
        )
    for (what, backend, length), ours in by_key.items():
        if what == "ttft" and backend == "ours":
            place = f"{length:,} tokens in storage"
            waiting = by_key["wait", "ours", length].ratios[FILE].median
            made += [
                Verdict(f"TTFT, {place}: ratio to `file` <= 1", ours.ratios[FILE].median, 1.0),
                Verdict(f"TTFT, {place}: ratio to recomputing <= 1", ours.ratios[REFERENCE].median, 1.0),
                Verdict(f"waiting for the storage, {place}: ratio to `file` <= 1", waiting, 1.0),
            ]
    return made


def _first(one: Again) -> float:
    return one.first


def _waited(one: Again) -> float:
    return one.waited


def _prompt(one: Again) -> Hashable:
    return one.prompt


def _answered(one: Cold) -> float:
    return one.answered / len(one.first)


def _stored(one: Cold) -> float:
    return one.stored / len(one.first)


def _turn(one: Cold) -> Hashable:
    return one.round, one.length


def _figure(
    what: str,
    backend: str,
    length: int | None,
    samples: Iterable[Sample],
    seconds: Callable[[Sample], float],
    key: Callable[[Sample], Hashable],
) -> Figure:
    """key: what was measured side by side has the same one."""
    of: dict[str, dict[Hashable, float]] = {}
    hits: list[int] = []
    for one in samples:
        of.setdefault(one.backend, {})[key(one)] = seconds(one)
        if isinstance(one, Again) and one.backend == backend:
            hits.append(one.answer.storage)
    mine = of[backend]
    ratios = {
        base: summarise([value / of[base][at] for at, value in mine.items()])
        for base in (REFERENCE, FILE)
        if base in of
    }
    hit = sum(hits) / len(hits) if hits else None
    return Figure(what, backend, length, summarise(list(mine.values())), ratios, hit)
