"""Must hold 4 on a true server: damaged files cost computing, never an answer.

Each test attaches a new store, answers a prompt, flushes, damages the store's files behind the server's back,
and asks again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpu_engine.server import CpuServer, Generation, random_prompt
from sglang_fleet import Fleet, all_from_storage, assert_same, extra_config

from posix_store.segment import PUT, RECORD_BYTES, decode_records

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("clean_log"),
]

PAGE = 64
PROMPT = random_prompt(1300, seed=30)
OTHER = random_prompt(700, seed=31)
PAGES = all_from_storage(PROMPT, PAGE) // PAGE


def stored(server: CpuServer) -> Generation:
    """Store the prompt, alone in its store, and leave nothing of it above the storage."""
    cold = ask(server)
    assert cold.cached_tokens == 0
    server.flush_cache()
    return cold


def segment_of(root: Path) -> Path:
    """The segment with the prompt's pages."""
    (segment,) = root.rglob("*.seg")
    return segment


def extents(segment: Path) -> np.ndarray:
    """Journal records of the stored pages, in the order of the prompt."""
    records, _, damaged = decode_records(segment.with_suffix(".idx").read_bytes()[RECORD_BYTES:])
    assert damaged == 0
    return records[records["kind"] == PUT][:PAGES]


def reopen(server: CpuServer, root: Path) -> None:
    """What a restart does to the store, without the restart."""
    server.detach_storage()
    server.attach_storage("dynamic", extra_config(root))


def ask(server: CpuServer, prompt: list[int] = PROMPT) -> Generation:
    return server.generate(prompt, return_logprob=True)


def assert_served(server: CpuServer, wanted: Generation, pages: int) -> None:
    """The answer is right and exactly this many leading pages of it come from storage."""
    got = ask(server)
    assert_same(got, wanted)
    assert (got.storage, got.cached_tokens) == (pages * PAGE, pages * PAGE)
    server.flush_cache()


def zero_pages(segment: Path, pages: list[int]) -> None:
    with segment.open("r+b") as file:
        for record in extents(segment)[pages]:
            file.seek(int(record["offset"]))
            file.write(bytes(int(record["length"])))


def flip_bits(segment: Path, pages: list[int]) -> None:
    with segment.open("r+b") as file:
        for record in extents(segment)[pages]:
            at = int(record["offset"]) + int(record["length"]) // 3
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), at)


def cut_off(segment: Path, pages: list[int]) -> None:
    os.truncate(segment, int(extents(segment)[pages[0]]["offset"]) + 100)


@pytest.mark.parametrize("damage", [zero_pages, flip_bits, cut_off])
def test_damaged_pages_are_computed_and_stored_again(
    fleet: Fleet, fresh_store: Callable[..., Path], damage: Callable[[Path, list[int]], None]
) -> None:
    """Must hold 4, I1: a burst of damage ends the run of pages before it; computed anew, they are hits."""
    server = fleet.main()
    root = fresh_store()
    cold = stored(server)
    damage(segment_of(root), [5, 6, 7, 12])
    fleet.new_log()
    assert_served(server, cold, pages=5)
    log = fleet.new_log()
    assert "they are misses" in log
    assert_served(server, cold, pages=PAGES)
    reopen(server, root)
    assert_served(server, cold, pages=PAGES)


def test_pages_that_a_truncated_journal_forgot_are_stored_again(
    fleet: Fleet, fresh_store: Callable[..., Path]
) -> None:
    """Must hold 4, I2: what the journal no longer says is absent after a restart, not before."""
    server = fleet.main()
    root = fresh_store()
    cold = stored(server)
    journal = segment_of(root).with_suffix(".idx")
    os.truncate(journal, RECORD_BYTES * 9 + 17)
    assert_served(server, cold, pages=PAGES)
    reopen(server, root)
    got = ask(server)
    assert_same(got, cold)
    assert got.storage < PAGES * PAGE
    server.flush_cache()
    assert_served(server, cold, pages=PAGES)
    reopen(server, root)
    assert_served(server, cold, pages=PAGES)


@pytest.mark.parametrize("what", ["segment", "journal", "namespace"])
def test_deleted_files_are_misses_and_the_next_pages_are_kept(
    fleet: Fleet, fresh_store: Callable[..., Path], what: str
) -> None:
    """Must hold 4: somebody cleans up below a running server; it goes on storing where it can be found."""
    server = fleet.main()
    root = fresh_store()
    cold = stored(server)
    segment = segment_of(root)
    match what:
        case "segment":
            segment.unlink()
        case "journal":
            segment.with_suffix(".idx").unlink()
        case "namespace":
            shutil.rmtree(segment.parent)
    assert_same(ask(server), cold)  # from the open file, or computed
    ask(server, OTHER)
    server.flush_cache()
    reopen(server, root)
    assert ask(server, OTHER).storage == all_from_storage(OTHER, PAGE)
    assert_same(ask(server), cold)
    server.flush_cache()
    assert_served(server, cold, pages=PAGES)


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_root_that_is_gone_costs_nothing_but_hits(
    fleet: Fleet, fresh_store: Callable[..., Path], what: str
) -> None:
    """Must hold 4: as when a file system is unmounted. Answers stay right, nothing is stored elsewhere."""
    server = fleet.main()
    root = fresh_store()
    cold = stored(server)
    shutil.rmtree(root)
    if what == "a file":
        root.write_text("not a directory")
    fleet.new_log()
    for prompt in (PROMPT, OTHER, PROMPT):
        last = ask(server, prompt)
        server.flush_cache()
    assert_same(last, cold)
    assert "blocks go unstored" in fleet.new_log()
    assert root.read_text() == "not a directory" if what == "a file" else not root.exists()
    server.detach_storage()
    root.unlink(missing_ok=True)
    server.attach_storage("dynamic", extra_config(root))
    assert_same(ask(server), cold)
    server.flush_cache()
    assert_served(server, cold, pages=PAGES)


def test_a_full_store_keeps_what_came_last(fleet: Fleet, fresh_store: Callable[..., Path]) -> None:
    """I4, issue 3: room for a few pages only; all is answered, the oldest pages have made room."""
    server = fleet.main()
    root = fresh_store(capacity="4MiB")
    fleet.new_log()
    prompts = [random_prompt(900, seed=40 + i) for i in range(6)]
    cold = [ask(server, prompt) for prompt in prompts]
    server.flush_cache()
    assert "nothing can be evicted" not in fleet.new_log()
    assert sum(path.stat().st_blocks * 512 for path in root.rglob("*")) <= 4 << 20
    hits = []
    for prompt, wanted in zip(reversed(prompts), reversed(cold), strict=True):
        got = ask(server, prompt)
        assert_same(got, wanted)
        hits.append(got.storage)
        server.flush_cache()
    assert hits[0] == all_from_storage(prompts[-1], PAGE) and hits[-1] == 0
    assert sum(path.stat().st_blocks * 512 for path in root.rglob("*")) <= 4 << 20
