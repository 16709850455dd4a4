"""The benchmark of stores (issue 4): its figures, its raw limit, wrong bytes, absent peers."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import bench_store
import numpy as np
import pytest
import store_bench.runner
from store_bench.cases import LOADS, MOST_BATCH_BYTES, Case, transfer_case, transfer_cases
from store_bench.check_gil import GapMeter
from store_bench.geometries import GEOMETRIES, KIB, MIB, block_sizes, is_mla, parse_size, size_text
from store_bench.hog import Hog
from store_bench.memory import Blocks
from store_bench.process import ChildProcess, Failed
from store_bench.raw import CannotRun, RawLoop
from store_bench.records import FIELDS, records
from store_bench.registry import REGISTRY
from store_bench.report import table
from store_bench.runner import Measured, Participant, Runner, participants
from store_bench.statistics import paired_ratios, summarise
from store_bench.stores.base import Spec, StoreUnderTest
from store_bench.targets import verdicts
from store_bench.turn import WrongBytes, run_turn


@pytest.fixture(scope="module")
def raw_loop() -> RawLoop:
    try:
        return RawLoop()
    except CannotRun as reason:
        pytest.skip(str(reason))


class Shelf(StoreUnderTest):
    """A store in a dictionary, with a fault of choice."""

    def __init__(self, spec: Spec, fault: str = "") -> None:
        super().__init__(spec)
        self.fault = fault

    def begin(self) -> None:
        self.kept: dict[bytes, np.ndarray] = {}

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        return ids, first

    def prepare_load(self, ids: list[bytes]) -> Any:
        return ids, 0

    def dump(self, prepared: Any) -> None:
        ids, first = prepared
        for row, block in enumerate(ids, first):
            self.kept[block] = self.blocks.components[0][row].copy()

    def load(self, prepared: Any) -> None:
        if self.fault == "loads nothing":
            return
        for row, block in enumerate(prepared[0]):
            self.blocks.components[0][row] = self.kept[block]
        if self.fault == "flips a byte":
            self.blocks.components[0][-1, -1] ^= 1
        if self.fault == "swaps blocks":
            self.blocks.components[0][[0, 1]] = self.blocks.components[0][[1, 0]]


def shelf(tmp_path: Path, fault: str = "", batch: int = 16) -> Shelf:
    return Shelf(Spec(str(tmp_path / "shelf"), 64, batch), fault)


def plan(depth: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": "transfers", "seed": 1, "check": True, "depth": depth, "loads": LOADS, **more}


# -- figures ---------------------------------------------------------------------------------------------


def test_median_spread_and_paired_ratios() -> None:
    """Issue 4: medians with spread; a ratio is of neighbours in time."""
    found = summarise([4.0, 1.0, 2.0])
    assert (found.median, found.spread, found.count) == (2.0, [1.0, 4.0], 3)
    # The second round was slow for both.
    assert paired_ratios([1.0, 10.0], [2.0, 20.0]) == [2.0, 2.0]
    with pytest.raises(ValueError, match="no values"):
        summarise([])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratios([1.0], [1.0, 2.0])


def test_geometries_are_those_of_the_models() -> None:
    """Issue 4: block sizes from the geometries of real models."""
    token_bytes = {geometry.name: geometry.token_bytes for geometry in GEOMETRIES}
    assert token_bytes == {
        "Llama-3.1-8B tp1": 128 * KIB,
        "Qwen3-32B tp1": 256 * KIB,
        "DeepSeek-V3 MLA tp1": 61 * 576 * 2,
        "Llama-3.1-8B tp8": 16 * KIB,
        "Qwen3-32B tp8": 32 * KIB,
        "DeepSeek-V3 MLA tp8": 61 * 576 * 2,
    }
    sizes = block_sizes()
    assert (min(sizes), max(sizes)) == (4 * KIB, 8 * MIB)
    assert "Llama-3.1-8B tp8 page 64" in sizes[MIB]
    assert is_mla(61 * 576 * 2 * 16) and not is_mla(MIB)


def test_sizes_are_read_and_written() -> None:
    assert [parse_size(text) for text in ("64k", "1MiB", "4096", "1.5m")] == [65536, MIB, 4096, 1572864]
    assert [size_text(size) for size in (65536, MIB, 70272, 64)] == ["64 KiB", "1 MiB", "68.62 KiB", "64 B"]
    for text in ("k", "-4k", "1x"):
        with pytest.raises(ValueError):
            parse_size(text)


def test_cases_cover_what_was_asked_and_stay_within_memory() -> None:
    cases = transfer_cases(None, (1, 16, 128), ("tmpfs", "disk", "disk-direct"), "both", quick=False)
    assert {case.batch for case in cases} >= {1, 16, 128}
    assert {(case.medium, case.io_mode) for case in cases} == {
        ("tmpfs", "buffered"), ("disk", "buffered"), ("disk-direct", "direct"),
    }  # fmt: skip
    assert {case.block_bytes for case in cases if case.medium == "tmpfs"} >= set(block_sizes())
    assert any(case.hog for case in cases) and any(not case.hog for case in cases)
    assert all(case.block_bytes * case.batch <= MOST_BATCH_BYTES for case in cases)
    assert all(case.reserve <= 4 * MOST_BATCH_BYTES + case.block_bytes for case in cases)


# -- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(("block", "piece"), [(512, 4096), (4096, 1 << 31), (20_000, 4096)])
def test_the_raw_loop_moves_the_right_bytes(
    raw_loop: RawLoop, tmp_path: Path, threads: int, checks: bool, block: int, piece: int
) -> None:
    """Issue 4: the raw limit is a loop that does the work; blocks larger and smaller than one call."""
    count = 37
    source, target = Blocks.contiguous(count, block), Blocks.contiguous(count, block)
    source.fill()
    offsets = np.arange(count, dtype=np.int64) * block
    offsets[20:] += 8 * block  # a gap in the file
    sums = np.zeros(count, np.uint32)
    order = np.random.default_rng(1).permutation(count)
    addresses = np.ascontiguousarray(target.addresses[:, 0][order].astype(np.uint64))
    how: dict[str, Any] = {"checks": checks, "threads": threads, "piece": piece}
    fd = os.open(tmp_path / "raw", os.O_RDWR | os.O_CREAT)
    try:
        raw_loop.move(fd, block, offsets, source.addresses[:, 0].astype(np.uint64), sums, writes=True, **how)
        raw_loop.move(fd, block, offsets, addresses, sums, writes=False, **how)
        assert np.array_equal(target.components[0][order], source.components[0])
        if checks:
            assert len(set(sums.tolist())) == count
            os.pwrite(fd, b"\xff" * 3, int(offsets[11]) + 100)
            with pytest.raises(OSError) as caught:
                raw_loop.move(fd, block, offsets, addresses, sums, writes=False, **how)
            assert caught.value.errno == errno.EBADMSG
        os.ftruncate(fd, block)
        with pytest.raises(OSError):
            raw_loop.move(fd, block, offsets, addresses, sums, writes=False, **how)
    finally:
        os.close(fd)


def test_the_pattern_shows_every_difference() -> None:
    """A benchmark that moves wrong bytes must fail: any byte, any two blocks swapped, in any component."""
    blocks = Blocks([np.zeros((5, 64), np.uint8), np.zeros((5, 32), np.uint8)])
    in_order = list(range(5))
    blocks.fill()
    assert blocks.hold_pattern_of(in_order)
    assert not blocks.hold_pattern_of([1, 0, 2, 3, 4])
    for component, place in ((0, 16), (0, 63), (1, 0), (1, 31)):
        blocks.components[component][3, place] ^= 1
        assert not blocks.hold_pattern_of(in_order)
        blocks.components[component][3, place] ^= 1
    ids = [bytes([n]) * 16 for n in range(5)]
    blocks.stamp(ids)
    assert blocks.stamps_are(ids) and blocks.hold_pattern_of(in_order)
    blocks.clear_stamps()
    assert not blocks.stamps_are(ids)


@pytest.mark.parametrize("depth", [2, 8])
def test_a_turn_times_every_operation(tmp_path: Path, depth: int) -> None:
    """Issue 4: dump, and load as written, shuffled, and interleaved over 8 batches."""
    samples = run_turn(shelf(tmp_path), plan(depth))["ways"][""]["samples"]
    interleaved = 8 if depth == 8 else 2
    assert {name: len(times) for name, times in samples.items()} == {
        "dump": depth // 2, "dump-sustained": depth // 2,
        "load": depth, "load-shuffled": depth, "load-interleaved": interleaved,
    }  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", ["loads nothing", "flips a byte", "swaps blocks"])
def test_wrong_bytes_fail_a_turn(tmp_path: Path, fault: str, load: str) -> None:
    """Issue 4: loaded bytes are compared with what was dumped, in every order of loading."""
    with pytest.raises(WrongBytes, match=load):
        run_turn(shelf(tmp_path, fault), plan(loads=[load]))


def test_interleaved_loads_take_every_block_from_another_batch(tmp_path: Path) -> None:
    """No two neighbours of an interleaved load come from one batch."""
    asked: list[list[bytes]] = []
    dumped: list[list[bytes]] = []
    store = shelf(tmp_path)

    def note(call: Any, notes: list[list[bytes]]) -> Any:
        return lambda prepared: (notes.append(prepared[0]), call(prepared))

    store.load, store.dump = note(store.load, asked), note(store.dump, dumped)  # type: ignore[method-assign]
    run_turn(store, plan(8, loads=["load-interleaved"]))
    batch_of = {block: number for number, batch in enumerate(dumped) for block in batch}
    for ids in asked:
        assert len(set(ids)) == len(ids)
        assert len({batch_of[block] for block in ids[:8]}) == 8


def test_the_hog_counts_and_its_rate_is_reported(tmp_path: Path) -> None:
    hog = Hog()
    hog.start()
    hog.stop()
    assert hog.count > 0
    rates = run_turn(shelf(tmp_path, batch=2), plan(loads=["load"], hog=True))["ways"][""]["hog_rates"]
    assert set(rates) == {"dump", "dump-sustained", "load"}


def test_gaps_within_a_call_are_added_up() -> None:
    """Must hold 6: what overlaps the call counts, what is before and behind it does not."""
    meter = GapMeter(0)
    meter._starts, meter._ends = [0, 90, 150, 190, 500], [50, 110, 160, 300, 600]
    assert meter.held(100, 200) == 10 + 10 + 10
    assert meter.held(310, 400) == 0


# -- records and tables ------------------------------------------------------------------------------------


def measured(store: str, seconds: list[float], case: Case, way: str = "", verify: bool = False) -> Measured:
    return Measured(case, Participant(store, verify), way, {"dump": seconds}, {}, {"dump": 9}, {}, "no")


def test_the_best_way_of_raw_is_the_limit() -> None:
    """Must hold 1: the better of one and two threads."""
    case = transfer_case(64 * KIB, 128, "tmpfs")
    made = records([
        measured("raw", [2.0, 2.0, 2.0], case, "one"),
        measured("raw", [1.0, 1.0, 3.0], case, "two"),
        measured("ours-native", [2.0, 1.0, 3.0], case, verify=True),
    ])  # fmt: skip
    by_store = {record["store"]: record for record in made}
    assert len(made) == 2 and set(FIELDS) <= set(made[0])
    assert by_store["raw"]["seconds_median"] == 1.0
    ours = by_store["ours-native"]
    assert (ours["ratio_to_raw"], ours["ratio_to_raw_spread"]) == (1.0, [0.5, 1.0])
    assert (ours["seconds_spread"], ours["runs"], ours["medium"]) == ([1.0, 3.0], 3, "tmpfs")
    assert ours["gbytes_per_s"] == pytest.approx(64 * KIB * 128 / 2.0 / 1e9)


def test_targets_say_met_missed_and_not_measured() -> None:
    case = transfer_case(64 * KIB, 128, "tmpfs")
    made = records([
        measured("raw", [0.8] * 3, case),
        measured("ours-native", [1.0] * 3, case, verify=True),
        measured("ours-native", [0.8] * 3, case),
        measured("hicache-file", [8.1] * 3, case),
    ])  # fmt: skip
    words = {verdict.what: verdict.word for verdict in verdicts(made)}
    assert words["dump 64 KiB verified / raw, tmpfs"] == "MISSED"  # 0.8 of 0.85
    assert words["dump 64 KiB unverified / raw, tmpfs"] == "met"  # 1.0 of 0.9
    assert words["dump 64 KiB verified / hicache-file"] == "met"  # 8.1 of 8
    assert words["dump 64 KiB verified / ucm-posix"] == "not measured"


def test_a_table_has_a_row_for_each() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


# -- whole runs --------------------------------------------------------------------------------------------


def run_bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_store.py", *arguments])
    return bench_store.main()


@pytest.mark.compiled
def test_a_tiny_run_writes_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raw_loop: RawLoop
) -> None:
    """Issue 4: results.json with its fields, a report, an absent peer reported with its command."""
    out, memory = tmp_path / "out", tmp_path / "memory"
    memory.mkdir()
    status = run_bench(
        monkeypatch, "--out", str(out), "--tmpfs", str(memory), "--peers-dir", str(tmp_path / "none"),
        "--stores", "raw", "ours-python", "ucm-posix", "--verify", "on", "--sizes", "4k", "--batches", "16",
        "--media", "tmpfs", "--hog", "off", "--rounds", "2", "--operations", "transfers", "lookup",
        "--checks",
    )  # fmt: skip
    assert status == 0
    found = json.loads((out / "results.json").read_text())
    assert {(r["store"], r["operation"]) for r in found} == {
        *(
            (store, operation)
            for store in ("raw", "ours-python")
            for operation in ("dump", "dump-sustained", *LOADS)
        ),
        ("ours-python", "lookup"),
    }
    for record in found:
        assert set(FIELDS) <= set(record)
        assert record["runs"] == 2 and record["seconds_median"] > 0
        assert (record["gbytes_per_s"] is None) == (record["operation"] == "lookup")
        assert record["operation"] != "lookup" or record["keys_per_s"] > 0
    about = json.loads((out / "about.json").read_text())
    reasons = {one["store"]: one["reason"] for one in about["unavailable"]}
    assert "scripts/env.sh ucm" in reasons["ucm-posix"]
    assert "left out" in reasons["vllm-fs"]
    report = (out / "report.md").read_text()
    assert "scripts/env.sh ucm" in report and about["command"] in report
    assert "preallocated" in report and "**Ratio**" in report
    assert list(memory.iterdir()) == []

    (out / "report.md").unlink()
    assert run_bench(monkeypatch, "--out", str(out), "--report-only") == 0
    assert (out / "report.md").exists()


def test_a_store_that_fails_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A case in which one store cannot run is measured with the others."""
    # A script in the place of an interpreter stands for a store whose process dies.
    monkeypatch.setattr(store_bench.runner, "interpreter", lambda entry, _: _interpreter_of(entry, tmp_path))
    said: list[str] = []
    places = {"tmpfs": tmp_path / "memory"}
    runner = Runner(participants(["ours-python", "ucm-posix"], "on"), tmp_path, places, tmp_path, said.append)
    try:
        case = Case("transfers", 4096, 8, "tmpfs", loads=("load",))
        ran = {one.participant.entry.store for one in runner.run(case, 1)}
    finally:
        runner.close()
    assert ran == {"ours-python"}
    assert [one.store for one in runner.unavailable] == ["ucm-posix"]
    assert "exit status 3: no such machine" in runner.unavailable[0].reason
    assert any("ucm-posix: cannot run" in text for text in said)


