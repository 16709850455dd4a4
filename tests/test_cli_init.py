"""`ucm-sglang init`: the store, the config file and the flags; what it refuses and what it leaves alone."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from clikit import NAMESPACE, dump, run, tree

from posix_store import PosixStore
from posix_store.root import StoreRoot
from ucm_sglang.cli import main
from ucm_sglang.cli.init import command
from ucm_sglang.config import StoreConfig, load_config_file


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is to be."""
    return str(tmp_path / "kv")


@pytest.fixture
def stored(path: str) -> str:
    """A store with 8 blocks of one dead writer."""
    dump(path)
    return path


def test_init_makes_a_store_a_config_and_the_flags(path, capsys):
    """The way in: what it writes must be a configuration that a server starts with."""
    status, out, err = run(capsys, "init", path, "--capacity", "500GiB", "--min-free", "3%")
    assert (status, err) == (0, "")
    file = path + ".ucm-sglang.json"
    assert load_config_file(file) == {
        "backend_name": "ucm",
        "module_path": "ucm_sglang.hicache",
        "class_name": "UcmHiCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "path": path,
        "capacity": "500GiB",
        "min_free": "3%",
    }
    assert StoreConfig.from_extra(load_config_file(file), source=file).path == path
    assert StoreRoot(path, create=False).capacity == 500 << 30
    assert set(os.listdir(path)) == {"STORE.json"}
    assert out.endswith(command(file) + "\n")
    assert "--hicache-storage-backend dynamic" in out
    assert f"--hicache-storage-backend-extra-config @{file}" in out


@pytest.mark.parametrize("ending", ["json", "yaml", "yml", "toml"])
def test_init_writes_each_format_that_sglang_reads(path, tmp_path, capsys, ending):
    file = str(tmp_path / "conf" / f"my.{ending}")
    assert run(capsys, "init", path, "--capacity", "1.5TB", "--config", file)[0] == 0
    assert StoreConfig.from_extra(load_config_file(file), source=file).capacity == 1_500_000_000_000


def test_the_printed_command_survives_a_shell(tmp_path):
    file = str(tmp_path / "my store's.json")
    echoed = command(file).replace("sglang serve", "printf '%s\\n'", 1)
    words = subprocess.run(
        ["sh", "-c", echoed], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[-1] == f"@{file}"


def test_init_again_changes_nothing(path, capsys):
    assert run(capsys, "init", path, "--capacity", "1GiB")[0] == 0
    before = tree(os.path.dirname(path))
    status, out, err = run(capsys, "init", path, "--capacity", "1024MiB")
    assert (status, err) == (0, "")
    assert "exists, kept as it is" in out and "note      capacity" not in out
    after = tree(os.path.dirname(path))
    del before[path], after[path]  # the write probe comes and goes in the store's directory
    assert after == before


def test_init_keeps_what_the_user_edited_and_says_how_it_differs(path, capsys):
    run(capsys, "init", path, "--capacity", "1GiB")
    file = Path(path + ".ucm-sglang.json")
    edited = {**load_config_file(str(file)), "capacity": "2GiB", "timeout": 3}
    file.write_text(json.dumps(edited))
    status, out, _ = run(capsys, "init", path, "--capacity", "1GiB", "--min-free", "1GiB")
    assert status == 0
    assert json.loads(file.read_text()) == edited
    assert "capacity is '2GiB' there, not '1GiB'" in out
    assert "min_free is not set there, not '1GiB'" in out
    assert StoreRoot(path, create=False).capacity == 2 << 30


def test_init_with_force_replaces_the_config_and_keeps_the_old_one(path, capsys):
    file = Path(path + ".ucm-sglang.json")
    file.write_text("not JSON at all")
    assert run(capsys, "init", path, "--capacity", "1GiB")[0] == 2
    assert run(capsys, "init", path, "--capacity", "1GiB", "--force")[0] == 0
    assert load_config_file(str(file))["capacity"] == "1GiB"
    assert Path(f"{file}.bak").read_text() == "not JSON at all"


def test_init_adopts_a_store_with_its_capacity_and_blocks(stored, capsys):
    status, out, _ = run(capsys, "init", stored)
    assert status == 0 and "exists, 1 namespaces" in out
    assert StoreRoot(stored, create=False).capacity == 1 << 28
    assert "capacity" not in load_config_file(stored + ".ucm-sglang.json")
    with PosixStore(stored, NAMESPACE, writable=False) as store:
        assert store.stats().blocks == 8


def test_init_sets_the_capacity_of_a_store_whose_config_leaves_it_open(stored, capsys):
    """What the warning about a damaged STORE.json tells the operator to do must work."""
    run(capsys, "init", stored)
    assert run(capsys, "init", stored, "--capacity", "64MiB")[0] == 0
    assert StoreRoot(stored, create=False).capacity == 64 << 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "500G"], "capacity = '500G': is not a size"),
        (["--capacity", "-1"], "capacity = '-1': is not a size"),
        (["--min-free", "120%"], "min_free = '120%'"),
        (["--config", "{path}/c.json"], "lies in the store"),
        (["--config", "{path}"], "lies in the store"),
        (["--config", "c.ini"], "must end in .json, .toml, .yaml, .yml"),
    ],
)
def test_init_refuses_bad_options_before_it_makes_anything(path, capsys, options, words):
    options = [option.format(path=path) for option in options]
    status, _, err = run(capsys, "init", path, *options)
    assert status == 2 and words in err
    assert os.listdir(os.path.dirname(path)) == []


def test_init_refuses_a_directory_of_others_and_leaves_it_alone(path, capsys):
    """Invariant I7."""
    os.makedirs(path)
    Path(path, "thesis.tex").write_text("x")
    before = tree(os.path.dirname(path))
    status, _, err = run(capsys, "init", path)
    assert status == 2 and "thesis.tex" in err
    assert tree(os.path.dirname(path)) == before


def test_init_refuses_the_config_of_another_store(path, tmp_path, capsys):
    file = str(tmp_path / "c.json")
    run(capsys, "init", path, "--config", file)
    status, _, err = run(capsys, "init", path + "2", "--config", file)
    assert status == 2 and f"belongs to the store {path}, not {path}2" in err
    assert not os.path.exists(path + "2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_init_says_who_may_not_write(capsys):
    """A store that the server's user cannot write must be found out now, with user, owner and mode."""
    with tempfile.TemporaryDirectory() as parent:  # pytest's own directories are closed to other users
        os.chmod(parent, 0o755)
        path = f"{parent}/kv"
        run(capsys, "init", path)
        try:
            os.seteuid(65534)
            status, _, err = run(capsys, "init", path, "--config", f"{parent}/mine.json")
        finally:
            os.seteuid(0)
        assert status == 2 and not os.path.exists(f"{parent}/mine.json")
    assert f"path = {path}: cannot make files there: Permission denied" in err
    assert "65534:" in err and "owner 0:" in err and "mode 755" in err


def test_a_store_inside_a_store_is_refused(tmp_path, capsys):
    """It would be a foreign thing in the outer store, and count twice against its capacity."""
    outer = tmp_path / "kv"
    assert main(["init", str(outer), "--capacity", "1GiB"]) == 0
    assert main(["init", str(outer / "sub" / "kv"), "--config", str(tmp_path / "c.json")]) == 2
    assert f"lies in the store {outer}" in capsys.readouterr().err
    assert not (outer / "sub").exists()


def test_a_floor_of_a_few_bytes_is_a_forgotten_percent_sign(tmp_path, capsys):
    assert main(["init", str(tmp_path / "kv"), "--min-free", "5"]) == 2
    assert "%" in capsys.readouterr().err
