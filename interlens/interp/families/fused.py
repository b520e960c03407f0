"""Blocks with one fused projection for q, k and v: Phi-3 (side by side), GPT-NeoX and Falcon (head by head)."""

import torch

from . import Family, into, out
from .llama import PRE_NORM, ROOT, STREAM


def phi3_columns(part: int):
    """Columns of q, k or v in a fused projection that has them side by side."""

    def columns(layer, width: int):
        attention = layer.self_attn
        key = attention.num_key_value_heads * attention.head_dim
        bounds = (0, width - 2 * key, width - key, width)
        return torch.arange(bounds[part], bounds[part + 1])

    return columns


def neox_columns(part: int):
    """Columns of q, k or v in a fused projection that interleaves them by head."""

    def columns(layer, width: int):
        return torch.arange(width).view(-1, 3, layer.attention.head_size)[:, part].reshape(-1)

    return columns


def falcon_columns(part: int):
    """Per group of heads: its queries, then its key, then its value (one group: multi-query)."""

    def columns(layer, width: int):
        attention = layer.self_attention
        groups = attention.num_kv_heads
        heads = torch.arange(width).view(groups, attention.num_heads // groups + 2, attention.head_dim)
        return (heads[:, :-2], heads[:, -2], heads[:, -1])[part].reshape(-1)

    return columns


def sequential(config) -> bool:
    """Whether attention and MLP come one after the other."""
    return not config.use_parallel_residual


def falcon_sequential(config) -> bool:
    """Whether a Falcon's attention and MLP come one after the other."""
    return not (config.parallel_attn or config.new_decoder_architecture)


PARALLEL = {"resid_mid": "attention and MLP read the same stream in parallel"}

FAMILIES = (
    Family(
        model_types=("phi3",),
        points={
            **PRE_NORM,
            **{name: out("self_attn.qkv_proj", columns=phi3_columns(part)) for part, name in enumerate("qkv")},
        },
    ),
    Family(
        model_types=("gpt_neox",),
        lacks=PARALLEL,
        points={
            **STREAM,
            "embed": out("embed_in"),
            "attn": out("attention"),
            "resid_mid": into("post_attention_layernorm", in_place=True, when=sequential),
            "mlp": out("mlp"),
            **{name: out("attention.query_key_value", columns=neox_columns(part)) for part, name in enumerate("qkv")},
            "head_out": into("attention.dense"),
            "final_norm": out("final_layer_norm"),
            "logits": ROOT["logits"],
        },
    ),
    Family(
        model_types=("falcon",),
        layers="h",
        lacks=PARALLEL,
        points={
            **STREAM,
            "embed": out("word_embeddings"),
            "attn": out("self_attention"),
            "resid_mid": into("post_attention_layernorm", in_place=True, when=falcon_sequential),
            "mlp": out("mlp", shared=True),
            **{
                name: out("self_attention.query_key_value", columns=falcon_columns(part))
                for part, name in enumerate("qkv")
            },
            "head_out": into("self_attention.dense"),
            "final_norm": out("ln_f"),
            "logits": ROOT["logits"],
        },
    ),
)
