"""What this package knows about SGLang's versions and reads from its running server.

Everything that may differ from one SGLang release to the next is in this file, so that the adapter does
not have to know (invariant I10).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ucm_sglang.identity import canonical_json

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.23",)

# Server arguments that change the numbers in a page while weights and shapes stay what they are.
_OVERRIDES = (
    "json_model_override_args", "load_format", "model_impl", "model_loader_extra_config", "context_length",
    "custom_weight_loader", "modelopt_quant", "rl_quant_profile", "enable_w4a4_mxfp4_megamoe",
    "enable_quant_communications", "enable_tf32_matmul",
    "rl_on_policy_target", "flashinfer_mxfp4_moe_precision", "dllm_algorithm", "kt_method",
    "speculative_draft_load_format", "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)  # fmt: skip
# Arguments that name a file whose content does so.
_OVERRIDE_FILES = ("quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file")
# Arguments that name further weights: label, argument, argument with its revision.
_FURTHER_WEIGHTS = (
    ("draft", "speculative_draft_model_path", "speculative_draft_model_revision"),
    ("experts", "kt_weight_path", ""),
    ("draft adapter", "uno_lora_path", ""),
)
_AFTER_WEIGHT_UPDATE = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.flush_cache_after_weight_update"
)
_ARGUMENT_GROUPS = ("model", "lora", "spec", "exec", "schedule")
_UNREMARKABLE = (None, "", "{}", "auto", False)


@dataclass(frozen=True)
class ServerFacts:
    """What a server was started with, as far as it decides the bytes of a page."""

    model_path: str
    revision: str | None
    download_dir: str | None
    dtype: str
    quantization: str
    kv_cache_dtype: str
    further_weights: tuple[tuple[str, str, str | None], ...]
    """Label, path and revision of whatever else has weights that reach the pool: a draft model whose
    layers share it, quantised experts, and the adapters given at start. (SGLang derives the keys of an
    adapter's pages from its name and path, so they say nothing about its weights.)"""
    overrides: str
    """Canonical JSON of further arguments that change numbers; "" when there are none."""


def read_server_facts(model_name: str | None) -> ServerFacts:
    """The facts of the server this process belongs to.

    Without a server (the controller driven by a test) `model_name` stands for the path, and the rest is
    "auto".
    """
    get = _argument_reader()
    overrides = {name: str(value) for name in _OVERRIDES if (value := get(name)) not in _UNREMARKABLE}
    overrides |= {name: _content(value) for name in _OVERRIDE_FILES if (value := get(name))}
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
        further_weights=_further_weights(get),
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


def _content(path: str) -> str:
    """A file as its path and what is in it, so that the same name with other content is another value."""
    try:
        return f"{path} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as error:
        logger.warning("ucm-sglang: %s cannot be read (%s); it is known by its name only", path, error)
        return path


def _further_weights(get: Callable[[str], Any]) -> tuple[tuple[str, str, str | None], ...]:
    found = [
        (label, str(path), get(revision) if revision else None)
        for label, argument, revision in _FURTHER_WEIGHTS
        if (path := get(argument))
    ]
    return (*found, *((f"lora {name}", path, None) for name, path in _adapters(get("lora_paths"))))


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


class WeightUpdates:
    """Counts how often the weights of this process's server were replaced while it ran.

    SGLang empties its own caches after `/update_weights_from_disk` and the like, but tells the storage
    backend nothing. This is told by SGLang's plug-in hooks.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """Begin to count. Idempotent; warns when this SGLang cannot be watched."""
        if self._watching:
            return
        self._watching = True
        try:
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            HookRegistry.register(_AFTER_WEIGHT_UPDATE, self._replaced, HookType.BEFORE)
            HookRegistry.apply_hooks()
        except Exception as error:
            logger.warning(
                "ucm-sglang: weight updates of the running server cannot be noticed (%s); after one, detach "
                "the storage backend and attach it with another `weights_fingerprint`", error,
            )  # fmt: skip

    def _replaced(self, *_: Any, **__: Any) -> None:
        self.count += 1
        logger.warning(
            "ucm-sglang: the weights were replaced, so stored pages are neither served nor stored any more; "
            "detach the storage backend and attach it with a `weights_fingerprint` that names the new weights"
        )


weight_updates = WeightUpdates()
"""Of this process: it has one server at most."""
