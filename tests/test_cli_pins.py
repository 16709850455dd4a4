"""`ucm-sglang pin`, `unpin` and `pins`, and the pins file that eviction reads."""

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from clikit import BLOCK, IDENTITY, NAMESPACE, dump, dump_chain, live_writer, refusal, report, run, tree
from faults import Fault, FaultySyscalls
from workers import Worker

from posix_store.capacity import SpaceKeeper
from posix_store.evictor import Evictor
from posix_store.pins import PINS_FILE, Pin, Pins, read_pin_list, read_pins, update_pins, write_pins
from posix_store.policies import LRU
from posix_store.root import StoreRoot
from ucm_sglang.identity import KV_POOL, BlockIds, bigrams, namespace_seed, same_but_rank, token_chain

PAGE = 16
IDENTITY_OF_PAGES = {**IDENTITY, "page_size": PAGE}
TOKENS = list(range(1000, 1000 + 6 * PAGE + 5))
KEYS = token_chain(TOKENS, PAGE)
OTHER = "cd" * 16


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a store is to be."""
    return str(tmp_path / "kv")


@pytest.fixture
def chain(path: str) -> bytes:
    """The packed ids of a prompt's six pages, which are stored."""
    return dump_chain(path, KEYS, identity=IDENTITY_OF_PAGES)


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    """The prompt, as token ids in a file."""
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(TOKENS))
    return str(file)


def pinned(path: str, namespace: str = NAMESPACE) -> list[bytes]:
    return [pin.id for pin in read_pin_list(StoreRoot(path, create=False), namespace)]


def evict_everything(path: str) -> None:
    root = StoreRoot(path)
    evictor = Evictor(root, SpaceKeeper(root, 0, chunk=0), LRU())
    for _ in range(5):
        evictor.evict(1 << 40, time.monotonic() + 5)
    evictor.close()


def stored_keys(capsys: pytest.CaptureFixture[str], path: str) -> list[str]:
    return [key for key in KEYS if run(capsys, "inspect", path, "--key", key)[0] == 0]


# -- pin and unpin --------------------------------------------------------------------------------------


def test_a_pinned_page_stays_with_all_pages_before_it(path, chain, capsys):
    """Issue 3: pinning of a chain by key, beside a process that writes; eviction takes all the rest."""
    with live_writer(path):
        (entry,) = report(capsys, "pin", path, "--key", KEYS[3])["namespaces"]
        assert (entry["new_pins"], entry["stored_blocks"]) == (1, 1)
        assert (entry["kept_blocks"], entry["kept_bytes"]) == (4, 4 * BLOCK)
        evict_everything(path)
        assert stored_keys(capsys, path) == KEYS[:4]


def test_what_was_unpinned_leaves(path, chain, capsys):
    run(capsys, "pin", path, "--key", KEYS[5], KEYS[1])
    (entry,) = report(capsys, "unpin", path, "--key", KEYS[5])["namespaces"]
    assert (entry["removed_pins"], entry["pins"]) == (1, 1)
    evict_everything(path)
    assert stored_keys(capsys, path) == KEYS[:2]


def test_a_block_pinned_by_its_id(path, capsys):
    ids = dump(path)
    assert run(capsys, "pin", path, "--id", ids[2].hex(), ids[5].hex())[0] == 0
    assert pinned(path) == [ids[2], ids[5]]
    assert run(capsys, "unpin", path, "--id", ids[2].hex().upper())[0] == 0
    assert pinned(path) == [ids[5]]


def test_pinning_twice_is_one_pin_with_the_latest_note(path, chain, capsys):
    run(capsys, "pin", path, "--key", KEYS[0], "--note", "first")
    (entry,) = report(capsys, "pin", path, "--key", KEYS[0], "--note", "second")["namespaces"]
    assert (entry["new_pins"], entry["pins"]) == (0, 1)
    assert [pin.note for pin in read_pin_list(StoreRoot(path, create=False), NAMESPACE)] == ["second"]


def test_unpin_all_leaves_no_file(path, chain, capsys):
    run(capsys, "pin", path, "--key", *KEYS[:3])
    assert run(capsys, "unpin", path, "--all")[0] == 0
    assert not Path(path, NAMESPACE, PINS_FILE).exists()
    assert run(capsys, "unpin", path, "--all")[0] == 0


def test_a_pin_that_is_not_there_and_a_page_that_is_not_stored_are_status_1(path, chain, capsys):
    status, out, _ = run(capsys, "unpin", path, "--key", KEYS[0])
    assert status == 1 and "no such pin" in out
    status, out, _ = run(capsys, "pin", path, "--key", "not stored yet")
    assert status == 1 and "0 of 1 page stored now" in out
    assert len(pinned(path)) == 1


# -- prompts --------------------------------------------------------------------------------------------


