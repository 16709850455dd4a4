"""Eviction policies: what a block is worth. Who leaves first follows from that and from the chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from posix_store.errors import StoreError


@dataclass(frozen=True)
class Residents:
    """n complete blocks of one namespace, in columns. A copy: it does not change."""

    ids: np.ndarray
    """uint64 (n, 2)."""
    parents: np.ndarray
    """uint64 (n, 2): the block before each in its chain, zeros where unknown."""
    stored: np.ndarray
    """float64 (n,): when it was stored, Unix seconds."""
    used: np.ndarray
    """float64 (n,): when it was last stored or loaded, Unix seconds."""
    length: np.ndarray
    """int64 (n,): bytes of payload, all shards together."""

    def __len__(self) -> int:
        return len(self.ids)


class Policy(Protocol):
    """Says what blocks are worth. Called by one thread at a time."""

    name: str

    def worth(self, residents: Residents) -> np.ndarray:
        """float64 (n,), finite: the block with the least goes first. Comparable over namespaces."""


class LRU:
    """The block goes first that was not used for the longest time."""

    name = "lru"

    def worth(self, residents: Residents) -> np.ndarray:
        return residents.used


class FIFO:
    """The block goes first that was stored first."""

    name = "fifo"

    def worth(self, residents: Residents) -> np.ndarray:
        return residents.stored


POLICIES: dict[str, type[LRU] | type[FIFO]] = {"lru": LRU, "fifo": FIFO}


def policy_named(name: str) -> Policy:
    """A new policy. Raises `StoreError` for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise StoreError(f"policy = {name!r}: unknown; name one of {', '.join(POLICIES)}")
    return POLICIES[name]()
