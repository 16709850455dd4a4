"""Chains: which block stands before which, and in what order blocks may leave so that no chain is cut.

A block is only useful while all blocks before it in its chain are present. So a block is worth at least
what the blocks behind it are worth, and among equals the one farther from the head leaves first: tails go
before heads, whatever the policy says about each block by itself.
"""

from __future__ import annotations

import numpy as np

ROOT, ORPHAN = -1, -2
"""In place of a parent's row: the head of a chain (or not known), and a parent that is not there."""


def parent_rows(ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """int64 (n,): the row of each block's parent, `ROOT` where none is recorded, `ORPHAN` where it is gone.

    Args:
        ids: uint64 (n, 2); of equal ones the first counts.
        parents: uint64 (n, 2), zeros where unknown.
    """
    rows = np.full(len(ids), ROOT, np.int64)
    known = np.flatnonzero(parents.any(axis=1))
    if not known.size:
        return rows
    order = np.argsort(ids[:, 0], kind="stable")
    low, high = ids[order, 0], ids[order, 1]
    # Two halves in one search: ids are digests, so equal first halves are rare and are walked through.
    wanted = parents[known]
    at = np.searchsorted(low, wanted[:, 0])
    found = np.full(known.size, ORPHAN, np.int64)
    pending = np.arange(known.size)
    while pending.size:
        pending = pending[at[pending] < len(ids)]
        pending = pending[low[at[pending]] == wanted[pending, 0]]
        match = high[at[pending]] == wanted[pending, 1]
        found[pending[match]] = order[at[pending[match]]]
        pending = pending[~match]
        at[pending] += 1
    # A block that names itself as its parent is nobody's tail.
    rows[known] = np.where(found == known, ROOT, found)
    return rows


def in_chains(worth: np.ndarray, parent_row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What blocks are worth as parts of chains, and how far from the head of its chain each stands.

    Args:
        worth: float64 (n,): what the policy says of each block by itself.
        parent_row: int64 (n,) from `parent_rows`. A block whose ancestor is gone is worth nothing.

    Returns:
        float64 (n,): the most that the block or any block behind it is worth (-inf: it cannot be
        reached). int64 (n,): blocks between it and the head, 0 for the head.
    """
    effective = worth.astype(np.float64, copy=True)
    depth = (parent_row >= 0).astype(np.int64)
    above = parent_row.copy()
    # Pointer doubling: in round k every block hands on to its 2^k-th ancestor, so a chain of a million
    # blocks takes 20 rounds. The bound ends rounds on chains that are circles (made by a damaged parent).
    for _ in range(len(worth).bit_length() + 1):
        rows = np.flatnonzero(above >= 0)
        if not rows.size:
            break
        ancestors = above[rows]
        np.maximum.at(effective, ancestors, effective[rows])
        depth[rows] += depth[ancestors]
        above[rows] = above[ancestors]
    effective[above == ORPHAN] = -np.inf
    return effective, depth


def leaving_order(worth: np.ndarray, parent_row: np.ndarray) -> np.ndarray:
    """int64 (n,): rows in the order in which blocks leave; tails before the heads of their chains."""
    effective, depth = in_chains(worth, parent_row)
    return np.lexsort((-depth, effective))
