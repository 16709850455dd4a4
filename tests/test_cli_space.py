"""`ucm-sglang du`, `evict` and `clear`, beside processes that write."""

import io
import json
import re
import time
from pathlib import Path

import pytest
from clikit import (
    BLOCK,
    IDENTITY,
    NAMESPACE,
    dump,
    dump_chain,
    flip,
    live_writer,
    only,
    refusal,
    report,
    run,
    tree,
)
from storekit import allocated

from posix_store import PosixStore
from posix_store.root import StoreRoot
from posix_store.segment import SEGMENT_HEADER_BYTES
from ucm_sglang.cli.support import age_text
from ucm_sglang.identity import KV_POOL, BlockIds

KEYS = [f"page-{number}" for number in range(8)]
OTHER = "cd" * 16
PARTS = ("payload_bytes", "header_bytes", "journal_bytes", "garbage_bytes")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is to be."""
    return str(tmp_path / "kv")


@pytest.fixture
def stored(path: str) -> str:
    """A store with a chain of 8 blocks."""
    dump_chain(path, KEYS)
    return path


def blocks_of(path: str, namespace: str = NAMESPACE) -> int:
    with PosixStore(path, namespace, writable=False) as store:
        return store.stats().blocks


def stored_keys(path: str, namespace: str = NAMESPACE) -> list[str]:
    with PosixStore(path, namespace, writable=False) as store:
        found = store.lookup(BlockIds(bytes.fromhex(namespace)).of(KV_POOL, KEYS))
    return [key for key, there in zip(KEYS, found.tolist(), strict=True) if there]


# -- du -------------------------------------------------------------------------------------------------


def states(capsys: pytest.CaptureFixture[str], path: str) -> dict[str, dict[str, int]]:
    (entry,) = report(capsys, "du", path)["namespaces"]
    return entry["states"]


def test_du_adds_up_to_what_the_file_system_has_allocated(stored, capsys):
    """Issue 3: capacity as disk truth; the operator sees the same sum, and what it consists of."""
    dump(stored, count=3, namespace=OTHER)
    found = report(capsys, "du", stored)
    assert found["allocated_bytes"] == allocated(stored)
    assert sum(found[part] for part in (*PARTS, "other_bytes")) == found["allocated_bytes"]
    assert found["payload_bytes"] == 11 * BLOCK
    sizes = [entry["allocated_bytes"] for entry in found["namespaces"]]
    assert [entry["namespace"] for entry in found["namespaces"]] == [NAMESPACE, OTHER]
    assert sizes == sorted(sizes, reverse=True)
    for entry in found["namespaces"]:
        for usage in entry["states"].values():
            assert usage["allocated_bytes"] == usage["payload_bytes"] + usage["overhead_bytes"]


def test_du_tells_living_dead_and_finished_writers_apart(path, capsys):
    dump(path)
    with live_writer(path) as process:
        running = states(capsys, path)
        assert {state: usage["segments"] for state, usage in running.items()} == {
            "live writer": 1,
            "sealed": 1,
        }
        assert running["live writer"]["blocks"] >= 20
        process.kill()
        process.wait(30)
        killed = states(capsys, path)
    assert {state: usage["segments"] for state, usage in killed.items()} == {"dead writer": 1, "sealed": 1}
    assert killed["sealed"]["payload_bytes"] == 8 * BLOCK


def test_du_shows_segments_that_nothing_can_be_read_from(stored, capsys):
    """A journal whose header is damaged: its segment takes up space and holds nothing that is found."""
    size = only(stored, ".seg").stat().st_blocks * 512
    flip(only(stored, ".idx"), 20)
    (state,) = (found := states(capsys, stored))
    assert state == "unreadable" and found[state]["payload_bytes"] == 0
    assert found[state]["garbage_bytes"] == size - SEGMENT_HEADER_BYTES


def test_du_shows_what_was_given_back_as_holes(stored, capsys):
    run(capsys, "evict", stored, "--bytes", str(3 * BLOCK))
    usage = states(capsys, stored)["sealed"]
    assert (usage["blocks"], usage["hole_bytes"]) == (5, 3 * BLOCK)
    assert usage["payload_bytes"] == 5 * BLOCK and usage["garbage_bytes"] == 0


def test_du_counts_a_segment_without_blocks_as_empty(stored, capsys):
    """What is left of evictions: a journal that says what is gone."""
    run(capsys, "evict", stored, "--older-than", "0s")
    found = states(capsys, stored)
    assert set(found) <= {"empty"} and all(usage["payload_bytes"] == 0 for usage in found.values())


def test_du_for_people_and_without_writing(stored, capsys):
    before = tree(stored)
    status, out, err = run(capsys, "du", stored)
    assert (status, err) == (0, "")
    assert re.search(rf"{NAMESPACE[:12]}\s+org/model \(tag \[blue\]\)\s+sealed\s+1\s+8\s+", out)
    assert "payload    64.0KiB" in out and "of the capacity" in out
    assert tree(stored) == before


def test_du_of_a_store_without_namespaces(path, capsys):
    StoreRoot(path, capacity=1 << 30)
    assert report(capsys, "du", path)["payload_bytes"] == 0
    assert "no server has stored anything" in run(capsys, "du", path)[1]


# -- evict ----------------------------------------------------------------------------------------------


def test_evict_takes_about_so_much_from_the_ends_of_chains(stored, capsys):
    """Issue 3: the chain-aware order, by hand: the tail goes before the head."""
    before = allocated(stored)
    found = report(capsys, "evict", stored, "--bytes", "20KiB")
    assert (found["evicted_blocks"], found["freed_bytes"], found["policy"]) == (3, 3 * BLOCK, "lru")
    assert stored_keys(stored) == KEYS[:5]
    assert found["allocated_bytes_before"] == before
    assert found["allocated_bytes"] == allocated(stored) < before


def test_evict_down_to_a_size_beside_a_process_that_writes(path, capsys):
    """Issue 3: all commands are safe against a running server."""
    dump_chain(path, KEYS)
    with live_writer(path) as process:
        found = report(capsys, "evict", path, "--to", "64KiB", status=1)  # the writer's reserve alone is more
        assert found["evicted_blocks"] > 0 and process.poll() is None
    assert process.returncode == 0
    assert run(capsys, "verify", path)[0] == 0
    run(capsys, "evict", path, "--to", "64KiB")
    assert allocated(path) <= 64 << 10


def test_evict_what_was_stored_long_ago(path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda now=time.time: now() - 7200)
        dump_chain(path, KEYS[:4])
    dump_chain(path, KEYS[4:])
    assert report(capsys, "evict", path, "--older-than", "3h")["evicted_blocks"] == 0
    assert report(capsys, "evict", path, "--older-than", "1.5h")["evicted_blocks"] == 4
    assert stored_keys(path) == KEYS[4:]


def test_evict_leaves_pinned_chains(stored, capsys):
    run(capsys, "pin", stored, "--key", KEYS[2])
    found = report(capsys, "evict", stored, "--bytes", "1GiB", status=1)
    assert found["evicted_blocks"] == 5
    assert stored_keys(stored) == KEYS[:3]
    assert "pinned" in run(capsys, "evict", stored, "--bytes", "1GiB")[1]


def test_evict_from_one_namespace_only(stored, capsys):
    dump_chain(stored, KEYS, namespace=OTHER)
    found = report(capsys, "evict", stored, "--bytes", "1MiB", "--namespace", "cd", status=1)
    assert found["evicted_blocks"] == 8
    assert (blocks_of(stored), blocks_of(stored, OTHER)) == (8, 0)
    assert "several" not in refusal(capsys, "evict", stored, "--bytes", "1", "--namespace", "ef")


def test_evict_takes_the_policy_of_the_config_file(stored, capsys):
    config = Path(stored + ".json")
    config.write_text(json.dumps({"path": stored, "policy": "fifo"}))
    assert report(capsys, "evict", str(config), "--bytes", "4KiB")["policy"] == "fifo"
    assert report(capsys, "evict", str(config), "--bytes", "4KiB", "--policy", "lru")["policy"] == "lru"


def test_evict_keeps_the_identity_of_the_namespace(stored, capsys):
    run(capsys, "evict", stored, "--bytes", "8KiB")
    assert StoreRoot(stored, create=False).read_identity(NAMESPACE) == IDENTITY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "10G"], "--to = '10G': is not a size"),
        (["--bytes", "much"], "--bytes = 'much': is not a size"),
        (["--older-than", "yesterday"], "--older-than = 'yesterday': is no duration"),
    ],
)
def test_evict_refuses_what_it_does_not_understand(stored, capsys, options, words):
    assert words in refusal(capsys, "evict", stored, *options)
    assert blocks_of(stored) == 8


# -- clear ----------------------------------------------------------------------------------------------


def test_clear_one_namespace_beside_a_process_that_writes_it(stored, capsys):
    """Invariant I7, and issue 3: `clear --namespace`. What the server stores afterwards stays."""
    dump(stored, namespace=OTHER)
    with live_writer(stored) as process:
        (entry,) = report(capsys, "clear", stored, "--namespace", "ab", "--yes")["namespaces"]
        assert entry["blocks"] >= 28 and entry["left_segments"] == 0
        assert process.poll() is None
        deadline = time.monotonic() + 10
        while not blocks_of(stored) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert blocks_of(stored) > 0
    assert process.returncode == 0
    assert stored_keys(stored) == []
    assert blocks_of(stored, OTHER) == 8


def test_clear_all_frees_the_space_and_keeps_pins_and_identities(stored, capsys):
    dump_chain(stored, KEYS, OTHER, {**IDENTITY, "model": "org/other"})
    run(capsys, "pin", stored, "--key", KEYS[0], "--namespace", "ab")
    files = [file.stat().st_blocks * 512 for file in Path(stored).glob("*/*-*")]
    entries = report(capsys, "clear", stored, "--all", "--yes")["namespaces"]
    assert [entry["blocks"] for entry in entries] == [8, 8]
    assert sum(entry["freed_bytes"] for entry in entries) == sum(files)
    assert [entry["pins"] for entry in entries] == [1, 0]
    assert not list(Path(stored, NAMESPACE).glob("*-*"))
    assert Path(stored, NAMESPACE, "PINS.json").exists()
    assert StoreRoot(stored, create=False).read_identity(NAMESPACE) == IDENTITY


class Terminal(io.StringIO):
    """Somebody at a keyboard, with one answer."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("YES\n", 0), ("n\n", 8), ("\n", 8), ("", 8)])
