"""A request trace replayed against a host cache (L2) with a disk tier (L3) behind it, as HiCache drives them.

Each request is a prefix: a list of blocks of 512 tokens. The leading blocks that the host cache has are
used from there, and the disk tier never hears of them. It is asked for the blocks behind them and loads the
leading run that it has. The rest is computed, and what the disk tier lacks of it is dumped (write-through).
Then all blocks of the request are in the host cache.

Left out: tokens that a model generates (a trace names them when a later request repeats them), the device's
own cache (its content is in the host cache too), and requests in parallel.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from posix_store.chains import ROOT, leaving_order, parent_rows
from posix_store.policies import LRU, Residents

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Trace:
    """Blocks are numbered from 0 as they first appear, so a parent has a lower number than its children."""

    requests: list[np.ndarray]
    """int64 (n,) for each request: its blocks from the head on."""
    lengths: list[int]
    """Tokens of each request; its last block may be partly filled."""
    parent: np.ndarray
    """int64 (blocks,): number of the block before each, `ROOT` for heads."""
    ids: np.ndarray
    """uint64 (blocks, 2): ids as digests would be, never zero."""
    parent_ids: np.ndarray
    """uint64 (blocks, 2): zeros for heads."""

    def tokens(self, request: int, first: int, last: int) -> int:
        """Tokens of the blocks `first` to `last` - 1 of a request."""
        length = self.lengths[request]
        return min(length, last * BLOCK_TOKENS) - min(length, first * BLOCK_TOKENS)


def trace_of(rows: Iterable[tuple[int, Sequence[int]]]) -> Trace:
    """A trace of (tokens, names of blocks) for each request. Equal names must have equal prefixes."""
    number: dict[int, int] = {}
    parents: list[int] = []
    requests, lengths = [], []
    for length, names in rows:
        above = ROOT
        for name in names:
            if name not in number:
                number[name] = len(parents)
                parents.append(above)
            assert parents[number[name]] == above, f"block {name} stands behind two different blocks"
            above = number[name]
        requests.append(np.array([number[name] for name in names], np.int64))
        lengths.append(length)
    parent = np.array(parents, np.int64)
    ids = np.random.default_rng(0).integers(1, 1 << 63, (len(parent), 2)).astype(np.uint64)
    parent_ids = np.where(parent[:, None] < 0, np.uint64(0), ids[parent])
    return Trace(requests, lengths, parent, ids, parent_ids)


def read_trace(path: Path, requests: int | None = None) -> Trace:
    """The first requests of a file in Mooncake's format: one JSON object a line."""
    with path.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(requests or 1 << 60))]  # noqa: B905
    return trace_of((row["input_length"], row["hash_ids"]) for row in rows)


def host_hits(trace: Trace, capacity: int, restart_every: int | None = None) -> list[int]:
    """Leading blocks of each request that the host cache has: LRU, tails before heads, as a radix tree does.

    It takes in every block of a request wherever that came from, so it does not depend on the disk tier.

    Args:
        restart_every: the cache is lost before every so many requests: a restart, or a flush.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for number, request in enumerate(trace.requests):
        if restart_every and number % restart_every == 0:
            cache.clear()
        blocks = request.tolist()
        hits.append(next((i for i, block in enumerate(blocks) if block not in cache), len(blocks)))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


class Tier(Protocol):
    """A disk tier of blocks that are named by their number in the trace."""

    def load(self, blocks: np.ndarray) -> int:
        """Load the leading run of these blocks that is stored; how many those are."""

    def dump(self, blocks: np.ndarray) -> None:
        """Store blocks, each behind its parent in the trace; some of them may be stored already."""


def replay(trace: Trace, hits: list[int], tier: Tier, after: Callable[[int], None] | None = None) -> int:
    """Prompt tokens that the disk tier served: loaded, with all blocks before them in use or loaded too.

    Args:
        hits: from `host_hits`.
        after: called with the number of each request when it is done.
    """
    served = 0
    for number, (request, known) in enumerate(zip(trace.requests, hits, strict=True)):
        loaded = tier.load(request[known:]) if known < len(request) else 0
        served += trace.tokens(number, known, known + loaded)
        if known + loaded < len(request):
            tier.dump(request[known + loaded :])
        if after:
            after(number)
    return served


Order = Callable[[Trace, np.ndarray, np.ndarray], np.ndarray]
"""(trace, blocks that are resident, when each was used) -> places in these, first to leave first."""


def chain_aware(trace: Trace, blocks: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The order of the store: `posix_store.chains` with the policy `lru`."""
    ids, parents = trace.ids[blocks], trace.parent_ids[blocks]
    residents = Residents(ids, parents, used, used, np.ones(len(blocks), np.int64))
    return leaving_order(LRU().worth(residents), parent_rows(ids, parents))


