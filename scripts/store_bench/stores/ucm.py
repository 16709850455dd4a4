"""`ucm-posix`: the Posix pipeline of UCM 0.8.1's wheel, with its engine psync."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from store_bench.stores.base import CannotRun, Spec, StoreUnderTest

# UCM imports torch for the type of an argument that is not used here.
_STUB = Path(__file__).resolve().parent.parent / "torch_stub"
# Transfer threads: 2 to 8 were equal within the noise on two cores, 16 and the default of 128 slower.
_TRANSFER_THREADS, _LOOKUP_THREADS = 8, 16


class Ucm(StoreUnderTest):
    """One shard a block, one tensor a shard: a call of `dump_data` or `load_data` and `wait`."""

    def __init__(self, spec: Spec) -> None:
        sys.path.append(str(_STUB))
        try:
            from ucm.store.pipeline import connector
        except Exception as error:
            raise CannotRun(f"import of ucm failed: {error}") from error
        super().__init__(spec)
        self._connector = connector
        self._addresses = self.blocks.addresses.astype(np.uint64)
        self._store: Any = None
        self._before: Any = None
        self._open()

    def _open(self) -> None:
        # Making the store makes 4,096 directories, so it is kept from turn to turn.
        self.directory.mkdir(parents=True, exist_ok=True)
        size = self.spec.block_bytes
        self._store = self._connector.UcmPipelineStore({
            "store_pipeline": "Posix", "storage_backends": [str(self.directory)], "device_id": 0,
            "tensor_size": size, "shard_size": size, "block_size": size, "tensor_size_list": [size],
            "posix_io_engine": "psync", "io_direct": self.spec.io_mode == "direct",
            "posix_data_trans_concurrency": _TRANSFER_THREADS,
            "posix_lookup_concurrency": _LOOKUP_THREADS,
            "timeout_ms": 60_000, "posix_gc_enable": False, "share_buffer_enable": False,
            "unique_id": "bench", "local_rank_size": 1,
        })  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {"transfer_threads": _TRANSFER_THREADS, "lookup_threads": _LOOKUP_THREADS, "engine": "psync"}

    def begin(self) -> None:
        if self._store is None:
            self._open()

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        return ids, [0] * len(ids), np.ascontiguousarray(self._addresses[first : first + len(ids)])

    def prepare_load(self, ids: list[bytes]) -> Any:
        return self.prepare_dump(ids)

    def dump(self, prepared: Any) -> None:
        self._store.wait(self._store.dump_data(*prepared))

    def load(self, prepared: Any) -> None:
        self._store.wait(self._store.load_data(*prepared))

    def lookup(self, prepared: Any) -> int:
        return int(self._store.lookup_on_prefix(prepared)) + 1

    def reopen(self) -> None:
        self._before = self._store
        self._open()

    def after_reopen(self) -> None:
        self._before = None

    def end(self) -> None:
        for folder, _, files in os.walk(self.directory):
            for name in files:
                os.unlink(os.path.join(folder, name))

    def close(self) -> None:
        self._store = None
        StoreUnderTest.end(self)
