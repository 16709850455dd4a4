"""Namespace: complete, strict, stable (invariant I5)."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_sglang.identity import BlockIds, Namespace, canonical_json
from ucm_sglang.identity import namespace as namespace_module

MHA: dict[str, Any] = {
    "engine": "sglang",
    "model": "Qwen/Qwen3-8B",
    "weights": "hub:b968826d9c46dd6066d109eabc6255188de91218",
    "model_dtype": "bfloat16",
    "quantization": "",
    "model_overrides": "",
    "kv_dtype": "bfloat16",
    "layout": "page_first",
    "object_layout": "buffers",
    "page_size": 64,
    "pool_class": "MHATokenToKVPoolHost",
    "attention": "mha",
    "page_bytes": 4718592,
    "layer_start": 0,
    "layer_end": 36,
    "num_layers": 36,
    "head_num": 4,
    "head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": None,
    "rope_dim": None,
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 1,
    "cp_rank": 0,
    "cp_size": 1,
    "dcp_rank": 0,
    "dcp_size": 1,
}
MLA: dict[str, Any] = MHA | {
    "attention": "mla",
    "pool_class": "MLATokenToKVPoolHost",
    "kv_dtype": "fp8_e5m2",
    "model_overrides": canonical_json({"rope_scaling": {"factor": 4.0, "type": "yarn"}}),
    "head_num": None,
    "head_dim": None,
    "v_head_dim": None,
    "kv_lora_rank": 512,
    "rope_dim": 64,
    "tp_rank": None,
    "tp_size": None,
    "tag": "blue",
}

# One other valid value per field: what a real second server would have.
OTHER: dict[str, Any] = {
    "engine": "vllm",
    "model": "Qwen/Qwen3-8B-Base",
    "weights": "hub:0968826d9c46dd6066d109eabc6255188de91218",
    "model_dtype": "float16",
    "quantization": "fp8",
    "model_overrides": canonical_json({"rope_theta": 1e6}),
    "kv_dtype": "fp8_e4m3",
    "layout": "layer_first",
    "object_layout": "flat",
    "page_size": 16,
    "pool_class": "OtherHostPool",
    "attention": "mla",
    "page_bytes": 4718591,
    "layer_start": 1,
    "layer_end": 37,
    "num_layers": 35,
    "head_num": 8,
    "head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 512,
    "rope_dim": 64,
    "tp_rank": 0,
    "tp_size": 4,
    "pp_rank": 1,
    "pp_size": 2,
    "cp_rank": 1,
    "cp_size": 2,
    "dcp_rank": 1,
    "dcp_size": 2,
    "dp_rank": 0,
    "dp_size": 2,
    "tag": "green",
}
PARTNER = {
    "pp_rank": "pp_size",
    "cp_rank": "cp_size",
    "dcp_rank": "dcp_size",
    "dp_rank": "dp_size",
    "dp_size": "dp_rank",
}


@pytest.mark.parametrize(
    ("values", "digest"),
    [(MHA, "cb8c68ded6dbbfcfd02d371c28d2b4c0"), (MLA, "8fb29f605939e6ed8e9b856b1cf1aa92")],
    ids=["mha", "mla"],
)
def test_golden_digest(values: dict[str, Any], digest: str) -> None:
    """I5: directories written by older versions keep their names. A change here needs a new SCHEMA."""
    assert namespace_module.SCHEMA == 1
    assert Namespace(**values).hexdigest() == digest
    assert Namespace(**values).digest() == bytes.fromhex(digest)


def test_encoding_is_what_the_format_says() -> None:
    """A reader in another language can derive the digest: domain, NUL, sorted compact ASCII JSON."""
    values = MHA | {"schema": 1, "tag": "", "dp_rank": None, "dp_size": None}
    text = "{" + ",".join(f"{json.dumps(k)}:{json.dumps(values[k])}" for k in sorted(values)) + "}"
    expected = hashlib.sha256(b"ucm-sglang-namespace\0" + text.encode("ascii")).digest()[:16]
    assert Namespace(**MHA).digest() == expected


@pytest.mark.parametrize("field", sorted(f.name for f in fields(Namespace) if f.name != "schema"))
def test_every_field_separates(field: str) -> None:
    """I5, issue 2 number 2: one changed field (with its axis partner if needed) gives another digest."""
    first = MHA
    if partner := PARTNER.get(field):
        first = MHA | {partner: OTHER[partner]}
        if field in ("dp_rank", "dp_size"):
            first |= {"dp_rank": 1, "dp_size": 3}
    assert first.get(field) != OTHER[field]
    assert Namespace(**first).digest() != Namespace(**first | {field: OTHER[field]}).digest()


def test_schema_separates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new schema makes new names even when every field is equal."""
    old = Namespace(**MHA).digest()
    monkeypatch.setattr(namespace_module, "SCHEMA", 2)
    assert Namespace(**MHA, schema=2).digest() != old


