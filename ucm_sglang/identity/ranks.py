"""Namespaces that are ranks of one server: their pages have the same keys and are of use only together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RANKS = frozenset(f"{axis}_rank" for axis in ("tp", "pp", "cp", "dcp", "dp"))
_BY_STAGE = frozenset({"layer_start", "layer_end", "num_layers", "page_bytes", "object_layout"})
"""Fields that also differ between pipeline stages, which hold other layers and perhaps not as many."""


def same_but_rank(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Do two identities (as in NAMESPACE.json) differ in nothing but the rank?"""
    ignored = _RANKS
    if one.get("pp_size") not in (None, 1):
        ignored = ignored | _BY_STAGE

    def rest(identity: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in identity.items() if name not in ignored}

    return rest(one) == rest(other)
