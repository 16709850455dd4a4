"""Measurements that compare our store with a number, not with another store. Each runs in a child process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from store_bench.process import ChildProcess, Failed
from store_bench.registry import REGISTRY, how_to_make, interpreter

CHECKS: dict[str, tuple[str, str]] = {
    "lookup": ("check_lookup", "hicache-file"),
    "gil": ("check_gil", "hicache-file"),
    "growth": ("check_growth", "ours-native"),
}
"""By name: the module, whose `run(directory)` makes the rows, and a store whose interpreter it needs."""


def row(
    must_hold: int, what: str, value: float, unit: str, method: str, *, most: float | None, least: float = 0.0
) -> dict[str, Any]:
    """One row of checks.json: a value that must be at most `most`, or at least `least`."""
    wanted = f"<= {most:g} {unit}" if most is not None else f">= {least:g} {unit}"
    if most is None and not least:
        wanted = ""
    met = None if not wanted else (value <= most if most is not None else value >= least)
    return {
        "must_hold": must_hold, "what": what, "wanted": wanted, "value": f"{value:.4g} {unit}",
        "number": value, "method": method, "met": met,
    }  # fmt: skip


def run_in_this_process(name: str, directory: str) -> list[dict[str, Any]]:
    """The rows of a check; what the child does. Raises `CannotRun`."""
    module = importlib.import_module(f"store_bench.{CHECKS[name][0]}")
    rows: list[dict[str, Any]] = module.run(Path(directory))
    return rows


def run_check(name: str, directory: Path, environments: Path, logs: Path) -> list[dict[str, Any]]:
    """The rows of a check, made in a child process. Raises `Failed`."""
    store = CHECKS[name][1]
    entry = REGISTRY[store]
    python = interpreter(entry, environments)
    if python is None:
        raise Failed("cannot run", f"its environment is not there; {how_to_make(entry)} makes it")
    child = ChildProcess(store, python, logs / f"check-{name}.log")
    try:
        request = {"do": "check", "name": name, "directory": str(directory)}
        rows: list[dict[str, Any]] = child.ask(request, timeout=1200.0)["rows"]
        return rows
    finally:
        child.close()