texts = st.text(min_size=1, max_size=12)
numbers = st.integers(min_value=1, max_value=2**70)
optional = st.none() | numbers


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    values: dict[str, Any] = {}
    for f in fields(Namespace):
        if f.type == "str":
            values[f.name] = draw(texts)
        elif f.type == "int":
            values[f.name] = draw(numbers)
        else:
            values[f.name] = draw(optional)
    for axis in ("tp", "pp", "cp", "dcp", "dp"):
        size = draw(st.none() | st.integers(min_value=1, max_value=64))
        values[f"{axis}_size"] = size
        values[f"{axis}_rank"] = None if size is None else draw(st.integers(0, size - 1))
    values["schema"] = 1
    values["engine"] = draw(st.sampled_from(["sglang", "vllm"]))
    values["layer_end"] += values["layer_start"]
    values["model_overrides"] = canonical_json(draw(st.dictionaries(texts, numbers | texts, max_size=2)))
    return Namespace(**values)


@given(namespaces(), st.data())
def test_any_other_value_of_any_field_separates(namespace: Namespace, data: st.DataObject) -> None:
    """I5: whatever the values are, replacing one changes the digest."""
    other = data.draw(namespaces())
    for f in fields(Namespace):
        value = getattr(other, f.name)
        if value == getattr(namespace, f.name):
            continue
        try:
            changed = replace(namespace, **{f.name: value})
        except ValueError:
            continue  # a rank without its size
        assert changed.digest() != namespace.digest(), f.name


@given(namespaces())
def test_round_trip_through_json(namespace: Namespace) -> None:
    """NAMESPACE.json says it all: reading it back gives the same identity."""
    again = Namespace.from_dict(json.loads(json.dumps(namespace.to_dict())))
    assert again == namespace
    assert again.digest() == namespace.digest()
    assert again.differences(namespace) == []


@given(namespaces())
def test_human_form_is_one_line_with_every_field(namespace: Namespace) -> None:
    """Issue 2 number 2: the log names the namespace and its fields; odd names cannot break the line."""
    line = str(namespace)
    assert len(line.splitlines()) == 1
    assert line.startswith(namespace.hexdigest())
    for name, value in namespace.to_dict().items():
        assert (f" {name}=" in line) == (value not in (None, "") and name != "schema")


class _Int(IntEnum):
    FOUR = 4


class _Str(StrEnum):
    FP8 = "fp8_e4m3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", True),
        ("page_size", 64.0),
        ("page_size", "64"),
        ("page_size", None),
        ("page_size", np.int64(64)),
        ("head_num", _Int.FOUR),
        ("head_num", False),
        ("tp_rank", 1.0),
        ("kv_dtype", _Str.FP8),
        ("kv_dtype", None),
        ("model", b"model"),
        ("tag", None),
        ("schema", True),
    ],
)
def test_wrong_type_is_refused(field: str, value: object) -> None:
    """I5: 1, True and "1" must not be two names for one thing, nor one name for two."""
    with pytest.raises(TypeError, match=f"namespace field {field} must be"):
        Namespace(**MHA | {field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "trt"}, "engine must be one of"),
        ({"model": ""}, "model must not be empty"),
        ({"weights": ""}, "weights must not be empty"),
        ({"kv_dtype": ""}, "kv_dtype must not be empty"),
        ({"page_size": 0}, "page_size is out of range: 0"),
        ({"page_bytes": 0}, "page_bytes is out of range: 0"),
        ({"layer_start": -1}, "layer_start is out of range: -1"),
        ({"layer_end": 3, "layer_start": 4}, r"layer_end \(3\) is before layer_start \(4\)"),
        ({"tp_rank": 2}, r"tp_rank \(2\) must be below tp_size \(2\)"),
        ({"tp_rank": None}, "tp_rank and tp_size must both be set"),
        ({"dcp_size": None}, "dcp_rank and dcp_size must both be set"),
        ({"model_overrides": '{"b": 1}'}, "model_overrides must come from canonical_json"),
        ({"model_overrides": '{"b":1,"a":1}'}, "model_overrides must come from canonical_json"),
        ({"model_overrides": "[1]"}, "model_overrides must come from canonical_json"),
        ({"model_overrides": "factor 4"}, "model_overrides must come from canonical_json"),
        ({"schema": 2}, "schema must be 1"),
    ],
)
def test_value_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    """I5: an adapter that could not find a value fails at start instead of guessing."""
    with pytest.raises(ValueError, match=message):
        Namespace(**MHA | changes)


