"""The adapter under SGLang's real controller and pools: every byte, every refusal, every miss."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs the SGLang environment")

from cpu_engine.controller import ControllerRig, Ranks
from cpu_engine.settings import IO_LAYOUTS_MHA, IO_LAYOUTS_MLA

from ucm_sglang.config import ConfigError

pytestmark = pytest.mark.sglang

PAGES = 20
COMBINATIONS = [
    *(("mha", *pair) for pair in IO_LAYOUTS_MHA),
    *(("mla", *pair) for pair in IO_LAYOUTS_MLA),
]

MakeRig = Callable[..., ControllerRig]


def extra_config(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "ucm",
        "module_path": "ucm_sglang.hicache",
        "class_name": "UcmHiCacheStorage",
        "interface_v1": 1,
        "path": str(root),
        "capacity": "1GiB",
        "min_free": 0,
        "weights_fingerprint": "weights-a",
        **more,
    }


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(f"/dev/shm/ucm-test-{os.getpid()}")
    shutil.rmtree(path, ignore_errors=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def rig(root: Path) -> Iterator[MakeRig]:
    """Makes rigs on one store, one open at a time: a new one stands for a restarted server."""
    opened: list[ControllerRig] = []

    def make(config: dict[str, Any] | None = None, **arguments: Any) -> ControllerRig:
        if opened:
            opened.pop().close()
        made = ControllerRig(
            backend="dynamic", extra_config=extra_config(root, **(config or {})), **arguments
        )
        opened.append(made)
        return made

    yield make
    if opened:
        opened.pop().close()


def store_pages(rig: ControllerRig, pages: int = PAGES) -> list[Any]:
    """Store a chain; the bytes on the device that were stored."""
    device = rig.fill(pages)
    wanted = rig.read_device(device)
    assert rig.backup(rig.to_host(device), rig.tokens(pages)) == pages
    return wanted


def hits(rig: ControllerRig, pages: int = PAGES) -> int:
    return rig.prefetch(rig.tokens(pages)).hit_pages


def assert_served(rig: ControllerRig, wanted: list[Any], pages: int = PAGES) -> None:
    """The whole chain comes back from storage with every byte as it was."""
    got = rig.prefetch(rig.tokens(pages))
    assert got.completed_pages == pages
    for before, after in zip(wanted, rig.read_device(rig.load(got.host_indices)), strict=True):
        assert (before == after).all()


@pytest.mark.parametrize("zero_copy", [1, 0], ids=["v1", "generic"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("kind", "io_backend", "layout"), COMBINATIONS)
def test_every_byte_survives_a_round_trip(
    rig: MakeRig, kind: str, io_backend: str, layout: str, page_size: int, zero_copy: int
) -> None:
    """Must hold 1: device to host to storage and back, pages in shuffled order, in every combination."""
    made = rig(
        {"interface_v1": zero_copy}, kind=kind, page_size=page_size, layout=layout, io_backend=io_backend
    )
    trip = made.round_trip(PAGES)
    assert (trip.stored_pages, trip.hit_pages, trip.completed_pages) == (PAGES, PAGES, PAGES)
    assert trip.identical
    assert made.storage.errors == {}


@pytest.mark.parametrize("first", [1, 0], ids=["v1-first", "generic-first"])
@pytest.mark.parametrize(("kind", "io_backend", "layout"), COMBINATIONS)
def test_zero_copy_and_generic_calls_share_pages(
    rig: MakeRig, kind: str, io_backend: str, layout: str, first: int
) -> None:
    """Switching `interface_v1` neither loses pages nor permutes their bytes (I1)."""
    arguments = {"kind": kind, "layout": layout, "io_backend": io_backend}
    wanted = store_pages(rig({"interface_v1": first}, **arguments))
    assert_served(rig({"interface_v1": 1 - first}, **arguments), wanted)


def test_a_restarted_server_is_served_from_storage(rig: MakeRig) -> None:
    """Must hold 2."""
    wanted = store_pages(rig())
    assert_served(rig(), wanted)


OTHER_IDENTITIES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "page size": {"page_size": 32},
    "layout": {"layout": "page_first", "io_backend": "kernel"},
    "weights": {"config": {"weights_fingerprint": "weights-b"}},
    "tag": {"config": {"tag": "another tenant"}},
    "model": {"model_name": "another"},
    "layers": {"layers": 8, "heads": 1},
    "heads": {"heads": 4, "head_dim": 32},
    "tp size": {"ranks": Ranks(tp_rank=0, tp_size=2)},
    "tp rank": {"ranks": Ranks(tp_rank=1, tp_size=2)},
    "pp": {"ranks": Ranks(pp_rank=1, pp_size=2)},
    "cp": {"ranks": Ranks(tp_rank=0, tp_size=2, cp_size=2)},
    "kv dtype argument": {"server_args": {"quantization": "fp8"}},
    "rope scaling": {"server_args": {"json_model_override_args": '{"rope_theta": 1.0}'}},
}


@pytest.mark.parametrize("change", OTHER_IDENTITIES)
def test_another_identity_finds_nothing(rig: MakeRig, change: str, caplog: pytest.LogCaptureFixture) -> None:
    """Must hold 2, I5, sglang#33268, sglang#24758, sglang#26670: zero hits, and the log says what it is."""
    import torch

    arguments = dict(OTHER_IDENTITIES[change])
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    store_pages(rig())
    assert hits(rig()) == PAGES
    with caplog.at_level(logging.INFO, "ucm_sglang.hicache"):
        made = rig(**arguments)
    assert hits(made) == 0
    line = next(record.getMessage() for record in caplog.records if "in namespace" in record.getMessage())
    assert made.storage.namespace.hexdigest() in line
    for field in ("kv_dtype=", "page_size=", "layout=", "weights=", "tp_size="):
        assert field in line
    assert hits(rig()) == PAGES


