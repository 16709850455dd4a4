"""`ours-native` and `ours-python`: `posix_store.PosixStore`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from store_bench.stores.base import CannotRun, Spec, StoreUnderTest

_NAMESPACE = "0123456789abcdef" * 2
_FAR = 600.0  # seconds: nothing here may be given up because the machine is busy


def open_store(root: str, engine: str, io_mode: str, **settings: Any) -> Any:
    """A `PosixStore` with this engine and I/O mode. Raises `CannotRun` where it has neither."""
    from posix_store import PosixStore, StoreError

    known = inspect.signature(PosixStore.__init__).parameters
    settings["engine"] = engine
    if "io_mode" in known:
        settings["io_mode"] = io_mode
    elif io_mode != "buffered":
        raise CannotRun(f"PosixStore has no {io_mode} I/O")
    try:
        store = PosixStore(root, _NAMESPACE, min_free=0, timeout=_FAR, slow_seconds=_FAR, **settings)
    except (StoreError, ImportError, ValueError, RuntimeError) as error:
        raise CannotRun(f"PosixStore(engine={engine!r}, io_mode={io_mode!r}): {error}") from error
    if engine not in (store.engine.name, "auto"):
        store.close()
        raise CannotRun(f"engine {engine!r} was asked for and {store.engine.name!r} came")
    return store


class Ours(StoreUnderTest):
    """Packed ids and an address matrix in, in the calling thread, with the maintenance thread at work."""

    preallocated = (
        "ahead of the dumps by the store's background thread, where there is a pause between them; sustained "
        "dumps outrun it and take space in large pieces themselves"
    )

    def __init__(self, spec: Spec, *, engine: str) -> None:
        super().__init__(spec)
        self._engine = engine
        self._store: Any = None
        self._addresses = self.blocks.addresses
        self._open().close()

    def _open(self) -> Any:
        capacity = self.spec.capacity or max(8 << 30, 4 * self.spec.reserve)
        return open_store(
            str(self.directory / "store"), self._engine, self.spec.io_mode,
            capacity=capacity, verify=self.spec.verify, maintenance=True,
            **({"segment_bytes": max(1 << 20, capacity // 16)} if self.spec.capacity else {}),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {"engine": self._engine}

    def begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._store = self._open()

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        return b"".join(ids), np.ascontiguousarray(self._addresses[first : first + len(ids)])

    def prepare_load(self, ids: list[bytes]) -> Any:
        return self.prepare_dump(ids)

    def dump(self, prepared: Any) -> None:
        ids, addresses = prepared
        task = self._store.dump_data(ids, None, addresses, self.spec.block_bytes, background=False)
        if not task.results().all():
            raise RuntimeError(f"dump: {self._store.stats().counters}")

    def load(self, prepared: Any) -> None:
        ids, addresses = prepared
        task = self._store.load_data(ids, None, addresses, self.spec.block_bytes, background=False)
        if not task.results().all():
            raise RuntimeError(f"load: {self._store.stats().counters}")

    def lookup(self, prepared: Any) -> int:
        return self._store.lookup_on_prefix(prepared) + 1

    def reopen(self) -> None:
        before, self._store = self._store, None
        self._store = self._open()
        # The store before is closed outside what is timed in `after_reopen`.
        self._closing = before

    def after_reopen(self) -> None:
        self._closing.close()

    def stats(self) -> Any:
        return self._store.stats()

    def end(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None
        super().end()
