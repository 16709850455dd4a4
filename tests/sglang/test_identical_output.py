"""Must hold 1 on true servers: greedy output is the same computed and from storage, in every combination.

All servers share one store root and answer the same prompts, so each of them also shows that it finds nothing
of what those with another layout, page size or model have stored (must hold 2, I5).

By default every pair of I/O backend and layout runs with one page size. UCM_FULL_MATRIX=1 runs them all with
both (about 10 minutes on two quiet cores).
"""

from __future__ import annotations

from typing import Any

import pytest
from cpu_engine.server import CpuServer, Generation, random_prompt
from cpu_engine.settings import IO_LAYOUTS_MHA, IO_LAYOUTS_MLA
from cpu_engine.tiny_model import require_varied_output
from sglang_fleet import Fleet, all_from_storage, assert_same, extra_config, in_full_matrix, namespaces

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("clean_log"),
]

RECOMMENDED = ("qwen3", "direct", "page_first_direct", 64)
DEFAULT = [
    ("qwen3", "direct", "layer_first", 16),
    ("qwen3", "kernel", "layer_first", 64),
    ("qwen3", "kernel", "page_first", 64),
    ("qwen3", "kernel", "page_head", 16),
    ("mla", "kernel", "layer_first", 16),
    ("mla", "direct", "page_first_direct", 64),
    RECOMMENDED,  # last: the tests that follow use this server, too
]
ALL = [
    (kind, *pair, page_size)
    for kind, pairs in (("qwen3", IO_LAYOUTS_MHA), ("mla", IO_LAYOUTS_MLA))
    for pair in pairs
    for page_size in (16, 64)
]
CASES = [
    *(pytest.param(*case, marks=in_full_matrix) for case in ALL if case not in DEFAULT),
    *DEFAULT,
]

# With 16 tokens a page the first is longer than SGLang's batch of 128 pages.
PROMPTS = [random_prompt(2100, seed=1), random_prompt(700, seed=2)]

ANSWERS: dict[tuple[str, str, int], list[Generation]] = {}
"""What servers of this session answered, by what makes their pages interchangeable."""


def generate(server: CpuServer, prompt: list[int]) -> Generation:
    return server.generate(prompt, return_logprob=True)


def first_answers(server: CpuServer, kind: str) -> list[Generation]:
    """The answers to `PROMPTS`: computed, unless a server with equal pages has stored them before.

    How pages are copied between device and host is no part of what they are, so direct + layer_first and
    kernel + layer_first share them.
    """
    equal_pages = (kind, server.settings.mem_layout, server.settings.page_size)
    earlier = ANSWERS.get(equal_pages)
    if earlier is not None:
        for prompt, wanted in zip(PROMPTS, earlier, strict=True):
            assert_from_storage(server, prompt, wanted)
        return earlier
    cold = [generate(server, prompt) for prompt in PROMPTS]
    assert [one.cached_tokens for one in cold] == [0, 0]
    require_varied_output([one.output_ids for one in cold])
    ANSWERS[equal_pages] = cold
    return cold


def assert_from_storage(server: CpuServer, prompt: list[int], wanted: Generation) -> None:
    """After a flush the whole prompt comes from storage, but for what SGLang always computes."""
    server.flush_cache()
    got = generate(server, prompt)
    assert got.storage == all_from_storage(prompt, server.settings.page_size)
    assert (got.device, got.host) == (0, 0)
    assert_same(got, wanted)


def switch_interface(server: CpuServer, config: dict[str, Any]) -> None:
    server.flush_cache()
    server.detach_storage()
    server.attach_storage("dynamic", config)


@pytest.mark.parametrize(("kind", "io_backend", "layout", "page_size"), CASES)
def test_output_is_identical_cold_and_from_storage(
    fleet: Fleet, kind: str, io_backend: str, layout: str, page_size: int
) -> None:
    """Must hold 1, with zero-copy and generic calls, and pages of either read by the other."""
    recommended = (kind, io_backend, layout, page_size) == RECOMMENDED
    server = fleet.get(
        fleet.main_settings()
        if recommended
        else fleet.settings(kind, io_backend=io_backend, mem_layout=layout, page_size=page_size)
    )
    (fields,) = namespaces(fleet.whole_log()).values()
    assert f"layout={layout} " in fields and f"page_size={page_size} " in fields

    cold = first_answers(server, kind)
    for prompt, wanted in zip(PROMPTS, cold, strict=True):
        assert_from_storage(server, prompt, wanted)

    zero_copy, generic = (extra_config(fleet.store, interface_v1=flag) for flag in (1, 0))
    switch_interface(server, generic)
    for prompt, wanted in zip(PROMPTS, cold, strict=True):
        assert_from_storage(server, prompt, wanted)
    prompt = random_prompt(900, seed=3 if io_backend == "direct" else 4)
    later = generate(server, prompt)
    assert later.cached_tokens == 0
    assert_from_storage(server, prompt, later)

    switch_interface(server, zero_copy)
    assert_from_storage(server, prompt, later)
