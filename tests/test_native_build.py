"""Building: with a compiler the native engine is there, without one the store still is. Defends issue 4."""

import glob
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from crc32c import crc32c
from storekit import NAMESPACE
from test_packaging import ROOT, copy_sources, without_compilers

from posix_store import PosixStore, StoreError, native

CC = shutil.which("cc")
HEADERS = sysconfig.get_paths()["include"]
DATA = bytes(range(256)) * 5
MOVES_A_BLOCK = """
import sys
import numpy as np
from posix_store import PosixStore
with PosixStore(sys.argv[1], "0" * 32, capacity=64 << 20, min_free=0, engine=sys.argv[2]) as store:
    ids, page = np.zeros((1, 16), np.uint8), np.arange(4096, dtype=np.uint8)
    assert not store.dump(ids, 0, [page], background=False).status().any()
    into = np.zeros_like(page)
    assert not store.load(ids, 0, [into], background=False).status().any()
    assert (into == page).all()
    print(store.engine.name, sys.modules["posix_store"].__file__)
"""

pytestmark = pytest.mark.compiled
needs_compiler = pytest.mark.skipif(
    CC is None or not Path(HEADERS, "Python.h").exists(), reason="needs a C compiler (cc) and Python.h"
)


def build(folder: Path, environment: dict[str, str]) -> Path:
    """Build a wheel and unpack it, as an installation does; the folder that holds the packages."""
    folder.mkdir()
    copy_sources(folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "-w", str(folder), str(folder / "source")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built") / "wheel", dict(os.environ))


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbuilt")
    return build(folder / "wheel", without_compilers(folder / "bin"))


def run_store(installed: Path, root: Path, engine: str) -> subprocess.CompletedProcess[str]:
    """Move a block in a process that imports the installed packages."""
    command = [sys.executable, "-c", MOVES_A_BLOCK, str(root), engine]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)


# ---- With a compiler ----


@needs_compiler
@pytest.mark.parametrize("engine", ["auto", "native"])
def test_a_build_gives_the_native_engine(built: Path, tmp_path: Path, engine: str) -> None:
    result = run_store(built, tmp_path, engine)
    assert result.returncode == 0, result.stderr
    name, module = result.stdout.split()
    assert name == "native" and module.startswith(str(built)) and not result.stderr


@needs_compiler
def test_one_build_is_for_every_python(built: Path) -> None:
    """The stable ABI, in the names of the library and of the wheel, which has the sources, too."""
    assert [path.name for path in (built / "posix_store").glob("_native*.so")] == ["_native.abi3.so"]
    wheel = next(built.parent.glob("*.whl")).name
    assert "-cp311-abi3-linux_" in wheel
    for path in (ROOT / "posix_store").glob("*.[ch]"):
        assert (built / "posix_store" / path.name).exists()


def other_pythons() -> list[str]:
    """Interpreters of other versions that the stable ABI reaches (3.11 and later)."""
    candidates = [shutil.which(f"python3.{minor}") or "" for minor in range(11, 20)]
    candidates += glob.glob(str(Path.home() / ".pyenv/versions/3.*/bin/python"))
    found: dict[str, str] = {}
    for candidate in filter(None, candidates):
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('3.%d' % sys.version_info[1])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0:
            found.setdefault(asked.stdout.strip(), candidate)
    own = f"3.{sys.version_info[1]}"
    return [path for version, path in found.items() if version != own and int(version[2:]) >= 11]


@needs_compiler
def test_other_pythons_load_the_same_library(built: Path) -> None:
    """Loaded by itself, since they need not have numpy."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python of 3.11 or later here")
    library = built / "posix_store" / "_native.abi3.so"
    program = f"""
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_native", {str(library)!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(module)
journal = module.Journal(-1, 64)
pool = module.pool(3)
try:
    module.move(pool)
except TypeError:
    print(module.crc32c({DATA!r}), journal.end, module.crc_kind() != "")
"""
    for python in pythons:
        result = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        assert result.stdout.split() == [str(crc32c(DATA)), "64", "True"], (python, result.stderr)


@needs_compiler
@pytest.mark.parametrize("level", ["-O2", "-O3"])
def test_the_compiler_has_nothing_to_say(tmp_path: Path, level: str) -> None:
    source = ROOT / "posix_store" / "_native.c"
    options = ["-std=gnu11", "-Wall", "-Wextra", level, "-fPIC", "-isystem", HEADERS]
    command = [str(CC), *options, "-c", str(source), "-o", str(tmp_path / "native.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr


# ---- Without ----


def test_without_a_compiler_the_python_engine_takes_its_place(unbuilt: Path, tmp_path: Path) -> None:
    """The install succeeds, `auto` works, and says once what to do."""
    assert not list((unbuilt / "posix_store").glob("*.so"))
    result = run_store(unbuilt, tmp_path, "auto")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "python"
    warnings = [line for line in result.stderr.splitlines() if "native engine" in line]
    assert len(warnings) == 1, result.stderr
    assert "install a C compiler" in warnings[0] and "python3-dev" in warnings[0]


def test_without_a_compiler_the_native_engine_is_refused(unbuilt: Path, tmp_path: Path) -> None:
    result = run_store(unbuilt, tmp_path, "native")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "StoreError: engine = 'native'" in last and "install a C compiler" in last, result.stderr
    assert run_store(unbuilt, tmp_path, "python").stderr == "", "who asks for it is not warned"


def test_the_warning_is_one_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "native", None)
    native._warn_once.cache_clear()
    for _ in range(2):
        with (
            caplog.at_level(logging.WARNING),
            PosixStore(str(tmp_path), NAMESPACE, capacity=64 << 20, min_free=0),
        ):
            pass
    assert sum("native engine" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("name", ["", "c", "Native", "native "])
def test_an_unknown_engine_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match=r"engine = .*auto.*native.*python") as error:
        PosixStore(str(tmp_path), NAMESPACE, capacity=64 << 20, min_free=0, engine=name)
    assert repr(name) in str(error.value)
