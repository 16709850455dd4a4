"""`ucm-sglang pin --prompt-file`: the keys are those that a true server stores under (issue 3)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_engine.server import random_prompt
from sglang_fleet import Fleet

from ucm_sglang import cli
from ucm_sglang.cli.prompt import _tokenize

pytestmark = pytest.mark.sglang

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's directory whose tokenizer adds a token in front and has a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory = str(tmp_path_factory.mktemp("model"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    return directory


def test_text_and_chats_are_tokenized_as_by_the_library(model: str) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(model)
    with_token = _tokenize(model, "Hello there", True)
    assert with_token == library.encode("Hello there")
    assert _tokenize(model, "Hello there", False) == with_token[1:]
    rendered = "<system>Be brief.<user>Why?"
    assert _tokenize(model, CHAT, True) == library.encode(rendered, add_special_tokens=False)


def test_the_tokenizers_library_alone_gives_the_same(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _tokenize(model, "Hello there", True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert _tokenize(model, "Hello there", True) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("clean_log")
def test_all_pages_of_a_prompt_that_a_server_stored_are_found(
    fleet: Fleet, fresh_store: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token ids and text, plain, salted and with an adapter's key, while the server runs."""
    server = fleet.main()
    root = fresh_store()
    text = "You are a careful assistant. " * 40
    tokens = random_prompt(500, seed=31)
    server.generate(tokens, cache_salt="tenant")
    server.generate(text)
    server.flush_cache()
    (tmp_path / "ids.json").write_text(json.dumps(tokens))
    (tmp_path / "system.txt").write_text(text)

    def pin(*options: str) -> dict[str, Any]:
        capsys.readouterr()
        status = cli.main(["pin", str(root), "--json", "--prompt-file", *options])
        (entry,) = json.loads(capsys.readouterr().out)["namespaces"]
        assert (status == 0) == (entry["stored_blocks"] > 0)
        return entry

    salted = pin(str(tmp_path / "ids.json"), "--cache-salt", "tenant")
    assert salted["stored_blocks"] == salted["blocks"] == salted["kept_blocks"] == len(tokens) // 64
    assert pin(str(tmp_path / "ids.json"))["stored_blocks"] == 0
    system = pin(str(tmp_path / "system.txt"), "--tokenizer", str(fleet.model()))
    assert system["stored_blocks"] == system["blocks"] == len(text) // 64
