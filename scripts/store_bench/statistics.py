"""Medians and spreads of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The median of some values, the least and the most, and how many there are."""

    median: float
    least: float
    most: float
    count: int

    @property
    def spread(self) -> list[float]:
        return [self.least, self.most]


def summarise(values: Sequence[float]) -> Summary:
    """Raises `ValueError` when there are no values."""
    if not values:
        raise ValueError("no values to summarise")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times faster `ours` is, round by round: seconds of theirs through seconds of ours.

    Rounds are neighbours in time, so what else the machine does changes a ratio less than it does a rate.
    """
    return [theirs_seconds / ours_seconds for ours_seconds, theirs_seconds in zip(ours, theirs, strict=True)]
