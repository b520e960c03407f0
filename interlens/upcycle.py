"""A sparse upcycle: a dense Llama-like model as a mixture of experts that really routes.

Every expert is a copy of the dense MLP plus a little seeded noise, the router is seeded and random, all else is the
dense model's. Without noise the logits are the dense model's. Source: Komatsuzaki et al., "Sparse upcycling" (2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def upcycle(model: nn.Module, *, num_experts: int = 4, top_k: int = 2, noise: float = 0.02, seed: int = 0) -> nn.Module:
    """A Mixtral model from a Llama one, in its dtype, on its device, in eval mode. The given model is not changed.

    noise: standard deviation added to each expert's weights, relative to that of the weight. ValueError for another
    architecture, or for biases that Mixtral does not have.
    """
    from transformers import MixtralForCausalLM

    whole: Any = model
    config = sparse_config(whole.config, num_experts, top_k)
    config._attn_implementation = whole.config._attn_implementation
    first = next(model.parameters())
    with torch.device("meta"):
        sparse = MixtralForCausalLM(config)
    sparse = sparse.to(first.dtype).to_empty(device=first.device)
    generator = torch.Generator().manual_seed(seed)
    weights = model.state_dict()
    with torch.no_grad():
        for name, target in sparse.state_dict().items():
            if ".mlp." not in name:
                target.copy_(weights[name])
        for old, new in zip(whole.model.layers, sparse.model.layers, strict=True):
            up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
            for expert in range(num_experts):
                new.mlp.experts.gate_up_proj[expert].copy_(_noisy(up, noise, generator))
                new.mlp.experts.down_proj[expert].copy_(_noisy(old.mlp.down_proj.weight, noise, generator))
            random = torch.randn(new.mlp.gate.weight.shape, generator=generator)
            new.mlp.gate.weight.copy_(random * config.hidden_size**-0.5)
    sparse.model.rotary_emb = type(sparse.model.rotary_emb)(config).to(first.device)
    sparse.tie_weights()
    sparse.generation_config = model.generation_config
    return sparse.eval()


def sparse_config(dense: Any, num_experts: int = 4, top_k: int = 2) -> Any:
    """The configuration of a Llama's upcycle; ValueError for another architecture, or impossible sizes."""
    from transformers import MixtralConfig

    if dense.model_type != "llama" or dense.attention_bias or dense.mlp_bias:
        raise ValueError(f"only a Llama without biases can be upcycled, got {dense.model_type!r}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k {top_k} of {num_experts} experts")
    return MixtralConfig(
        **{name: getattr(dense, name) for name in _SHARED},
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        sliding_window=None,
    )


def _noisy(weight: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    if not noise:
        return weight
    values = weight.float().cpu()
    return (values + noise * values.std() * torch.randn(values.shape, generator=generator)).to(weight)
