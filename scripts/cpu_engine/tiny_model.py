"""Write a tiny random-weight model and tokenizer, so that a true server can run without downloads.

    PYTHONPATH=scripts python -m cpu_engine.tiny_model OUT [--kind qwen3|mla] [--seed 0]

The weights are random but not arbitrary: greedy output must depend on the whole prompt and vary from token
to token, otherwise "same output with a cache hit" proves nothing. Default initialisation gives neither, so
the weights are scaled to keep every layer's contribution as large as what it is added to, and to make
attention pick few tokens. `make_model` checks the result and refuses a model whose output is degenerate.

The tokenizer maps each UTF-8 byte to one token: a prompt of n ASCII characters has n tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import cpu_engine

Kind = Literal["qwen3", "mla"]

_FORMAT = 1  # raise it when the same kind and seed no longer give the same files
_MARKER = "cpu_engine_tiny_model.json"
_VOCAB = 1024
_EOS, _PAD = 256, 257
_CHECK_TOKENS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": _EOS,
    "bos_token_id": _EOS,
    "pad_token_id": _PAD,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    # All layers dense: experts are no part of what this project stores.
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
# SGLang's CPU rotary embedding for MLA exists only in its yarn form.
_YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


class DegenerateOutputError(ValueError):
    """Greedy output that would stay the same whatever the cache held."""


def require_varied_output(outputs: Sequence[Sequence[int]], min_distinct: int = 4) -> None:
    """Refuse reference outputs that cannot show a wrong cache.

    Args:
        outputs: greedy token ids, one list per prompt; the prompts are different.
        min_distinct: how many different ids each list must hold.

    Raises:
        DegenerateOutputError: a list repeats itself, or two prompts have the same output.
    """
    for i, ids in enumerate(outputs):
        if len(set(ids)) < min_distinct:
            raise DegenerateOutputError(
                f"output {i} has {len(set(ids))} distinct tokens, fewer than {min_distinct}: {list(ids)}"
            )
        if any(list(ids) == list(other) for other in outputs[:i]):
            raise DegenerateOutputError(f"two prompts gave the same output: {list(ids)}")


def make_model(out: str | Path, kind: Kind = "qwen3", seed: int = 0) -> Path:
    """Write model, tokenizer and marker to directory `out`; do nothing if they are there already.

    A model of another kind or seed at `out` is replaced as a whole. Needs torch, transformers and
    tokenizers; takes a few seconds.

    Raises:
        FileExistsError: `out` exists and was not made by this function.
        DegenerateOutputError: the model's greedy output does not vary; use another seed.
    """
    out = Path(out)
    marker = {"format": _FORMAT, "kind": kind, "seed": seed}
    if out.exists():
        if not (out / _MARKER).is_file():
            raise FileExistsError(f"{out} exists and is not a tiny model; choose another path")
        if json.loads((out / _MARKER).read_text()) == marker:
            return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-model-", dir=out.parent) as tmp:
        staged = Path(tmp) / "model"
        _write(staged, kind, seed)
        (staged / _MARKER).write_text(json.dumps(marker))
        if out.exists():
            shutil.rmtree(out)
        staged.rename(out)
    return out


def make_lora(out: str | Path, seed: int = 1, rank: int = 4) -> Path:
    """Write a random LoRA adapter (q_proj and v_proj of every layer) for the tiny qwen3 model."""
    import torch
    from safetensors.torch import save_file

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    hidden = _COMMON["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(_COMMON["num_hidden_layers"]):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, hidden, generator=generator) / math.sqrt(hidden)
            b = torch.randn(width, rank, generator=generator) / math.sqrt(rank)
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(tensors, out / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny-qwen3",
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return out


def _write(out: Path, kind: Kind, seed: int) -> None:
    cpu_engine.install()  # transformers imports torchvision, which a CPU-only torch needs the shim for
    _make_tokenizer().save_pretrained(str(out))
    model = _make_network(kind, seed)
    _check(model, kind, seed)
    model.save_pretrained(str(out))
    if kind == "mla":
        path = out / "config.json"
        config = json.loads(path.read_text())
        config["moe_layer_freq"] = 1  # SGLang reads it; transformers does not write it
        path.write_text(json.dumps(config, indent=1))


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]
    # The rest of the vocabulary is never produced by text, but the model may generate it.
    names += [f"<{i}>" for i in range(len(names), _VOCAB)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def _make_network(kind: Kind, seed: int) -> Any:
    import torch
    import transformers

    if kind == "qwen3":
        config = transformers.Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=64)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.DeepseekV2Config(**_COMMON, **_MLA, rope_parameters=_YARN)
        model = transformers.DeepseekV2ForCausalLM(config)
    _scale_weights(model, torch.Generator().manual_seed(seed))
    return model.float().eval()


def _scale_weights(model: Any, generator: Any) -> None:
    """Redraw all weights: unit variance through every layer, attention logits of a few units."""
    import torch

    sharpness = 1.8  # standard deviation of queries and keys; attention logits get about its square
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                query_or_key = name.endswith(("q_norm.weight", "k_norm.weight"))
                weight.fill_(sharpness if query_or_key else 1.0)
                continue
            weight.copy_(torch.randn(weight.shape, generator=generator))
            if "embed_tokens" not in name:
                weight.mul_(1.0 / math.sqrt(weight.shape[-1]))
            if name.endswith(("q_proj.weight", "kv_a_proj_with_mqa.weight")):
                weight.mul_(sharpness)  # MLA has no query and key norms; with norms this has no effect
            if name.endswith(("down_proj.weight", "lm_head.weight")):
                weight.mul_(3.0)  # a gated MLP shrinks its input; the head only spreads the logits


def _check(model: Any, kind: Kind, seed: int) -> None:
    """Greedy output must vary, and must differ between prompts that differ only in their first half."""
    import torch

    tail = "and so on, as before. " * 4
    prompts = ["the quick brown fox " * 4 + tail, "five dozen liquor jugs " * 4 + tail]
    outputs = []
    for text in prompts:
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_CHECK_TOKENS,
                min_new_tokens=_CHECK_TOKENS,
            )  # fmt: skip
        outputs.append(out[0, ids.shape[1] :].tolist())
    try:
        require_varied_output(outputs)
    except DegenerateOutputError as e:
        raise DegenerateOutputError(f"tiny {kind} model with seed {seed}: {e}. Use another --seed.") from e


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write; replaced if it holds another tiny model")
    kinds = "qwen3 (grouped-query attention) or mla (DeepSeek-V2)"
    parser.add_argument("--kind", choices=get_args(Kind), default="qwen3", help=kinds)
    parser.add_argument("--seed", type=int, default=0, help="different seeds give different weights")
    args = parser.parse_args(argv)
    print(make_model(args.out, args.kind, args.seed))


if __name__ == "__main__":
    main()