def by_block(trace: Trace, blocks: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Plain LRU: the single coldest block first, whatever stands behind it."""
    return np.argsort(used, kind="stable")


@dataclass
class SimulatedTier:
    """A disk tier of `capacity` blocks. A block is used when it is loaded or stored, and at no other time.

    Args:
        order: who leaves first.
        ties: how much later a block of a batch was used than the one before it in its chain. With more than
            0 (a loop that touches head first) the head is the coldest, with less the tail is.
        share: of the capacity that leaves at a time.
    """

    trace: Trace
    capacity: int
    order: Order
    ties: float = 1e-6
    share: float = 0.05
    evictions: int = 0
    most_cut: int = 0
    """The most blocks that were there without their parent after an eviction."""
    usable: list[float] = field(default_factory=list)
    """Share of the resident blocks whose chain is there from its head on, after every 16th eviction: what
    an engine would find that has just started."""

    def __post_init__(self) -> None:
        self.resident = np.zeros(len(self.trace.parent), bool)
        self._used = np.zeros(len(self.trace.parent))
        self._count = 0
        self._now = 0

    def load(self, blocks: np.ndarray) -> int:
        there = self.resident[blocks]
        run = len(blocks) if there.all() else int(np.argmin(there))
        self._use(blocks[:run])
        return run

    def dump(self, blocks: np.ndarray) -> None:
        new = blocks[~self.resident[blocks]]
        if self._count + len(new) > self.capacity:
            self._evict(max(self._count + len(new) - self.capacity, int(self.capacity * self.share)))
        self.resident[new] = True
        self._count += len(new)
        self._use(new)

    def _use(self, blocks: np.ndarray) -> None:
        self._now += 1
        self._used[blocks] = self._now + self.ties * np.arange(len(blocks))

    def _evict(self, count: int) -> None:
        blocks = np.flatnonzero(self.resident)
        self.resident[blocks[self.order(self.trace, blocks, self._used[blocks])[:count]]] = False
        self._count -= min(count, len(blocks))
        self.evictions += 1
        self.most_cut = max(self.most_cut, len(cut_blocks(self.trace, self.resident)))
        if self.evictions % 16 == 1:
            self.usable.append(usable_share(self.trace, self.resident))


def cut_blocks(trace: Trace, resident: np.ndarray) -> np.ndarray:
    """Resident blocks (numbers) whose parent is not. Where there are none, every chain is whole."""
    blocks = np.flatnonzero(resident)
    parents = trace.parent[blocks]
    return blocks[(parents >= 0) & ~resident[parents]]


def usable_share(trace: Trace, resident: np.ndarray) -> float:
    """Share of the resident blocks of which all ancestors are resident too."""
    usable: set[int] = set()
    blocks = np.flatnonzero(resident)
    for block, parent in zip(blocks.tolist(), trace.parent[blocks].tolist(), strict=True):
        if parent < 0 or parent in usable:
            usable.add(block)
    return len(usable) / max(1, len(blocks))
