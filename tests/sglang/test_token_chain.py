"""Our token chain is SGLang's: other adapters derive the keys that SGLang stores under (issue 2)."""

import sys
from array import array
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_sglang.identity import bigrams, namespace_seed, token_chain

pytestmark = pytest.mark.sglang

narrow_ids = st.integers(0, 2**32 - 1)
any_ids = narrow_ids | st.integers(2**32 - 2, 2**32 + 1) | st.integers(0, 2**63 - 1)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
parts = st.none() | st.text(max_size=20)
MANY = settings(max_examples=400)
KEPT: list[Any] = []  # an operator is gone with the object that declared it


@pytest.fixture(scope="module")
def sgl() -> Any:
    """SGLang's own hashing, imported late: collecting needs no engine."""
    torch = import_module("torch")
    if "cpu_engine_shim" not in sys.modules and not hasattr(torch.ops.torchvision, "nms"):
        # The torchvision of PyPI is built for CUDA; beside a CPU torch it cannot be imported without these.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
    utils = import_module("sglang.srt.mem_cache.utils")
    return SimpleNamespace(
        get_hash_str=utils.get_hash_str,
        get_storage_hash_str=utils.get_storage_hash_str,
        storage_namespace_seed=utils.storage_namespace_seed,
        RadixKey=import_module("sglang.srt.mem_cache.radix_cache").RadixKey,
    )


@MANY
@given(
    st.lists(narrow_ids, max_size=200) | st.lists(any_ids, max_size=60),
    st.integers(1, 70),
    st.none() | hashes,
)
def test_flat_ids(sgl: Any, ids: list[int], page_size: int, prior: str | None) -> None:
    """Plain keys, with and without ids above u32, from the start and after a prior page."""
    full = ids[: len(ids) // page_size * page_size]
    expected = sgl.get_hash_str(full, prior, page_size)
    assert token_chain(ids, page_size, prior=prior) == expected
    assert token_chain(array("q", ids), page_size, prior=prior) == expected


@MANY
@given(st.lists(any_ids, max_size=60), st.integers(1, 12), st.none() | hashes)
def test_bigram_keys(sgl: Any, ids: list[int], page_size: int, prior: str | None) -> None:
    """EAGLE: SGLang's bigram view over raw tokens, and the same pairs as tuples."""
    key = sgl.RadixKey(array("q", ids), is_bigram=True)
    full = key[: len(key) // page_size * page_size]
    expected = sgl.get_hash_str(full, prior, page_size)
    assert token_chain(bigrams(ids), page_size, prior=prior) == expected
    assert sgl.get_hash_str(list(full), prior, page_size) == expected


@MANY
@given(
    st.integers(1, 4).flatmap(lambda w: st.lists(st.tuples(*[any_ids] * w), max_size=30)), st.integers(1, 8)
)
def test_tuple_keys(sgl: Any, ids: list[tuple[int, ...]], page_size: int) -> None:
    """Positions of several ids hash as their flat ids."""
    full = ids[: len(ids) // page_size * page_size]
    assert token_chain(ids, page_size) == sgl.get_hash_str(full, None, page_size)


@MANY
@given(parts, parts)
def test_namespace_seed(sgl: Any, extra_key: str | None, cache_salt: str | None) -> None:
    """Issue 2 number 3: the same seed for LoRA and salt, None for plain requests."""
    assert namespace_seed(extra_key, cache_salt) == sgl.storage_namespace_seed(extra_key, cache_salt)


@MANY
@given(st.lists(any_ids, min_size=1, max_size=40), st.integers(1, 8), parts, parts.filter(lambda p: p != ""))
def test_keys_of_a_salted_request(
    sgl: Any, ids: list[int], page_size: int, extra: str | None, salt: str | None
) -> None:
    """The whole way of a request: RadixKey with LoRA and salt to page hashes."""
    full = ids[: len(ids) // page_size * page_size]
    key = sgl.RadixKey(array("q", full), extra_key=extra, cache_salt=salt)
    seed = namespace_seed(extra, salt)
    assert token_chain(ids, page_size, seed=seed) == sgl.get_storage_hash_str(key, page_size=page_size)


@pytest.mark.parametrize("bad", [-1, 2**63])
def test_ids_that_sglang_refuses_are_refused(sgl: Any, bad: int) -> None:
    """Neither side invents a key for an id outside 0..2**63-1."""
    with pytest.raises((ValueError, IndexError, OverflowError)):
        sgl.get_hash_str([1, bad], None, 2)
    with pytest.raises(ValueError):
        token_chain([1, bad], 2)


def test_golden_values_come_from_sglang(sgl: Any) -> None:
    """The constants of the core suite (tests/test_identity_token_chain.py) are SGLang's own."""
    seed = sgl.storage_namespace_seed("lora-a", "tenant-1")
    assert seed == namespace_seed("lora-a", "tenant-1")
    for ids in ([5, 70000, 3], [5, 70000, 3, 4, 9, 1], [5, 2**32, 3]):
        assert token_chain(ids, 3) == sgl.get_hash_str(ids, None, 3)
        assert token_chain(ids, 3, seed=seed) == sgl.get_hash_str(ids, seed, 3)