def test_fp8_kinds_are_told_apart(rig: MakeRig) -> None:
    """sglang#33268: e4m3 and e5m2 are both stored as uint8; only the server's arguments differ."""
    import torch

    arguments = {"dtype": torch.float8_e4m3fn, "server_args": {"kv_cache_dtype": "fp8_e4m3"}}
    store_pages(rig(**arguments))
    assert hits(rig(**arguments)) == PAGES
    assert hits(rig(dtype=torch.float8_e5m2, server_args={"kv_cache_dtype": "fp8_e5m2"})) == 0


def test_weights_changed_under_the_same_path_find_nothing(rig: MakeRig, tmp_path: Path) -> None:
    """Must hold 2, sglang#24758: the fingerprint, not the path, is the identity of the weights."""
    (tmp_path / "config.json").write_text('{"architectures": ["Any"]}')
    weights = tmp_path / "model.bin"
    weights.write_bytes(bytes(10_000))
    arguments = {"config": {"weights_fingerprint": "auto"}, "server_args": {"model_path": str(tmp_path)}}
    store_pages(rig(**arguments))
    assert hits(rig(**arguments)) == PAGES
    changed = bytearray(10_000)
    changed[5_000] = 1
    weights.write_bytes(changed)
    assert hits(rig(**arguments)) == 0


def test_mla_is_written_once_and_read_by_all_ranks(rig: MakeRig) -> None:
    """I5: the ranks of an MLA model hold the same bytes, so their keys have no rank and rank 0 writes."""
    wanted = store_pages(rig(kind="mla", ranks=Ranks(tp_rank=0, tp_size=2)))
    other = rig(kind="mla", ranks=Ranks(tp_rank=1, tp_size=2))
    assert_served(other, wanted)
    before = other.storage._store.stats().blocks
    host = other.to_host(other.fill(PAGES))
    keys = other.hashes(other.tokens(PAGES, seed=7))
    assert all(other.storage.batch_set_v1(keys, host))
    assert other.storage._store.stats().blocks == before


def test_dp_attention_replicas_share_pages(rig: MakeRig) -> None:
    """With dp attention the rank within the attention group decides the bytes, not the replica."""
    wanted = store_pages(rig(ranks=Ranks(tp_rank=0, tp_size=4, dp_size=2)))
    assert_served(rig(ranks=Ranks(tp_rank=2, tp_size=4, dp_size=2)), wanted)
    assert hits(rig(ranks=Ranks(tp_rank=1, tp_size=4, dp_size=2))) == 0


