"""What a page of KV cache is called: the namespace, the weights, the block ids and the token chain.

Nothing here imports an engine. All functions are pure (apart from reading the model directory) and
thread-safe.
"""

from __future__ import annotations

from ucm_sglang.identity.block_ids import KV_POOL, BlockIds
from ucm_sglang.identity.namespace import SCHEMA, Namespace, canonical_json
from ucm_sglang.identity.ranks import same_but_rank
from ucm_sglang.identity.token_chain import bigrams, namespace_seed, token_chain
from ucm_sglang.identity.weights import FingerprintError, weights_fingerprint

__all__ = [
    "KV_POOL",
    "SCHEMA",
    "BlockIds",
    "FingerprintError",
    "Namespace",
    "bigrams",
    "canonical_json",
    "namespace_seed",
    "same_but_rank",
    "token_chain",
    "weights_fingerprint",
]