def _interpreter_of(entry: Any, folder: Path) -> str:
    if entry is not REGISTRY["ucm-posix"]:
        return sys.executable
    fake = folder / "python"
    fake.write_text("#!/bin/sh\necho no such machine >&2\nexit 3\n")
    fake.chmod(0o755)
    return str(fake)


def test_a_child_says_what_it_cannot_do(tmp_path: Path) -> None:
    child = ChildProcess("raw", sys.executable, tmp_path / "log")
    try:
        spec = {"directory": str(tmp_path), "block_bytes": 1000, "batch": 2, "io_mode": "direct"}
        with pytest.raises(Failed) as caught:
            child.ask({"do": "open", "spec": spec})
        assert caught.value.kind == "cannot run"
        assert child.ask({"do": "close"}) == {}
    finally:
        child.close()


def test_the_order_of_turns_moves_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Issue 4: interleaved, so that no store is always first."""
    turns: list[str] = []
    answer = {"facts": {}, "preallocated": "", "ways": {"": {"samples": {"dump": [1.0]}, "hog_rates": {}}}}

    class Fake:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def send(self, request: dict[str, Any]) -> None: ...

        def receive(self, timeout: float) -> dict[str, Any]:
            return answer

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "turn":
                turns.append(self.name)
            return answer

        def close(self) -> None: ...

    monkeypatch.setattr(store_bench.runner, "ChildProcess", Fake)
    wanted = [p for name in ("raw", "raw-crc", "ours-python") for p in participants([name], "on")]
    runner = Runner(wanted, tmp_path, {"tmpfs": tmp_path / "memory"}, tmp_path, lambda _: None)
    runner.run(transfer_case(4096, 16, "tmpfs"), 3)
    names = [p.name for p in wanted]
    assert turns == [*names, *names[1:], names[0], names[2], *names[:2]]
