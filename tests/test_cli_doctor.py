"""`ucm-sglang doctor`: what it finds, and that it leaves nothing behind."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clikit import dump, live_writer, report, run

from posix_store.abilities import Abilities
from posix_store.root import StoreRoot, encode_settings
from posix_store.segment import FORMAT_VERSION
from posix_store.syscalls import Syscalls
from ucm_sglang.cli import doctor


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A store of one dead writer."""
    path = str(tmp_path / "kv")
    dump(path)
    return path


def names(path: str) -> set[str]:
    return {str(file.relative_to(path)) for file in Path(path).rglob("*")}


def findings(
    capsys: pytest.CaptureFixture[str], path: str, status: int = 0
) -> dict[str, list[tuple[str, str]]]:
    """Level and text of what each check found."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in report(capsys, "doctor", path, status=status)["findings"]:
        found.setdefault(entry["check"], []).append((entry["level"], entry["text"]))
    return found


def test_a_good_store_that_a_server_uses(path, capsys):
    """LMCache#2876: a self-test that stores, loads and deletes, and says so. The server never notices."""
    with live_writer(path) as process:
        before = names(path)
        found = findings(capsys, path)
        assert names(path) == before
        assert process.poll() is None
    assert process.returncode == 0
    assert list(found) == ["settings", "permissions", "space", "file system", "self-test"]
    assert {level for each in found.values() for level, _ in each} <= {"ok", "note"}
    assert "stored, loaded and deleted 1.0MiB" in found["self-test"][0][1]


def test_text_for_people(path, capsys):
    status, out, err = run(capsys, "doctor", path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "nothing is wrong here" and "user " in out and "256.0MiB" in out


def test_what_the_file_system_lacks_is_said_with_its_consequence(path, capsys, monkeypatch):
    """Issue 3: what each file system supports is shown by `doctor`."""
    abilities = Abilities(file_system="odd", punching=False, flock=False, errors={"punching": "no"})
    monkeypatch.setattr(doctor, "probe", lambda root: abilities)
    found = findings(capsys, path)["file system"]
    assert [text for level, text in found if level == "note"] == abilities.consequences() != []
    assert "odd" in found[0][1]


@pytest.mark.parametrize("content", [None, b"{}"])
def test_lost_settings_are_a_finding_and_are_left_as_they_are(path, capsys, content):
    """A doctor must not set another capacity by looking."""
    file = Path(path, "STORE.json")
    file.unlink() if content is None else file.write_bytes(content)
    ((level, text),) = findings(capsys, path, status=1)["settings"]
    assert level == "BAD" and f"ucm-sglang init {path} --capacity" in text
    assert (file.read_bytes() if content is not None else file.exists()) == (content or False)


def test_more_than_the_capacity_is_a_finding_and_nothing_is_evicted_for_the_test(path, capsys):
    Path(path, "STORE.json").write_bytes(encode_settings(FORMAT_VERSION, 32 << 10, 0))
    found = findings(capsys, path, status=1)
    assert [level for level, _ in found["space"]].count("BAD") == 1
    assert "evict --to" in found["space"][1][1] and "left out" in found["self-test"][0][1]
    assert run(capsys, "verify", path)[1].splitlines()[-1].startswith("clean: 8 blocks")


def test_the_floor_of_the_config_file_counts(path, capsys):
    config = Path(path + ".json")
    config.write_text(json.dumps({"path": path, "min_free": 1 << 60}))
    found = findings(capsys, str(config), status=1)
    assert any(level == "BAD" and "less is free than min_free" in text for level, text in found["space"])
    config.write_text(json.dumps({"path": path, "min_free": 0}))
    assert "BAD" not in {level for level, _ in findings(capsys, str(config))["space"]}


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("pwritev", errno.EIO, "16 io_error"),
        ("preadv", errno.EIO, "not loaded"),
        ("fallocate", errno.ENOSPC, "full"),
    ],
)
def test_a_disk_that_fails_the_self_test_is_found_out_and_cleaned_up(
    path, capsys, monkeypatch, call, number, words
):
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    before = names(path)
    monkeypatch.setattr(doctor, "probe", lambda root: Abilities())
    with monkeypatch.context() as patch:
        patch.setattr(Syscalls, call, fail)
        status, out, _ = run(capsys, "doctor", path)
    assert status == 1 and out.splitlines()[-1] == "1 BAD"
    assert words in next(line for line in out.splitlines() if line.startswith("self-test"))
    assert names(path) <= before | {"EVICT.lock"}


def test_an_error_of_the_disk_is_a_finding_and_the_other_checks_go_on(path, capsys, monkeypatch):
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(StoreRoot, "allocated_bytes", fail)
    found = findings(capsys, path, status=1)
    assert found["space"] == [("BAD", f"cannot look: {path}: Input/output error")]
    assert found["settings"][0][0] == "ok"


@pytest.fixture
def readable_by_all() -> Iterator[str]:
    """A store outside pytest's own directories, which are closed to other users."""
    parent = tempfile.mkdtemp()
    os.chmod(parent, 0o755)
    dump(f"{parent}/kv")
    yield f"{parent}/kv"
    shutil.rmtree(parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_this_user_may_not_write_are_named_with_owner_and_mode(readable_by_all, capsys):
    """Permissions are found out as the server's user, before the server finds out."""
    try:
        os.seteuid(65534)
        found = findings(capsys, readable_by_all, status=1)
    finally:
        os.seteuid(0)
    ((level, text),) = found["permissions"]
    assert level == "BAD" and "user 65534:" in text and f"{readable_by_all} (owner 0:0, mode 755)" in text
    assert found["self-test"][0][0] == "note"
