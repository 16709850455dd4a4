"""`hicache-file`: SGLang's HiCacheFile, through its real host pools and its controller's own page calls."""

from __future__ import annotations

import os
from typing import Any

from store_bench.memory import Blocks
from store_bench.stores.base import CannotRun, Spec, StoreUnderTest
from store_bench.stores.sglang_pools import LAYOUT, HostPool


class HiCacheFileStore(StoreUnderTest):
    """What SGLang's I/O thread does for one batch: dummy pages, `batch_get`, a copy of each page, and back.

    Ids become keys of 64 hex digits, as SGLang's hashes are.
    """

    def __init__(self, spec: Spec) -> None:
        if spec.io_mode == "direct":
            raise CannotRun("HiCacheFile has no direct I/O")
        super().__init__(spec)

    def make_blocks(self) -> Blocks:
        self._pool = HostPool(self.spec.block_bytes, self.spec.batch, self.spec.mla)
        return self._pool.blocks

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.directory)
        extra = {"max_size": str(self.spec.capacity)} if self.spec.capacity else None
        self._storage = self._pool.sglang.storage.HiCacheFile(
            self._pool.storage_config(extra), str(self.directory)
        )
        self._storage.register_mem_pool_host(self._pool.pool)
        self._get, self._set = self._pool.controller(self._storage)

    def facts(self) -> dict[str, Any]:
        return {"layout": LAYOUT, "page_size": self._pool.page_size, "pool": type(self._pool.pool).__name__}

    def begin(self) -> None:
        self._open()

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        return self.prepare_lookup(ids), self._pool.indices(first, len(ids))

    def prepare_load(self, ids: list[bytes]) -> Any:
        return self.prepare_dump(ids)

    def dump(self, prepared: Any) -> None:
        if not self._set(*prepared):
            raise RuntimeError("_generic_page_set failed")

    def load(self, prepared: Any) -> None:
        if self._get(*prepared) != len(prepared[0]):
            raise RuntimeError("_generic_page_get failed")

    def prepare_lookup(self, ids: list[bytes]) -> Any:
        return [block.hex() * 2 for block in ids]

    def lookup(self, prepared: Any) -> int:
        # What the hybrid controller asks on a hit query, all pages at once.
        return int(self._storage.batch_exists_v2(prepared).kv_hit_pages)

    def reopen(self) -> None:
        self._open()
