"""`ucm-sglang stats` and `verify` (with `--repair`), on real stores, beside processes that write them."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from clikit import BLOCK, IDENTITY, NAMESPACE, dump, environment, flip, live_writer, only, run, tree

from posix_store import PosixStore
from posix_store.catalog import Catalog
from posix_store.root import StoreRoot, encode_settings
from posix_store.segment import EXTENT_ALIGNMENT, FORMAT_VERSION, RECORD_BYTES
from posix_store.syscalls import Syscalls
from ucm_sglang import cli
from ucm_sglang.cli.stats import identity_cells


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is to be."""
    return str(tmp_path / "kv")


@pytest.fixture
def stored(path: str) -> str:
    """A store with 8 blocks of one dead writer."""
    dump(path)
    return path


# -- stats ----------------------------------------------------------------------------------------------


def stats(capsys: pytest.CaptureFixture[str], path: str) -> dict[str, object]:
    status, out, err = run(capsys, "stats", path, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_stats_counts_what_was_stored_in_each_namespace(stored, capsys):
    dump(stored, count=3, namespace="cd" * 16)
    report = stats(capsys, stored)
    assert report["path"] == stored and report["capacity_bytes"] == 1 << 28
    assert report["allocated_bytes"] == StoreRoot(stored, create=False).allocated_bytes()
    assert report["free_bytes"] > 0
    first, second = report["namespaces"]
    assert (first["namespace"], first["identity"]) == (NAMESPACE, IDENTITY)
    counts = ("blocks", "payload_bytes", "segments", "live_writers", "incomplete_blocks", "damaged_records")
    assert [first[name] for name in counts] == [8, 8 * BLOCK, 1, 0, 0, 0]
    assert [second[name] for name in counts] == [3, 3 * BLOCK, 1, 0, 0, 0]


def test_stats_and_verify_write_nothing(stored, capsys):
    """Issue 2: both read a store, also while a server runs; must-hold 6 for processes that only look."""
    before = tree(stored)
    for name in ("stats", "verify"):
        assert run(capsys, name, stored)[0] == 0
    assert tree(stored) == before


def test_stats_takes_the_config_file_for_the_store(stored, capsys):
    run(capsys, "init", stored)
    assert stats(capsys, stored + ".ucm-sglang.json") == stats(capsys, stored)


def test_stats_for_people_shows_the_identity_and_the_numbers(stored, capsys):
    status, out, _ = run(capsys, "stats", stored)
    assert status == 0
    row = next(line for line in out.splitlines() if NAMESPACE[:12] in line)
    for part in (
        "org/model (tag [blue])",
        "fp8_e5m2 mha page_first_direct",
        "64 tokens, 2.0MiB",
        "tp 3/4",
        " 8 ",
    ):
        assert part in row
    assert "pp 0/1" not in row
    assert "256.0MiB" in out


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_stats_shows_a_namespace_whose_identity_is_lost(stored, capsys, content):
    file = Path(stored, NAMESPACE, "NAMESPACE.json")
    file.unlink() if content is None else file.write_bytes(content)
    (entry,) = stats(capsys, stored)["namespaces"]
    assert entry["identity"] is None and entry["blocks"] == 8
    assert "missing or damaged" in run(capsys, "stats", stored)[1]


@pytest.mark.parametrize("identity", [{}, {"page_size": "x", "page_bytes": "y", "tp_size": [1]}])
def test_an_identity_of_another_version_is_shown_as_far_as_it_goes(identity):
    assert len(identity_cells(identity)) == 4


def test_stats_counts_damaged_records(stored, capsys):
    """A journal record that fails its own checksum: its block is not found any more (invariant I1)."""
    file = only(stored, ".idx")
    data = bytearray(file.read_bytes())
    data[3 * RECORD_BYTES + 5] ^= 1
    file.write_bytes(data)
    (entry,) = stats(capsys, stored)["namespaces"]
    assert entry["damaged_records"] >= 1 and entry["blocks"] < 8


def test_stats_and_verify_beside_a_process_that_writes(path, capsys):
    """Issue 2: `stats` and `verify` work while a server runs, and the server never notices."""
    with live_writer(path) as process:
        (entry,) = stats(capsys, path)["namespaces"]
        assert entry["live_writers"] == 1 and entry["blocks"] >= 20
        for _ in range(3):
            status, out, err = run(capsys, "verify", path, "--json")
            assert (status, err) == (0, ""), out
            assert json.loads(out)["namespaces"][0]["blocks"] >= 20
        assert process.poll() is None
    assert process.returncode == 0
    assert stats(capsys, path)["namespaces"][0]["live_writers"] == 0


def test_stats_after_the_writer_was_killed(path, capsys):
    """Must-hold 5, seen from the command line: no live writer, every block there and whole."""
    with live_writer(path) as process:
        process.kill()
    (entry,) = stats(capsys, path)["namespaces"]
    assert entry["live_writers"] == 0 and entry["blocks"] >= 20
    assert run(capsys, "verify", path)[0] == 0


# -- verify ---------------------------------------------------------------------------------------------


def test_verify_of_a_clean_store(stored, capsys):
    status, out, err = run(capsys, "verify", stored)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("clean: 8 blocks, 64.0KiB")


def test_verify_finds_one_flipped_bit_and_names_the_block(stored, capsys):
    """Invariant I1, for the operator: which block, where, and status 1 for scripts."""
    flip(only(stored, ".seg"), EXTENT_ALIGNMENT + 2 * BLOCK + 1234)
    status, out, err = run(capsys, "verify", stored)
    assert (status, err) == (1, "")
    assert "1 blocks: checksum" in out and (b"\3" * 16).hex() in out and "DAMAGED" in out
    status, out, _ = run(capsys, "verify", stored, "--json")
    report = json.loads(out)
    assert (status, report["ok"]) == (1, False)
    assert report["namespaces"][0]["damaged_blocks"] == {"checksum": 1}
    assert report["namespaces"][0]["blocks"] == 8


def truncated_segment(path: str) -> None:
    os.truncate(only(path, ".seg"), EXTENT_ALIGNMENT + 5 * BLOCK)


def zeroed_segment(path: str) -> None:
    file = only(path, ".seg")
    file.write_bytes(bytes(file.stat().st_size))


def flipped_journal_record(path: str) -> None:
    flip(only(path, ".idx"), 2 * RECORD_BYTES + 3)


def flipped_journal_header(path: str) -> None:
    flip(only(path, ".idx"), 20)


@pytest.mark.parametrize(
    "damage", [truncated_segment, zeroed_segment, flipped_journal_record, flipped_journal_header]
)
def test_verify_reports_every_kind_of_damage(stored, capsys, damage):
    """Must-hold 4: what servers count as misses is damage to `verify`, with status 1."""
    damage(stored)
    status, out, _ = run(capsys, "verify", stored)
    assert status == 1 and "DAMAGED" in out.splitlines()[-1]


def test_blocks_that_are_deleted_during_verify_are_no_damage(stored, capsys, monkeypatch):
    """A server may clear its namespace at any time: that must not alarm anybody."""
    refresh = Catalog.refresh

    def then_clear(catalog: Catalog, *arguments: float, **named: float) -> bool:
        looked = refresh(catalog, *arguments, **named)
        if catalog.counters.refreshes == 2:  # one by opening, one by verify
            only(stored, ".seg").unlink()
        return looked

    monkeypatch.setattr(Catalog, "refresh", then_clear)
    status, out, _ = run(capsys, "verify", stored, "--json")
    (entry,) = json.loads(out)["namespaces"]
    assert (status, entry["deleted_meanwhile"]) == (0, 8)


def test_verify_of_chosen_namespaces_only(stored, capsys):
    dump(stored, count=3, namespace="cd" * 16)
    flip(only(stored, ".seg"), EXTENT_ALIGNMENT + 1)
    for prefix, blocks, expected in (("cd", 3, 0), ("CDcd", 3, 0), (NAMESPACE, 8, 1), ("", 11, 1)):
        status, out, _ = run(capsys, "verify", stored, "--json", "--namespace", prefix)
        assert status == expected
        assert sum(entry["blocks"] for entry in json.loads(out)["namespaces"]) == blocks


@pytest.mark.parametrize(("prefix", "words"), [("ef", f"there are: {NAMESPACE[:12]}"), ("xyz", "hex digits")])
def test_verify_refuses_a_namespace_that_is_not_there(stored, capsys, prefix, words):
    """A script with a typing error must not read "clean"."""
    status, out, err = run(capsys, "verify", stored, "--namespace", prefix)
    assert (status, out) == (2, "") and words in err


# -- verify --repair ------------------------------------------------------------------------------------


def repair(capsys: pytest.CaptureFixture[str], path: str, status: int = 0) -> dict[str, object]:
    found, out, err = run(capsys, "verify", path, "--repair", "--json")
    assert found == status, out + err
    return json.loads(out)["namespaces"][0]


def test_repair_lets_go_of_damaged_blocks_beside_a_process_that_writes(stored, capsys):
    """Issue 3: they are gone, so that they are stored again; the good ones and the server stay."""
    file = only(stored, ".seg")
    for block in (2, 5):
        flip(file, EXTENT_ALIGNMENT + block * BLOCK + 77)
    allocated = file.stat().st_blocks * 512
    with live_writer(stored) as process:
        found = repair(capsys, stored)
        assert found["damaged_blocks"] == {"checksum": 2} and found["repaired_blocks"] == 2
        assert run(capsys, "verify", stored)[0] == 0
        assert process.poll() is None
    assert process.returncode == 0
    assert file.stat().st_blocks * 512 == allocated - 2 * BLOCK
    assert StoreRoot(stored, create=False).read_identity(NAMESPACE) == IDENTITY
    ids = dump(stored)
    with PosixStore(stored, NAMESPACE, writable=False) as store:
        pages = [np.empty(BLOCK, np.uint8) for _ in ids]
        assert store.load(ids, None, pages).results().all()
        assert [page[0] for page in pages] == list(range(8))


def test_repair_of_a_clean_store_changes_nothing(stored, capsys):
    before = {path: seen for path, seen in tree(stored).items() if path.endswith((".seg", ".idx"))}
    found = repair(capsys, stored)
    assert (found["ok"], found["repaired_blocks"], found["deleted_segments"]) == (True, 0, 0)
    assert {path: seen for path, seen in tree(stored).items() if path.endswith((".seg", ".idx"))} == before


@pytest.mark.parametrize("damage", [zeroed_segment, flipped_journal_header])
def test_repair_deletes_a_segment_of_which_nothing_can_be_read(stored, capsys, damage):
    damage(stored)
    found = repair(capsys, stored)
    assert found["deleted_segments"] == 1 and found["freed_segment_bytes"] >= 8 * BLOCK
    assert not list(Path(stored, NAMESPACE).glob("*.seg"))
    assert run(capsys, "verify", stored)[1].splitlines()[-1].startswith("clean: 0 blocks")


@pytest.mark.parametrize(("damage", "left"), [(truncated_segment, 5), (flipped_journal_record, 7)])
@pytest.mark.parametrize("killed", [False, True], ids=["sealed", "killed"])
def test_repair_rewrites_journals_that_are_damaged_in_part(stored, capsys, damage, left, killed):
    """What can be read stays, and `verify` is content afterwards."""
    if killed:  # as if the writer had not lived to seal its journal
        os.truncate(only(stored, ".idx"), only(stored, ".idx").stat().st_size - RECORD_BYTES)
    damage(stored)
    found = repair(capsys, stored)
    assert (found["ok"], found["rewritten_journals"], found["unrepaired"]) == (False, 1, 0)
    status, out, _ = run(capsys, "verify", stored)
    assert status == 0 and out.splitlines()[-1].startswith(f"clean: {left} blocks")


def test_repair_leaves_segments_that_a_living_process_writes(path, capsys):
    """Its journal can be damaged while it writes; the files are its own until it has died."""
    with live_writer(path) as process:
        file = only(path, ".idx")
        with file.open("r+b") as journal:
            journal.seek(20)
            journal.write(b"\xff")
        found = repair(capsys, path, status=1)
        assert (found["deleted_segments"], found["unrepaired"]) == (0, 1)
        assert file.exists() and process.poll() is None
        process.kill()
        process.wait(30)
        assert repair(capsys, path)["deleted_segments"] == 1
    assert not file.exists()


def test_repair_leaves_segments_of_a_newer_version_and_of_other_machines(stored, capsys):
    """What this version or this machine cannot judge is not deleted."""
    file = only(stored, ".idx")
    data = bytearray(file.read_bytes())
    data[8] = FORMAT_VERSION + 1
    file.write_bytes(data)
    newer = repair(capsys, stored, status=1)
    assert (newer["deleted_segments"], newer["unrepaired"]) == (0, 1)
    data[8] = FORMAT_VERSION
    data[20] ^= 1
    file.write_bytes(data)
    for old in (file, only(stored, ".seg")):
        old.rename(old.with_name("elsewhere-" + old.name.split("-", 1)[1]))
    assert repair(capsys, stored, status=1)["unrepaired"] == 1
    for old in (only(stored, ".idx"), only(stored, ".seg")):
        os.utime(old, (0, 0))
    assert repair(capsys, stored)["deleted_segments"] == 1


def test_repair_keeps_blocks_that_an_error_of_the_disk_hides(stored, capsys, monkeypatch):
    """They may be good: EIO says nothing of the bytes."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Syscalls, "preadv", fail)
        found = repair(capsys, stored, status=1)
    assert found["damaged_blocks"] == {"io_error": 8} and found["unrepaired"] == 8
    assert run(capsys, "verify", stored)[1].splitlines()[-1].startswith("clean: 8 blocks")


def test_what_repair_did_is_said(stored, capsys):
    flip(only(stored, ".seg"), EXTENT_ALIGNMENT)
    status, out, _ = run(capsys, "verify", stored, "--repair")
    assert status == 0 and "1 damaged blocks recorded as gone" in out
    assert out.splitlines()[-1].startswith("REPAIRED: 8 blocks")


# -- errors ---------------------------------------------------------------------------------------------


def empty(path: str) -> None:
    os.makedirs(path)


def foreign(path: str) -> None:
    os.makedirs(path)
    Path(path, "notes.txt").write_text("x")


def some_file(path: str) -> None:
    Path(path).write_text("x")


def newer(path: str) -> None:
    os.makedirs(path)
    Path(path, "STORE.json").write_bytes(encode_settings(FORMAT_VERSION + 1, 1 << 30, 0))


@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["verify"],
        ["verify", "--repair"],
        ["du"],
        ["inspect"],
        ["inspect", "--key", "k"],
        ["doctor"],
        ["pins"],
        ["pin", "--key", "k"],
        ["unpin", "--all"],
        ["evict", "--bytes", "1"],
        ["clear", "--all", "--yes"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: None, "no store here; make one with `ucm-sglang init`"),
        (empty, "no store here; make one with `ucm-sglang init`"),
        (foreign, "notes.txt"),
        (some_file, "must end in .json"),
        (newer, "upgrade ucm-sglang"),
    ],
)
def test_what_is_no_store_is_said_in_one_line_with_status_2(path, capsys, command, prepare, words):
    """Must-hold 4: missing, a file, foreign, of a newer format. Nothing is made there either."""
    prepare(path)
    before = tree(os.path.dirname(path))
    status, out, err = run(capsys, command[0], path, *command[1:])
    assert (status, out) == (2, "")
    assert err.startswith("ucm-sglang: ") and err.count("\n") == 1 and words in err
    assert tree(os.path.dirname(path)) == before


def test_an_interrupt_ends_without_a_traceback(stored, capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PosixStore, "verify", interrupted)
    assert run(capsys, "verify", stored) == (130, "", "ucm-sglang: interrupted\n")


# -- as a program ---------------------------------------------------------------------------------------


def program(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ucm_sglang.cli", *argv],
        capture_output=True, text=True, env=environment(), check=False, **options,
    )  # fmt: skip


def test_the_program_from_init_to_verify(path):
    """The whole way as an operator goes it, in processes of their own."""
    assert program("init", path, "--capacity", "1GiB").returncode == 0
    dump(path)
    report = program("stats", path + ".ucm-sglang.json", "--json")
    assert json.loads(report.stdout)["namespaces"][0]["blocks"] == 8
    flip(only(path, ".seg"), EXTENT_ALIGNMENT)
    damaged = program("verify", path)
    assert (damaged.returncode, damaged.stderr) == (1, "")


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["stats"], ["init"], ["verify", "x", "--jsno"]])
def test_wrong_usage_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as usage:
        cli.main(argv)
    assert usage.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ucm-sglang")


def test_a_reader_that_leaves_early_is_no_error_message(stored):
    """`ucm-sglang verify PATH | head -0`"""
    piped = f"'{sys.executable}' -m ucm_sglang.cli stats '{stored}' --json | true"
    result = subprocess.run(
        ["sh", "-c", piped], capture_output=True, text=True, env=environment(), check=False
    )
    assert result.stderr == ""