def test_a_prompt_is_pinned_by_its_last_whole_page(path, chain, prompt, capsys):
    """Issue 3: by a prompt file. The keys are SGLang's own (proved in tests/sglang/test_token_chain.py)."""
    (entry,) = report(capsys, "pin", path, "--prompt-file", prompt)["namespaces"]
    assert (entry["blocks"], entry["stored_blocks"], entry["kept_blocks"]) == (6, 6, 6)
    (pin,) = read_pin_list(StoreRoot(path, create=False), NAMESPACE)
    assert (pin.id, pin.others, pin.note) == (chain[-16:], (), "prompt.json, 101 tokens")
    assert run(capsys, "unpin", path, "--prompt-file", prompt)[0] == 0
    assert pinned(path) == []


def test_the_stored_part_of_a_prompt_stays_until_the_rest_is_stored(path, prompt, capsys):
    dump_chain(path, KEYS[:4], identity=IDENTITY_OF_PAGES)
    status, out, _ = run(capsys, "pin", path, "--prompt-file", prompt)
    assert status == 0 and "4 of 6 pages stored now" in out and "pin again" in out
    evict_everything(path)
    assert stored_keys(capsys, path) == KEYS[:4]
    (entry,) = report(capsys, "pins", path)["namespaces"]
    assert [pin["state"] for pin in entry["pins"]] == ["in part"]


def test_chains_whose_parents_were_not_recorded_stay_whole(path, prompt, capsys):
    """Without `hicache_storage_pass_prefix_keys` each batch looks like a chain of its own."""
    dump_chain(path, KEYS[:2], identity=IDENTITY_OF_PAGES)
    dump_chain(path, KEYS[2:], identity=IDENTITY_OF_PAGES)  # as if nothing stood before
    run(capsys, "pin", path, "--prompt-file", prompt)
    evict_everything(path)
    assert stored_keys(capsys, path) == KEYS


def test_nothing_stored_of_a_prompt_says_what_to_look_at(path, chain, tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text(json.dumps([7] * 40))
    status, out, _ = run(capsys, "pin", path, "--prompt-file", str(file))
    assert status == 1 and "chat template" in out


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--cache-salt", "tenant"], token_chain(TOKENS, PAGE, seed=namespace_seed(None, "tenant"))),
        (["--extra-key", "lora"], token_chain(TOKENS, PAGE, seed=namespace_seed("lora", None))),
        (["--eagle"], token_chain(bigrams(TOKENS), PAGE)),
        (["--page-size", "32"], token_chain(TOKENS, 32)),
    ],
)
def test_what_else_decides_the_keys(path, chain, prompt, capsys, options, keys):
    run(capsys, "pin", path, "--prompt-file", prompt, *options)
    assert pinned(path) == [BlockIds(bytes.fromhex(NAMESPACE)).of(KV_POOL, keys[-1:])]


class FakeTokenizer:
    """Stands in for `tokenizers.Tokenizer`: a token for each byte."""

    @classmethod
    def from_file(cls, file: str) -> "FakeTokenizer":
        if not os.path.exists(file):
            raise Exception(f"No such file: {file}")  # what the library raises
        return cls()

    def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(ids=[1] * add_special_tokens + list(text.encode()))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's directory, and an environment with `tokenizers` and without `transformers`."""
    module = ModuleType("tokenizers")
    module.Tokenizer = FakeTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.mark.parametrize(("options", "first"), [([], [1]), (["--no-special-tokens"], [])])
def test_a_text_is_tokenized_with_the_models_tokenizer(path, chain, model, tmp_path, capsys, options, first):
    text = "You are a careful assistant. " * 3
    file = tmp_path / "system.txt"
    file.write_text(text)
    run(capsys, "pin", path, "--prompt-file", str(file), "--tokenizer", model, *options)
    keys = token_chain(first + list(text.encode()), PAGE)
    assert pinned(path) == [BlockIds(bytes.fromhex(NAMESPACE)).of(KV_POOL, keys[-1:])]


def wrong_prompts(tmp_path: Path) -> dict[str, str]:
    files = {
        "a.txt": "word",
        "short.json": "[1, 2]",
        "bad.json": "{",
        "odd.json": '{"a": 1}',
        "chat.json": '[{"role": "user"}]',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in files}


