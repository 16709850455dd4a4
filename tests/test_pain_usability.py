"""Nothing is found and nobody knows why: what users of other disk tiers reported, and what happens here.

Issue 3. Each test is named after a public report and shows its scenario in small; most of it is tested in
depth elsewhere.
"""

import errno
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clikit import IDENTITY, NAMESPACE, dump_chain, environment, report, run
from faults import Fault, FaultySyscalls
from storekit import assert_counters_add_up, dump, ids_of, load, memory_directory, open_store

from posix_store import PosixStore, Reason
from ucm_sglang.config import SGLangKeys, StoreConfig, config_table
from ucm_sglang.identity import KV_POOL, BlockIds

LENGTH = 4096
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def path() -> Iterator[str]:
    with memory_directory() as place:
        yield str(place / "kv")


def test_d1_sglang_26886_files_are_written_and_never_read(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.2 TB were written and never read: write_back had left out the heads of chains. Only debug logs told.

    Here a block says whether its chain reaches back to a head, and which block is missing.
    """
    ids = dump_chain(path, ["2", "3", "4"], before=b"\x01" * 16)
    with PosixStore(path, NAMESPACE, writable=False) as store:
        assert store.lookup_on_prefix(b"\x01" * 16 + ids) == -1 and store.lookup(ids).all()
    status, out, _ = run(capsys, "inspect", path, "--key", "4")
    assert status == 1 and "CUT" in out and "01" * 16 in out and "no request can use this one" in out
    dump_chain(path, ["1", "2'"])
    assert run(capsys, "inspect", path, "--key", "2'")[0] == 0


def test_d2_sglang_12092_the_reader_looks_under_another_name(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages were written under one key and looked for under another: no hit, and no reason.

    Here the two namespaces lie side by side with all their fields, so that the field that differs shows.
    """
    other = {**IDENTITY, "page_size": 16}
    dump_chain(path, ["a"])
    dump_chain(path, ["a"], namespace="cd" * 16, identity=other)
    entries = report(capsys, "inspect", path)["namespaces"]
    assert [entry["blocks"] for entry in entries] == [1, 1]
    one, two = (entry["identity"] for entry in entries)
    assert {key for key in one if one[key] != two[key]} == {"page_size"}


def test_d5_sglang_11668_17648_37503_every_stage_is_counted(path: str) -> None:
    """Users asked how the hit ratio is computed, and where pages were lost on the way.

    Here what was asked for, found, loaded, and refused is counted, with a reason for each block; it adds up.
    """
    ids = ids_of(1, 4)
    with open_store(path) as store:
        dump(store, ids, LENGTH)
        dump(store, ids, LENGTH)
        store.lookup(np.concatenate([ids, ids_of(2, 2)]))
        load(store, np.concatenate([ids, ids_of(2, 2)]), LENGTH)
        load(store, ids[:1], 2 * LENGTH)
        counts = store.stats().counters
        assert_counters_add_up(store)
    assert (counts["lookups"], counts["lookup_hits"]) == (6, 4)
    assert (counts["dump_blocks"], counts["written_blocks"], counts["already_stored_blocks"]) == (8, 4, 4)
    assert (counts["load_blocks"], counts["loaded_blocks"], counts["loaded_bytes"]) == (7, 4, 4 * LENGTH)
    assert counts["misses"] == {"absent": 2, "length": 1}


def test_d6_sglang_14718_14688_39444_the_policy_that_persists_is_printed(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It surprised users which pages reach the disk under write_back and write_through.

    Here `init` prints the flags under which all do, and the operator's guide compares the policies.
    """
    status, out, _ = run(capsys, "init", path, "--capacity", "64MiB")
    assert status == 0 and "--hicache-write-policy write_through" in out
    text = (REPOSITORY / "docs" / "OPERATIONS.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `--hicache-write-policy"))
    assert "`write_back`" in row and "restart" in row and "`write_through_selective`" in row


def test_d10_ucm_640_1078_900_388_no_hit_has_a_reason(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """No hits, no files, and no reason.

    Here a page that was not stored has a reason, and the log says so without being asked.
    """
    calls = FaultySyscalls()
    with open_store(path, syscalls=calls, write_queue_bytes=2 * LENGTH) as store:
        dump(store, ids_of(1, 4), LENGTH)
        calls.faults = [Fault(kinds=["pwritev"], times=math.inf, error=errno.EIO)]
        dump(store, ids_of(2, 2), LENGTH)
        assert store.counters.snapshot()["unstored"] == {"queue": 2, "io_error": 2}
        assert store.counters.snapshot()["written_blocks"] == 2
    assert "unstored" in caplog.text
    with open_store(path, writable=False) as store:
        dump(store, ids_of(3, 4), LENGTH)
        assert store.counters.snapshot()["unstored"] == {"read_only": 4}
        assert store.stats().read_only_because


def test_d11_lmcache_2876_1788_562_1175_1411_a_self_test(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users enabled the disk, nothing was offloaded, and nothing said why.

    Here one command stores, loads and deletes, and says so; a key that is wrong stops the start; and all keys
    are in the README as the code has them.
    """
    run(capsys, "init", path, "--capacity", "64MiB")
    findings = report(capsys, "doctor", path)["findings"]
    (test,) = [entry for entry in findings if entry["check"] == "self-test"]
    assert test["level"] == "ok" and "stored, loaded and deleted" in test["text"]
    with pytest.raises(ValueError, match="capacity"):
        StoreConfig.from_extra({"path": path, "capcity": "1GiB"}, source="test")
    readme = (REPOSITORY / "README.md").read_text()
    assert config_table(StoreConfig) in readme and config_table(SGLangKeys) in readme


def test_d12_lmcache_2273_a_restart_finds_everything(path: str) -> None:
    """The index was in memory only: after a restart all files were orphans.

    Here a new process finds all blocks, with one read of each journal, and owns their space.
    """
    batches = [ids_of(seed, 100) for seed in range(3)]
    for ids in batches:
        with open_store(path) as store:
            dump(store, ids, LENGTH)
    calls = FaultySyscalls()
    with open_store(path, syscalls=calls) as store:
        assert calls.counts["pread"] <= 4 * len(batches) + 4
        assert (load(store, np.concatenate(batches), LENGTH) == Reason.OK).all()
        assert store.clear() == 300


def test_d13_vllm_fs_tier_ids_do_not_depend_on_the_process() -> None:
    """`PYTHONHASHSEED` had to be the same in all processes, or nothing was shared.

    Here the same key has the same id in every process, on every machine, for ever.
    """
    code = (
        "from ucm_sglang.identity import BlockIds, token_chain;"
        "print(BlockIds(bytes(16)).of('kv', token_chain(range(128), 64)).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**environment(), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("0", "4711")
    }  # fmt: skip
    assert len(found) == 1 and len(found.pop()) == 64
    assert BlockIds(bytes(16)).of(KV_POOL, ["a"]).hex() == "fe4f236e8e7c4000709ef05e55615158"


def test_d14_sglang_9750_clear_is_limited_to_its_own(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Clearing one server's pages deleted those of all others, and files of others too.

    Here it deletes the segments of one namespace; all else stays as it is. (I7)
    """
    ids = ids_of(1, 4)
    mine, other = "1" * 32, "2" * 32
    for namespace in (mine, other):
        with open_store(path, namespace=namespace) as store:
            dump(store, ids, LENGTH)
    foreign = Path(path, mine, "notes.txt")
    foreign.write_text("mine")
    before = {file: file.read_bytes() for file in Path(path, other).iterdir()}
    assert run(capsys, "clear", path, "--namespace", mine, "--yes")[0] == 0
    assert foreign.read_text() == "mine"
    assert {file: file.read_bytes() for file in Path(path, other).iterdir()} == before
    for namespace, there in ((mine, False), (other, True)):
        with open_store(path, namespace=namespace) as store:
            assert (store.lookup(ids) == there).all()
