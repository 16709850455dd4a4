"""Is an answer right? Two servers compute the same prompt; both answers must be the same.

A request that is alone on its server shares its batch with none, so its token ids must be identical, with no
excuse. Log probabilities are compared as well: a wrong page among many may leave the tokens as they are, but
hardly every probability. `MOST_DRIFT` is well above what another split into cached and computed tokens
changes (measured up to 8e-6 here, and 5e-6 on a server with nothing but SGLang's own cache on the device),
and far below what one wrong page does (measured 0.01 to 1).

Two pages of one prompt in each other's place would not show: keys carry their position, and attention adds up
whatever is there in any order. The checksums of pages, which the store keeps by key, stand against that.

Requests that run together share batches whose sizes depend on timing. Sums may then be rounded in another
order, and where two tokens are practically equally likely the other one may win. Such a tie has to show it:
up to it nothing differs, both tokens are equally likely to within `MOST_DRIFT`, and the same prompt asked
again alone, while the pages in question are still in the caches, has the identical answer. Anything else is a
wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpu_engine.server import Generation

MOST_DRIFT = 5e-5
"""Between log probabilities of right answers."""


@dataclass(frozen=True)
class Difference:
    """How an answer differs from the reference. token: index of the first other token, None if all are equal.

    drift: largest difference of a log probability, of the tokens up to and including that one.
    """

    token: int | None
    drift: float

    @property
    def right(self) -> bool:
        return self.token is None and self.drift <= MOST_DRIFT

    @property
    def may_be_a_tie(self) -> bool:
        return self.token is not None and self.drift <= MOST_DRIFT


def compare(got: Generation, wanted: Generation) -> Difference:
    """Compare token ids and log probabilities; both must have been asked for."""
    pairs = zip(got.output_ids, wanted.output_ids, strict=True)
    token = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    until = len(wanted.output_ids) if token is None else token + 1
    if got.logprobs is None or wanted.logprobs is None:
        raise ValueError("log probabilities are needed")
    drift = max(abs(a - b) for a, b in zip(got.logprobs[:until], wanted.logprobs[:until], strict=True))
    return Difference(token, drift)