def damage_first_block(root: Path, made: ControllerRig, block: int) -> None:
    (segment,) = [path for path in root.rglob("*.seg") if path.stat().st_size > 4096]
    page = made.storage._layout.page_bytes
    with segment.open("r+b") as file:
        file.seek(4096 + block * page + page // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("zero_copy", [1, 0], ids=["v1", "generic"])
def test_a_flipped_bit_ends_the_prefix_before_it_and_is_healed(
    rig: MakeRig, root: Path, zero_copy: int
) -> None:
    """Must hold 4, I1: SGLang uses the leading run of pages; the bad page is stored again later."""
    made = rig({"interface_v1": zero_copy})
    store_pages(made)
    damage_first_block(root, made, block=5)
    made = rig({"interface_v1": zero_copy})
    got = made.prefetch(made.tokens(PAGES))
    assert (got.hit_pages, got.completed_pages) == (PAGES, 5)
    assert made.storage._store.counters.misses == {"checksum": 1}
    assert hits(made) == 5
    wanted = store_pages(made)
    assert hits(made) == PAGES
    del wanted


def test_a_store_that_fails_everywhere_raises_nowhere(
    rig: MakeRig, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I3: whatever breaks below, an engine thread sees misses and unstored pages, and the log says why."""
    made = rig()
    store_pages(made)
    storage = made.storage
    host = made.to_host(made.fill(PAGES))
    keys = made.hashes(made.tokens(PAGES))
    for method in ("lookup_on_prefix", "load_data", "dump_data", "clear"):
        monkeypatch.setattr(storage._store, method, _broken)
    assert storage.batch_exists(keys) == 0
    assert storage.exists(keys[0]) is False
    assert storage.batch_get_v1(keys, host) == [False] * PAGES
    assert storage.batch_set_v1(keys, host) == [False] * PAGES
    pages = [made.host_pool.get_data_page(int(host[i * made.page_size])) for i in range(PAGES)]
    assert storage.batch_get(keys, pages) == [None] * PAGES
    assert storage.batch_set(keys, pages) is False
    assert storage.get(keys[0], pages[0]) is None
    assert storage.set(keys[0], pages[0]) is False
    storage.clear()
    assert storage.errors == {
        "batch_exists": 2, "batch_get_v1": 1, "batch_set_v1": 1, "batch_get": 2, "batch_set": 2, "clear": 1,
    }  # fmt: skip
    assert sum("counts as a miss" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.undo()
    assert storage.batch_exists(keys) == PAGES


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def test_wrong_arguments_are_misses(rig: MakeRig) -> None:
    """I3, I5: host indices that are not whole pages are refused, not guessed at."""
    made = rig()
    host = made.to_host(made.fill(2))
    keys = made.hashes(made.tokens(2))
    assert made.storage.batch_set_v1(keys, host[:-1]) == [False, False]
    assert made.storage.batch_set_v1(keys, host + 1) == [False, False]
    assert made.storage.batch_get_v1(keys, host + 10**9) == [False, False]
    assert made.storage.batch_set_v1(keys, host) == [True, True]


def test_calls_before_attach_and_after_close_are_misses(rig: MakeRig) -> None:
    made = rig()
    storage = made.storage
    store_pages(made)
    host = made.to_host(made.fill(PAGES))
    keys = made.hashes(made.tokens(PAGES))
    storage.close()
    storage.close()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, host) == [False] * PAGES
    storage.clear()


def test_clear_touches_only_its_own_namespace(rig: MakeRig, root: Path) -> None:
    """I7: in-tree `file` deletes other models' pages and foreign files (facts; sglang#9750)."""
    store_pages(rig(model_name="other"))
    foreign = root / "README.txt"
    made = rig()
    store_pages(made)
    foreign.write_text("mine")
    made.storage.clear()
    assert hits(made) == 0
    assert foreign.read_text() == "mine"
    foreign.unlink()
    assert hits(rig(model_name="other")) == PAGES


def test_prefix_keys_become_parents_in_the_journal(rig: MakeRig, root: Path) -> None:
    """The chain is on disk: the first page of a batch knows the last of `prefix_keys` as its parent."""
    from posix_store.segment import PUT, decode_records

    made = rig()
    device = made.fill(4)
    tokens = made.tokens(8)
    keys = made.hashes(tokens)
    page = made.page_size
    made.backup(made.to_host(device), tokens[4 * page :], keys[4:], keys[:4])
    (journal,) = root.rglob("*.idx")
    records, _, _ = decode_records(journal.read_bytes()[64:])
    records = records[records["kind"] == PUT]
    ids = made.storage._ids.of("kv", keys)
    assert records["id"].tobytes() == ids[4 * 16 :]
    assert records["parent"].tobytes() == ids[3 * 16 : 7 * 16]


def test_a_read_only_root_serves_hits_and_stores_nothing(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I4: a read-only disk means unstored pages, not a server that does not start."""
    import errno

    from posix_store.root import StoreRoot

    wanted = store_pages(rig())

    def read_only(self: Any, path: str, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(StoreRoot, "write_file", read_only)
    made = rig({"capacity": "2GiB"})
    assert_served(made, wanted)
    tokens = made.tokens(PAGES, seed=9)
    assert made.backup(made.to_host(made.fill(PAGES)), tokens) == 0
    assert "READ-ONLY" in caplog.text or made.storage._store.counters.unstored


def test_settings_that_hurt_are_named_once_with_the_fix(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang#13140: without `interface_v1` SGLang copies each page; small pieces make small I/O."""
    rig({"interface_v1": 0}, layout="layer_first")
    assert caplog.text.count('"interface_v1": 1') == 1
    assert caplog.text.count("page_first_direct") == 1
    caplog.clear()
    rig(page_size=64)
    assert not [record for record in caplog.records if record.name == "ucm_sglang.hicache"
                and record.levelno >= logging.WARNING]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"capcity": "1GiB"}, ["capcity", "capacity"]),
        ({"capacity": "lots"}, ["capacity", "lots"]),
        ({"path": "/dev/null"}, ["path", "/dev/null", "not a directory"]),
        ({"path": "/proc/1"}, ["path", "/proc/1"]),
        ({"timeout": 20}, ["timeout", "20"]),
        ({"tp_lcm_size": 4}, ["tp_lcm_size", "4"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_configuration_fails_the_attach(rig: MakeRig, config: dict[str, Any], words: list[str]) -> None:
    """I3: with the key, the value and the fix."""
    with pytest.raises(ValueError) as caught:
        rig(config)
    assert not [word for word in words if word not in str(caught.value)]


def test_models_with_more_pools_are_refused_at_attach(rig: MakeRig) -> None:
    """sglang#23043: a model whose pages need companions is declined at start, not at request time."""
    made = rig()
    storage = made.storage
    storage.register_mem_host_pool_v2(storage.mem_pool_host, "mamba")
    with pytest.raises(ConfigError, match="mamba"):
        storage.on_host_pools_registered()


def test_after_a_weight_update_nothing_old_is_served(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I1, I5, sglang#24758: SGLang flushes its caches after `/update_weights_from_disk`, and so must L3.

    SGLang's own method is called, on an updater whose flush does nothing, as the scheduler calls it.
    """
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from ucm_sglang.sglang_facts import weight_updates

    monkeypatch.setattr(weight_updates, "count", weight_updates.count)
    made = rig()
    store_pages(made)
    host = made.to_host(made.fill(PAGES))
    keys = made.hashes(made.tokens(PAGES))
    updater = object.__new__(SchedulerWeightUpdaterManager)
    object.__setattr__(updater, "flush_cache", lambda **_: True)
    updater.flush_cache_after_weight_update(
        SimpleNamespace(flush_cache=True, torch_empty_cache=False), True, ""
    )
    assert "weights_fingerprint" in caplog.text
    assert made.storage.batch_exists(keys) == 0
    assert not any(made.storage.batch_get_v1(keys, host))
    assert not any(made.storage.batch_set_v1(keys, host))
    with pytest.raises(ConfigError, match="weights_fingerprint"):
        rig({"weights_fingerprint": "auto"})
    assert hits(rig({"weights_fingerprint": "weights-b"})) == 0
    assert hits(rig()) == PAGES


def test_sglang_own_injectors(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Must hold 8: with random failures and delays injected by SGLang, what is loaded is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    complete = 0
    made = rig()
    for seed, _ in itertools.product(range(12), range(1)):
        trip = made.round_trip(PAGES, tokens_seed=seed)
        assert trip.identical
        complete += trip.completed_pages == PAGES
    assert 0 < complete < 12
