"""Page-aligned memory, and bytes in it that show whether what came back is what was stored."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

STAMP_BYTES = 16


def anonymous(size: int) -> np.ndarray:
    """uint8 (size,): page-aligned anonymous memory, every page of it touched.

    Of ordinary pages: whether huge pages are at hand differs between processes of one run.
    """
    area = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(area, np.uint8)[:size]
    memory[:] = 1
    return memory


class Blocks:
    """`count` blocks in memory, each of one or more components; component j is uint8 (count, size_j).

    Sizes are multiples of 8. The first 16 bytes of a block are its stamp, the rest is a pattern.
    """

    def __init__(self, components: list[np.ndarray], seed: int = 1) -> None:
        self.components = components
        self.count = len(components[0])
        self.block_bytes = sum(component.shape[1] for component in components)
        self._seed = seed
        self._words = np.random.default_rng(seed + 1).integers(0, 1 << 63, self.count, np.uint64)

    @classmethod
    def contiguous(cls, count: int, block_bytes: int) -> Blocks:
        """One component a block, one after the other in page-aligned memory."""
        return cls([anonymous(count * block_bytes).reshape(count, block_bytes)])

    @property
    def addresses(self) -> np.ndarray:
        """int64 (count, components)."""
        columns = [part.ctypes.data + np.arange(self.count) * part.strides[0] for part in self.components]
        return np.ascontiguousarray(np.stack(columns, 1).astype(np.int64))

    def stamp(self, ids: list[bytes], first: int = 0) -> None:
        """Write the ids over the first bytes of blocks `first` and following."""
        rows = np.frombuffer(b"".join(ids), np.uint8).reshape(len(ids), STAMP_BYTES)
        self.components[0][first : first + len(ids), :STAMP_BYTES] = rows

    def clear_stamps(self) -> None:
        self.components[0][:, :STAMP_BYTES] = 0

    def stamps_are(self, ids: list[bytes]) -> bool:
        wanted = np.frombuffer(b"".join(ids), np.uint8).reshape(len(ids), STAMP_BYTES)
        return bool((self.components[0][: len(ids), :STAMP_BYTES] == wanted).all())

    def fill(self) -> None:
        """Write the pattern: random bytes, the same for every block but for a word of its own."""
        for component, base in zip(self.components, self._bases(), strict=True):
            words = component.view(np.uint64)
            for row in range(self.count):
                np.bitwise_xor(base, self._words[row], out=words[row])

    def wipe(self) -> None:
        for component in self.components:
            component[:] = 0

    def hold_pattern_of(self, rows: list[int]) -> bool:
        """Does block i hold the pattern of block `rows[i]`, for all i of `rows`? Stamps are left out."""
        stamps = STAMP_BYTES // 8
        for component, base in zip(self.components, self._bases(), strict=True):
            words = component.view(np.uint64)
            for row, source in enumerate(rows):
                wanted = base[stamps:] ^ self._words[source]
                if not np.array_equal(words[row, stamps:], wanted):
                    return False
            stamps = 0
        return True

    def _bases(self) -> list[np.ndarray]:
        random = np.random.default_rng(self._seed)
        return [random.integers(0, 1 << 63, part.shape[1] // 8, np.uint64) for part in self.components]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """The address of an array, for a C function."""
    return ctypes.c_void_p(array.ctypes.data)
