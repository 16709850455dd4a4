"""The load: many conversations that repeat their history, share a system prompt, and return after a while."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["first", "next", "retry", "return"]
"""What a prompt is: the first of a conversation; one more turn of a recent one; the prompt before once more;
one more turn of a conversation that was away for long."""

PAGE_SIZE = 16
TOKEN_BYTES = 4096
"""KV cache of one token of the tiny model in float32: 4 layers, K and V, 2 heads of 64 numbers of 4 bytes.
The pages of the store are compared with this, so it cannot go stale unseen."""
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES
NEW_TOKENS = 8
WORKING_SET_FACTOR = 10
"""The working set is this many times the store's capacity, or more."""
MARGIN = 1.05
"""So much more, because a long conversation that makes room for a new one lets it shrink for a while."""


@dataclass(frozen=True)
class Shape:
    """Sizes of everything, all from the store's capacity. Tokens unless they say bytes.

    turns: a conversation has about this many before another one takes its place.
    """

    capacity_bytes: int
    system: int
    document: int
    user: int
    turns: int

    @property
    def longest(self) -> int:
        """Prompt and answer of the longest conversation."""
        return self.system + self.document + self.turns * (self.user + NEW_TOKENS)

    @property
    def device(self) -> int:
        """The device pool: one longest conversation and a quarter, in whole pages."""
        return self.longest * 5 // 4 // PAGE_SIZE * PAGE_SIZE

    host_ratio = 1.5
    """Host pool over device pool. SGLang accepts less, but then what the device holds fills the host pool,
    and what is found in the storage does not fit in."""

    @property
    def host(self) -> int:
        return int(self.device * self.host_ratio)


LONG = Shape(capacity_bytes=48 << 20, system=256, document=640, user=80, turns=5)
SHORT = Shape(capacity_bytes=8 << 20, system=64, document=144, user=24, turns=4)


@dataclass
class Conversation:
    """history: all token ids so far, answers included. prompt: what was asked last. at: when, in turns."""

    history: list[int]
    prompt: list[int] = field(default_factory=list)
    at: int = 0
    turns: int = 0


@dataclass(frozen=True)
class Turn:
    """One request to be made. away: requests since the conversation's last one."""

    conversation: Conversation
    kind: Kind
    prompt: list[int]
    away: int


class Workload:
    """Chooses what is asked next. The same seed and the same answers give the same prompts. One thread.

    Until the working set is complete, new conversations are begun instead of returning to old ones. After
    that their number stays, and a conversation that has got too long makes room for a new one.
    """

    recent = 6
    """So many conversations are being talked in at a time: more than the device and host pools hold. The very
    last one waits for its user."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.complete = False
        """Has the working set been as large as promised?"""
        self.peak_bytes = 0
        """Most bytes that the pages of the living conversations had, shared ones counted once."""
        self.least_bytes = 0
        """Fewest, since the working set is complete."""
        self._random = random.Random(seed)
        self._system = self._tokens(shape.system)
        self._all: list[Conversation] = []
        self._count = 0

    @property
    def population(self) -> int:
        """Conversations that are alive."""
        return len(self._all)

    def next(self) -> Turn:
        if self._random.random() < (0.6 if self.complete else 0.4) and len(self._all) >= self.recent:
            conversation = self._random.choice(self.latest(self.recent)[1:])
            if self._random.random() < 0.1:
                return Turn(conversation, "retry", conversation.prompt, self._count - conversation.at)
            return self._turn(conversation, "next")
        if not self.complete:
            conversation = Conversation(list(self._system))
            self._all.append(conversation)
            return self._turn(conversation, "first")
        return self._turn(self._random.choice(self._all), "return")

    def several(self, number: int) -> list[Turn]:
        """Turns of so many different conversations, recent ones and old ones, to be asked at once."""
        recent = self.latest(self.recent)
        old = [conversation for conversation in self._all if conversation not in recent]
        half = min(number - number // 2, len(old))
        chosen = self._random.sample(recent, number - half) + self._random.sample(old, half)
        return [self._turn(conversation, "next") for conversation in chosen]

    def latest(self, number: int) -> list[Conversation]:
        """The conversations that were asked last, latest first."""
        return sorted(self._all, key=lambda conversation: -conversation.at)[:number]

    def answered(self, turn: Turn, output_ids: tuple[int, ...]) -> None:
        """Go on from a right answer."""
        self._count += 1
        conversation = turn.conversation
        conversation.at = self._count
        if turn.kind != "retry":
            conversation.turns += 1
            conversation.prompt = turn.prompt
            conversation.history = [*turn.prompt, *output_ids]
            self._measure()

    def _turn(self, conversation: Conversation, kind: Kind) -> Turn:
        if conversation.turns > self.shape.turns:
            # It has got too long: another one takes its place.
            conversation.history, conversation.turns = list(self._system), 0
        if conversation.turns == 0:
            kind = "first"
        message = self.shape.document if conversation.turns == 0 else self.shape.user
        prompt = conversation.history + self._tokens(message)
        return Turn(conversation, kind, prompt, self._count - conversation.at)

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(number)]

    def _measure(self) -> None:
        shared = self.shape.system // PAGE_SIZE
        own = sum(len(conversation.history) // PAGE_SIZE - shared for conversation in self._all)
        now = (own + shared) * PAGE_BYTES
        self.peak_bytes = max(self.peak_bytes, now)
        if self.complete:
            self.least_bytes = min(self.least_bytes, now)
        elif now >= MARGIN * WORKING_SET_FACTOR * self.shape.capacity_bytes:
            self.complete, self.least_bytes = True, now
