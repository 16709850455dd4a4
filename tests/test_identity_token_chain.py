"""The token chain against its definition; against SGLang itself: tests/sglang/test_token_chain.py."""

import hashlib
import struct
from array import array
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_sglang.identity import bigrams, namespace_seed, token_chain

narrow_ids = st.integers(0, 2**32 - 1)
any_ids = narrow_ids | st.integers(2**32 - 2, 2**32 + 1) | st.integers(0, 2**63 - 1)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)


def reference(ids: list[int], page_size: int, prior: str | None = None) -> list[str]:
    """The chain as SGLang defines it, one page at a time."""
    chain: list[str] = []
    previous = bytes.fromhex(prior or "")
    for start in range(0, len(ids) // page_size * page_size, page_size):
        page = ids[start : start + page_size]
        wide = max(page) > 0xFFFFFFFF
        payload = (
            b"\xff" + struct.pack(f"<{page_size}Q", *page) if wide else struct.pack(f"<{page_size}I", *page)
        )
        previous = hashlib.sha256(previous + payload).digest()
        chain.append(previous.hex())
    return chain


def test_golden_chain() -> None:
    """Values computed by SGLang 0.5.23: a change here loses every stored page."""
    seed = namespace_seed("lora-a", "tenant-1")
    assert seed == "7d5eebadb5b6d118f6fb1bee6a7270aef93f903baf6224b4d5dc6579365f3491"
    assert token_chain([5, 70000, 3, 4, 9, 1, 7], 3) == [
        "02c4533ce1ce107b46d5824c4c38e2ab2efdf37cb059638bf693b238b6f25675",
        "95a4a86aa591f2bffc69514d5b212a5a9d3e3ebbe1d6fcbf60ec48443ac91769",
    ]
    assert token_chain([5, 70000, 3], 3, seed=seed) == [
        "1a14e87fa85f4781dc97c81fa60e3c932ed12f0178bfe5e170a56272b1f7d141"
    ]
    assert token_chain([5, 2**32, 3], 3) == [
        "4115e2017af688488b7a31907bff93e12de509b1b53fc3c3314d85eb4fabadbb"
    ]


@given(st.lists(any_ids, max_size=70), st.integers(1, 20), st.none() | hashes)
def test_chain_is_the_definition(ids: list[int], page_size: int, prior: str | None) -> None:
    """Full pages only, each hashed after the one before, wide encoding page by page."""
    assert token_chain(ids, page_size, prior=prior) == reference(ids, page_size, prior)
    assert token_chain(ids, page_size, seed=prior) == reference(ids, page_size, prior)


@given(st.lists(any_ids, max_size=60), st.integers(1, 8), st.integers(0, 60), hashes)
def test_chain_continues_from_prior(ids: list[int], page_size: int, cut: int, seed: str) -> None:
    """A request that extends a known prefix gets the same keys as one hashed from the start."""
    cut = min(cut, len(ids)) // page_size * page_size
    head = token_chain(ids[:cut], page_size, seed=seed)
    tail = token_chain(ids[cut:], page_size, seed=seed, prior=head[-1] if head else None)
    assert head + tail == token_chain(ids, page_size, seed=seed)


@given(st.lists(narrow_ids, max_size=40), st.integers(1, 8))
def test_every_container_gives_the_same_chain(ids: list[int], page_size: int) -> None:
    """Engines hand over lists, arrays of several widths, and views; the keys must not depend on it."""
    expected = token_chain(ids, page_size)
    spread = np.zeros(2 * len(ids), dtype=np.int64)
    spread[::2] = ids
    forms: list[Any] = [tuple(ids), array("q", ids), array("I", ids), spread[::2]]
    forms += [np.array(ids, dtype=t) for t in ("<u4", "<i8", "<u8", ">i8")]
    for form in forms:
        assert token_chain(form, page_size) == expected


@given(st.lists(any_ids, max_size=40), st.integers(1, 8))
def test_bigrams_hash_as_flat_pairs(ids: list[int], page_size: int) -> None:
    """EAGLE keys: a page of n pairs hashes its 2n ids."""
    pairs = [*pairwise(ids)]
    assert bigrams(ids).tolist() == [list(p) for p in pairs]
    flat = [i for p in pairs for i in p]
    assert token_chain(bigrams(ids), page_size) == token_chain(pairs, page_size)
    assert token_chain(pairs, page_size) == reference(flat, 2 * page_size)


def test_seeds_never_collide_by_joining() -> None:
    """vllm#44701, sglang#38577: LoRA name and salt are separate domains, absent and empty are different.

    Every pair of absent and short parts over an alphabet that holds the marker bytes of the encoding.
    """
    short = ["".join(letters) for size in range(4) for letters in product("a\0\1", repeat=size)]
    pairs = list(product([None, *short], repeat=2))
    seeds = {namespace_seed(*pair) for pair in pairs}
    assert len(seeds) == len(pairs) == 41 * 41


def test_a_salt_changes_every_page_and_none_changes_nothing() -> None:
    """Issue 2 number 3: salted requests share no page; plain requests have no seed."""
    ids = list(range(64))
    plain = token_chain(ids, 16)
    assert namespace_seed() is namespace_seed(None, None) is None
    assert token_chain(ids, 16, seed=namespace_seed(None, None)) == plain
    chains = [
        token_chain(ids, 16, seed=namespace_seed(*p))
        for p in [("a", None), (None, "a"), ("a", "a"), ("", None)]
    ]
    assert len({h for chain in [plain, *chains] for h in chain}) == 5 * 4


@pytest.mark.parametrize(
    "ids",
    [
        [1, -1],
        [1, 2**63],
        [2**63, 2**63],
        [1, 2**64],
        [1.0, 2.0],
        [True, False],
        ["a", "b"],
        [(1, 2), (3,)],
        [[[1]]],
        np.array([1, 2**63], dtype=np.uint64),
    ],
)
def test_bad_ids_are_refused(ids: Any) -> None:
    """An id that is rounded or wrapped would name another page."""
    with pytest.raises(ValueError):
        token_chain(ids, 1)


@pytest.mark.parametrize("page_size", [0, -1, 1.0, True, None])
def test_bad_page_size_is_refused(page_size: Any) -> None:
    """Never an endless loop or a division by zero on an engine thread."""
    with pytest.raises(ValueError, match="page_size must be a positive int"):
        token_chain([1], page_size)


@pytest.mark.parametrize("value", ["", "ab", "g" * 64, "A" * 64, "0" * 63, "0" * 65, "00" * 32 + "\n"])
@pytest.mark.parametrize("name", ["seed", "prior"])
def test_bad_hash_is_refused(name: str, value: str) -> None:
    """A cut or mistyped hash would start a chain of its own."""
    with pytest.raises(ValueError, match=f"{name} must be 64"):
        token_chain([1], 1, **{name: value})
