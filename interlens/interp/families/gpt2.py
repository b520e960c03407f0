"""GPT-2: learned absolute positions, one fused projection for q, k and v."""

import torch

from . import Family, into, out


def third(index: int):
    """Columns of one of three equal parts of a fused projection."""
    return lambda layer, width: torch.arange(index * width // 3, (index + 1) * width // 3)


FAMILIES = (
    Family(
        model_types=("gpt2",),
        layers="h",
        points={
            "embed": out("wte"),
            "resid_pre": into(""),
            "resid_mid": into("ln_2", in_place=True),
            "residual": out(""),
            "attn": out("attn"),
            "mlp": out("mlp"),
            "q": out("attn.c_attn", columns=third(0)),
            "k": out("attn.c_attn", columns=third(1)),
            "v": out("attn.c_attn", columns=third(2)),
            "head_out": into("attn.c_proj"),
            "final_norm": out("ln_f"),
            "logits": out(""),
        },
    ),
)
