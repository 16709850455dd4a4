"""How much is measured, with which prompts, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cpu_engine.server import random_prompt

from ttft_bench.backends import NAMES

PAGE_SIZE = 64
LEAST_LENGTH = 256
"""Tokens: SGLang fetches no shorter prefix from storage (`prefetch_threshold`)."""
TAIL = 40
"""Tokens behind the stored prefix that are in no cache; less than a page."""
NEW_TOKENS = 4
"""Tokens of an answer that is compared. The first one is timed."""


@dataclass(frozen=True)
class Turn:
    """One length in one round: every backend is asked the same prompts, in this order of backends."""

    round: int
    length: int
    order: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """lengths: tokens of the prefixes, multiples of a page. prompts: different ones in each turn.

    Raises ValueError for what cannot be measured.
    """

    lengths: tuple[int, ...]
    rounds: int
    prompts: int
    seed: int = 0

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < LEAST_LENGTH or length % PAGE_SIZE:
                raise ValueError(
                    f"length {length}: must be a multiple of {PAGE_SIZE}, {LEAST_LENGTH} at the least"
                )
        if len(set(self.lengths)) != len(self.lengths) or not self.lengths:
            raise ValueError("lengths must be given, and differ")
        if self.rounds < 1 or self.prompts < 1:
            raise ValueError("one round and one prompt at the least")

    def turns(self) -> Iterator[Turn]:
        """All turns; each backend comes first, second and third equally often."""
        for number in range(self.rounds):
            for i, length in enumerate(self.lengths):
                first = (number + i) % len(NAMES)
                yield Turn(number, length, NAMES[first:] + NAMES[:first])

    def prefix(self, turn: Turn, number: int) -> list[int]:
        """The prompt that is stored: no page of it is in another prompt."""
        return random_prompt(turn.length, self._seed(turn, number))

    def continued(self, turn: Turn, number: int) -> list[int]:
        """The prompt with that prefix and a tail of its own."""
        return self.prefix(turn, number) + random_prompt(TAIL, self._seed(turn, number) + 1)

    def apart(self, turn: Turn) -> list[int]:
        """A prompt of one page that is stored, which is no page of those that are measured."""
        return random_prompt(PAGE_SIZE + 1, self._seed(turn, 0) + 2)

    def warm_up(self) -> list[int]:
        """A prompt that is long enough to be fetched from storage, and shares no page with others."""
        return random_prompt(LEAST_LENGTH + PAGE_SIZE, 3)

    def _seed(self, turn: Turn, number: int) -> int:
        place = (turn.round * self.prompts + number) * len(self.lengths) + self.lengths.index(turn.length)
        return 4 * (self.seed * 1_000_003 + place + 1)  # in between is room for the other seeds

    def tokens_of_round(self) -> int:
        """Tokens that one backend stores in a round."""
        return self.prompts * sum(self.lengths)

    def device_tokens(self) -> int:
        """Size of the device pool: room for a turn's prompts, so that nothing leaves it while one runs."""
        return self.prompts * (max(self.lengths) + 2 * PAGE_SIZE) + 8 * PAGE_SIZE
