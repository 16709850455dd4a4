"""The namespace: everything that must match for the bytes of two processes to be interchangeable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

SCHEMA = 1
"""Version of the field list and its encoding. Any change to either needs a new number."""

DIGEST_BYTES = 16

_DOMAIN = b"ucm-sglang-namespace\0"
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "int | None": (int, type(None)),
}
_ENGINES = ("sglang", "vllm")
_REQUIRED_TEXT = (
    "model",
    "weights",
    "model_dtype",
    "kv_dtype",
    "layout",
    "object_layout",
    "pool_class",
    "attention",
)
_POSITIVE = ("page_size", "num_layers", "page_bytes")
_AXES = ("tp", "pp", "cp", "dcp", "dp")


def canonical_json(value: Mapping[str, Any]) -> str:
    """One spelling per mapping: sorted keys, no spaces, ASCII; ``""`` if empty. `ValueError` for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False) if value else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """Identity of one keyspace: one pool of one rank of one model server. Immutable, hashable, thread-safe.

    Its digest names the directory and enters every block id, so a process that differs in any field
    finds nothing rather than something wrong. Every field is given by the adapter from the live pool and the
    engine's arguments; a field that has no meaning for the pool is None (numbers) or ``""`` (text).

    `TypeError` for an unknown or missing field or a value of another type (a bool is no int, an enum no
    str); `ValueError` for a value out of range. Both name the field.
    """

    schema: int = SCHEMA

    # --- What computed the bytes ---
    engine: str
    """"sglang" or "vllm": they order the bytes of a page and derive keys in their own ways."""
    model: str
    """Model path or served name: the readable half of the model's identity, and a cheap separation."""
    weights: str
    """Fingerprint of the weights behind `model`, since a path may hold other weights tomorrow. For a pool
    whose bytes depend on two models (a draft model fed by its target) it names both."""
    model_dtype: str
    """Dtype of the computation: the same weights run in float16 or bfloat16 give other keys and values."""
    quantization: str
    """Quantisation chosen at start (for example "fp8" over bfloat16 weights): changes every activation."""
    model_overrides: str
    """Server arguments that replace numbers of the model (RoPE scaling, context extension, KV scales) as
    `canonical_json`: the weights stay the same and the bytes do not."""

    # --- How one value is stored ---
    kv_dtype: str
    """Logical dtype of the cache, "auto" already resolved: fp8_e4m3 and fp8_e5m2 are both stored as uint8."""

    # --- How the values of a page are arranged ---
    layout: str
    """The engine's name for the memory layout of its host pool: equal sizes, other order."""
    object_layout: str
    """Order of the bytes of one block, "buffers" (each buffer in turn) or "flat" (one flat page): the same
    pool can be written through either interface."""
    page_size: int
    """Tokens in a page: how much of a prompt one key covers."""
    pool_class: str
    """Class of the host pool: decides which tensors a page consists of."""
    attention: str
    """"mha", "mla" or another family: decides what those tensors mean."""
    page_bytes: int
    """Bytes of a page in this pool: catches every difference in geometry that no other field names."""

    # --- Which part of the model the page covers ---
    layer_start: int
    """First layer of the model in this pool: with pipeline parallelism, equal shapes hold other layers."""
    layer_end: int
    """End of the layer range, as the engine counts it."""
    num_layers: int
    """Layers the pool stores; fewer than the range in hybrid models."""
    head_num: int | None
    """KV heads on this rank; None without a head axis (MLA)."""
    head_dim: int | None
    """Size of a key head; None for MLA."""
    v_head_dim: int | None
    """Size of a value head, which may differ from `head_dim`; None for MLA."""
    kv_lora_rank: int | None
    """MLA: size of the compressed part. The same sum with `rope_dim` would give the same page size."""
    rope_dim: int | None
    """MLA: size of the rotary part."""

    # --- Which rank wrote it; both None where every rank holds the same bytes ---
    tp_rank: int | None
    """Attention tensor parallelism: which heads. None for MLA, whose ranks share one copy."""
    tp_size: int | None
    pp_rank: int | None
    """Pipeline parallelism: which layers."""
    pp_size: int | None
    cp_rank: int | None
    """Attention context parallelism: which tokens of a page, or which share of the sequence."""
    cp_size: int | None
    dcp_rank: int | None
    """Decode context parallelism: which tokens of a page."""
    dcp_size: int | None
    dp_rank: int | None = None
    """Data parallelism. Replicas hold the same bytes and share them, so this is None unless an engine makes
    the bytes differ by replica."""
    dp_size: int | None = None

    tag: str = ""
    """Free text of the operator, to keep apart what these fields cannot tell apart."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_values()
        self._check_axes()

    def digest(self) -> bytes:
        """16 bytes: the first half of SHA-256 over the canonical JSON of all fields; the same everywhere."""
        encoded = _DOMAIN + canonical_json(self.to_dict()).encode("ascii")
        return hashlib.sha256(encoded).digest()[:DIGEST_BYTES]

    def hexdigest(self) -> str:
        """`digest` as 32 hex digits: the name of the directory."""
        return self.digest().hex()

    def to_dict(self) -> dict[str, int | str | None]:
        """All fields, for NAMESPACE.json. `from_dict` is its inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The namespace that `to_dict` described.

        `ValueError` naming the cause for another schema version, unknown or missing fields, and bad values.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a namespace is a mapping of fields, got {type(values).__name__}")
        schema = values.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(
                f"namespace schema {schema!r} is not the schema {SCHEMA} of this version of ucm-sglang; "
                "read it with the version that wrote it"
            )
        names = {f.name for f in fields(cls)}
        if unknown := sorted(map(str, values.keys() - names)):
            raise ValueError(f"unknown namespace fields: {', '.join(unknown)}")
        if missing := sorted(names - values.keys()):
            raise ValueError(f"missing namespace fields: {', '.join(missing)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def differences(self, other: Namespace) -> list[tuple[str, int | str | None, int | str | None]]:
        """``(field, mine, theirs)`` of every field that differs, in the order of the fields."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]

    def __str__(self) -> str:
        """One line: the digest, then every field that says something."""
        shown = {k: v for k, v in self.to_dict().items() if v is not None and v != "" and k != "schema"}
        pairs = (f"{k}={v if _is_plain(v) else json.dumps(v)}" for k, v in shown.items())
        return f"{self.hexdigest()} {' '.join(pairs)}"

    def _check_types(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            # Exact types: a bool, an IntEnum or a numpy integer would be encoded in a way of its own.
            if type(value) not in _KINDS[str(f.type)]:
                got = f"{value!r} ({type(value).__name__})"
                raise TypeError(f"namespace field {f.name} must be {f.type}, got {got}")

    def _check_values(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"namespace field schema must be {SCHEMA}, got {self.schema}")
        if self.engine not in _ENGINES:
            raise ValueError(f"namespace field engine must be one of {_ENGINES}, got {self.engine!r}")
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is int and value < (1 if f.name in _POSITIVE else 0):
                raise ValueError(f"namespace field {f.name} is out of range: {value}")
        for name in _REQUIRED_TEXT:
            if not getattr(self, name):
                raise ValueError(f"namespace field {name} must not be empty")
        if self.layer_end < self.layer_start:
            raise ValueError(
                f"namespace field layer_end ({self.layer_end}) is before layer_start ({self.layer_start})"
            )
        if not _is_canonical(self.model_overrides):
            got = repr(self.model_overrides)
            raise ValueError(f"namespace field model_overrides must come from canonical_json(), got {got}")

    def _check_axes(self) -> None:
        for axis in _AXES:
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if (rank is None) != (size is None):
                raise ValueError(
                    f"namespace fields {axis}_rank and {axis}_size must both be set or both None"
                )
            if rank is not None and rank >= size:
                raise ValueError(f"namespace field {axis}_rank ({rank}) must be below {axis}_size ({size})")


def _is_canonical(text: str) -> bool:
    if not text:
        return True
    try:
        value = json.loads(text)
        return isinstance(value, dict) and canonical_json(value) == text
    except ValueError:
        return False


def _is_plain(value: int | str) -> bool:
    return isinstance(value, int) or (value.isascii() and value.isprintable() and " " not in value)