def test_clear_asks_on_a_terminal(stored, capsys, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    status, _, err = run(capsys, "clear", stored, "--namespace", NAMESPACE)
    assert "8 blocks, 64.0KiB" in err and "Delete" in err
    assert (status == 0, blocks_of(stored)) == (left == 0, left)


def test_clear_refuses_to_ask_where_nobody_can_answer(stored, capsys, monkeypatch):
    """A script that forgot --yes must neither hang nor delete."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "give --yes" in refusal(capsys, "clear", stored, "--all")
    assert blocks_of(stored) == 8


def test_clear_refuses_a_name_that_is_not_unique(path, capsys):
    dump(path, namespace="ab" * 16)
    dump(path, namespace="ac" * 16)
    words = refusal(capsys, "clear", path, "--namespace", "a", "--yes")
    assert "2 namespaces begin so" in words and "ab" * 16 in words
    assert "give the first hex digits" in refusal(capsys, "clear", path, "--namespace", "", "--yes")
    assert blocks_of(path, "ab" * 16) == 8


# -- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["evict"],
        ["evict", "--to", "1", "--bytes", "1"],
        ["clear", "--yes"],
        ["clear", "--all", "--namespace", "a"],
    ],
)
def test_what_must_be_said_once_must_be_said_once(stored, capsys, argv):
    with pytest.raises(SystemExit) as usage:
        run(capsys, argv[0], stored, *argv[1:])
    assert usage.value.code == 2
    assert blocks_of(stored) == 8


def test_a_config_with_several_directories_is_gone_through(path, tmp_path, capsys):
    """Several roots: each has a report of its own."""
    second = str(tmp_path / "kv2")
    dump(path)
    dump(second, count=3)
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"path": [path, second]}))
    reports = report(capsys, "du", str(config))["roots"]
    assert [each["payload_bytes"] for each in reports] == [8 * BLOCK, 3 * BLOCK]
    status, out, _ = run(capsys, "clear", str(config), "--all", "--yes")
    assert status == 0 and f"== {path}\n" in out and f"== {second}\n" in out
    assert (blocks_of(path), blocks_of(second)) == (0, 0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0s"),
        (59, "59s"),
        (3601, "1h"),
        (3661, "1h 1m"),
        (90061, "1d 1h"),
        (8 * 86400, "1w 1d"),
        (-5, "0s"),
    ],
)
def test_times_for_people(seconds, words):
    assert age_text(seconds) == words


def test_a_narrow_terminal_gets_whole_numbers(stored, capsys, monkeypatch):
    """In 80 columns nothing is cut short: each segment state is shown line by line."""
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "du", stored)[1]
    assert "…" not in out and re.search(r"^payload +64\.0KiB$", out, re.MULTILINE)
    assert re.search(r"^model +org/model \(tag \[blue\]\)$", out, re.MULTILINE)
