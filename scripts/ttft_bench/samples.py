"""What was measured, and whether it measured what it was to measure."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpu_engine.server import Generation
from cpu_engine.tiny_model import DegenerateOutputError, require_varied_output
from server_soak.answers import Difference, compare

REFERENCE = "none"


@dataclass(frozen=True)
class Cold:
    """A turn's prompts at 0 % hits on one backend.

    answered, stored: seconds from sending the first until the last was answered, and until every page had
    been handed to the storage and acknowledged. first: seconds to the first token of each prompt. cached:
    tokens that were not computed, all together.
    """

    backend: str
    round: int
    length: int
    answered: float
    stored: float
    first: tuple[float, ...]
    cached: int


@dataclass(frozen=True)
class Again:
    """One prompt whose prefix of `length` tokens is in the storage, if there is one, and nowhere else.

    first: seconds to the first token. waited: seconds for which the scheduler held it back for the storage.
    """

    backend: str
    round: int
    length: int
    number: int
    first: float
    waited: float
    answer: Generation

    @property
    def prompt(self) -> tuple[int, int, int]:
        """Which prompt it was: backends are asked the same ones."""
        return self.round, self.length, self.number


@dataclass
class Samples:
    cold: list[Cold] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)

    def differences(self) -> list[tuple[Again, Difference]]:
        """How each answer with a storage differs from the computed one."""
        computed = {one.prompt: one.answer for one in self.again if one.backend == REFERENCE}
        return [
            (one, compare(one.answer, computed[one.prompt])) for one in self.again if one.backend != REFERENCE
        ]

    def drift(self) -> float:
        """Largest difference of a log probability from the computed answer's."""
        return max((difference.drift for _, difference in self.differences()), default=0.0)


def problems(samples: Samples) -> list[str]:
    """Why the figures are not worth anything: wrong answers, or tokens from elsewhere than expected."""
    found = [
        f"{_place(one)}: {one.cached} tokens of new prompts were cached" for one in samples.cold if one.cached
    ]
    for one in samples.again:
        expected = 0 if one.backend == REFERENCE else one.length
        tiers = (one.answer.device, one.answer.host, one.answer.storage, one.answer.cached_tokens)
        if tiers != (0, 0, expected, expected):
            found.append(
                f"{_place(one)}: {tiers} tokens from device, host, storage and all of them, "
                f"expected {expected} from storage"
            )
    found += [
        f"{_place(one)}: the answer is not the computed one: {one.answer.output_ids}, "
        f"log probabilities differ by {difference.drift:.3g}"
        for one, difference in samples.differences()
        if not difference.right
    ]
    outputs = [one.answer.output_ids for one in samples.again if one.backend == REFERENCE]
    try:
        require_varied_output(outputs, min_distinct=2)
    except DegenerateOutputError as error:
        found.append(f"the computed answers prove nothing: {error}")
    return found


def _place(one: Cold | Again) -> str:
    return f"{one.backend}, {one.length} tokens, round {one.round + 1}"
