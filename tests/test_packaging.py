"""What `pip install .` delivers: issue 2 asks that it works with no compiler and no engine present."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("posix_store", "ucm_sglang")
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld")


def copy_sources(target: Path) -> None:
    """Copy what a build reads, so that it leaves nothing in the working tree."""
    target.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )


def without_compilers(folder: Path) -> dict[str, str]:
    """An environment whose compilers all fail."""
    folder.mkdir()
    for name in COMPILERS:
        program = folder / name
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CC": "cc", "CXX": "c++"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    copy_sources(folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "-w", str(folder), str(folder / "source")],
        env=without_compilers(folder / "bin"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("ucm_sglang-*.whl"))


def test_wheel_holds_every_module_and_the_type_markers(wheel: Path) -> None:
    """Fails when a folder lacks __init__.py, which would leave its modules out in silence."""
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())


def test_installed_packages_import_without_an_engine(wheel: Path, tmp_path: Path) -> None:
    """The wheel's own files import, with engines blocked."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
for engine in ("torch", "sglang", "vllm"):
    sys.modules[engine] = None
import posix_store, ucm_sglang, ucm_sglang.cli
for module in (posix_store, ucm_sglang, ucm_sglang.cli):
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
assert callable(ucm_sglang.cli.main)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
