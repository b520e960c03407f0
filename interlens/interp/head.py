"""From normed hidden states to logits by a model's own code after its decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.utils import ModelOutput

from .attach import replaced_forward
from .sites import Locator


@dataclass
class _Decoded(ModelOutput):
    """What a text decoder returns: the hidden states, and None for whatever else a family looks for in it."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def logits_of(at: Locator, normed: Float[Tensor, "*token width"]) -> Float[Tensor, "*token vocab"]:
    """Logits of hidden states that already passed the final norm; see `lens.unembed`."""
    rows = normed.reshape(1, -1, normed.shape[-1])
    project = getattr(at.decoder, "project_out", None)
    rows = rows if project is None else project(rows)

    def decoder(forward, *args, **kwargs):
        return _Decoded(last_hidden_state=rows)

    with replaced_forward(at.decoder, decoder):
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        logits = at.base(input_ids=ids, use_cache=False).logits
    return logits.reshape(*normed.shape[:-1], -1)