@pytest.mark.parametrize(
    ("file", "tokenizer", "words"),
    [
        ("a.txt", None, "--tokenizer: is missing"),
        ("a.txt", "/no/such", "--tokenizer = /no/such: is no directory"),
        ("short.json", None, "less than one page of 16"),
        ("bad.json", None, "is not valid JSON"),
        ("odd.json", None, "must hold a list of token ids or a list of chat messages"),
        ("chat.json", "model", "need the package transformers"),
        ("missing.txt", None, "No such file or directory"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(
    path, chain, model, tmp_path, capsys, file, tokenizer, words
):
    where = wrong_prompts(tmp_path).get(file, str(tmp_path / file))
    options = ["--tokenizer", model if tokenizer == "model" else tokenizer] if tokenizer else []
    assert words in refusal(capsys, "pin", path, "--prompt-file", where, *options)
    assert not Path(path, NAMESPACE, PINS_FILE).exists()


def test_without_any_tokenizer_library_the_error_says_where_there_is_one(
    path, chain, tmp_path, capsys, monkeypatch
):
    for name in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "s.txt").write_text("text")
    words = refusal(
        capsys, "pin", path, "--prompt-file", str(tmp_path / "s.txt"), "--tokenizer", str(tmp_path)
    )
    assert "SGLang's environment" in words


# -- which namespaces -----------------------------------------------------------------------------------


def test_a_key_is_pinned_on_all_ranks_of_its_server(path, chain, capsys):
    """A page is of use only when every rank has its share."""
    dump_chain(path, KEYS, OTHER, {**IDENTITY_OF_PAGES, "tp_rank": 0})
    stranger = "ef" * 16
    dump_chain(path, KEYS, stranger, {**IDENTITY_OF_PAGES, "model": "org/other"})
    for name in ("pin", "unpin"):
        entries = report(capsys, name, path, "--key", KEYS[1], "--namespace", "ab")["namespaces"]
        assert [entry["namespace"] for entry in entries] == [NAMESPACE, OTHER]
    assert "several servers or models" in refusal(capsys, "pin", path, "--key", KEYS[1])
    assert "several servers or models" in refusal(capsys, "pin", path, "--id", "00" * 16)


def test_pipeline_stages_are_ranks_of_one_server_though_they_hold_other_layers():
    stage = {**IDENTITY, "pp_size": 2, "pp_rank": 0, "layer_start": 0, "layer_end": 16, "page_bytes": 1 << 20}
    other = {**stage, "pp_rank": 1, "layer_start": 16, "layer_end": 36, "page_bytes": 5 << 18}
    assert same_but_rank(stage, other)
    assert not same_but_rank(stage, {**other, "kv_dtype": "bfloat16"})
    one_stage = {"pp_size": 1, "pp_rank": 0}
    assert not same_but_rank({**stage, **one_stage}, {**other, **one_stage})


def test_an_id_belongs_to_one_rank(path, chain, capsys):
    dump_chain(path, KEYS, OTHER, {**IDENTITY_OF_PAGES, "tp_rank": 0})
    assert "one namespace only" in refusal(capsys, "pin", path, "--id", chain[:16].hex())
    run(capsys, "pin", path, "--id", chain[:16].hex(), "--namespace", NAMESPACE)
    assert (pinned(path), pinned(path, OTHER)) == ([chain[:16]], [])


# -- pins -----------------------------------------------------------------------------------------------


def test_pins_lists_what_is_kept_and_writes_nothing(path, chain, prompt, capsys):
    run(capsys, "pin", path, "--prompt-file", prompt, "--note", "the [system] prompt")
    run(capsys, "pin", path, "--key", KEYS[1])
    run(capsys, "pin", path, "--key", "nowhere")
    before = tree(path)
    listed = report(capsys, "pins", path)
    (entry,) = listed["namespaces"]
    assert [(pin["state"], pin["kept_blocks"]) for pin in entry["pins"]] == [
        ("stored", 6), ("stored", 2), ("not stored", 0),
    ]  # fmt: skip
    assert listed["kept_bytes"] == 6 * BLOCK  # what two pins keep counts once
    out = run(capsys, "pins", path)[1]
    assert "the [system] prompt" in out and "3 pins: 48.0KiB kept" in out and chain[-16:].hex() in out
    assert tree(path) == before


def test_inspect_counts_what_is_pinned(path, chain, capsys):
    run(capsys, "pin", path, "--key", KEYS[2])
    (entry,) = report(capsys, "inspect", path)["namespaces"]
    assert (entry["pins"], entry["pinned_blocks"], entry["pinned_bytes"]) == (1, 3, 3 * BLOCK)
    for key, expected in ((KEYS[1], True), (KEYS[3], False)):
        (block,) = report(capsys, "inspect", path, "--key", key)["blocks"]
        assert block["pinned"] is expected


# -- the file -------------------------------------------------------------------------------------------


def pinning_process(connection: Connection, path: str, seed: int, count: int) -> None:
    """Pin blocks one by one."""
    root = StoreRoot(path)
    connection.send("ready")
    connection.recv()
    for number in range(count):
        update_pins(root, NAMESPACE, add=[Pin(bytes([seed, number]) * 8)])
    connection.send("done")


def test_processes_that_pin_at_once_lose_nothing(path, chain):
    """Issue 3: changes are made under the store lock."""
    with Worker(pinning_process, path, 1, 15) as one, Worker(pinning_process, path, 2, 15) as other:
        for worker in (one, other):
            assert worker.receive() == "ready"
        for worker in (one, other):
            worker.send("go")
        for worker in (one, other):
            assert worker.receive() == "done"
    assert set(pinned(path)) == {bytes([seed, number]) * 8 for seed in (1, 2) for number in range(15)}


def test_a_lock_that_others_hold_is_a_refusal(path, chain, capsys, monkeypatch):
    monkeypatch.setattr("posix_store.pins._LOCK_SECONDS", 0.05)
    with StoreRoot(path).lock(1) as held:
        assert held
        assert "held the store lock" in refusal(capsys, "pin", path, "--key", KEYS[0])


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"format": 1, "pins": [], "crc32c": 1}'])
def test_a_damaged_file_is_said_and_protects_nothing(path, chain, capsys, caplog, content):
    """It must not stop eviction, or the store would fill up for ever."""
    run(capsys, "pin", path, "--key", KEYS[0])
    Path(path, NAMESPACE, PINS_FILE).write_bytes(content)
    assert read_pins(StoreRoot(path), NAMESPACE).shape == (0, 2)
    assert "pin again" in caplog.text
    assert run(capsys, "pin", path, "--key", KEYS[1])[0] == 0
    assert len(pinned(path)) == 1


def test_every_flipped_bit_is_noticed(path, chain, capsys, caplog):
    """Eviction must not spare blocks that nobody pinned, nor take for pinned what is not."""
    run(capsys, "pin", path, "--key", KEYS[0])
    file = Path(path, NAMESPACE, PINS_FILE)
    good, before = file.read_bytes(), pinned(path)
    fields = json.loads(good)
    for at in range(0, len(good), 3):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        found = pinned(path)
        assert found == [] or found == before
    assert fields["pins"][0]["id"] == before[0].hex()


def test_a_change_that_cannot_be_written_leaves_the_pins_as_they_were(path, chain):
    root = StoreRoot(path)
    update_pins(root, NAMESPACE, add=[Pin(b"a" * 16)])
    for kind in ("pwrite", "fsync", "rename"):
        faulty = StoreRoot(path, syscalls=FaultySyscalls(Fault(1, (kind,), error=28)))
        with pytest.raises(OSError):
            update_pins(faulty, NAMESPACE, add=[Pin(b"b" * 16)])
        assert pinned(path) == [b"a" * 16]
    assert [name for name in os.listdir(Path(path, NAMESPACE)) if name.startswith(".")] == []


def test_a_process_that_evicts_sees_changes_and_keeps_what_it_knew_when_it_cannot_look(path, chain):
    """An error of the disk must not give free what an operator pinned."""
    calls = FaultySyscalls()
    pins = Pins(StoreRoot(path, syscalls=calls), NAMESPACE)
    assert pins.ids().shape == (0, 2)
    root = StoreRoot(path)
    write_pins(root, NAMESPACE, [b"b" * 16, b"a" * 16, b"a" * 16])
    assert pins.ids().tobytes() == b"a" * 16 + b"b" * 16
    write_pins(root, NAMESPACE, [b"c" * 16])
    for kind in ("stat", "open", "pread"):
        calls.faults = [Fault(1, (kind,), suffix=PINS_FILE, error=5, times=float("inf"))]
        assert pins.ids().tobytes() == b"a" * 16 + b"b" * 16
    calls.faults = []
    assert pins.ids().tobytes() == b"c" * 16
    write_pins(root, NAMESPACE, [])
    assert pins.ids().shape == (0, 2)


def test_what_has_not_changed_is_not_read_again(path, chain):
    """Eviction asks often."""
    write_pins(StoreRoot(path), NAMESPACE, [b"a" * 16])
    calls = FaultySyscalls()
    pins = Pins(StoreRoot(path, create=False, syscalls=calls), NAMESPACE)
    pins.ids()
    before = calls.counts["open"]
    assert len(pins.ids()) == 1
    assert calls.counts["open"] == before


def test_a_store_with_pins_is_still_recognised_without_its_settings(path, chain, capsys):
    """Invariant I7: PINS.json is a file of ours."""
    run(capsys, "pin", path, "--key", KEYS[0])
    os.unlink(os.path.join(path, "STORE.json"))
    assert StoreRoot(path).namespaces() == [NAMESPACE]


def test_ids_are_pinned_as_arrays_too(path, chain):
    root = StoreRoot(path)
    ids = np.arange(8, dtype=np.uint64).reshape(4, 2)
    write_pins(root, NAMESPACE, ids)
    assert sorted(read_pins(root, NAMESPACE).tolist()) == ids.tolist()
