"""One true server with our backend: who shares pages, attach, detach and clear over HTTP, errors, the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_engine.server import Generation, ServerError, random_prompt
from cpu_engine.tiny_model import require_varied_output
from sglang_fleet import (
    LORAS,
    Fleet,
    all_from_storage,
    assert_same,
    errors_in,
    extra_config,
    namespaces,
    our_warnings_in,
)

from ucm_sglang import cli

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
clean_log = pytest.mark.usefixtures("clean_log")

PROMPT = random_prompt(1000, seed=20)
EVERYTHING = all_from_storage(PROMPT, 64)


def test_a_good_start_is_announced_without_complaint(fleet: Fleet) -> None:
    """Must hold 2: the log names the namespace and its fields. Recommended settings cause no warning."""
    fleet.main()
    log = fleet.whole_log().partition("The server is fired up")[0]
    assert errors_in(log) == our_warnings_in(log) == []
    (fields,) = namespaces(log).values()
    for field in ("weights=", "kv_dtype=float32", "layout=page_first_direct", "page_size=64", "tp_size=1"):
        assert field in fields


# ---- who shares pages with whom -----------------------------------------------------------------------

ASKED_BY: dict[str, dict[str, str]] = {
    "plain": {},
    "salt x": {"cache_salt": "x"},
    "salt y": {"cache_salt": "y"},
    "key x": {"extra_key": "x"},
    "lora one": {"lora": LORAS[0]},
    "lora two": {"lora": LORAS[1]},
    "lora one, salt x": {"lora": LORAS[0], "cache_salt": "x"},
}


@clean_log
def test_salted_and_lora_requests_share_no_pages(fleet: Fleet, fresh_store: Callable[..., Path]) -> None:
    """Must hold 3; sglang#38577, LMCache#2961, vllm#44250 (LoRA), vllm#44701 (salt "x" is not key "x")."""
    server = fleet.main()
    fresh_store()
    first: dict[str, Generation] = {}
    for who, options in ASKED_BY.items():
        first[who] = server.generate(PROMPT, return_logprob=True, **options)
        assert first[who].cached_tokens == 0, who
        server.flush_cache()
    for who, options in ASKED_BY.items():
        again = server.generate(PROMPT, return_logprob=True, **options)
        assert again.storage == EVERYTHING, who
        assert_same(again, first[who])
        server.flush_cache()
    # The adapters do change the output, so another's pages would have shown.
    require_varied_output([first[who].output_ids for who in ("plain", "lora one", "lora two")])
    assert_same(first["salt x"], first["plain"])


@clean_log
def test_a_common_prefix_is_served_and_the_rest_computed(
    fleet: Fleet, fresh_store: Callable[..., Path]
) -> None:
    """Must hold 1: a prompt that shares 10 of its pages with a stored one; the rest of those stays unused."""
    server = fleet.main()
    fresh_store()
    server.generate(PROMPT)
    fork = PROMPT[: 10 * 64 + 17] + random_prompt(600, seed=21)
    server.flush_cache()
    got = server.generate(fork, return_logprob=True)
    assert (got.cached_tokens, got.storage) == (10 * 64, 10 * 64)
    assert_same(got, server.generate(fork, return_logprob=True, cache_salt="computed anew"))
    server.flush_cache()
    assert server.generate(fork).storage == all_from_storage(fork, 64)


# ---- administration over HTTP -------------------------------------------------------------------------


@clean_log
def test_detached_the_server_goes_on_and_leaves_the_store_alone(
    fleet: Fleet, fresh_store: Callable[..., Path]
) -> None:
    """A detach (I9): nothing is read or written afterwards, and attached again all is there."""
    server = fleet.main()
    root = fresh_store()
    wanted = server.generate(PROMPT, return_logprob=True)
    server.flush_cache()
    server.detach_storage()
    before = contents(root)
    got = server.generate(PROMPT, return_logprob=True)
    assert got.cached_tokens == 0
    assert_same(got, wanted)
    server.generate(random_prompt(700, seed=22))
    server.flush_cache()
    assert contents(root) == before
    server.attach_storage("dynamic", extra_config(root))
    got = server.generate(PROMPT, return_logprob=True)
    assert got.storage == EVERYTHING
    assert_same(got, wanted)


