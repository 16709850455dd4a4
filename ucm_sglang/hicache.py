"""The HiCache storage backend: SGLang's calls, turned into batches of a store.

SGLang makes one instance on each scheduler rank (`--hicache-storage-backend dynamic`), gives it the host
pool, and from then on calls it from its storage threads: look-ups, loads and dumps at the same time. No
call raises there (invariant I3); a call that fails is a miss, or a page that goes unstored.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from posix_store.abilities import probe
from posix_store.opening import Store, make_roots, open_store
from posix_store.striped import StripedStore
from ucm_sglang.config import ConfigError, StoreConfig
from ucm_sglang.identity import KV_POOL, BlockIds
from ucm_sglang.keyspace import namespace_of
from ucm_sglang.layout import PoolLayout
from ucm_sglang.sglang_facts import (
    read_server_facts,
    warn_if_untested,
    weight_updates,
)

logger = logging.getLogger(__name__)

SMALL_COMPONENT_BYTES = 16 << 10
_LOG_EVERY_SECONDS = 30.0
_ANCESTORS = 64
"""Pages before a batch that the store is told of: of several roots, each should have one among them."""

P = ParamSpec("P")
R = TypeVar("R")


def _never_raises(
    fallback: Callable[..., R],
) -> Callable[
    [Callable[Concatenate[UcmHiCacheStorage, P], R]], Callable[Concatenate[UcmHiCacheStorage, P], R]
]:
    """Make a method answer `fallback(*its arguments)` where it would raise; count and log what happened."""

    def decorate(
        method: Callable[Concatenate[UcmHiCacheStorage, P], R],
    ) -> Callable[Concatenate[UcmHiCacheStorage, P], R]:
        @functools.wraps(method)
        def guarded(self: UcmHiCacheStorage, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._record_error(method.__name__, error)
                return fallback(*args, **kwargs)

        return guarded

    return decorate


def _no_pages(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


class UcmHiCacheStorage(HiCacheStorage):
    """SGLang HiCache L3 on a POSIX file system.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` is validated by `StoreConfig`.
        kwargs: what SGLang's backend factory passes along; not used.

    Raises:
        ConfigError, posix_store.StoreError: the configuration cannot work; names the key, the value and
            the fix. Also from `register_mem_pool_host`, which is when the host pool is known.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self.config = StoreConfig.from_extra(extra, source="--hicache-storage-backend-extra-config")
        _refuse_unsupported(storage_config)
        warn_if_untested()
        weight_updates.watch()
        # Fails now, with a clear message, rather than when the first page is stored.
        make_roots(self.config.paths, self.config.capacities)
        self.storage_config = storage_config
        self.errors: dict[str, int] = {}
        """Exceptions that were turned into misses, by method."""
        self._zero_copy = bool(extra.get("interface_v1"))
        self._store: Store | None = None
        self._layout: PoolLayout | None = None
        self._ids: BlockIds | None = None
        self._refused_pools: list[str] = []
        self._weights_at_attach = 0
        self._lock = threading.Lock()
        self._logged_at = float("-inf")

    # -- attach (scheduler main thread) ------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this host pool's pages."""
        super().register_mem_pool_host(mem_pool_host)
        try:
            layout = PoolLayout.of(mem_pool_host)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        facts = read_server_facts(self.storage_config.model_name)
        namespace = namespace_of(self.storage_config, self.config, layout, facts)
        self.close()
        store = open_store(
            namespace=namespace.hexdigest(), identity=namespace.to_dict(), **self.config.store_arguments()
        )
        self._weights_at_attach = weight_updates.count
        self._layout, self._ids, self._store = layout, BlockIds(namespace.digest()), store
        self.namespace = namespace
        try:
            stats = store.stats()
        except OSError as error:
            raise ConfigError(f"path = {self.config.path}: cannot be examined: {error}") from error
        logger.info(
            "ucm-sglang: store %s (capacity %d bytes, %d allocated), %d blocks in namespace %s; engine %s, "
            "I/O %s, %s%s",
            stats.root, stats.capacity, stats.allocated_bytes, stats.blocks, namespace,
            store.engine.name, store.io_mode, "zero-copy" if self._zero_copy else "generic interface",
            f"; READ-ONLY: {stats.read_only_because}" if stats.read_only_because else "",
        )  # fmt: skip
        self._report_file_systems(store)
        self._warn_about_settings(layout)

    def _report_file_systems(self, store: Store) -> None:
        """Try what the file system of each root can do, by writing, reading and deleting a small file."""
        if not self.storage_config.is_storage_writer:
            return
        for part in store.stores if isinstance(store, StripedStore) else (store,):
            abilities = probe(part.root)
            logger.info("ucm-sglang: %s is on %s", part.root.path, abilities.describe())
            for consequence in abilities.consequences():
                logger.warning("ucm-sglang: %s: %s", part.root.path, consequence)

    def _warn_about_settings(self, layout: PoolLayout) -> None:
        if not self._zero_copy:
            self._flat_offsets(layout)
            logger.warning(
                'ucm-sglang: "interface_v1" is not set in the extra config, so SGLang copies every page '
                'twice; add "interface_v1": 1'
            )
        if layout.k > 1 and layout.contiguous_bytes < SMALL_COMPONENT_BYTES:
            logger.warning(
                "ucm-sglang: a page consists of %d pieces of %d bytes or more; larger ones are faster: use "
                "--hicache-mem-layout page_first_direct (with --hicache-io-backend direct) or "
                "page_first, and --page-size 64",
                layout.k, layout.contiguous_bytes,
            )  # fmt: skip

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Note a pool of the server; every pool but the KV pool is one too many."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV_POOL:
            self._refused_pools.append(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Refuse models whose pages are not whole without further pools."""
        if self._refused_pools:
            raise ConfigError(
                f"host pools {', '.join(self._refused_pools)}: models with more than the KV pool (sliding "
                "window, Mamba, sparse indexer, draft) are not supported by this version; run them "
                "without --hicache-storage-backend"
            )

    # -- look-up (prefetch thread) -----------------------------------------------------------------

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored. Any number of keys."""
        if self._store is None or self._ids is None or self._outdated():
            return 0
        return self._store.lookup_on_prefix(self._ids.of(KV_POOL, keys)) + 1

    def exists(self, key: str) -> bool:
        """Is one page stored?"""
        return self.batch_exists([key]) == 1

    # -- zero-copy (I/O and backup threads) --------------------------------------------------------

    @_never_raises(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool: page i into `host_indices[i * page_size]` and following."""
        layout = self._attached()[1]
        if layout.flat:
            return self._get_flat(keys, host_indices)
        return self._load(keys, layout.addresses(host_indices), layout.sizes).tolist()

    @_never_raises(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. Those that are stored already count as stored."""
        if not self.storage_config.is_storage_writer:
            return [True] * len(keys)
        layout = self._attached()[1]
        if layout.flat:
            pages = [
                self.mem_pool_host.get_data_page(start) for start in layout.page_starts(host_indices).tolist()
            ]
            return self._dump_pages(keys, pages, extra_info).tolist()
        return self._dump(keys, layout.addresses(host_indices), layout.sizes, extra_info).tolist()

    # -- generic (the same threads) ----------------------------------------------------------------

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages into flat tensors, which are returned; None in place of a page that was not loaded."""
        targets = list(target_locations)
        good = self._load_pages(keys, targets)
        return [target if ok else None for target, ok in zip(targets, good.tolist(), strict=True)]

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; True when all are stored."""
        if not self.storage_config.is_storage_writer:
            return True
        return bool(self._dump_pages(keys, list(values), None).all())

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """`batch_get` of one page."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """`batch_set` of one page."""
        return self.batch_set([key], [value])

    # -- models with several pools: declined -------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """No hit: a page without its companions in the other pools would be wrong."""
        if not pool_transfers:
            return PoolTransferResult(self.batch_exists(keys, extra_info), {})
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing is loaded."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing is stored."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    # -- administration (scheduler main thread) ----------------------------------------------------

    @_never_raises(lambda: None)
    def clear(self) -> None:
        """Delete the pages of this namespace, of all processes; nothing else."""
        store, _, _ = self._attached()
        logger.info("ucm-sglang: cleared %d blocks of namespace %s", store.clear(), store.namespace)

    @_never_raises(lambda: None)
    def close(self) -> None:
        """Let go of files. Not needed for correctness. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # ----------------------------------------------------------------------------------------------

    def _outdated(self) -> bool:
        """Were the weights replaced since attach? The namespace's pages are not this server's any more."""
        return weight_updates.count != self._weights_at_attach

    def _attached(self) -> tuple[Store, PoolLayout, BlockIds]:
        if self._store is None or self._layout is None or self._ids is None:
            raise RuntimeError("no host pool is registered, or the backend is closed")
        return self._store, self._layout, self._ids

    def _dump(self, keys: list[str], addresses: np.ndarray, sizes: np.ndarray, extra_info: Any) -> np.ndarray:
        store, _, ids = self._attached()
        if self._outdated():
            return np.zeros(len(keys), bool)
        blocks = ids.of(KV_POOL, keys)
        prefix_keys = getattr(extra_info, "prefix_keys", None)
        before = ids.of(KV_POOL, prefix_keys[-1:]) if prefix_keys else bytes(16)
        parents = before + blocks[:-16]
        ancestors = ids.of(KV_POOL, prefix_keys[-_ANCESTORS:]) if prefix_keys else None
        return store.dump_data(
            blocks, None, addresses, sizes, parents=parents, ancestors=ancestors, background=False
        ).results()

    def _dump_pages(self, keys: list[str], pages: list[Any], extra_info: Any) -> np.ndarray:
        pages = [page.contiguous() for page in pages]
        addresses, sizes = self._flat_components(pages)
        return self._dump(keys, addresses, sizes, extra_info)

    def _load(self, keys: list[str], addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        store, _, ids = self._attached()
        if self._outdated():
            return np.zeros(len(keys), bool)
        return store.load_data(ids.of(KV_POOL, keys), None, addresses, sizes, background=False).results()

    def _load_pages(self, keys: list[str], targets: list[Any]) -> np.ndarray:
        return self._load(keys, *self._flat_components(targets))

    def _flat_components(self, pages: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Components of flat pages in the order in which zero-copy calls store them."""
        _, layout, _ = self._attached()
        offsets = self._flat_offsets(layout)
        for page in pages:
            if page.nbytes != layout.page_bytes or not page.is_contiguous():
                raise ValueError(
                    f"a flat page of {page.nbytes} bytes where {layout.page_bytes} were expected"
                )
        starts = np.array([page.data_ptr() for page in pages], np.int64)
        return starts[:, None] + offsets, layout.sizes

    def _flat_offsets(self, layout: PoolLayout) -> np.ndarray:
        if layout.flat_offsets is None:
            raise ConfigError(
                f"host pools of kind {type(self.mem_pool_host).__name__} need the zero-copy interface: add "
                '"interface_v1": 1 to the extra config'
            )
        return layout.flat_offsets

    def _get_flat(self, keys: list[str], host_indices: Any) -> list[bool]:
        _, layout, _ = self._attached()
        pool = self.mem_pool_host
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        good = self._load_pages(keys, targets).tolist()
        for start, target, ok in zip(layout.page_starts(host_indices).tolist(), targets, good, strict=True):
            if ok:
                pool.set_from_flat_data_page(start, target)
        return good

    def _record_error(self, method: str, error: Exception) -> None:
        with self._lock:
            self.errors[method] = self.errors.get(method, 0) + 1
            now = time.monotonic()
            say = now - self._logged_at > _LOG_EVERY_SECONDS
            if say:
                self._logged_at = now
        if say:
            logger.error(
                "ucm-sglang: %s failed, which counts as a miss (%d times so far): %s",
                method, self.errors[method], error, exc_info=error,
            )  # fmt: skip


def _refuse_unsupported(storage_config: Any) -> None:
    if storage_config.dcp_size > 1:
        raise ConfigError(
            f"dcp_size = {storage_config.dcp_size}: decode context parallelism is not supported with a "
            "dynamic storage backend; start the server without it"
        )
    if storage_config.is_mla_model and storage_config.attn_cp_size > 1:
        raise ConfigError(
            f"attn_cp_size = {storage_config.attn_cp_size}: SGLang lets only the first rank of an MLA model "
            "write, so the pages of the other context-parallel ranks would never be there; start the server "
            "without it"
        )
    if storage_config.tp_lcm_size:
        raise ConfigError(
            f"tp_lcm_size = {storage_config.tp_lcm_size}: sharing pages between tensor-parallel sizes is not "
            "supported by this version; remove the key"
        )
