"""`ucm-sglang inspect`: namespaces and single blocks, beside processes that write them."""

import time
from pathlib import Path

import numpy as np
import pytest
from clikit import (
    BLOCK,
    IDENTITY,
    NAMESPACE,
    dump,
    dump_chain,
    flip,
    live_writer,
    only,
    refusal,
    report,
    run,
    tree,
)

from posix_store import PosixStore
from posix_store.segment import EXTENT_ALIGNMENT
from ucm_sglang.identity import KV_POOL, BlockIds

KEYS = [f"page-{number}" for number in range(6)]
OTHER = "cd" * 16


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is to be."""
    return str(tmp_path / "kv")


def the_block(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, object]:
    (block,) = report(capsys, "inspect", *argv, status=status)["blocks"]
    return block


# -- namespaces -----------------------------------------------------------------------------------------


def test_a_namespace_that_a_process_writes_and_the_same_afterwards(path, capsys):
    """Issue 3: namespaces with their identity, blocks, bytes, age and live writers, while a server runs."""
    began = time.time()
    dump(path)
    with live_writer(path) as process:
        (entry,) = report(capsys, "inspect", path)["namespaces"]
        assert (entry["served"], entry["live_writers"]) == (True, 1)
        assert process.poll() is None
    (after,) = report(capsys, "inspect", path)["namespaces"]
    assert (after["served"], after["live_writers"]) == (False, 0)
    assert after["blocks"] >= entry["blocks"] >= 28
    assert after["payload_bytes"] == after["blocks"] * BLOCK
    assert after["identity"] == IDENTITY
    assert (
        int(began)
        <= after["oldest_stored"]
        <= after["newest_stored"]
        <= after["last_used"]
        <= time.time() + 1
    )


def test_text_for_people_has_every_field_of_the_identity(path, capsys):
    dump(path)
    status, out, _ = run(capsys, "inspect", path)
    assert status == 0
    for part in (NAMESPACE, "8 blocks, 64.0KiB in 1 segment", "no process has it open", "model=org/model"):
        assert part in out
    assert all(f"{name}={value}" in out for name, value in IDENTITY.items())


def test_only_the_namespaces_that_were_asked_for(path, capsys):
    dump(path)
    dump(path, count=3, namespace=OTHER)
    names = [
        entry["namespace"] for entry in report(capsys, "inspect", path, "--namespace", "CD")["namespaces"]
    ]
    assert names == [OTHER]
    assert "no such namespace" in refusal(capsys, "inspect", path, "--namespace", "ef")


def test_a_block_that_was_loaded_counts_as_used(path, capsys):
    """The store says when blocks were used, also after the process that used them has gone."""
    ids = dump(path)
    with PosixStore(path, NAMESPACE, identity=IDENTITY, min_free=0) as store:
        store.dump([b"x" * 16], None, [np.zeros(BLOCK, np.uint8)]).results()
        time.sleep(0.01)
        assert store.load(ids[:3], None, [np.empty(BLOCK, np.uint8) for _ in range(3)]).results().all()
    (entry,) = report(capsys, "inspect", path)["namespaces"]
    assert entry["last_used"] >= entry["newest_stored"]


def test_inspect_writes_nothing(path, capsys):
    """Must-hold 6 of part 1, for this command too."""
    dump_chain(path, KEYS)
    before = tree(path)
    run(capsys, "inspect", path)
    run(capsys, "inspect", path, "--key", KEYS[-1])
    assert tree(path) == before


# -- one block ------------------------------------------------------------------------------------------


def test_a_block_by_its_id_lies_where_inspect_says(path, capsys):
    """The place is true: the bytes of the page are there, beside a process that goes on writing."""
    ids = dump(path)
    with live_writer(path):
        block = the_block(capsys, path, "--id", ids[4].hex())
    (shard,) = block["shards"]
    assert (block["namespace"], block["checksum"], block["bytes"]) == (NAMESPACE, "ok", BLOCK)
    data = Path(path, NAMESPACE, shard["segment"]).read_bytes()
    assert data[shard["offset"] :][: shard["length"]] == bytes([4]) * BLOCK


def test_a_block_by_the_key_of_its_page_and_its_chain(path, capsys):
    ids = dump_chain(path, KEYS)
    block = the_block(capsys, path, "--key", KEYS[3])
    assert block["id"] == BlockIds(bytes.fromhex(NAMESPACE)).of(KV_POOL, [KEYS[3]]).hex()
    assert block["parent"] == ids[2 * 16 : 3 * 16].hex()
    assert (block["chain_blocks"], block["chain_bytes"], block["chain_whole"]) == (4, 4 * BLOCK, True)
    assert the_block(capsys, path, "--key", KEYS[0])["parent"] is None
    assert "whole: 4 blocks" in run(capsys, "inspect", path, "--key", KEYS[3])[1]


def test_a_chain_without_its_head_is_a_finding(path, capsys):
    """sglang#37172: under write_back the head of a chain is never written and the rest is not reachable."""
    head = b"\7" * 16
    dump_chain(path, KEYS, before=head)
    block = the_block(capsys, path, "--key", KEYS[2], status=1)
    assert (block["chain_blocks"], block["chain_whole"], block["chain_cut_at"]) == (3, False, head.hex())
    status, out, _ = run(capsys, "inspect", path, "--key", KEYS[2])
    assert status == 1 and "CUT" in out and head.hex() in out


