"""From a host pool and a server's facts to the namespace of its pages."""

from __future__ import annotations

from typing import Any

from ucm_sglang.config import ConfigError, StoreConfig
from ucm_sglang.identity import FingerprintError, Namespace, weights_fingerprint
from ucm_sglang.layout import PoolLayout
from ucm_sglang.sglang_facts import ServerFacts, logical_dtype, weight_updates


def namespace_of(
    storage_config: Any, config: StoreConfig, layout: PoolLayout, facts: ServerFacts
) -> Namespace:
    """The identity of the pages in one host pool of one rank (invariant I5).

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`.

    Raises:
        ConfigError: something that must be known is not; says what to set.
    """
    pool = layout.describe()
    rank_free = bool(storage_config.is_mla_model)
    layers = pool["num_layers"]
    start = pool["layer_start"] or 0
    end = pool["layer_end"] if pool["layer_end"] is not None else start + (layers or 0)
    try:
        return Namespace(
            engine="sglang",
            model=str(storage_config.model_name or facts.model_path or "unnamed"),
            weights=_weights(config, facts),
            model_dtype=facts.dtype,
            quantization=facts.quantization,
            model_overrides=facts.overrides,
            kv_dtype=logical_dtype(str(pool["dtype"]), facts),
            layout=str(pool["layout"]),
            object_layout=_object_layout(pool),
            page_size=layout.page_size,
            pool_class=pool["pool_class"],
            attention=pool["attention"],
            page_bytes=layout.page_bytes,
            layer_start=start,
            layer_end=end,
            num_layers=layers,
            head_num=pool["head_num"],
            head_dim=pool["head_dim"],
            v_head_dim=pool["v_head_dim"],
            kv_lora_rank=pool["kv_lora_rank"],
            rope_dim=pool["rope_dim"],
            tp_rank=None if rank_free else storage_config.tp_rank,
            tp_size=None if rank_free else storage_config.tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            cp_size=storage_config.attn_cp_size,
            dcp_rank=storage_config.dcp_rank,
            dcp_size=storage_config.dcp_size,
            tag=config.tag,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the identity of this server's pages is not complete: {error}. Pages are not stored rather than "
            "stored under a name that may be wrong; run without this backend, or report the model and flags"
        ) from error


def _weights(config: StoreConfig, facts: ServerFacts) -> str:
    """Fingerprints of everything whose weights decide the bytes: target, draft, and adapters."""
    if config.weights_fingerprint != "auto":
        return config.weights_fingerprint
    if weight_updates.count:
        raise ConfigError(
            'weights_fingerprint = "auto": the weights of this server were replaced while it ran, so the '
            "files of the model do not tell them; give a text that names the new weights"
        )
    models = [("", facts.model_path, facts.revision)]
    models += [(f"{label}=", path, revision) for label, path, revision in facts.further_weights]
    try:
        return " ".join(
            label + weights_fingerprint(path, revision, cache_dir=facts.download_dir)
            for label, path, revision in models
        )
    except FingerprintError as error:
        raise ConfigError(str(error)) from error


def _object_layout(pool: dict[str, Any]) -> str:
    """How the bytes of a page follow each other: the kind, and the runs of equal components."""
    runs = " ".join(f"{count}x{size}" for size, count in pool["components"])
    extra = [
        f"{name}={pool[name]}"
        for name in ("row_dim", "target_layers", "format_tag")
        if pool[name] is not None
    ]
    return " ".join([f"{pool['object_layout']} {runs}", *extra])
