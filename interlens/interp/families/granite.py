"""Granite: the embedding and both contributions are multiplied by constants before they reach the stream."""

from . import Family, out
from .llama import PRE_NORM, moe


def residual_multiplier(layer, x):
    """What the family multiplies contributions with before it adds them."""
    return layer.residual_multiplier


SCALED = {
    **PRE_NORM,
    "embed": out("embed_tokens", scale=lambda decoder, x: decoder.embedding_multiplier),
    "attn": out("self_attn", scale=residual_multiplier),
    "mlp": out("mlp", scale=residual_multiplier),
}

FAMILIES = (
    Family(model_types=("granite",), points=SCALED),
    Family(
        model_types=("granitemoe",),
        points={**SCALED, **moe("block_sparse_moe"), "mlp": out("block_sparse_moe", scale=residual_multiplier)},
    ),
)
