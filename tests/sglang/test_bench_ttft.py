"""Issue 4, must hold 8, in short: the benchmark of the time to the first token, on a true server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_engine.server import CpuServer
from sglang_fleet import Fleet, extra_config
from ttft_bench.backends import NAMES, attached
from ttft_bench.measure import measure
from ttft_bench.plan import Plan
from ttft_bench.report import write
from ttft_bench.samples import problems

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

PLAN = Plan((256, 384, 512), rounds=1, prompts=2)
ABOUT = {"command": "c", "date": "d", "commit": "c", "machine": "m", "seconds": 1.0, "settings": {}}


@pytest.fixture
def server(fleet: Fleet) -> Iterator[CpuServer]:
    """The main server without a storage."""
    server = fleet.main()
    server.flush_cache()
    server.detach_storage()
    yield server
    if fleet.server is server:
        server.flush_cache()
        server.attach_storage("dynamic", extra_config(fleet.store))


@pytest.mark.usefixtures("clean_log")
def test_a_report_of_all_three_backends(server: CpuServer, tmp_path: Path) -> None:
    """All prefixes come from the storage that is attached, none without one; answers are identical."""
    lines: list[str] = []
    samples = measure(server, PLAN, tmp_path / "stores", lines.append)
    assert problems(samples) == []
    prompts = len(PLAN.lengths) * PLAN.prompts
    for name in NAMES:
        hits = [one.answer.storage for one in samples.again if one.backend == name]
        expected = [one.length if name != "none" else 0 for one in samples.again if one.backend == name]
        assert hits == expected and len(hits) == prompts
    assert all(0 < one.first <= one.answer.seconds for one in samples.again)
    assert all(one.waited > 0 for one in samples.again if one.backend != "none")
    assert all(0 < max(one.first) <= one.answered <= one.stored for one in samples.cold)
    assert len(lines) == len(PLAN.lengths) and list((tmp_path / "stores").iterdir()) == []
    text = write(tmp_path, ABOUT, samples, [])
    found = json.loads((tmp_path / "ttft.json").read_text())["figures"]
    assert {(one["backend"], one["length"]) for one in found if one["what"] == "ttft"} == {
        (name, length) for name in NAMES for length in PLAN.lengths
    }
    assert all(f"| {name} |" in text for name in NAMES)


def test_what_is_attached_is_what_stores(server: CpuServer, tmp_path: Path) -> None:
    """Each backend stores in its own folder, and nothing is stored without one."""
    folder = tmp_path / "stores"
    folder.mkdir()
    prompt = list(range(200))
    for name, there in (("none", set()), ("file", {"file"}), ("ours", {"file", "ours"})):
        with attached(server, name, folder):
            server.generate(prompt, 1)
            server.wait_idle()
        assert {path.name for path in folder.iterdir()} == there
    assert len(list((folder / "file").glob("*.bin"))) == 200 // 64
    assert list((folder / "ours").glob("*/*.seg"))
