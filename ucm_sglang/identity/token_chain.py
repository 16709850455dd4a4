"""SGLang's page hashes, derived from token ids alone.

Each page hashes to ``SHA-256(hash of the page before it ‖ token ids as u32 little-endian)``. The first page
of a request that carries a LoRA or a cache salt hashes after a seed made of these; that of any other request
hashes after nothing. Equality with SGLang is proved in ``tests/sglang/test_token_chain.py``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenIds = Sequence[int] | Sequence[tuple[int, ...]] | npt.NDArray[np.integer]

_HASH = re.compile(r"[0-9a-f]{64}")
_SEED_DOMAIN = b"sglang-cache-namespace-v1"
_U32_MAX = 0xFFFF_FFFF
_I64_MAX = 0x7FFF_FFFF_FFFF_FFFF
# One odd byte in front keeps a page of 8-byte ids apart from every page of 4-byte ids.
_WIDE_TAG = b"\xff"


def token_chain(
    token_ids: TokenIds,
    page_size: int,
    seed: str | None = None,
    prior: str | None = None,
) -> list[str]:
    """Hashes of the full pages of `token_ids`, in order, as 64 hex digits each; a partial tail has none.

    `token_ids`: shape ``(n,)``, or ``(n, width)`` where a position is a tuple of ids (see `bigrams`). Ids are
    0 to 2**63 - 1; a page with an id above u32 is hashed in the wide encoding. `page_size` counts
    positions. `seed` is the result of `namespace_seed`; `prior` is the hash of the page before the first
    token. With `prior` the seed has no effect: it is in the chain already.

    `ValueError` for ids, a page size or hashes that are none.
    """
    if type(page_size) is not int or page_size < 1:
        raise ValueError(f"page_size must be a positive int, got {page_size!r}")
    previous = _parse_hash("seed", seed)
    if prior is not None:
        previous = _parse_hash("prior", prior)
    ids = _as_ids(token_ids)
    pages = len(ids) // page_size
    if pages == 0:
        return []
    words = ids[: pages * page_size].reshape(pages, -1)
    narrow = words.astype("<u4")
    wide = words.max(axis=1) > _U32_MAX
    hashes: list[str] = []
    for page in range(pages):
        digest = hashlib.sha256(previous)
        if wide[page]:
            digest.update(_WIDE_TAG + words[page].astype("<i8").tobytes())
        else:
            digest.update(narrow[page])
        previous = digest.digest()
        hashes.append(previous.hex())
    return hashes


def namespace_seed(*parts: str | None) -> str | None:
    """The hash that starts the chain of a request with namespace `parts`; None if every part is None.

    SGLang's parts are ``(extra_key, cache_salt)``; LoRA requests carry the adapter in ``extra_key``. Every
    part is written with its presence and its length, so that absent, empty and joined parts all differ.
    """
    if all(part is None for part in parts):
        return None
    digest = hashlib.sha256(_SEED_DOMAIN)
    for part in parts:
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def bigrams(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Neighbouring pairs, shape ``(max(n - 1, 0), 2)``: what SGLang hashes under EAGLE speculation."""
    ids = _as_ids(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"bigrams are made of a flat list of ids, got shape {ids.shape}")
    return np.stack((ids[:-1], ids[1:]), axis=1)


def _as_ids(token_ids: TokenIds) -> npt.NDArray[np.int64]:
    ids = np.asarray(token_ids)
    if ids.shape[:1] == (0,):
        return np.zeros(0, dtype=np.int64)
    if ids.ndim not in (1, 2):
        raise ValueError(f"token ids must have shape (n,) or (n, width), got {ids.shape}")
    if ids.dtype.kind not in "iu":
        # numpy turns integers that fit no integer type into floats or objects.
        raise ValueError(f"token ids must be integers in 0..2**63-1, got {ids.dtype}")
    if ids.min() < 0 or ids.max() > _I64_MAX:
        raise ValueError(f"token ids must be in 0..2**63-1, got {ids.min()}..{ids.max()}")
    return ids.astype(np.int64, copy=False)


def _parse_hash(name: str, value: str | None) -> bytes:
    if value is None:
        return b""
    if not _HASH.fullmatch(value):
        raise ValueError(f"{name} must be 64 lower-case hex digits, got {value!r}")
    return bytes.fromhex(value)
