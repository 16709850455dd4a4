"""Must hold 2 and 6 on true servers: restarts, crashes, other identities, and two servers on one store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cpu_engine.server import CpuServer, Generation, ServerError, random_prompt
from cpu_engine.tiny_model import require_varied_output
from sglang_fleet import (
    LORAS,
    Fleet,
    all_from_storage,
    assert_same,
    errors_in,
    extra_config,
    in_full_matrix,
    namespaces,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("clean_log"),
]

PROMPT = random_prompt(1500, seed=50)
EVERYTHING = all_from_storage(PROMPT, 64)


def ask(server: CpuServer, prompt: list[int] = PROMPT, **options: Any) -> Generation:
    return server.generate(prompt, return_logprob=True, **options)


@pytest.fixture(scope="session")
def reference(fleet: Fleet) -> Generation:
    """The main server's answer, computed, and stored in the store that all servers share."""
    server = fleet.main()
    for options in ({}, {"lora": LORAS[0]}):
        ask(server, **options)
    cold = ask(server, cache_salt="a cold reference at any time")
    assert cold.cached_tokens == 0
    server.flush_cache()
    return cold


def assert_served(server: CpuServer, prompt: list[int], wanted: Generation) -> None:
    got = ask(server, prompt)
    assert got.storage == all_from_storage(prompt, server.settings.page_size)
    assert_same(got, wanted)


def assert_foreign(fleet: Fleet, server: CpuServer, *expected: str) -> Generation:
    """It finds its own pages and nobody else's; the log says who it is. Returns its cold answer."""
    cold = ask(server)
    assert cold.cached_tokens == 0
    server.flush_cache()
    assert_served(server, PROMPT, cold)
    announced = namespaces(fleet.whole_log())
    assert len(announced) == server.settings.tp_size
    for digest, fields in announced.items():
        assert (fleet.store / digest / "NAMESPACE.json").is_file()
        assert [word for word in expected if word not in fields] == []
    return cold


# ---- the same server again ----------------------------------------------------------------------------


def test_after_a_restart_the_prompt_comes_from_storage(fleet: Fleet, reference: Generation) -> None:
    """Must hold 2: stopped and started again."""
    fleet.stop()
    assert_served(fleet.main(), PROMPT, reference)


def test_a_killed_server_loses_nothing_that_was_stored(fleet: Fleet, reference: Generation) -> None:
    """Must hold 2, 5 and I2: SIGKILL to all its processes while it computes and stores other prompts."""
    server = fleet.main()
    busy = [random_prompt(1200, seed=60 + i) for i in range(6)]
    first_done = threading.Event()

    def keep_busy() -> None:
        try:
            for prompt in busy:
                server.generate(prompt)
                first_done.set()
        except ServerError:
            pass  # killed

    thread = threading.Thread(target=keep_busy)
    thread.start()
    assert first_done.wait(120)
    fleet.kill()
    thread.join()
    server = fleet.main()
    assert_served(server, PROMPT, reference)
    for i, prompt in enumerate(busy[:3]):
        got = ask(server, prompt)
        assert_same(got, ask(server, prompt, cache_salt=f"computed anew {i}"))


# ---- two at a time ------------------------------------------------------------------------------------


@contextmanager
def second_server(fleet: Fleet) -> Iterator[CpuServer]:
    server = fleet.another(fleet.main_settings())
    try:
        yield server
    finally:
        server.kill()


def test_two_servers_on_one_store_see_each_others_pages(fleet: Fleet, reference: Generation) -> None:
    """Must hold 6: both ways, without a restart of either, and also after one of them was killed."""
    first = fleet.main()
    new = [random_prompt(800, seed=70 + i) for i in range(3)]
    with second_server(fleet) as second:
        assert_served(second, PROMPT, reference)
        assert ask(first, new[1]).cached_tokens == 0  # so it has looked at the other's journal already
        for storing, finding, prompt in ((second, first, new[0]), (first, second, new[2])):
            cold = ask(storing, prompt)
            assert cold.cached_tokens == 0
            storing.wait_idle()
            assert_served(finding, prompt, cold)
        last = random_prompt(800, seed=79)
        cold = ask(second, last)
        second.wait_idle()
        log = second.log.read_text(errors="replace")
        second.kill()
        assert errors_in(log) == []
    assert_served(first, last, cold)


