"""Engine keys to 16-byte block ids."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128_digest

ID_BYTES = 16
KV_POOL = "kv"
"""Pool of the pages of a model with one host pool."""


class BlockIds:
    """Names blocks of one namespace: ``xxh3_128(digest(16) ‖ len(pool) u32 LE ‖ pool ‖ key)``.

    The digest has a fixed length, the pool carries its length and the key is the rest, so two different
    (namespace, pool, key) triples never feed the same bytes to the hash. xxh3 is no cryptographic hash: it
    is fed keys that are SHA-256 digests already, so nobody can choose its input freely.

    Thread-safe.
    """

    def __init__(self, namespace_digest: bytes) -> None:
        """`namespace_digest`: the 16 bytes of `Namespace.digest`; `ValueError` for any other length."""
        self._digest = bytes(namespace_digest)
        if len(self._digest) != ID_BYTES:
            raise ValueError(f"namespace digest has {len(self._digest)} bytes, expected {ID_BYTES}")

    def of(self, pool: str, keys: Sequence[str]) -> bytes:
        """Ids of `keys` in `pool`, packed: id `i` is bytes ``[16 * i, 16 * (i + 1))``.

        `TypeError` if `keys` is one string instead of a sequence of strings.
        """
        if isinstance(keys, str):
            raise TypeError("keys must be a sequence of strings, not one string")
        name = pool.encode()
        prefix = self._digest + len(name).to_bytes(4, "little") + name
        return b"".join([xxh3_128_digest(prefix + key.encode()) for key in keys])
