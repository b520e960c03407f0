"""From hidden states to logits by the model's own final norm and head: `unembed`, `logit_lens`."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from .head import logits_of
from .locate import locator


def final_norm(model: nn.Module, hidden: Float[Tensor, "*token width"]) -> Float[Tensor, "*token width"]:
    """The model's own final norm; identity for a model without one."""
    at = locator(model)
    place = at.place("final_norm", len(at.layers) - 1)
    return hidden if place is None else place.module(hidden)


def unembed(model: nn.Module, normed: Float[Tensor, "*token width"]) -> Float[Tensor, "*token vocab"]:
    """Logits of hidden states that already passed the final norm, by the model's own code after its decoder.

    That includes what a family does to logits (soft caps, scales). Differentiable. The decoder itself does not run.
    """
    return logits_of(locator(model), normed)


def logit_lens(model: nn.Module, hidden: Float[Tensor, "*token width"]) -> Float[Tensor, "*token vocab"]:
    """Logits as if the model ended here: its final norm and head on residual-stream states of any layer.

    For the last layer's `residual` these are the model's logits. Source: nostalgebraist, "interpreting GPT: the logit
    lens" (2020). Use under `torch.no_grad()` unless you want gradients.
    """
    return unembed(model, final_norm(model, hidden))
