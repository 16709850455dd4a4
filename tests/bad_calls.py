"""Calls of a store's verbs that nothing could satisfy, for the contract of every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def bad_calls() -> dict[str, Callable[[Any, np.ndarray], object]]:
    """Calls whose arguments no store can make sense of; each gets a store and 64 bytes of memory."""
    one, two = [b"x" * 16], [b"x" * 16, b"y" * 16]
    at = lambda memory, *shape: np.full(shape, memory.ctypes.data, np.int64)  # noqa: E731
    return {
        "lookup: id too short": lambda s, m: s.lookup([b"x" * 15]),
        "lookup: id too long": lambda s, m: s.lookup([b"x" * 17]),
        "lookup: packed ids of 20 bytes": lambda s, m: s.lookup(b"x" * 20),
        "lookup: ids that add up to 32 bytes": lambda s, m: s.lookup([b"x" * 15, b"x" * 17]),
        "prefix: packed ids of 15 bytes": lambda s, m: s.lookup_on_prefix(b"x" * 15),
        "prefetch: id too short": lambda s, m: s.prefetch([b"x"]),
        "load: fewer buffers than ids": lambda s, m: s.load(two, None, [bytearray(8)]),
        "load: more buffers than ids": lambda s, m: s.load(one, None, [bytearray(8)] * 2),
        "load: into bytes": lambda s, m: s.load(one, None, [bytes(8)]),
        "load: buffers of two sizes": lambda s, m: s.load(two, None, [bytearray(8), bytearray(9)]),
        "load: rows of two lengths": lambda s, m: s.load(two, None, [[m[:8], m[8:16]], [m[16:32]]]),
        "load: strided buffer": lambda s, m: s.load(one, None, [m[::2]]),
        "load: empty buffer": lambda s, m: s.load(one, None, [bytearray()]),
        "load: negative shard": lambda s, m: s.load(one, -1, [bytearray(8)]),
        "load: shard beyond 65,535": lambda s, m: s.load(one, 1 << 16, [bytearray(8)]),
        "load: fewer shards than ids": lambda s, m: s.load(two, [0], [bytearray(8)] * 2),
        "load_data: fewer addresses than ids": lambda s, m: s.load_data(two, None, at(m, 1, 1), 8),
        "load_data: three-dimensional addresses": lambda s, m: s.load_data(one, None, at(m, 1, 1, 1), 8),
        "load_data: no components": lambda s, m: s.load_data(one, None, at(m, 1, 0), 8),
        "load_data: sizes for other components": lambda s, m: s.load_data(one, None, at(m, 1, 3), [8, 8]),
        "load_data: size 0": lambda s, m: s.load_data(one, None, at(m, 1, 2), [8, 0]),
        "load_data: negative size": lambda s, m: s.load_data(one, None, at(m, 1, 1), -8),
        "dump: no shards": lambda s, m: s.dump(one, None, [bytes(8)], n_shards=0),
        "dump: too many shards": lambda s, m: s.dump(one, None, [bytes(8)], n_shards=(1 << 16) + 1),
        "dump: shard 2 of 2": lambda s, m: s.dump(one, 2, [bytes(8)], n_shards=2),
        "dump: shard 1 of a block in one piece": lambda s, m: s.dump(one, 1, [bytes(8)]),
        "dump: fewer parents than ids": lambda s, m: s.dump(two, None, [bytes(8)] * 2, parents=one),
        "dump: fewer buffers than ids": lambda s, m: s.dump(two, None, [bytes(8)]),
        "dump_data: fewer addresses than ids": lambda s, m: s.dump_data(two, None, at(m, 1, 1), 8),
        "dump_data: size 0": lambda s, m: s.dump_data(one, None, at(m, 1, 1), 0),
    }


BAD_CALLS = bad_calls()