@clean_log
def test_clear_empties_this_namespace_and_nothing_else(
    fleet: Fleet, fresh_store: Callable[..., Path]
) -> None:
    """I7; SGLang's own `file` backend deletes other models' pages and foreign files (facts, sglang#9750)."""
    server = fleet.main()
    root = fresh_store(tag="other")
    wanted = server.generate(PROMPT, return_logprob=True)
    server.flush_cache()
    server.detach_storage()
    (root / "notes.txt").write_text("mine")
    others = contents(root)

    server.attach_storage("dynamic", extra_config(root))
    assert server.generate(PROMPT).storage == 0
    server.flush_cache()
    assert server.generate(PROMPT).storage == EVERYTHING
    server.wait_idle()
    server.clear_storage()
    server.flush_cache()
    after = contents(root)
    assert {path: after.get(path) for path in others} == others
    got = server.generate(PROMPT, return_logprob=True)
    assert got.cached_tokens == 0
    assert_same(got, wanted)
    server.flush_cache()
    assert server.generate(PROMPT).storage == EVERYTHING

    server.flush_cache()
    server.detach_storage()
    server.attach_storage("dynamic", extra_config(root, tag="other"))
    assert server.generate(PROMPT).storage == EVERYTHING


@clean_log
def test_the_command_line_reads_the_store_of_a_running_server(
    fleet: Fleet, fresh_store: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 2: `stats` and `verify` read a store while a server uses it, and do not disturb it."""
    server = fleet.main()
    root = fresh_store()
    server.generate(PROMPT)
    server.flush_cache()
    before = contents(root)
    assert cli.main(["stats", str(root)]) == 0
    assert cli.main(["verify", str(root)]) == 0
    assert next(iter(namespaces(fleet.whole_log()))) in capsys.readouterr().out
    assert contents(root) == before
    assert server.generate(PROMPT).storage == EVERYTHING


WRONG_CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"capcity": "1GiB"}, ["capcity", "did you mean capacity"]),
    ({"capacity": "lots"}, ["capacity", "'lots'", "give whole bytes"]),
    ({"timeout": 20}, ["timeout", "20", "less than 9"]),
    ({"path": "kv"}, ["path", "'kv'", "absolute"]),
    ({"path": "/dev/null"}, ["path", "/dev/null", "not a directory"]),
    ({"path": "/etc"}, ["path", "/etc"]),
    ({"verify": "maybe", "io_threads": 0}, ["2 wrong keys", "verify", "io_threads"]),
]


def test_a_wrong_configuration_is_refused_and_the_server_lives_on(
    fleet: Fleet, fresh_store: Callable[..., Path]
) -> None:
    """I3, must hold 4: the answer names the key, the value and the fix; the next attach works."""
    server = fleet.main()
    root = fresh_store()
    wanted = server.generate(PROMPT, return_logprob=True)
    server.flush_cache()
    server.detach_storage()
    for change, words in WRONG_CONFIGS:
        with pytest.raises(ServerError) as caught:
            server.attach_storage("dynamic", {**extra_config(root), **change})
        answer = str(caught.value).split("End of", maxsplit=1)[0]
        assert "answered 400" in answer
        assert [word for word in words if word not in answer] == [], answer
    assert server.generate(PROMPT).cached_tokens == 0
    server.flush_cache()
    server.attach_storage("dynamic", extra_config(root))
    got = server.generate(PROMPT, return_logprob=True)
    assert got.storage == EVERYTHING
    assert_same(got, wanted)


# ---- helpers ------------------------------------------------------------------------------------------


def contents(root: Path) -> dict[str, bytes]:
    """Every file under a root with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
