"""What this package knows about SGLang's versions and reads from its running server.

Everything that may differ from one SGLang release to the next is in this file, so that the adapter does
not have to know (invariant I10).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ucm_sglang.identity import canonical_json

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.23",)

# Server arguments that change the numbers in a page while weights and shapes stay what they are.
_OVERRIDES = ("json_model_override_args", "quantization_param_path", "load_format", "model_impl")
_UNREMARKABLE = {None, "", "{}", "auto"}


@dataclass(frozen=True)
class ServerFacts:
    """What a server was started with, as far as it decides the bytes of a page."""

    model_path: str
    revision: str | None
    download_dir: str | None
    dtype: str
    quantization: str
    kv_cache_dtype: str
    draft_model_path: str
    """A draft model whose layers share the host pool with the target's; "" when there is none."""
    lora_paths: tuple[tuple[str, str], ...]
    """Name and path of each adapter given at start, sorted. SGLang derives the keys of an adapter's pages
    from these two, so they say nothing about its weights."""
    overrides: str
    """Canonical JSON of further arguments that change numbers; "" when there are none."""


def read_server_facts(model_name: str | None) -> ServerFacts:
    """The facts of the server this process belongs to.

    Without a server (the controller driven by a test) `model_name` stands for the path, and the rest is
    "auto".
    """
    arguments = _server_arguments()
    if arguments is None:
        return ServerFacts(model_name or "", None, None, "auto", "", "auto", "", (), "")
    overrides = {
        name: str(value)
        for name in _OVERRIDES
        if (value := getattr(arguments, name, None)) not in _UNREMARKABLE
    }
    if overrides.get("load_format") == "dummy":
        # Random weights, made anew at each start: the seed is all that tells them apart.
        overrides["random_seed"] = str(getattr(arguments, "random_seed", None))
    return ServerFacts(
        model_path=str(getattr(arguments, "model_path", model_name) or ""),
        revision=getattr(arguments, "revision", None),
        download_dir=getattr(arguments, "download_dir", None),
        dtype=str(getattr(arguments, "dtype", "auto") or "auto"),
        quantization=str(getattr(arguments, "quantization", None) or ""),
        kv_cache_dtype=str(getattr(arguments, "kv_cache_dtype", "auto") or "auto"),
        draft_model_path=str(getattr(arguments, "speculative_draft_model_path", None) or ""),
        lora_paths=_lora_paths(arguments),
        overrides=canonical_json(overrides),
    )


def _server_arguments() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception as error:  # no server in this process; SGLang raises its own kinds for that
        logger.debug("no server arguments: %s", error)
        return None


def _lora_paths(arguments: Any) -> tuple[tuple[str, str], ...]:
    adapters = getattr(arguments, "lora_paths", None) or []
    return tuple(sorted((str(adapter.lora_name), str(adapter.lora_path)) for adapter in adapters))


def logical_dtype(pool_dtype: str, facts: ServerFacts) -> str:
    """The KV dtype as the model means it: pools store every kind of fp8 and fp4 as plain bytes."""
    stored = pool_dtype.removeprefix("torch.")
    if stored not in ("uint8", "int8"):
        return stored
    return f"{facts.kv_cache_dtype} as {stored}"


def warn_if_untested() -> None:
    """One line when this SGLang is not one that the package was tested with."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return
    if found.split("+")[0] not in TESTED_VERSIONS:
        logger.warning(
            "ucm-sglang was tested with SGLang %s, this is %s: batch signatures and host pool layouts are "
            "checked where possible, the rest is untested",
            ", ".join(TESTED_VERSIONS), found,
        )  # fmt: skip
