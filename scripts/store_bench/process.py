"""A child process of the benchmark, seen from the parent."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from pathlib import Path
from typing import Any

from store_bench.registry import ROOT


class Failed(Exception):
    """A child could not do what it was asked; `kind` as in `child.py`, or "died"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


class ChildProcess:
    """Runs `store_bench.child` with an interpreter; what it prints goes to `log`."""

    def __init__(self, name: str, python: str, log: Path) -> None:
        self.name = name
        self._log = log
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", "store_bench.child", name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment,
            )  # fmt: skip
        self._buffer = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error

    def receive(self, timeout: float) -> dict[str, Any]:
        """The answer to the request before. Raises `Failed`."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(timeout):
                    self.kill()
                    raise Failed("died", f"no answer within {timeout:.0f} s")
                data = os.read(self._process.stdout.fileno(), 1 << 20)
                if not data:
                    raise self._died()
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise Failed(answer["kind"], answer["reason"])
        return answer

    def ask(self, request: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
        self.send(request)
        return self.receive(timeout)

    def _died(self) -> Failed:
        self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        return Failed("died", f"exit status {self._process.returncode}: {last}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self, timeout: float = 10.0) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What was not sent yet cannot be sent to a process that is gone.
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
