"""Public reports on disk tiers that need SGLang to be shown (issue 3): its real controller and pools.

The others are in tests/test_pain_*.py. Each test is named after a report and shows its scenario in small.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs the SGLang environment")

import torch
from cpu_engine.controller import ControllerRig, Ranks
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from ucm_sglang.config import ConfigError

pytestmark = pytest.mark.sglang

PAGES = 6
SMALL: dict[str, Any] = {"pages": 16, "layers": 2}
MakeRig = Callable[..., ControllerRig]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs on one store, one open at a time: a new one stands for a restarted server."""
    opened: list[ControllerRig] = []

    def make(**arguments: Any) -> ControllerRig:
        if opened:
            opened.pop().close()
        config = {
            "backend_name": "ucm", "module_path": "ucm_sglang.hicache", "class_name": "UcmHiCacheStorage",
            "interface_v1": 1, "path": str(tmp_path / "store"), "capacity": "64MiB", "min_free": 0,
            "weights_fingerprint": "weights-a",
        }  # fmt: skip
        opened.append(ControllerRig(backend="dynamic", extra_config=config, **{**SMALL, **arguments}))
        return opened[0]

    yield make
    if opened:
        opened.pop().close()


def store_pages(rig: ControllerRig) -> None:
    """Store a chain of pages."""
    assert rig.backup(rig.to_host(rig.fill(PAGES)), rig.tokens(PAGES)) == PAGES


def hits(rig: ControllerRig) -> int:
    return rig.prefetch(rig.tokens(PAGES)).hit_pages


def test_a1_sglang_33268_another_kv_dtype_is_another_namespace(rig: MakeRig) -> None:
    """Both fp8 kinds are stored as uint8: after a restart with the other the sizes fitted, garbled output.

    Here the dtype comes from the server's arguments and the pool, and the other kind finds nothing. (I5)
    """
    e4m3 = {"dtype": torch.float8_e4m3fn, "server_args": {"kv_cache_dtype": "fp8_e4m3"}}
    store_pages(rig(**e4m3))
    assert hits(rig(dtype=torch.float8_e5m2, server_args={"kv_cache_dtype": "fp8_e5m2"})) == 0
    assert hits(rig(**e4m3)) == PAGES


def test_a4_sglang_26670_context_parallel_ranks_have_pages_of_their_own(rig: MakeRig) -> None:
    """The ranks of one context-parallel group wrote one file: garbled output.

    Here the rank is in the namespace; where SGLang lets only the first rank write (MLA), the start is
    refused. (I5)
    """
    store_pages(rig(ranks=Ranks(tp_rank=0, tp_size=2, cp_size=2)))
    assert hits(rig(ranks=Ranks(tp_rank=1, tp_size=2, cp_size=2))) == 0
    assert hits(rig(ranks=Ranks(tp_rank=0, tp_size=2, cp_size=2))) == PAGES
    with pytest.raises(ValueError, match="attn_cp_size"):
        rig(kind="mla", ranks=Ranks(tp_rank=0, tp_size=2, cp_size=2))


@pytest.mark.parametrize("name", [PoolName.INDEXER, PoolName.DEEPSEEK_V4_C1_INDEXER])
def test_a10_sglang_31108_30057_30321_fewer_sidecar_pages_than_kv_pages(rig: MakeRig, name: PoolName) -> None:
    """Fewer pages of the sparse indexer than KV pages were loaded: garbled output.

    Here such models are declined at the start, and a hit that needs another pool is no hit. (I5)
    """
    _assert_declined(rig(), name)


def test_a13_sglang_32176_a_draft_model_s_pages_come_together_or_not_at_all(rig: MakeRig) -> None:
    """The draft model's KV was not restored with its target's: no error, and acceptance fell to a third.

    Here servers with a pool for the draft are declined at the start.
    """
    _assert_declined(rig(), PoolName.DRAFT)


def _assert_declined(made: ControllerRig, name: PoolName) -> None:
    store_pages(made)
    keys = made.hashes(made.tokens(PAGES))
    assert made.storage.batch_exists(keys) == PAGES
    transfers = [PoolTransfer(name=name, keys=keys)]
    found = made.storage.batch_exists_v2(keys, transfers)
    assert found.kv_hit_pages == 0
    assert made.storage.batch_get_v2(transfers) == {name: [False] * PAGES}
    assert made.storage.batch_set_v2(transfers) == {name: [False] * PAGES}
    made.storage.register_mem_host_pool_v2(made.host_pool, name)
    with pytest.raises(ConfigError, match=name.value):
        made.storage.on_host_pools_registered()


def test_a16_vllm_49438_auto_is_resolved(rig: MakeRig) -> None:
    """With the dtype "auto" in the key, a cache of float16 and one of bfloat16 had one name.

    Here the dtype of the live pool counts, whatever the arguments say. (I5)
    """
    auto = {"server_args": {"kv_cache_dtype": "auto"}}
    made = rig(dtype=torch.bfloat16, **auto)
    assert made.storage.namespace.kv_dtype == "bfloat16"
    store_pages(made)
    made = rig(dtype=torch.float16, **auto)
    assert made.storage.namespace.kv_dtype == "float16" and hits(made) == 0


def test_b11_sglang_38428_no_exception_ends_the_backup_thread(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the backend ended SGLang's backup thread: host memory was never released again.

    Here the store raises, SGLang is told that nothing was stored, and its thread stores the next pages. (I3)
    """
    made = rig()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(made.storage._store, "dump_data", broken)
        patch.setattr(made.storage._store, "lookup_on_prefix", broken)
        host = made.to_host(made.fill(PAGES))
        assert made.backup(host, made.tokens(PAGES)) == 0
        assert hits(made) == 0
    assert made.storage.errors == {"batch_set_v1": 1, "batch_exists": 1}
    assert made.backup(host, made.tokens(PAGES)) == PAGES
    assert hits(made) == PAGES


def test_b12_sglang_36882_38483_no_thread_is_left(rig: MakeRig) -> None:
    """Threads leaked each time a backend was detached, or died in it.

    Here attach, use and detach three times leave no thread behind.
    """
    made = rig()
    store_pages(made)
    made.storage.close()
    count = None
    for _ in range(3):
        made = rig()
        assert hits(made) == PAGES
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("posix-store")]
        count = count or len(ours)
        assert len(ours) == count
    made.storage.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("posix-store")]
