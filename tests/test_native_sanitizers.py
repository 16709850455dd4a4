"""The C code under the sanitizers of addresses, undefined behaviour and threads. Defends issue 4.

The engines' own tests run once more on a library that is built with them, in a copy of the package; a driver
in C (native_driver.c) runs the engine from many threads without Python.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "posix_store"
CC = shutil.which("cc")
HEADERS = sysconfig.get_paths()["include"]
FLAGS = ["-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-std=gnu11"]
KIT = ["engine_contract.py", "faults.py", "storekit.py"]
CONTRACT = [
    "test_engines.py",
    "test_engines_agree.py",
    "test_engines_journal.py",
    "test_engines_threads.py",
]

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(CC is None, reason="no C compiler (cc) on the path"),
]


def runtime(name: str) -> str:
    """Path of a sanitizer's library, which the compiler answers with a bare name when it lacks it."""
    found = subprocess.run([str(CC), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"the C compiler comes without {name}")
    return path


def compile_c(sanitizers: str, *arguments: str | Path) -> None:
    command = [str(CC), *FLAGS, f"-fsanitize={sanitizers}", *map(str, arguments), "-lpthread"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def reports(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("report*")))


@pytest.mark.parametrize(("sanitizers", "library", "rounds"), [
    ("address,undefined", "libasan.so", 8),
    ("thread", "libtsan.so", 2),
])  # fmt: skip
def test_many_threads_without_python(tmp_path: Path, sanitizers: str, library: str, rounds: int) -> None:
    """Batches, appends, failing and short calls from four threads, on pools that come and go."""
    runtime(library)
    program = tmp_path / "driver"
    compile_c(sanitizers, f"-I{PACKAGE}", TESTS / "native_driver.c", "-o", program)
    command = [str(program), str(tmp_path), str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this sanitizer cannot run under this kernel's address randomisation")
    assert (result.returncode, result.stdout) == (0, "all right\n"), result.stdout + result.stderr
    assert not result.stderr


def test_the_contract_of_engines(tmp_path: Path) -> None:
    """All tests of the native engine, and those that compare both, on a sanitised library."""
    if not Path(HEADERS, "Python.h").exists():
        pytest.skip("needs Python.h")
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    shutil.copytree(PACKAGE, tmp_path / "posix_store", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tmp_path / "tests").mkdir()
    for name in ["conftest.py", *KIT, *CONTRACT]:
        shutil.copy(TESTS / name, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sglang\n    vllm\n")
    library = tmp_path / "posix_store" / "_native.abi3.so"
    source = tmp_path / "posix_store" / "_native.c"
    compile_c("address,undefined", "-shared", "-fPIC", f"-I{HEADERS}", source, "-o", library)
    log = f"log_path={tmp_path}/report"
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        # Python itself leaks at its end. Its small objects get allocations of their own, so that an access
        # beyond one is seen.
        "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=1:exitcode=99:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:exitcode=99:{log}",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    where = f"import posix_store._native as n; assert n.__file__ == {str(library)!r}, n.__file__"
    command = [sys.executable, "-c", f"{where}; import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"]
    # What has "python" in its name is the case of the Python engine.
    options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-k", "not python"]
    result = subprocess.run(
        [*command, "-c", str(tmp_path / "pytest.ini"), *options, str(tmp_path / "tests")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert not reports(tmp_path), reports(tmp_path)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout, result.stdout
