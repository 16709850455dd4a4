"""What is measured: the cases of a run, from the options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from store_bench.geometries import GIB, KIB, MIB, POWERS, block_sizes, is_mla

BATCHES = (1, 16, 128)
LOADS = ("load", "load-shuffled", "load-interleaved")
MEDIA = ("tmpfs", "disk", "disk-direct")

MOST_BATCH_BYTES = 550 * MIB
"""A batch is halved where it would have more bytes: each store has memory for one."""

MOST_TURN_BYTES = 1 * GIB
_TURN_BYTES = 64 * MIB
LOOKUP_KEYS = 2000


@dataclass(frozen=True)
class Case:
    """One configuration, in which all stores take turns."""

    kind: str
    block_bytes: int
    batch: int
    medium: str
    hog: bool = False
    depth: int = 2
    loads: tuple[str, ...] = LOADS
    keys: int = 0
    capacity: int = 0
    fill: int = 0

    @property
    def io_mode(self) -> str:
        return "direct" if self.medium == "disk-direct" else "buffered"

    @property
    def reserve(self) -> int:
        """Bytes that a turn writes, at most."""
        batches = self.depth + 1 + (1 if "load-interleaved" in self.loads else 0)
        return self.block_bytes * max(batches * self.batch + 1, self.keys + self.batch)

    @property
    def mla(self) -> bool:
        return is_mla(self.block_bytes)

    def plan(self, seed: int, check: bool) -> dict[str, object]:
        """The request of one turn (see `turn.py`)."""
        return {
            "kind": self.kind, "seed": seed, "check": check, "hog": self.hog, "depth": self.depth,
            "loads": self.loads, "keys": self.keys, "fill": self.fill,
            "repeats": 3 if self.kind == "open" else 30,
        }  # fmt: skip


def transfer_case(block: int, batch: int, medium: str, hog: bool = False, quick: bool = False) -> Case:
    """A case of dumps and loads: enough batches in a turn for a median, and no more than memory allows."""
    while batch > 1 and batch * block > MOST_BATCH_BYTES:
        batch //= 2
    wanted = (_TURN_BYTES // 2 if quick else _TURN_BYTES) // (block * batch)
    depth = max(2, min(wanted, 4 if quick else 32, MOST_TURN_BYTES // (block * batch)))
    loads: tuple[str, ...]
    if hog or batch == 1 or (quick and block > 64 * KIB):
        loads = LOADS[:1]
    else:
        loads = LOADS if batch % 8 == 0 else LOADS[:2]
    return Case("transfers", block, batch, medium, hog, depth, loads)


def transfer_cases(
    sizes: Sequence[int] | None, batches: Sequence[int], media: Sequence[str], hog: str, quick: bool
) -> list[Case]:
    """Sizes that the targets name with every batch size; sizes of models with the largest one, on tmpfs.

    On other media and beside the hog: the sizes that the targets name, with the largest batches. Sizes that
    were asked for by hand are measured everywhere.
    """
    most = max(batches)
    named = list(sizes) if sizes else list(POWERS)
    cases = []
    for medium in media:
        if hog != "on":
            for batch in batches if medium == "tmpfs" else [most]:
                cases += [transfer_case(block, batch, medium, quick=quick) for block in named]
            if medium == "tmpfs" and not sizes:
                others = [size for size in block_sizes() if size not in POWERS]
                cases += [transfer_case(block, most, medium) for block in others]
        if hog != "off" and medium == "tmpfs":
            beside = [block for block in named if block >= 64 * KIB or sizes]
            cases += [transfer_case(block, most, medium, hog=True, quick=quick) for block in beside]
    return list(dict.fromkeys(cases))


def other_cases(operations: Iterable[str], media: Sequence[str], open_blocks: int) -> list[Case]:
    """Lookup, open and evicting dumps."""
    cases = []
    for medium in media:
        if medium == "disk-direct":
            continue
        if "lookup" in operations:
            cases.append(Case("lookup", 4 * KIB, 125, medium, keys=LOOKUP_KEYS, loads=()))
        if "open" in operations:
            cases.append(Case("open", 4 * KIB, 125, medium, keys=open_blocks, loads=()))
        if "evict" in operations:
            block, batch = 64 * KIB, 128
            cases.append(
                Case("evict", block, batch, medium, depth=16, loads=(), fill=48, capacity=32 * batch * block)
            )
    return cases
