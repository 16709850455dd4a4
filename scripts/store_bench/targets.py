"""The targets of the store's speed, and whether a run's records meet them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from store_bench.geometries import KIB, MIB, POWERS, size_text
from store_bench.statistics import Summary, paired_ratios, summarise

Records = Sequence[dict[str, Any]]

OURS = "ours-native"

_NAMED = dict(zip(POWERS, range(5), strict=True))
# Against raw, by (operation, verify): from 64 KiB on, and at 16 KiB.
_RAW = {("load", False): (0.95, 0.7), ("dump", False): (0.90, 0.6), ("load", True): (0.85, None),
        ("dump", True): (0.85, None)}  # fmt: skip
# Against peers that verify nothing, ours verifying, at 16 KiB, 64 KiB, 256 KiB, 1 MiB, 4 MiB.
_PEERS = {
    ("ucm-posix", "dump"): (3, 1.7, 1.3, 1.1, 1.0),
    ("ucm-posix", "load"): (1.5, 1.05, 0.85, 0.85, 0.85),
    ("vllm-fs", "dump"): (5, 4, 2.5, 1.3, 1.0),
    ("vllm-fs", "load"): (2.5, 1.5, 1.2, 1.0, 0.85),
    ("hicache-file", "dump"): (10, 8, 4, 4, 4),
    ("hicache-file", "load"): (8, 6, 3, 3, 3),
}
_UNVERIFIED_UCM_LOAD = 1.0
_LOOKUP = {"ucm-posix": 8.0, "vllm-fs": 8.0}
_HOG_TRANSFER, _HOG_RATE, _DIRECT = 0.8, 0.9, 0.95


@dataclass(frozen=True)
class Verdict:
    """One target: what it is about, what is wanted, what was measured; `value` None: not measured."""

    must_hold: int
    what: str
    wanted: float
    value: Summary | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value.median >= self.wanted

    @property
    def word(self) -> str:
        return {None: "not measured", True: "met", False: "MISSED"}[self.met]


def find(records: Records, **fields: Any) -> dict[str, Any] | None:
    """The first record that has all these values."""
    for record in records:
        if all(record.get(name) == value for name, value in fields.items()):
            return record
    return None


def ratio(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> Summary | None:
    """How many times faster ours is, round by round."""
    if ours is None or other is None or len(ours["seconds_of_rounds"]) != len(other["seconds_of_rounds"]):
        return None
    return summarise(paired_ratios(ours["seconds_of_rounds"], other["seconds_of_rounds"]))


def verdicts(records: Records) -> list[Verdict]:
    """Every target that a benchmark of stores can say something about."""
    biggest = [r for r in records if r["batch"] == 128 or r["operation"] == "lookup"]
    idle = [r for r in biggest if not r["hog"]]
    tmpfs = [r for r in idle if r["medium"] == "tmpfs"]
    return [
        *_against_raw(tmpfs, "tmpfs"),
        *_against_raw([r for r in idle if (r["medium"], r["io_mode"]) == ("disk", "buffered")], "page cache"),
        *_against_peers(tmpfs),
        *_lookups(tmpfs),
        *_beside_hog([r for r in biggest if r["hog"]]),
        *_direct([r for r in idle if r["io_mode"] == "direct"]),
    ]


def _pairs(
    records: Records, other: str, operation: str, verify: bool
) -> Iterable[tuple[int, Summary | None]]:
    """(block bytes, ratio) for each size the targets name that was measured at all."""
    for size in POWERS:
        fields = {"operation": operation, "block_bytes": size}
        if not any(r["block_bytes"] == size for r in records):
            continue
        ours = find(records, store=OURS, verify=verify, **fields)
        yield size, ratio(ours, find(records, store=other, **fields))


def _against_raw(records: Records, where: str) -> Iterable[Verdict]:
    for (operation, verify), (large, small) in _RAW.items():
        for size, value in _pairs(records, "raw", operation, verify):
            wanted = large if size >= 64 * KIB else small
            if wanted is not None and size <= 4 * MIB:
                yield Verdict(1, _text(operation, verify, size, f"raw, {where}"), wanted, value)


def _against_peers(records: Records) -> Iterable[Verdict]:
    for (peer, operation), wanted in _PEERS.items():
        for size, value in _pairs(records, peer, operation, True):
            yield Verdict(2, _text(operation, True, size, peer), wanted[_NAMED[size]], value)
    for size, value in _pairs(records, "ucm-posix", "load", False):
        yield Verdict(2, _text("load", False, size, "ucm-posix"), _UNVERIFIED_UCM_LOAD, value)


def _lookups(records: Records) -> Iterable[Verdict]:
    ours = find(records, store=OURS, operation="lookup")
    if ours is None:
        return
    for peer, wanted in _LOOKUP.items():
        value = ratio(ours, find(records, store=peer, operation="lookup"))
        yield Verdict(2, f"lookup of {ours['keys']:,} keys / {peer}", wanted, value)


def _beside_hog(records: Records) -> Iterable[Verdict]:
    for operation in ("load", "dump"):
        for verify in (True, False):
            for size, value in _pairs(records, "raw", operation, verify):
                name = _text(operation, verify, size, "raw beside the hog")
                yield Verdict(3, name, _HOG_TRANSFER, value)
                fields = {"store": OURS, "operation": operation, "verify": verify, "block_bytes": size}
                found = find(records, **fields)
                rate = None
                if found and "hog_rate_ratio" in found:
                    least, most = found["hog_rate_ratio_spread"]
                    rate = Summary(found["hog_rate_ratio"], least, most, found["runs"])
                name = f"loops of the hog, {_text(operation, verify, size, 'beside raw')}"
                yield Verdict(3, name, _HOG_RATE, rate)


def _direct(records: Records) -> Iterable[Verdict]:
    for operation in ("load", "dump"):
        for size, value in _pairs(records, "raw", operation, False):
            yield Verdict(5, _text(operation, False, size, "raw O_DIRECT"), _DIRECT, value)


def _text(operation: str, verify: bool, size: int, other: str) -> str:
    return f"{operation} {size_text(size)} {'verified' if verify else 'unverified'} / {other}"