def test_chains_that_end_in_a_circle_end(path, capsys):
    """A damaged parent must not hang the command."""
    with PosixStore(path, NAMESPACE, identity=IDENTITY, capacity=1 << 28, min_free=0) as store:
        ids = [b"a" * 16, b"b" * 16]
        pages = [np.zeros(BLOCK, np.uint8)] * 2
        assert store.dump(ids, None, pages, parents=ids[::-1]).results().all()
    assert the_block(capsys, path, "--id", ids[0].hex(), status=1)["chain_blocks"] == 2


def test_a_block_with_a_flipped_bit_is_found_out(path, capsys):
    """Invariant I1, for the operator."""
    ids = dump(path)
    flip(only(path, ".seg"), EXTENT_ALIGNMENT + 2 * BLOCK + 99)
    assert the_block(capsys, path, "--id", ids[2].hex(), status=1)["checksum"] == "checksum"
    assert the_block(capsys, path, "--id", ids[1].hex())["checksum"] == "ok"
    assert "WRONG: checksum" in run(capsys, "inspect", path, "--id", ids[2].hex())[1]


def test_every_shard_of_a_sharded_block_is_listed_and_checked(path, capsys):
    block_id = b"s" * 16
    with PosixStore(path, NAMESPACE, identity=IDENTITY, capacity=1 << 28, min_free=0) as store:
        for shard in (2, 0, 1):
            page = np.full(BLOCK, shard, np.uint8)
            assert store.dump([block_id], shard, [page], n_shards=3).results().all()
    block = the_block(capsys, path, "--id", block_id.hex())
    assert [shard["shard"] for shard in block["shards"]] == [0, 1, 2]
    assert (block["bytes"], block["checksum"]) == (3 * BLOCK, "ok")
    last = block["shards"][2]
    flip(Path(path, NAMESPACE, last["segment"]), last["offset"] + 5)
    assert the_block(capsys, path, "--id", block_id.hex(), status=1)["checksum"] == "checksum"


def test_a_key_is_looked_for_in_every_namespace(path, capsys):
    """Ranks store pages under the same key, each in a namespace of its own."""
    dump_chain(path, KEYS)
    dump_chain(path, KEYS[:2], namespace=OTHER)
    found = report(capsys, "inspect", path, "--key", KEYS[1])["blocks"]
    assert [block["namespace"] for block in found] == [NAMESPACE, OTHER]
    assert found[0]["id"] != found[1]["id"]
    assert len(report(capsys, "inspect", path, "--key", KEYS[1], "--namespace", "cd")["blocks"]) == 1


def test_what_is_not_stored_is_status_1(path, capsys):
    dump(path)
    status, out, err = run(capsys, "inspect", path, "--key", "no such page")
    assert (status, err) == (1, "") and "not stored" in out
    assert report(capsys, "inspect", path, "--key", KEYS[0], "--pool", "swa", status=1)["blocks"] == []


def test_an_id_that_is_none_is_refused(path, capsys):
    dump(path)
    assert "--id = 'abc': is no block id" in refusal(capsys, "inspect", path, "--id", "abc")
