"""Which root a block lives on, and what of a chain one root sees.

Weighted rendezvous hashing: every (block, root) pair draws a number from its hash, and the block lives on the
root that drew best for its weight. So blocks are spread in proportion to the weights, any process with the
same names and weights finds the same root without asking, and adding a root moves only what goes to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from posix_store.chains import parent_rows

MOST_STEPS = 1024
"""How far back in a chain the nearest block of the same root is looked for."""


class Placement:
    """A function from ids to roots. Immutable, thread-safe. What it answers must never change: it is where
    the blocks of existing stores are.

    Args:
        names: what identifies each root, all different. Their order does not matter.
        weights: the share of each in proportion to the others, more than 0.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self._seeds = np.array([xxh3_64_intdigest(os.fsencode(name)) for name in names], np.uint64)
        self._weights = np.array(weights, np.float64)

    def homes(self, ids: np.ndarray) -> np.ndarray:
        """int64 (n,): the root of each block, as an index into `names`. Ids are uint64 (n, 2)."""
        mixed = _mix(_mix(ids[:, 0]) ^ ids[:, 1])
        draws = _mix(mixed[:, None] ^ self._seeds)
        # 53 bits in the middle of their interval: neither 0 nor 1, so the logarithm is finite and not 0.
        uniform = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        # Waiting times of Poisson processes: the first to ring is root i with probability w_i / sum(w).
        # numpy's log may differ by one ulp from CPU to CPU; one block in 10^15 is then a miss.
        best: np.ndarray = np.argmin(-np.log(uniform) / self._weights, axis=1)
        return best

    def parents(self, ids: np.ndarray, parents: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
        """uint64 (n, 2): for each block the nearest block before it in its chain that has the same root.

        A root knows only its own blocks and would take one whose parent lives elsewhere for an orphan, of
        no use to anybody. Linked like this, the chain's blocks on one root are a chain of their own.

        Args:
            ids: uint64 (n, 2); a block may come more than once.
            parents: uint64 (n, 2), the block right before each, zeros where unknown.
            ancestors: uint64 (m, 2), blocks in the order of their chain, which the batch may continue.
        """
        if not parents.any():
            return parents
        # Parents at the end, so that each is found: with its own parent if it has come before.
        every = np.concatenate([ids, ancestors, parents])
        above = np.zeros_like(every)
        above[: len(ids)] = parents
        above[len(ids) + 1 : len(ids) + len(ancestors)] = ancestors[:-1]
        up = parent_rows(every, above)
        home = self.homes(every)
        at = up[: len(ids)].copy()
        wanted = home[: len(ids)]
        # The bound ends walks on chains that are circles.
        for _ in range(MOST_STEPS):
            away = np.flatnonzero((at >= 0) & (home[at] != wanted))
            if not away.size:
                break
            at[away] = up[at[away]]
        found = (at >= 0) & (home[at] == wanted)
        return np.where(found[:, None], every[at], np.uint64(0))


def _mix(words: np.ndarray) -> np.ndarray:
    """uint64: a bijection in which each bit of a word changes half of all bits (the one of splitmix64)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed
