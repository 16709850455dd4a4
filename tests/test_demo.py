"""The demo's verdict (issue 2, scripts/demo.sh): it must fail whenever the main job did not happen."""

import dataclasses
import fcntl
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_engine.server import Generation
from demo_report import Expect, Row, drift, problems, summary, table
from rich.console import Console

ROOT = Path(__file__).parents[1]
PAGE = 64
OUTPUTS = {"A": (1, 2, 3, 4, 5), "B": (9, 8, 7, 6, 5)}


def row(step: str, prompt: str, expect: Expect, device: int = 0, storage: int = 0, **more: Any) -> Row:
    values: dict[str, Any] = {
        "output_ids": OUTPUTS[prompt], "logprobs": (-0.5, -1.0), "prompt_tokens": 1500,
        "cached_tokens": device + storage, "device": device, "host": 0, "storage": storage, "seconds": 0.5,
    }  # fmt: skip
    return Row(step, prompt, expect, Generation(**(values | more)))


def good_rows() -> list[Row]:
    """What a demo measures when all is well."""
    return [
        row("cold", "A", "computed"),
        row("cold", "B", "device", device=960),
        row("flushed", "A", "storage", storage=1472),
        row("restarted", "B", "storage", device=960, storage=512),
        row("no store", "A", "computed"),
    ]


def changed(index: int, **values: Any) -> list[Row]:
    """The good rows with one result that is different."""
    rows = good_rows()
    result = dataclasses.replace(rows[index].result, **values)
    rows[index] = dataclasses.replace(rows[index], result=result)
    return rows


def test_passes_when_all_is_well() -> None:
    assert problems(good_rows(), PAGE) == []
    assert "1,984 of 3,000 prompt tokens" in summary(good_rows())


@pytest.mark.parametrize("index", [2, 3])
def test_fails_without_hits_from_storage(index: int) -> None:
    """Zero storage tokens fail, also where device or host served the prompt instead."""
    for tiers in ({"device": 0, "cached_tokens": 0}, {"device": 1472}, {"device": 0, "host": 1472}):
        (problem,) = problems(changed(index, **({"cached_tokens": 1472} | tiers), storage=0), PAGE)
        assert "no tokens from storage" in problem


def test_fails_when_storage_served_only_a_part() -> None:
    """All but the last page must come from a cache: a store that loses pages does not pass."""
    (problem,) = problems(changed(2, storage=1408, cached_tokens=1408), PAGE)
    assert "92 tokens were computed again" in problem


@pytest.mark.parametrize("index", [2, 3, 4])
def test_fails_when_the_output_differs(index: int) -> None:
    """One other token anywhere, or one fewer, fails; and the table says NO in that row."""
    ids = OUTPUTS[good_rows()[index].prompt]
    for other in ((*ids[:-1], 99), ids[:-1]):
        rows = changed(index, output_ids=other)
        assert any("the output differs from 'cold'" in problem for problem in problems(rows, PAGE))
        assert text_of(rows).count("NO") == 1


@pytest.mark.parametrize("index", [0, 4])
def test_fails_when_a_run_without_cache_had_hits(index: int) -> None:
    """A cold run that hits is no reference, and without a store nothing may be found after a flush."""
    (problem,) = problems(changed(index, storage=64, cached_tokens=64), PAGE)
    assert "64 tokens were cached, expected 0" in problem


def test_fails_when_a_shared_prefix_came_from_the_wrong_place() -> None:
    assert "shared prefix" in problems(changed(1, device=0, cached_tokens=0), PAGE)[0]
    assert "from storage, expected 0" in problems(changed(1, storage=64, cached_tokens=1024), PAGE)[0]


def test_fails_when_the_counts_do_not_add_up() -> None:
    """Tokens of a tier that the demo does not know would be hidden in the table."""
    assert "do not add up" in problems(changed(2, cached_tokens=1480), PAGE)[0]


def test_fails_when_the_reference_proves_nothing() -> None:
    """Output that repeats one token, or is the same for both prompts, is the same whatever a cache holds."""
    repeated = [dataclasses.replace(r, result=dataclasses.replace(r.result, output_ids=(7,) * 5))
                for r in good_rows()]  # fmt: skip
    same = [dataclasses.replace(r, result=dataclasses.replace(r.result, output_ids=OUTPUTS["A"]))
            for r in good_rows()]  # fmt: skip
    for rows in (repeated, same):
        assert "proves nothing" in problems(rows, PAGE)[0]


def test_fails_when_nothing_was_measured() -> None:
    assert problems([], PAGE)
    assert problems(good_rows()[:2], PAGE) == ["no request was made that needs the store"]


def test_drift_is_the_largest_difference_from_the_reference() -> None:
    assert drift(good_rows()) == 0.0
    assert drift(changed(3, logprobs=(-0.5, -1.25))) == 0.25
    assert math.isnan(drift(changed(0, logprobs=None)[:1]))


def text_of(rows: list[Row], **terminal: Any) -> str:
    console = Console(file=io.StringIO(), width=120, **terminal)
    console.print(table(rows, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_shows_every_request_and_is_plain_text_where_it_must_be() -> None:
    plain = text_of(good_rows())
    assert plain.isascii()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in plain.split("\n") if "|" in line]
    assert cells[0][:6] == ["step", "prompt", "device", "host", "storage", "computed"]
    assert cells[5] == ["restarted", "B", "960", "0", "512", "28", "0.50", "yes"]
    assert [line[-1] for line in cells[2:]] == ["(reference)", "(reference)", "yes", "yes", "yes"]
    assert "│" in text_of(good_rows(), force_terminal=True, _environ={"TERM": "xterm"})


@pytest.mark.parametrize("marker", [None, ".ucm-sglang-demo"])
def test_a_directory_in_use_by_others_is_left_alone(tmp_path: Path, marker: str | None) -> None:
    """--work on a directory with a store in it: refused, nothing removed, and the verdict says so."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "STORE.json").write_text("{}")
    if marker:
        held = (tmp_path / marker).open("w")
        fcntl.flock(held, fcntl.LOCK_EX)  # another demo at work there
    argv = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--work", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.strip().split("\n")[-1].startswith(f"demo: FAIL (--work {tmp_path}: ")
    assert (store / "STORE.json").exists()