@pytest.mark.parametrize("field", sorted(MHA))
def test_no_field_of_the_identity_has_a_default(field: str) -> None:
    """I5: a field that an adapter forgets is an error, not a default that fits everything."""
    with pytest.raises(TypeError, match=field):
        Namespace(**{k: v for k, v in MHA.items() if k != field})


def test_unknown_and_positional_arguments_are_refused() -> None:
    """I5: an axis this version does not know cannot be dropped silently."""
    with pytest.raises(TypeError, match="ep_rank"):
        Namespace(**MHA, ep_rank=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Namespace(1, **MHA)  # type: ignore[call-arg]


def test_frozen_and_hashable() -> None:
    """The identity of a running process cannot change under it."""
    namespace = Namespace(**MHA)
    with pytest.raises(FrozenInstanceError):
        namespace.page_size = 16  # type: ignore[misc]
    assert len({namespace, Namespace(**MHA), Namespace(**MLA)}) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"schema": 2}, "schema 2 is not the schema 1"),
        (lambda d: d | {"schema": "1"}, "schema '1' is not the schema 1"),
        (lambda d: d | {"schema": True}, "schema True is not the schema 1"),
        (lambda d: {k: v for k, v in d.items() if k != "schema"}, "schema None is not the schema 1"),
        (lambda d: d | {"zz": 0, "ep_rank": 1}, "unknown namespace fields: ep_rank, zz"),
        (lambda d: {k: v for k, v in d.items() if k not in ("tag", "layout")}, "missing.*: layout, tag"),
        (lambda d: d | {"page_size": 64.0}, "page_size must be int"),
        (lambda d: d | {"tp_rank": 7}, "tp_rank"),
        (list, "mapping of fields, got list"),
    ],
)
def test_from_dict_refuses(change: Any, message: str) -> None:
    """A NAMESPACE.json of another version or a damaged one is named, never half understood."""
    with pytest.raises(ValueError, match=message):
        Namespace.from_dict(change(Namespace(**MHA).to_dict()))


def test_differences_names_fields_in_order() -> None:
    """`doctor` explains a cold cache: which field, mine, theirs (issue 2 number 2)."""
    mine, theirs = (
        Namespace(**MHA),
        Namespace(**MHA | {"page_size": 16, "kv_dtype": "fp8_e5m2", "dp_rank": 0, "dp_size": 2}),
    )
    assert mine.differences(theirs) == [
        ("kv_dtype", "bfloat16", "fp8_e5m2"),
        ("page_size", 64, 16),
        ("dp_rank", None, 0),
        ("dp_size", None, 2),
    ]


def test_fp8_variants_of_equal_size_are_apart() -> None:
    """sglang#33268: e4m3 and e5m2 pages have the same length and the same storage dtype."""
    e4m3, e5m2 = (Namespace(**MHA | {"kv_dtype": name}) for name in ("fp8_e4m3", "fp8_e5m2"))
    assert e4m3.digest() != e5m2.digest()


def test_canonical_json_has_one_spelling() -> None:
    """The same overrides given in another order are the same namespace; NaN has no spelling."""
    assert canonical_json({"b": 1, "a": {"d": None, "c": "ü"}}) == '{"a":{"c":"\\u00fc","d":null},"b":1}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert canonical_json({}) == ""
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_same_names_in_another_process(seed: str) -> None:
    """Names survive a restart: none depends on Python's string hashing."""
    program = (
        "import json, sys\n"
        "from ucm_sglang.identity import BlockIds, Namespace, namespace_seed, token_chain\n"
        "n = Namespace(**json.load(sys.stdin))\n"
        "c = token_chain(range(64), 16, seed=namespace_seed('lora', 'salt'))\n"
        "print(n.hexdigest(), BlockIds(n.digest()).of('kv', c).hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(MHA),
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    from ucm_sglang.identity import namespace_seed, token_chain

    namespace = Namespace(**MHA)
    chain = token_chain(range(64), 16, seed=namespace_seed("lora", "salt"))
    assert done.stdout.split() == [namespace.hexdigest(), BlockIds(namespace.digest()).of("kv", chain).hex()]
