"""Who leaves: an order over the blocks of all namespaces, made once and used up in portions.

Making the order costs a pass over all blocks, so it is made for a larger amount than is needed at the
moment. Until a portion's turn comes, its blocks may have been used again; then they and all blocks before
them in their chains are spared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from posix_store.catalog import Catalog
from posix_store.chains import in_chains, parent_rows
from posix_store.policies import Policy, Residents

_MOST_AT_ONCE = 4096
_LOOK = 4096
"""Blocks looked up at a time, so that look-ups of others get in between."""


@dataclass
class Candidates:
    """The blocks of one namespace that could leave, and how they are ordered."""

    namespace: str
    catalog: Catalog
    rank: int
    """Namespaces of a lower rank leave first: those that nobody serves, oldest use first."""
    residents: Residents
    segment: np.ndarray
    """int32 (n,): segment of each block's first shard."""
    parent_row: np.ndarray
    effective: np.ndarray
    """float64 (n,): what each is worth as a part of its chains; inf: pinned."""
    depth: np.ndarray

    @property
    def can_leave(self) -> np.ndarray:
        return self.effective < np.inf

    @property
    def segment_is_held(self) -> np.ndarray:
        """bool (n,): is there a block in the same segment that must stay?"""
        return np.isin(self.segment, self.segment[~self.can_leave])


def candidates(
    namespace: str, catalog: Catalog, rank: int, policy: Policy, pins: np.ndarray, older_than: float | None
) -> Candidates:
    """Order the blocks of one namespace.

    Args:
        pins: uint64 (p, 2), ids that stay, with all blocks before them.
        older_than: only blocks stored before this (Unix seconds) may leave; with the blocks behind them,
            which cannot be reached without them.
    """
    residents, segment = catalog.index.residents()
    worth = policy.worth(residents).astype(np.float64)
    parent_row = parent_rows(residents.ids, residents.parents)
    if len(pins):
        held = np.isin(
            residents.ids.view("V16").reshape(-1), np.ascontiguousarray(pins).view("V16").reshape(-1)
        )
        worth[held] = np.inf
    effective, depth = in_chains(worth, parent_row)
    if older_than is not None:
        old = residents.stored < older_than
        effective[~_with_descendants(old, parent_row)] = np.inf
    return Candidates(namespace, catalog, rank, residents, segment, parent_row, effective, depth)


def _with_descendants(marked: np.ndarray, parent_row: np.ndarray) -> np.ndarray:
    marked, above = marked.copy(), parent_row.copy()
    for _ in range(len(marked).bit_length() + 1):
        rows = np.flatnonzero(above >= 0)
        if not rows.size:
            break
        marked[rows] |= marked[above[rows]]
        above[rows] = above[above[rows]]
    return marked


@dataclass
class _Share:
    """What a plan takes from one namespace, in the order of leaving."""

    of: Candidates
    rows: np.ndarray
    above: np.ndarray
    """int64 (n,): place of each block's parent in `rows`, -1 when the parent stays."""
    pending: np.ndarray
    """bool (n,): still to leave."""


@dataclass
class Plan:
    """Blocks in the order in which they leave. Used by one thread at a time."""

    shares: list[_Share] = field(default_factory=list)
    which: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 (n,): share of each block."""
    place: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 (n,): its place there."""
    length: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    cursor: int = 0

    def take(self, target: int) -> Iterator[tuple[Candidates, np.ndarray]]:
        """The next blocks with `target` bytes in all, or as many as leave at once.

        By namespace, their ids (uint64 (n, 2)).
        """
        ahead = self.length[self.cursor : self.cursor + _MOST_AT_ONCE]
        end = self.cursor + 1 + int(np.searchsorted(np.cumsum(ahead), target))
        part = slice(self.cursor, end)
        which, place = self.which[part], self.place[part]
        self.cursor = min(end, len(self.which))
        for number in np.unique(which).tolist():
            share = self.shares[number]
            _spare(share)
            places = place[which == number]
            places = places[share.pending[places]]
            share.pending[places] = False
            yield share.of, share.of.residents.ids[share.rows[places]]

    @property
    def exhausted(self) -> bool:
        return self.cursor >= len(self.which)


def plan(among: list[Candidates], target: int, whole_segments: bool) -> Plan:
    """Choose blocks of `target` bytes or a little more; fewer only when there are not so many.

    With `whole_segments` (nothing less can be freed) all blocks of a segment leave together, coldest first.
    """
    parts = [np.flatnonzero(each.can_leave & ~(whole_segments & each.segment_is_held)) for each in among]
    which = np.repeat(np.arange(len(among)), [len(part) for part in parts])
    if not len(which):
        return Plan()
    rows = np.concatenate(parts)
    effective = np.concatenate([each.effective[part] for each, part in zip(among, parts, strict=True)])
    depth = np.concatenate([each.depth[part] for each, part in zip(among, parts, strict=True)])
    rank = np.array([each.rank for each in among])[which]
    length = np.concatenate([each.residents.length[part] for each, part in zip(among, parts, strict=True)])
    if whole_segments:
        segment = np.concatenate([each.segment[part] for each, part in zip(among, parts, strict=True)])
        order = _by_segment(among, which, segment, effective, rank)
    else:
        order = np.lexsort((-depth, effective, rank))
    order = order[: 1 + int(np.searchsorted(np.cumsum(length[order]), target))]
    if whole_segments:
        last = order[-1]
        more = (which == which[last]) & (segment == segment[last])
        order = np.concatenate([order, np.setdiff1d(np.flatnonzero(more), order)])
    return _shared_out(among, which[order], rows[order], length[order])


def _by_segment(
    among: list[Candidates], which: np.ndarray, segment: np.ndarray, effective: np.ndarray, rank: np.ndarray
) -> np.ndarray:
    """Rows segment by segment, least mean worth first; segments that a living writer extends come last."""
    keys = np.stack([which, segment], axis=1)
    groups, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    finite = np.where(np.isfinite(effective), effective, 0.0)
    mean = np.bincount(group, weights=finite) / np.bincount(group)
    growing = np.array([not among[int(w)].catalog.segment(int(s)).sealed for w, s in groups.tolist()], bool)
    return np.lexsort((group, mean[group], growing[group], rank))


def _shared_out(among: list[Candidates], which: np.ndarray, rows: np.ndarray, length: np.ndarray) -> Plan:
    shares, place = [], np.empty(len(which), np.int64)
    for number, each in enumerate(among):
        mine = np.flatnonzero(which == number)
        place[mine] = np.arange(len(mine))
        place_of = np.full(len(each.residents), -1, np.int64)
        place_of[rows[mine]] = np.arange(len(mine))
        parents = each.parent_row[rows[mine]]
        above = np.where(parents >= 0, place_of[np.maximum(parents, 0)], -1)
        shares.append(_Share(each, rows[mine], above, np.ones(len(mine), bool)))
    return Plan(shares, which, place, length)


def _spare(share: _Share) -> None:
    """Keep blocks that were used since the plan was made, and all blocks before them in their chains."""
    residents = share.of.residents
    places = np.flatnonzero(share.pending)
    changed = np.zeros(len(share.rows), np.float64)
    for start in range(0, len(places), _LOOK):
        part = places[start : start + _LOOK]
        rows = share.rows[part]
        changed[part] = share.of.catalog.index.used_since(residents.ids[rows], residents.used[rows])
    if changed.any():
        used, _ = in_chains(changed, share.above)
        share.pending[used > 0] = False
