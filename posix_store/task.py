"""The handle of a load or dump."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from posix_store.errors import Reason


class Task:
    """A batch under way. It keeps the caller's buffers alive until it is done."""

    def __init__(self, future: Future[np.ndarray]) -> None:
        self._future = future
        self._buffers: object = None

    @staticmethod
    def of(status: np.ndarray) -> Task:
        """A task that is done: uint8 (n,) of `Reason`."""
        return _Done(status)

    def keep(self, buffers: object) -> Task:
        """Keep objects alive until the task is done; returns the task."""
        self._buffers = buffers
        self._future.add_done_callback(self._let_go)
        return self

    def _let_go(self, _: Future[np.ndarray]) -> None:
        self._buffers = None

    def done(self) -> bool:
        return self._future.done()

    def status(self, timeout: float | None = None) -> np.ndarray:
        """uint8 (n,): a `Reason` for each block, in the order of the call; waits for the end.

        Raises:
            TimeoutError: not done within `timeout` seconds. The batch goes on, and so does its use of
                the caller's memory.
        """
        return self._future.result(timeout)

    def results(self, timeout: float | None = None) -> np.ndarray:
        """bool (n,): which blocks were loaded, or are stored. Like `status` otherwise."""
        good: np.ndarray = self.status(timeout) == Reason.OK
        return good


class _Done(Task):
    """Without a future, which would cost more than the rest of a small batch."""

    def __init__(self, status: np.ndarray) -> None:
        self._status = status

    def keep(self, buffers: object) -> Task:
        return self

    def done(self) -> bool:
        return True

    def status(self, timeout: float | None = None) -> np.ndarray:
        return self._status
