"""A child process that leads its own process group, so that the whole group, and only it, can be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class GroupProcess:
    """Start `argv` in a new session with its output appended to `log`.

    The exit of the leader is observed without reaping it. As long as it is not reaped its process id, and
    with it the group id, cannot be given to another process; so a signal to the group cannot go astray.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._popen.pid
        self._reaped = False

    def exited(self) -> bool:
        """True once the leader has ended; other members of the group may still run."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return self._reaped or os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:
            return True  # another thread is in the middle of `kill_group`

    def wait_exit(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the leader to end."""
        deadline = time.monotonic() + timeout
        while not self.exited():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def terminate(self) -> None:
        """SIGTERM to the leader only."""
        if not self.exited():
            os.kill(self.pid, signal.SIGTERM)

    def kill_group(self, timeout: float = 10.0) -> None:
        """SIGKILL to all of the group, then wait until it is gone (up to `timeout` seconds)."""
        if self._reaped:
            return
        os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._reaped = True
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._group_runs():
            time.sleep(0.02)

    def _group_runs(self) -> bool:
        """True while a member runs; one that has ended but is not reaped yet does not."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _parent, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            except OSError:
                continue  # it has just gone
            if int(group) == self.pid and state not in "ZX":
                return True
        return False

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, without SGLang's notes on models that need packages we do not install."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in text if "Ignore import error" not in line][-lines:])
