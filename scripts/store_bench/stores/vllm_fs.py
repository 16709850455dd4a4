"""`vllm-fs`: the I/O primitives of vLLM 0.32's file system tier, with its C extension."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from store_bench.stores.base import CannotRun, Spec, StoreUnderTest

# The tier gives one job to one thread; more of them, up to 16, were not faster on two cores.
_THREADS = 2


class VllmFs(StoreUnderTest):
    """`batch_store_block` and `batch_load_block` over contiguous parts of a batch, on threads that are kept.

    Paths and their directories are made beforehand, which the tier does in its calls.
    """

    def __init__(self, spec: Spec) -> None:
        try:
            from vllm.fs_io_C import batch_lookup
            from vllm.v1.kv_offload.tiering.fs import io
        except Exception as error:
            raise CannotRun(f"import of vllm failed: {error}") from error
        super().__init__(spec)
        self._io, self._batch_lookup = io, batch_lookup
        self._direct = spec.io_mode == "direct"
        self._view = self.blocks.components[0].reshape(-1).data
        self._pool = ThreadPoolExecutor(_THREADS)
        self._made: set[str] = set()

    def facts(self) -> dict[str, Any]:
        return {"threads": _THREADS, "c_extension": bool(self._io._HAS_FSIO_C)}

    def begin(self) -> None:
        self._made.clear()

    def _path(self, block: bytes) -> str:
        name = block.hex()
        folder = f"{self.directory}/{name[:3]}/{name[3:5]}_g0"
        return f"{folder}/{name}.bin"

    def _parts(self, ids: list[bytes], first: int) -> list[tuple[list[str], list[int]]]:
        paths = [self._path(block) for block in ids]
        offsets = [(first + row) * self.spec.block_bytes for row in range(len(ids))]
        step = -(-len(ids) // _THREADS)
        return [(paths[at : at + step], offsets[at : at + step]) for at in range(0, len(ids), step)]

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        parts = self._parts(ids, first)
        for folder in {os.path.dirname(path) for paths, _ in parts for path in paths} - self._made:
            os.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        return parts

    def prepare_load(self, ids: list[bytes]) -> Any:
        return self._parts(ids, 0)

    def dump(self, prepared: Any) -> None:
        self._run(self._io.batch_store_block, prepared)

    def load(self, prepared: Any) -> None:
        self._run(self._io.batch_load_block, prepared)

    def _run(self, call: Any, parts: Any) -> None:
        size = self.spec.block_bytes
        if len(parts) == 1:
            call(parts[0][0], self._view, parts[0][1], size, self._direct)
            return
        started = [self._pool.submit(call, paths, self._view, at, size, self._direct) for paths, at in parts]
        for future in started:
            future.result()

    def prepare_lookup(self, ids: list[bytes]) -> Any:
        return [self._path(block) for block in ids]

    def lookup(self, prepared: Any) -> int:
        return sum(map(bool, self._batch_lookup(prepared)))

    def close(self) -> None:
        self._pool.shutdown()
        super().close()
