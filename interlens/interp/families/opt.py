"""OPT: the MLP is two bare projections; the 350m model norms after adding, so that its parts are no contributions."""

from . import Family, into, out
from .llama import ATTENTION, ROOT, STREAM


def pre_norm(config) -> bool:
    """Whether the layer normalises before attention."""
    return config.do_layer_norm_before


POST_NORM = "this model norms the stream after adding to it, so that attention and MLP are no plain contributions"

FAMILIES = (
    Family(
        model_types=("opt",),
        lacks={"attn": POST_NORM, "mlp": POST_NORM, "resid_mid": POST_NORM, "final_norm": "this model has none"},
        points={
            **ROOT,
            **STREAM,
            **ATTENTION,
            "attn": out("self_attn", when=pre_norm),
            "resid_mid": into("final_layer_norm", in_place=True, when=pre_norm),
            "mlp": out("fc2", when=pre_norm),
            "head_out": into("self_attn.out_proj"),
            "final_norm": out("final_layer_norm"),
        },
    ),
)