# ---- another identity on the same store ---------------------------------------------------------------


def test_weights_replaced_in_a_running_server_find_nothing(fleet: Fleet, reference: Generation) -> None:
    """I1, I5: SGLang empties its own caches then, but does not tell the storage. Attached anew it works."""
    server = fleet.main()
    server.flush_cache()
    assert_served(server, PROMPT, reference)
    server.wait_idle()
    try:
        server.update_weights(fleet.unrelated_model())
        got = ask(server)
        assert got.cached_tokens == 0
        require_varied_output([got.output_ids, reference.output_ids])
        server.flush_cache()
        assert ask(server).cached_tokens == 0  # nor was it stored
        server.flush_cache()
        server.detach_storage()
        server.attach_storage("dynamic", extra_config(fleet.store, weights_fingerprint="unrelated"))
        cold = ask(server)
        assert cold.cached_tokens == 0
        assert_same(cold, got)
        server.flush_cache()
        assert_served(server, PROMPT, cold)
    finally:
        fleet.stop()


def test_other_weights_under_the_same_path_find_nothing(fleet: Fleet, reference: Generation) -> None:
    """Must hold 2, sglang#24758: the name is the same, the weights are not."""
    with fleet.other_weights("qwen3", seed=1):
        server = fleet.main()
        cold = assert_foreign(fleet, server, f"model={fleet.model()} ", "weights=")
        require_varied_output([cold.output_ids, reference.output_ids])


def test_a_replaced_lora_adapter_finds_nothing(fleet: Fleet, reference: Generation) -> None:
    """I5: SGLang's id of an adapter is its name and path: only our namespace tells new weights from old."""
    with fleet.other_weights(LORAS[0]):
        server = fleet.main()
        new = ask(server, lora=LORAS[0])
        assert new.cached_tokens == 0
        server.flush_cache()
        got = ask(server, lora=LORAS[0])
        assert got.storage == EVERYTHING
        assert_same(got, new)


def test_another_kv_dtype_finds_nothing(fleet: Fleet, reference: Generation) -> None:
    """Must hold 2, sglang#33268: the same weights and computation, a cache in bfloat16."""
    server = fleet.get(fleet.main_settings(kv_cache_dtype="bfloat16"))
    assert_foreign(fleet, server, "kv_dtype=bfloat16", "model_dtype=float32")


def test_other_tp_size_finds_nothing_and_each_rank_keeps_its_own(fleet: Fleet, reference: Generation) -> None:
    """Must hold 2, I5: two ranks store half of the heads each, in two namespaces, and both must hit."""
    server = fleet.get(fleet.main_settings(tp_size=2))
    assert_foreign(fleet, server, "tp_size=2", "head_num=1")
    fields = namespaces(fleet.whole_log()).values()
    assert sorted(field.split("tp_rank=")[1][0] for field in fields) == ["0", "1"]


@in_full_matrix
def test_mla_ranks_share_one_copy(fleet: Fleet) -> None:
    """I5: the ranks of an MLA model hold the same bytes: one namespace, written by rank 0, read by both."""
    before = set(fleet.store.glob("*/*.seg"))
    server = fleet.get(fleet.settings("mla", tp_size=2))
    prompt = random_prompt(1500, seed=51)
    cold = ask(server, prompt)
    assert cold.cached_tokens == 0
    server.flush_cache()
    assert_served(server, prompt, cold)
    ((digest, fields),) = namespaces(fleet.whole_log()).items()
    assert "attention=mla" in fields and "tp_rank" not in fields
    (written,) = set(fleet.store.glob("*/*.seg")) - before
    assert written.parent.name == digest
