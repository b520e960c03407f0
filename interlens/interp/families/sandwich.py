"""Sandwich-norm blocks: what attention and MLP give is normed once more before it is added to the stream."""

from . import Family, into, out
from .llama import PRE_NORM

GEMMA = {
    **PRE_NORM,
    "attn": out("post_attention_layernorm"),
    "resid_mid": into("pre_feedforward_layernorm", in_place=True),
    "mlp": out("post_feedforward_layernorm"),
}
OLMO2 = {**GEMMA, "resid_mid": into("mlp", in_place=True)}
GLM4 = {**PRE_NORM, "attn": out("post_self_attn_layernorm"), "mlp": out("post_mlp_layernorm")}

FAMILIES = (
    Family(model_types=("gemma2", "gemma3_text"), points=GEMMA),
    Family(model_types=("olmo2", "olmo3"), points=OLMO2),
    Family(model_types=("glm4",), points=GLM4),
)
