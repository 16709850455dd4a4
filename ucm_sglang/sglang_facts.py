"""What this package knows about SGLang's versions and reads from its running server.

Everything that may differ from one SGLang release to the next is in this file, so that the adapter does
not have to know (invariant I10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ucm_sglang.identity import canonical_json

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.23",)

# Server arguments that change the numbers in a page while weights and shapes stay what they are.
_OVERRIDES = ("json_model_override_args", "quantization_param_path", "load_format", "model_impl")
_ARGUMENT_GROUPS = ("model", "lora", "spec", "exec", "schedule")
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
    get = _argument_reader()
    overrides = {name: str(value) for name in _OVERRIDES if (value := get(name)) not in _UNREMARKABLE}
    if overrides.get("load_format") == "dummy":
        # Random weights, made anew at each start: the seed is all that tells them apart.
        overrides["random_seed"] = str(get("random_seed"))
    return ServerFacts(
        model_path=str(get("model_path") or model_name or ""),
        revision=get("revision"),
        download_dir=get("download_dir"),
        dtype=str(get("dtype") or "auto"),
        quantization=str(get("quantization") or ""),
        kv_cache_dtype=str(get("kv_cache_dtype") or "auto"),
        draft_model_path=str(get("speculative_draft_model_path") or ""),
        lora_paths=_adapters(get("lora_paths")),
        overrides=canonical_json(overrides),
    )


def _argument_reader() -> Callable[[str], Any]:
    """A function from the name of a server argument to its value, None when it has none.

    SGLang keeps arguments as it resolved them ("auto" replaced) in groups; the published `ServerArgs` has
    what was typed.
    """
    try:
        from sglang.srt import runtime_context

        typed = runtime_context.get_server_args()
    except Exception as error:  # no server in this process; SGLang raises its own kinds for that
        logger.debug("no server arguments: %s", error)
        return lambda name: None
    groups = []
    for group in _ARGUMENT_GROUPS:
        try:
            groups.append(getattr(runtime_context, f"get_{group}")())
        except Exception as error:  # as above, or a version without this group
            logger.debug("no resolved arguments in %s: %s", group, error)

    def get(name: str) -> Any:
        for source in (*groups, typed):
            try:
                return getattr(source, name)
            except Exception as error:  # a group refuses names that are not its own, each in its way
                logger.debug("%s: %s", name, error)
        return None

    return get


def _adapters(given: Any) -> tuple[tuple[str, str], ...]:
    """Name and path of each adapter, sorted, from SGLang's `LoRARef` objects or from what was typed."""
    if isinstance(given, Mapping):
        return tuple(sorted((str(name), str(path)) for name, path in given.items()))
    return tuple(sorted(_adapter(item) for item in given or []))


def _adapter(item: Any) -> tuple[str, str]:
    if hasattr(item, "lora_path"):
        return str(item.lora_name), str(item.lora_path)
    if isinstance(item, Mapping):
        return str(item.get("lora_name")), str(item.get("lora_path"))
    name, separator, path = str(item).partition("=")
    return (name, path) if separator else (name, name)


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
