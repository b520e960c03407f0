"""From hidden states to logits by the model's own final norm and head: `unembed`, `logit_lens`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .hooks import replaced_forward
from .sites import Locator


@dataclass
class _Decoded(ModelOutput):
    """What a text decoder returns: the hidden states, and None for whatever else a family looks for in it."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def final_norm(model: nn.Module, hidden: Float[Tensor, "*token width"]) -> Float[Tensor, "*token width"]:
    """The model's own final norm; identity for a model without one."""
    at = Locator(model)
    place = at.place("final_norm", len(at.layers) - 1)
    return hidden if place is None else place.module(hidden)


def unembed(model: nn.Module, normed: Float[Tensor, "*token width"]) -> Float[Tensor, "*token vocab"]:
    """Logits of hidden states that already passed the final norm, by the model's own code after its decoder.

    That includes what a family does to logits (soft caps, scales). Differentiable. The decoder itself does not run.
    """
    at = Locator(model)
    rows = normed.reshape(1, -1, normed.shape[-1])
    project = getattr(at.decoder, "project_out", None)
    rows = rows if project is None else project(rows)

    def decoder(forward, *args, **kwargs):
        return _Decoded(last_hidden_state=rows)

    with replaced_forward(at.decoder, decoder):
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        logits = at.base(input_ids=ids, use_cache=False).logits
    return logits.reshape(*normed.shape[:-1], -1)


def logit_lens(model: nn.Module, hidden: Float[Tensor, "*token width"]) -> Float[Tensor, "*token vocab"]:
    """Logits as if the model ended here: its final norm and head on residual-stream states of any layer.

    For the last layer's `residual` these are the model's logits. Source: nostalgebraist, "interpreting GPT: the logit
    lens" (2020). Use under `torch.no_grad()` unless you want gradients.
    """
    return unembed(model, final_norm(model, hidden))
