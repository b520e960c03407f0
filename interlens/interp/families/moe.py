"""Llama-like blocks whose MLP is a router over experts, some with a shared expert, some with dense layers between."""

import torch

from . import Family, into, out
from .llama import PRE_NORM, moe


def gated(layer, x):
    """The shared expert is added through a sigmoid gate of its own."""
    return layer.mlp.shared_expert_gate(x).sigmoid()


def first_half_of_each_head(layer, width: int):
    """Qwen3-Next's query projection gives, head by head, the query and then an output gate."""
    head = layer.self_attn.head_dim
    return torch.arange(width).view(-1, 2, head)[:, 0].reshape(-1)


GATED = {"shared_expert": out("mlp.shared_expert", scale=gated)}
SHARED = {"shared_expert": out("mlp.shared_experts")}
LATENT = {name: point for name, point in PRE_NORM.items() if name not in ("q", "k", "v")}
LATENT_LACKS = dict.fromkeys("qkv", "latent attention has no flat q, k and v projections of the stream")

FAMILIES = (
    Family(
        model_types=("mixtral", "qwen3_moe", "olmoe", "phimoe", "gpt_oss"),
        points={**PRE_NORM, **moe()},
    ),
    Family(model_types=("qwen2_moe",), points={**PRE_NORM, **moe(), **GATED}),
    Family(model_types=("glm4_moe",), points={**PRE_NORM, **moe(), **SHARED}),
    Family(model_types=("deepseek_v2", "deepseek_v3"), points={**LATENT, **moe(), **SHARED}, lacks=LATENT_LACKS),
    Family(
        model_types=("qwen3_next",),
        points={
            **PRE_NORM,
            **moe(),
            **GATED,
            "attn": (out("self_attn"), out("linear_attn")),
            "q": out("self_attn.q_proj", columns=first_half_of_each_head),
            "head_out": (into("self_attn.o_proj"), into("linear_attn.out_proj")),
        },
    ),
)
