"""PNG plots of the records, where matplotlib is there."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from store_bench.cases import MOST_BATCH_BYTES
from store_bench.geometries import size_text
from store_bench.registry import STORES


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path] | None:
    """One plot for each medium and way of I/O, of GB/s by block size; None without matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for record in records:
        if record["operation"] in ("dump", "load"):
            key = (record["medium"], record["io_mode"], record["hog"])
            groups.setdefault(key, []).append(record)
    paths = []
    for (medium, io_mode, hog), group in groups.items():
        path = folder / f"{medium}-{io_mode}{'-hog' if hog else ''}.png"
        title = f"{medium}, {io_mode}{', beside a thread that hogs the GIL' if hog else ''}"
        _figure(group, title, path)
        paths.append(path)
    return paths


def _figure(records: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    batch = max(record["batch"] for record in records)
    operations = [name for name in ("dump", "load") if any(r["operation"] == name for r in records)]
    figure, axes = pyplot.subplots(1, len(operations), figsize=(7 * len(operations), 5), squeeze=False)
    for axis, operation in zip(axes[0], operations, strict=True):
        lines: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for record in records:
            # Batches of large blocks are smaller than asked for.
            large = record["block_bytes"] * batch > MOST_BATCH_BYTES
            if record["operation"] == operation and (record["batch"] == batch or large):
                lines.setdefault((record["store"], record["verify"]), []).append(record)
        for store, verify in sorted(lines, key=lambda line: (STORES.index(line[0]), not line[1])):
            points = sorted(lines[store, verify], key=lambda record: record["block_bytes"])
            label = f"{store} verify {'on' if verify else 'off'}" if store.startswith("ours") else store
            sizes = [point["block_bytes"] for point in points]
            rates = [point["gbytes_per_s"] for point in points]
            style = {"raw": "k-", "raw-crc": "k--"}.get(store, "-")
            axis.plot(sizes, rates, style, marker="o", markersize=3, label=label)
        ticks = sorted({r["block_bytes"] for r in records if r["block_bytes"] & (r["block_bytes"] - 1) == 0})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [size_text(size) for size in ticks], rotation=45)
        axis.minorticks_off()
        axis.set(
            title=f"{operation}: {title}", xlabel=f"block, batches of {batch}", ylabel="GB/s", ylim=(0, None)
        )
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
