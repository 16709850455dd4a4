"""The model to measure with: random weights, but prefill takes time and pages of KV cache have a real size.

8 layers with 4 KV heads of 128 in float32 make 32 KiB of KV cache a token, 2 MiB a page of 64 tokens: about a
quarter of what a token of Llama-3.1-8B takes. A prefill of 4,096 tokens takes seconds on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import cpu_engine
from cpu_engine import tiny_model

SHAPE = {
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
}
FLOAT32_BYTES = 4


def bytes_per_token(model: Path) -> int:
    """Bytes of KV cache of one token in float32, for a model directory with grouped-query attention."""
    config = json.loads((model / "config.json").read_text())
    heads: int = config["num_key_value_heads"] * config["num_hidden_layers"]
    return 2 * FLOAT32_BYTES * heads * int(config["head_dim"])


def make_bench_model(out: Path) -> Path:
    """Write the model and a tokenizer to the new directory `out`. Needs torch and transformers.

    The output of `tiny_model.make_model` with larger layers; weights are drawn as there, so that greedy
    output depends on the whole prompt.
    """
    cpu_engine.install()
    import torch
    import transformers

    tiny_model.make_model(out)
    config = transformers.AutoConfig.from_pretrained(out)
    for name, value in SHAPE.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * SHAPE["num_hidden_layers"]
    network = transformers.Qwen3ForCausalLM(config)
    tiny_model._scale_weights(network, torch.Generator().manual_seed(0))
    for weights in out.glob("*.safetensors"):
        weights.unlink()
    network.float().eval().save_pretrained(str(out))
    return out
