"""From a prompt in a file to the keys of its pages, as SGLang derives them.

The tokenizer libraries are imported only when there is text to tokenize.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ucm_sglang.config import ConfigError
from ucm_sglang.identity import bigrams, namespace_seed, token_chain


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and what else decides the keys of its pages."""

    name: str
    tokens: list[int]
    seed: str | None
    eagle: bool

    def keys(self, page_size: int) -> list[str]:
        """Keys of the whole pages, the first page first. Raises `ConfigError` when there is none."""
        keys = token_chain(bigrams(self.tokens) if self.eagle else self.tokens, page_size, seed=self.seed)
        if not keys:
            raise ConfigError(
                f"--prompt-file = {self.name}: has {len(self.tokens):,} tokens, less than one page of "
                f"{page_size:,}; only whole pages are stored"
            )
        return keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a prompt",
        "What --prompt-file holds and how the server treats it, so that the keys come out the same.",
    )
    group.add_argument(
        "--tokenizer", metavar="DIR", help="the model's directory, with its tokenizer; needs transformers"
    )
    group.add_argument(
        "--page-size", metavar="N", type=int, help="tokens in a page; default: what the namespace says"
    )
    group.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="do not add the tokens that the tokenizer puts around text, such as a first <s>: for a text "
        "that a chat template has made",
    )
    group.add_argument("--cache-salt", metavar="TEXT", help="the requests' cache_salt")
    group.add_argument("--extra-key", metavar="TEXT", help="the requests' extra_key; the adapter, for LoRA")
    group.add_argument("--eagle", action="store_true", help="the server uses EAGLE speculation")


def read_prompt(args: argparse.Namespace) -> Prompt:
    """The prompt that the arguments describe. Raises `ConfigError` naming the argument."""
    file = args.prompt_file
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"--prompt-file = {file}: {why}; name a readable file") from error
    content = _json(file, text) if file.endswith(".json") else text
    tokens: list[int]
    if _are_ids(content):
        tokens = content  # type: ignore[assignment]
    elif args.tokenizer is None:
        raise ConfigError(
            "--tokenizer: is missing; give the model's directory, or a .json file with a list of token ids"
        )
    else:
        tokens = _tokenize(args.tokenizer, content, not args.no_special_tokens)
    seed = namespace_seed(args.extra_key, args.cache_salt or None)
    return Prompt(os.path.basename(file), tokens, seed, args.eagle)


def _json(file: str, text: str) -> Any:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--prompt-file = {file}: is not valid JSON: {error}") from error
    messages = isinstance(content, list) and all(isinstance(entry, dict) for entry in content)
    if not (content and (messages or _are_ids(content))):
        raise ConfigError(f"--prompt-file = {file}: must hold a list of token ids or a list of chat messages")
    return content


def _are_ids(content: Any) -> bool:
    return isinstance(content, list) and all(type(entry) is int and entry >= 0 for entry in content)


def _tokenize(directory: str, content: Any, special: bool) -> list[int]:
    """Token ids of a text, or of chat messages by the model's template."""
    if not os.path.isdir(directory):
        raise ConfigError(f"--tokenizer = {directory}: is no directory; name the model's own, as downloaded")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        transformers = import_module("transformers")
    except ImportError:
        return _with_tokenizers(directory, content, special)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if isinstance(content, str):
            ids = tokenizer.encode(content, add_special_tokens=special)
        else:
            ids = tokenizer.apply_chat_template(content, tokenize=True, return_dict=False)
    except Exception as error:  # the library raises whatever its files make it stumble over
        raise _no_tokens(directory, error) from error
    return [int(token) for token in ids]


def _with_tokenizers(directory: str, content: Any, special: bool) -> list[int]:
    file = os.path.join(directory, "tokenizer.json")
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer = {directory}: neither transformers nor tokenizers is installed here; run this in "
            "SGLang's environment, or give a .json file with a list of token ids"
        ) from error
    if not isinstance(content, str):
        raise ConfigError(
            "--prompt-file: chat messages need the package transformers, which is not installed here; run "
            "this in SGLang's environment"
        )
    try:
        return list(tokenizers.Tokenizer.from_file(file).encode(content, add_special_tokens=special).ids)
    except Exception as error:  # as above
        raise _no_tokens(directory, error) from error


def _no_tokens(directory: str, error: Exception) -> ConfigError:
    return ConfigError(f"--tokenizer = {directory}: cannot tokenize with it: {' '.join(str(error).split())}")
