"""Eviction on request traces with a host cache in front: must hold 4 of issue 3.

"With the upper tiers simulated (an LRU host cache in front), the chain-aware policy keeps strictly more
usable prefix tokens than block LRU on the conversation trace, and no block is resident whose ancestor was
evicted, except transiently."

The host cache answers for the heads of chains, so the store never sees that they are in use: plain LRU evicts
them, and their tails are worthless as soon as the host cache has lost the heads too.

The conversation trace is third-party data that is not part of this repository; without it those tests are
skipped, and a generated trace makes the same checks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from storekit import NAMESPACE, PAGE, memory_directory, open_store
from trace_model import (
    BLOCK_TOKENS,
    SimulatedTier,
    Trace,
    by_block,
    chain_aware,
    host_hits,
    read_trace,
    replay,
    trace_of,
)

from posix_store import PosixStore, Reason
from posix_store.catalog import Catalog
from posix_store.chains import ORPHAN, parent_rows
from posix_store.root import StoreRoot

HEAD_FIRST, TAIL_FIRST = 1e-6, -1e-6
"""`ties` of an LRU whose loop over a batch begins at the head (what stores do), or at the tail."""
PART = 4000
CONVERSATION = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"


@functools.cache
def conversation(requests: int | None = None) -> Trace:
    if not CONVERSATION.exists():
        pytest.skip(f"the conversation trace is not here ({CONVERSATION})")
    return read_trace(CONVERSATION, requests)


@functools.cache
def generated(seed: int = 7, requests: int = 3000) -> Trace:
    """Multi-turn chats: a few system prompts, and turns that come back soon, later, or never."""
    random = np.random.default_rng(seed)
    fresh = iter(range(1 << 60))
    systems = [[next(fresh) for _ in range(int(random.integers(1, 9)))] for _ in range(4)]
    chats: list[list[int]] = []
    rows = []
    for _ in range(requests):
        if not chats or random.random() < 0.3:
            chats.append(list(systems[int(random.integers(len(systems)))]))
        # The younger a chat, the likelier its next turn; most are never continued.
        back = min(int(random.exponential(40)), len(chats) - 1)
        chat = chats[-1 - back]
        chat += [next(fresh) for _ in range(int(random.integers(1, 7)))]
        rows.append((len(chat) * BLOCK_TOKENS, list(chat)))
    return trace_of(rows)


@dataclass(frozen=True)
class Outcome:
    served: int
    """Prompt tokens that the disk tier served over the trace."""
    kept: float
    """Share of its blocks that an engine which has just started could use, on average."""


def outcome(trace: Trace, hits: list[int], tier: SimulatedTier) -> Outcome:
    served = replay(trace, hits, tier)
    assert tier.evictions > 50
    return Outcome(served, float(np.mean(tier.usable)))


def chain_aware_outcome(trace: Trace, hits: list[int], disk: int) -> Outcome:
    """What the chain-aware policy gives, after a check that none of its evictions cut a chain."""
    tier = SimulatedTier(trace, disk, chain_aware)
    result = outcome(trace, hits, tier)
    assert tier.most_cut == 0, "after an eviction a block was resident whose ancestor was not"
    return result


def lru_outcome(trace: Trace, hits: list[int], disk: int, ties: float = HEAD_FIRST) -> Outcome:
    return outcome(trace, hits, SimulatedTier(trace, disk, by_block, ties))


def compare(trace: Trace, host: int, disk: int) -> None:
    hits = host_hits(trace, host)
    ours, plain = chain_aware_outcome(trace, hits, disk), lru_outcome(trace, hits, disk)
    print(
        f"host {host}, disk {disk}: chain-aware served {ours.served} tokens, block LRU {plain.served} "
        f"({ours.served / plain.served - 1:+.2%}); usable after a restart {ours.kept:.0%}, {plain.kept:.0%}"
    )
    assert ours.served > plain.served
    assert ours.kept == 1 > plain.kept


@pytest.mark.parametrize(
    ("host", "disk", "requests"),
    [(500, 2000, PART), (500, 5000, None), (500, 10_000, PART), (2000, 5000, PART), (2000, 10_000, PART)],
)
def test_chain_aware_eviction_beats_block_lru_on_the_conversation_trace(
    host: int, disk: int, requests: int | None
) -> None:
    """Issue 3, must hold 4, at every point where the store is larger than the host cache in front of it.

    Most points are measured on the first third of the trace, to save time; they hold on all of it as well.
    """
    compare(conversation(requests), host, disk)


@pytest.mark.parametrize(("host", "disk"), [(100, 500), (100, 800), (400, 1000), (400, 1500)])
def test_chain_aware_eviction_beats_block_lru_on_a_generated_trace(host: int, disk: int) -> None:
    """Issue 3, must hold 4, where the conversation trace is not at hand."""
    compare(generated(), host, disk)


@pytest.mark.parametrize("source", ["generated", "conversation"])
def test_after_restarts_it_beats_also_an_lru_that_lets_tails_go_first(source: str) -> None:
    """Issue 3, must hold 4: what the tier is for. The host cache is lost now and then, with the heads in it.

    An LRU that touches each batch from its tail on comes near to the chain-aware order as long as the same
    host cache goes on for ever, and no longer.
    """
    trace, host, disk = (
        (generated(), 400, 1500) if source == "generated" else (conversation(3000), 2000, 5000)
    )
    hits = host_hits(trace, host, restart_every=500)
    ours = chain_aware_outcome(trace, hits, disk)
    plain, tails_first = (lru_outcome(trace, hits, disk, ties) for ties in (HEAD_FIRST, TAIL_FIRST))
    print(f"chain-aware {ours}, block LRU {plain}, tails first {tails_first}")
    assert ours.served > max(plain.served, tails_first.served)
    assert ours.kept == 1 > max(plain.kept, tails_first.kept)


def test_a_store_no_larger_than_the_host_cache_is_of_use_only_after_a_restart() -> None:
    """Where the chain-aware policy serves no more than block LRU: both serve next to nothing.

    Whole chains of the newest blocks are what the host cache holds, too. Block LRU has a few blocks beyond
    these, in the place of heads; a tier for that is not worth having. What survives a restart is.
    """
    trace = conversation(2500)
    hits = host_hits(trace, 2000)
    ours, plain = chain_aware_outcome(trace, hits, 2000), lru_outcome(trace, hits, 2000)
    print(f"chain-aware {ours}, block LRU {plain}")
    assert max(ours.served, plain.served) < sum(trace.lengths) / 1000
    assert ours.kept == 1 and plain.kept < 0.1


class StoreTier:
    """The real store as a disk tier: blocks of one page each, with the parents that the trace says."""

    def __init__(self, store: PosixStore, trace: Trace) -> None:
        self.store = store
        self.trace = trace
        self._page = np.zeros(PAGE, np.uint8)

    def _addresses(self, count: int) -> np.ndarray:
        return np.full((count, 1), self._page.ctypes.data)

    def load(self, blocks: np.ndarray) -> int:
        run = self.store.lookup_on_prefix(self.trace.ids[blocks]) + 1
        if run:
            ids = self.trace.ids[blocks[:run]]
            task = self.store.load_data(ids, None, self._addresses(run), PAGE, background=False)
            assert (task.status() == Reason.OK).all(), "what a look-up promised was not loaded"
        return run

    def dump(self, blocks: np.ndarray) -> None:
        task = self.store.dump_data(
            self.trace.ids[blocks], None, self._addresses(len(blocks)), PAGE,
            parents=self.trace.parent_ids[blocks], background=False,
        )  # fmt: skip
        assert (task.status() == Reason.OK).all(), "a full store must make room for a dump"


@pytest.mark.parametrize(("source", "host", "disk"), [("generated", 100, 600), ("conversation", 200, 4000)])
def test_the_store_does_on_a_trace_what_the_simulation_says(source: str, host: int, disk: int) -> None:
    """Issue 3, must hold 4, in the real store: as many usable tokens as simulated, and no chain is cut.

    Chains are read from the journals by a second reader, which knows only what is on the disk. The capacity
    is in bytes with journals, so the simulation keeps as many blocks on average as the store did.
    """
    trace = generated(requests=700) if source == "generated" else conversation(1200)
    hits = host_hits(trace, host)
    kept: list[int] = []
    # One process, which makes room only when a dump has to: what happens does not depend on time.
    options = {"capacity": disk * PAGE + (1 << 20), "maintenance": False, "segment_bytes": 4 << 20}
    with memory_directory() as root, open_store(root / "store", **options) as store:
        reader = Catalog(StoreRoot(str(root / "store"), create=False), NAMESPACE)
        evicted = 0

        def no_chain_is_cut(request: int) -> None:
            nonlocal evicted
            if store.evictor.total.blocks:
                kept.append(store.counters.snapshot()["written_blocks"] - store.evictor.total.blocks)
            if store.evictor.total.blocks == evicted:
                return
            evicted = store.evictor.total.blocks
            reader.refresh(max_age=0, budget=float("inf"))
            there, _ = reader.index.residents()
            cut = parent_rows(there.ids, there.parents) == ORPHAN
            assert not cut.any(), f"after request {request}, {cut.sum()} blocks are without their parent"
            assert len(there) == kept[-1]

        served = replay(trace, hits, StoreTier(store, trace), no_chain_is_cut)
        assert evicted > disk, "nothing was tried"
    # A dump that must wait frees a 16th, so on average the store is a 32nd below what it may hold.
    share = 1 / 16
    capacity = round(np.mean(kept) / (1 - share / 2))
    simulated = replay(trace, hits, SimulatedTier(trace, capacity, chain_aware, share=share))
    plain = replay(trace, hits, SimulatedTier(trace, capacity, by_block, share=share))
    print(f"{source}: store {served}, simulated {simulated}, block LRU {plain}; {capacity} blocks")
    assert abs(served - simulated) < 0.03 * simulated
    assert served > plain
