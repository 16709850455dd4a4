"""A whole run: from the options to the files in the output folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from store_bench.cases import MEDIA, Case, other_cases, transfer_cases
from store_bench.checks import CHECKS as CHECK_FUNCTIONS
from store_bench.checks import run_check
from store_bench.geometries import KIB, MIB
from store_bench.plots import draw
from store_bench.process import Failed
from store_bench.records import records
from store_bench.registry import PEERS, REGISTRY, ROOT, STORES, environments_dir, how_to_make, interpreter
from store_bench.report import report
from store_bench.runner import Measured, Runner, Unavailable, participants, run_cases

OPERATIONS = ("transfers", "lookup", "open", "evict")
CHECKS = tuple(CHECK_FUNCTIONS)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_session(options: argparse.Namespace) -> int:
    """Measure and write everything, also when ended early.

    0; 1 when a store returned wrong bytes, 2 when the run was ended early.
    """
    _defaults(options)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    about = _about(options)
    environments = environments_dir(options.peers_dir)
    missing = _stores_left_out(options)
    if options.peers == "all":
        _make_environments(options.stores, environments)
    with _Places(options) as directories:
        about["media"] = {name: _describe(path) for name, path in directories.items()}
        runner = Runner(
            participants(options.stores, options.verify), environments, directories, options.out / "logs", say
        )
        measured: list[Measured] = []
        checks: list[dict[str, Any]] = []
        early = False
        try:
            measured.extend(run_cases(runner, _cases(options), options.rounds, say))
            runner.close()
            checks += _checks(options, environments, missing)
        except (KeyboardInterrupt, SystemExit):
            early = True
            say("ended early; what was measured so far is written")
            missing.append(Unavailable("every store", "the rest", "the run was ended early"))
        finally:
            runner.close()
    about |= {
        "seconds": time.monotonic() - started,
        "load_after": _load(),
        "unavailable": [dataclasses.asdict(one) for one in missing + runner.unavailable],
        "wrong_bytes": [dataclasses.asdict(one) for one in runner.wrong_bytes],
    }
    for name, content in (("results", records(measured)), ("checks", checks), ("about", about)):
        (options.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    write_report(options.out)
    for one in runner.wrong_bytes:
        say(f"WRONG BYTES: {one.store}, {one.what}: {one.reason}")
    return 1 if runner.wrong_bytes else 2 if early else 0


def write_report(folder: Path) -> None:
    """report.md and the plots, from the JSON files in the folder."""
    found, checks, about = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("results", "checks", "about")
    )
    plots = draw(found, folder)
    if plots is None:
        say("no plots: matplotlib is not installed; `scripts/env.sh bench` makes an environment that has it, "
            "then --report-only draws them")  # fmt: skip
    text = report(found, checks, about)
    for plot in plots or []:
        text += f"\n![{plot.stem}]({plot.name})\n"
    (folder / "report.md").write_text(text)
    say(f"wrote {folder}/results.json, report.md and {len(plots or [])} plots")


def _defaults(options: argparse.Namespace) -> None:
    quick = options.quick
    if quick:
        options.batches = [128]
        options.sizes = options.sizes or [64 * KIB, MIB]
    options.media = options.media or (["tmpfs"] if quick else list(MEDIA))
    options.rounds = options.rounds or (3 if quick else 5)
    options.hog = options.hog or ("off" if quick else "both")
    if options.operations is None:
        options.operations = ["transfers", "lookup"] if quick else list(OPERATIONS)
    if options.checks is None:
        options.checks = [] if quick else list(CHECKS)


def _cases(options: argparse.Namespace) -> list[Case]:
    cases = other_cases(options.operations, options.media, options.open_blocks)
    if "transfers" in options.operations:
        cases = (
            transfer_cases(options.sizes, options.batches, options.media, options.hog, options.quick) + cases
        )
    return cases


def _stores_left_out(options: argparse.Namespace) -> list[Unavailable]:
    """Chooses the stores; those that the options leave out are reported, too."""
    chosen = list(options.stores or STORES)
    if options.peers == "none":
        chosen = [store for store in chosen if store not in PEERS]
    options.stores = chosen
    reason = "left out by --stores or --peers"
    return [Unavailable(store, "everything", reason) for store in STORES if store not in chosen]


def _make_environments(stores: list[str], environments: Path) -> None:
    for store in stores:
        entry = REGISTRY[store]
        if interpreter(entry, environments) is None:
            command = how_to_make(entry)
            say(f"{store}: {command}")
            variables = {**os.environ, "UCM_ENVS_DIR": str(environments.resolve())}
            subprocess.run(shlex.split(command), cwd=ROOT, env=variables, check=False, stdout=sys.stderr)


class _Places:
    """Folders for the media of a run, deleted afterwards."""

    def __init__(self, options: argparse.Namespace) -> None:
        disk = options.dir or options.out
        self._parents = {"tmpfs": options.tmpfs, "disk": disk, "disk-direct": disk}
        self._media = options.media
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def __enter__(self) -> dict[str, Path]:
        found = {}
        for medium in self._media:
            self._folders.append(tempfile.TemporaryDirectory(prefix="bench-", dir=self._parents[medium]))
            found[medium] = Path(self._folders[-1].name)
        return found

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            folder.cleanup()


def _checks(
    options: argparse.Namespace, environments: Path, missing: list[Unavailable]
) -> list[dict[str, Any]]:
    found = []
    for name in options.checks:
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="bench-check-", dir=options.tmpfs) as folder:
                found += run_check(name, Path(folder), environments, options.out / "logs")
            say(f"check {name}: {time.monotonic() - started:.1f} s")
        except Failed as failure:
            say(f"check {name}: cannot run: {failure.reason}")
            missing.append(Unavailable("checks", name, failure.reason))
    return found


def _about(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit or "unknown",
        "rounds": options.rounds,
        "machine": _machine(),
        "load_before": _load(),
    }


def _machine() -> str:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores {cpu}, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _describe(path: Path) -> str:
    done = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE,SOURCE,OPTIONS", "-T", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"`{path.parent}`, {' '.join(done.stdout.split()) or 'file system unknown'}"
