"""Stores for the tests of the command line: small ones, with a process that writes them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posix_store import PosixStore
from ucm_sglang import cli
from ucm_sglang.identity import KV_POOL, BlockIds

REPOSITORY = Path(__file__).parents[1]
NAMESPACE = "ab" * 16
BLOCK = 8192
IDENTITY = {
    "model": "org/model", "kv_dtype": "fp8_e5m2", "attention": "mha", "layout": "page_first_direct",
    "page_size": 64, "page_bytes": 2 << 20, "tp_rank": 3, "tp_size": 4, "pp_rank": 0, "pp_size": 1,
    "tag": "[blue]",
}  # fmt: skip

# A server stand-in: dumps 20 blocks, says so, and goes on dumping until it is told to end.
WRITER = f"""
import os, select, sys
import numpy as np
from posix_store import PosixStore
store = PosixStore(sys.argv[1], "{NAMESPACE}", capacity=1 << 28, min_free=0)
def dump(count):
    ids = [os.urandom(16) for _ in range(count)]
    assert store.dump(ids, None, [np.frombuffer(os.urandom({BLOCK}), np.uint8) for _ in ids]).results().all()
dump(20)
print("ready", flush=True)
for _ in range(500):
    if select.select([sys.stdin], [], [], 0.01)[0]:
        break
    dump(4)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@contextmanager
def live_writer(path: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def dump(path: str, count: int = 8, namespace: str = NAMESPACE) -> list[bytes]:
    ids = [bytes([i]) * 16 for i in range(1, count + 1)]
    pages = [np.full(BLOCK, i, np.uint8) for i in range(count)]
    with PosixStore(path, namespace, identity=IDENTITY, capacity=1 << 28, min_free=0) as store:
        assert store.dump(ids, None, pages).results().all()
    return ids


def dump_chain(
    path: str, keys: list[str], namespace: str = NAMESPACE, identity: dict[str, object] = IDENTITY,
    before: bytes = bytes(16),
) -> bytes:  # fmt: skip
    """Store the pages of a prompt as a server does, each with its parent; their packed ids."""
    ids = BlockIds(bytes.fromhex(namespace)).of(KV_POOL, keys)
    pages = [np.full(BLOCK, sum(key.encode()) % 256, np.uint8) for key in keys]
    with PosixStore(path, namespace, identity=identity, capacity=1 << 28, min_free=0) as store:
        assert store.dump(ids, None, pages, parents=before + ids[:-16]).results().all()
    return ids


def flip(file: Path, offset: int) -> None:
    """Damage one bit."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


def report(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    """What a command says as JSON."""
    found, out, err = run(capsys, *argv, "--json")
    assert (found, err) == (status, ""), out + err
    return json.loads(out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line in which a command refuses, having printed nothing else."""
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "") and err.startswith("ucm-sglang: ") and err.count("\n") == 1, err
    return err


def only(path: str, ending: str) -> Path:
    (file,) = Path(path, NAMESPACE).glob(f"*{ending}")
    return file


def tree(path: str) -> dict[str, tuple[int, int, int]]:
    """Every file below a directory with size, mtime and inode."""
    files = {}
    for entry in [Path(path), *Path(path).rglob("*")]:
        status = entry.stat()
        files[str(entry)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return files


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err
