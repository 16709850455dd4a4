"""report.md: tables for people, made from the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from store_bench.definitions import DEFINITIONS
from store_bench.geometries import size_text
from store_bench.registry import STORES
from store_bench.targets import Verdict, verdicts

Records = Sequence[dict[str, Any]]
Column = tuple[str, bool]
_TRANSFERS = ("dump", "dump-sustained", "load", "load-shuffled", "load-interleaved")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report(records: Records, checks: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The whole document. `about`: as in about.json."""
    parts = [
        "# Benchmark of block stores\n",
        _about(about),
        _unavailable(about["unavailable"]),
        "## Targets\n",
        targets_table(verdicts(records)),
        checks_table(checks),
        *_transfer_tables(records),
        *_other_tables(records),
        _space(records),
        "## Geometries\n",
        _geometries(records),
        "## Definitions\n",
        DEFINITIONS,
    ]
    return "\n".join(part for part in parts if part)


def _about(about: dict[str, Any]) -> str:
    lines = [
        f"`{about['command']}`\n",
        f"* {about['date']}, commit {about['commit']}, {about['seconds']:.0f} s, {about['rounds']} rounds",
        f"* {about['machine']}",
        *(f"* {name}: {where}" for name, where in about["media"].items()),
        f"* load average {about['load_before']} before, {about['load_after']} after",
    ]
    return "\n".join(lines) + "\n"


def _unavailable(missing: Sequence[dict[str, str]]) -> str:
    if not missing:
        return "Every store that was asked for ran.\n"
    rows = [(one["store"], one["what"], one["reason"]) for one in missing]
    return "## What could not run\n\n" + table(("store", "what", "why"), rows)


def targets_table(found: Sequence[Verdict]) -> str:
    if not found:
        return "No target is about what was measured.\n"
    rows = []
    for one in found:
        value, spread = "-", "-"
        if one.value is not None:
            value = f"{one.value.median:.2f}"
            spread = f"{one.value.least:.2f}..{one.value.most:.2f}"
        rows.append((str(one.must_hold), one.what, f">= {one.wanted:g}", value, spread, one.word))
    met = sum(one.met is True for one in found)
    missed = sum(one.met is False for one in found)
    text = f"{met} met, {missed} missed, {len(found) - met - missed} not measured.\n\n"
    return text + table(("must hold", "ours-native, ratio", "target", "median", "spread", ""), rows)


def checks_table(checks: Sequence[dict[str, Any]]) -> str:
    if not checks:
        return ""
    rows = [
        (str(one["must_hold"]), one["what"], one["wanted"], one["value"], one["method"], _met(one["met"]))
        for one in checks
    ]
    head = ("must hold", "what", "target", "measured", "method", "")
    return "## Checks\n\n" + table(head, rows)


def _met(met: bool | None) -> str:
    return {None: "", True: "met", False: "MISSED"}[met]


def _columns(records: Records) -> list[Column]:
    """(store, verify) in the order of the registry."""
    there = {(r["store"], r["verify"]) for r in records}
    return sorted(there, key=lambda column: (STORES.index(column[0]), not column[1]))


def _head(column: Column, columns: Sequence[Column]) -> str:
    store, verify = column
    if (store, not verify) in columns or store.startswith("ours"):
        return f"{store} verify {'on' if verify else 'off'}"
    return store


def _transfer_tables(records: Records) -> Iterable[str]:
    moved = [r for r in records if r["operation"] in _TRANSFERS]
    groups = dict.fromkeys((r["medium"], r["io_mode"], r["hog"]) for r in moved)
    for medium, io_mode, hog in groups:
        group = [r for r in moved if (r["medium"], r["io_mode"], r["hog"]) == (medium, io_mode, hog)]
        yield f"## {medium}, {io_mode}{', beside the hog' if hog else ''}\n"
        yield (
            "GB/s (least..most of the rounds), and the ratio to raw in brackets. Space of raw and raw-crc is "
            "preallocated; of the others it is not (see *Space*).\n"
        )
        columns = _columns(group)
        for operation in dict.fromkeys(r["operation"] for r in group):
            yield f"### {operation}\n"
            yield _transfer_table([r for r in group if r["operation"] == operation], columns)
            if hog:
                yield _hog_table([r for r in group if r["operation"] == operation], columns)


def _transfer_table(records: Records, columns: Sequence[Column]) -> str:
    shapes = sorted({(r["batch"], r["block_bytes"]) for r in records})
    rows = []
    for batch, size in shapes:
        by_column = {
            (r["store"], r["verify"]): r for r in records if (r["batch"], r["block_bytes"]) == (batch, size)
        }
        cells = [_cell(by_column.get(column)) for column in columns]
        rows.append((f"{size_text(size)} x {batch}", *cells))
    return table(("block x batch", *(_head(column, columns) for column in columns)), rows)


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    size = record["block_bytes"] * record["batch"] / 1e9
    least, most = record["seconds_spread"]
    text = f"{record['gbytes_per_s']:.2f} ({size / most:.2f}..{size / least:.2f})"
    return text + (f" [{record['ratio_to_raw']:.2f}]" if "ratio_to_raw" in record else "")


def _hog_table(records: Records, columns: Sequence[Column]) -> str:
    rows = []
    for record in sorted(
        records, key=lambda r: (r["block_bytes"], STORES.index(r["store"]), not r["verify"])
    ):
        if "hog_rate_ratio" in record:
            least, most = record["hog_rate_ratio_spread"]
            rows.append((
                size_text(record["block_bytes"]),
                _head((record["store"], record["verify"]), columns),
                f"{record['hog_loops_per_s'] / 1e6:.1f}",
                f"{record['hog_rate_ratio']:.2f} ({least:.2f}..{most:.2f})",
            ))  # fmt: skip
    head = ("block", "beside", "million loops of the hog a second", "through those beside raw")
    return table(head, rows) if rows else ""


def _other_tables(records: Records) -> Iterable[str]:
    others = [r for r in records if r["operation"] not in _TRANSFERS]
    for operation in dict.fromkeys(r["operation"] for r in others):
        yield f"## {operation}\n"
        rows = []
        for r in others:
            if r["operation"] != operation:
                continue
            rate = (
                f"{r['gbytes_per_s']:.2f} GB/s" if r["gbytes_per_s"] else f"{r['keys_per_s'] / 1e6:.3g} M/s"
            )
            least, most = (f"{seconds * 1e3:.3g}" for seconds in r["seconds_spread"])
            what = f"{r['keys']:,} keys" if r.get("keys") else f"{size_text(r['block_bytes'])} x {r['batch']}"
            rows.append(
                (r["medium"], r["store"], what, f"{r['seconds_median'] * 1e3:.3g} ({least}..{most})", rate)
            )
        yield table(("medium", "store", "of", "ms (least..most)", "rate"), rows)


def _space(records: Records) -> str:
    texts = {r["store"]: r["preallocated"] for r in records}
    facts: dict[str, set[str]] = {}
    for record in records:
        facts.setdefault(record["store"], set()).update(
            f"{name} {value}"
            for name, value in record["facts"].items()
            if name != "way" and value is not None
        )
    rows = [(store, texts[store], ", ".join(sorted(facts[store]))) for store in STORES if store in texts]
    return "## Space\n\n" + table(("store", "is space for dumps preallocated?", "set up with"), rows)


def _geometries(records: Records) -> str:
    names = {r["block_bytes"]: r["geometries"] for r in records if r["operation"] in _TRANSFERS}
    rows = [(size_text(size), ", ".join(names[size]) or "of no model here") for size in sorted(names)]
    return table(("block", "is a page of (2-byte elements, one rank)"), rows)
