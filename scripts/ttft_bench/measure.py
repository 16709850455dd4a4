"""The measurement: a running server, and one backend after the other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from cpu_engine.server import CpuServer

from ttft_bench.backends import NAMES, attached
from ttft_bench.plan import NEW_TOKENS, Plan, Turn
from ttft_bench.samples import Again, Cold, Samples
from ttft_bench.stream import ask

Say = Callable[[str], None]


def measure(server: CpuServer, plan: Plan, folder: Path, say: Say) -> Samples:
    """Measure everything in the plan.

    Args:
        server: runs, has no storage attached, and empty caches; so it is left.
        folder: for what the backends store. Made here, a round's part of it removed after the round.

    Raises `ServerError` when the server fails a request.
    """
    samples = Samples()
    for name in NAMES:
        _warm_up(server, plan, name, folder / "warm-up")
    shutil.rmtree(folder / "warm-up")
    for turn in plan.turns():
        began = time.monotonic()
        store = folder / f"round-{turn.round}"
        store.mkdir(parents=True, exist_ok=True)
        for name in turn.order:
            with attached(server, name, store):
                _settle(server, plan, turn)
                samples.cold.append(_cold(server, plan, turn, name))
                samples.again += _again(server, plan, turn, name)
        seconds = time.monotonic() - began
        say(f"round {turn.round + 1} of {plan.rounds}, {turn.length} tokens: {seconds:.0f} s")
        if turn.length == plan.lengths[-1]:
            shutil.rmtree(store)
    return samples


def _warm_up(server: CpuServer, plan: Plan, name: str, folder: Path) -> None:
    """What only happens once: SGLang compiles its hash, and modules are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    with attached(server, name, folder):
        for _ in range(2):
            server.generate(plan.warm_up(), 2)
            server.flush_cache()


def _settle(server: CpuServer, plan: Plan, turn: Turn) -> None:
    """One page that is not timed, and in no prompt: a server opens its storage once, not for each prompt."""
    server.generate(plan.apart(turn), 1)
    server.wait_idle()
    time.sleep(0.2)  # for background threads that have been started


def _cold(server: CpuServer, plan: Plan, turn: Turn, name: str) -> Cold:
    """Prompts that nobody has seen, one right after the other: each is written while the next is computed."""
    prompts = [plan.prefix(turn, number) for number in range(plan.prompts)]
    started = time.perf_counter()
    answers = [ask(server, prompt, 1) for prompt in prompts]
    answered = time.perf_counter() - started
    server.wait_idle()
    stored = time.perf_counter() - started
    return Cold(
        name, turn.round, turn.length, answered, stored,
        tuple(answer.first for answer in answers),
        sum(answer.generation.cached_tokens for answer in answers),
    )  # fmt: skip


def _again(server: CpuServer, plan: Plan, turn: Turn, name: str) -> list[Again]:
    """The same prefixes with a new end, each with empty caches on device and host."""
    found = []
    for number in range(plan.prompts):
        server.flush_cache()
        answer = ask(server, plan.continued(turn, number), NEW_TOKENS)
        found.append(
            Again(name, turn.round, turn.length, number, answer.first, answer.waited, answer.generation)
        )
    return found
