"""Admission: which blocks that are not stored yet are worth a place on disk."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from posix_store.chains import parent_rows
from posix_store.errors import StoreError


class Admission(Protocol):
    """Says which blocks of a dump are stored. Thread-safe."""

    name: str

    def admit(self, ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """bool (n,): which blocks to store. The rest counts as `NOT_ADMITTED`.

        Give it blocks that are not stored, or a stored block that it does not know would refuse what hangs on
        it; and each block once for each dump: every shard asked for would be one more touch.

        Args:
            ids: uint64 (n, 2).
            parents: uint64 (n, 2): the block before each in its chain, zeros where unknown.
        """


class Always:
    """Stores everything."""

    name = "always"

    def admit(self, ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)


class SecondTouch:
    """Stores a block when it is dumped for the second time: prompts seen once cost no disk. Thread-safe.

    Repeats within one batch are one touch. Within a batch no chain is cut: what stands behind a refused block
    is refused too, and counts as touched.

    The memory has a fixed size and forgets the oldest: between the last `capacity_blocks` and twice as many
    touched blocks are remembered. About one block in ten thousand is taken for another one that was
    touched. That is harmless: it is stored a touch too early. A restart forgets everything.

    Args:
        capacity_blocks: blocks to remember, 1 or more. Takes 16 bytes of memory for each.

    Raises:
        StoreError: `capacity_blocks` is less than 1.
    """

    name = "second_touch"

    def __init__(self, capacity_blocks: int = 1 << 20) -> None:
        if capacity_blocks < 1:
            raise StoreError(f"capacity_blocks = {capacity_blocks}: must be 1 or more blocks to remember")
        self._capacity = capacity_blocks
        self._newer = _Generation(capacity_blocks)
        self._older = _Generation(capacity_blocks)
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the memory of blocks takes, once it has been written to."""
        return self._newer.words.nbytes + self._older.words.nbytes

    def admit(self, ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """See `Admission`."""
        prints, first, which = np.unique(_fingerprints(ids), return_index=True, return_inverse=True)
        with self._lock:
            known = self._newer.contains(prints)
            admitted = known | self._older.contains(prints)
            # Also what the older generation knows: it was touched now.
            fresh = np.flatnonzero(~known)
            self._remember(prints[fresh[np.argsort(first[fresh])]])
        _refuse_descendants(admitted, parent_rows(ids[first], parents[first]))
        return admitted[which]

    def _remember(self, prints: np.ndarray) -> None:
        """Record distinct fingerprints, oldest first, that the newer generation does not know.

        The caller holds the lock.
        """
        while prints.size:
            room = self._capacity - self._newer.filled
            if not room:
                self._older, self._newer = self._newer, _Generation(self._capacity)
                continue
            self._newer.add(prints[:room])
            prints = prints[room:]


class _Generation:
    """A set of 64-bit fingerprints: a Bloom filter whose bits for one element lie in one 64-bit word.

    So a batch is one gather or one scatter. It never forgets, and with one element for each word, `contains`
    is wrong for about one unknown element in ten thousand.
    """

    _BITS = 5

    def __init__(self, capacity: int) -> None:
        self.words = np.zeros(max(capacity, 64), np.uint64)
        self.filled = 0

    def contains(self, prints: np.ndarray) -> np.ndarray:
        """bool (n,), for fingerprints uint64 (n,)."""
        at, bits = self._places(prints)
        found: np.ndarray = (self.words[at] & bits) == bits
        return found

    def add(self, prints: np.ndarray) -> None:
        at, bits = self._places(prints)
        np.bitwise_or.at(self.words, at, bits)
        self.filled += len(prints)

    def _places(self, prints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The word of each fingerprint, from its upper half, and the bits in it, from its lower half."""
        at = (prints >> np.uint64(32)) * np.uint64(len(self.words)) >> np.uint64(32)
        bits = np.zeros(len(prints), np.uint64)
        for i in range(self._BITS):
            bits |= np.uint64(1) << (prints >> np.uint64(6 * i) & np.uint64(63))
        return at.astype(np.int64), bits


def _fingerprints(ids: np.ndarray) -> np.ndarray:
    """uint64 (n,): ids mixed down to 64 bits, so that ids need not be uniform."""
    mixed: np.ndarray = ids[:, 0] * np.uint64(0x9E3779B97F4A7C15) + ids[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)


def _refuse_descendants(admitted: np.ndarray, parent_row: np.ndarray) -> None:
    """Refuse what stands behind a refused block of the same batch.

    Args:
        admitted: bool (n,), changed in place.
        parent_row: int64 (n,) from `parent_rows`, changed too.
    """
    # Pointer doubling: after round k each block has heard from its 2^k nearest ancestors. The bound ends
    # rounds on chains that are circles.
    for _ in range(len(admitted).bit_length()):
        rows = np.flatnonzero(parent_row >= 0)
        if not rows.size:
            break
        ancestors = parent_row[rows]
        admitted[rows] &= admitted[ancestors]
        parent_row[rows] = parent_row[ancestors]


ADMISSIONS: dict[str, type[Always] | type[SecondTouch]] = {"always": Always, "second_touch": SecondTouch}


def admission_named(name: str) -> Admission:
    """A new admission. Raises `StoreError` for a name that is not in `ADMISSIONS`."""
    if name not in ADMISSIONS:
        raise StoreError(f"admission = {name!r}: unknown; name one of {', '.join(ADMISSIONS)}")
    return ADMISSIONS[name]()
