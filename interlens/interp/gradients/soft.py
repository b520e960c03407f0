"""Soft tokens: distributions over the vocabulary as embeddings, and a bridge between two models' spaces."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..sites import unwrap


def soft_embed(model: nn.Module, probs: Float[Tensor, "*token vocab"]) -> Float[Tensor, "*token width"]:
    """The expected input embedding under `probs`; for one-hots exactly what the model's embedding gives for the ids.

    The embedding module's own scale (Gemma) is included. Differentiable. ValueError for another vocabulary size.
    """
    inner: Any = unwrap(model)
    embedding = inner.get_input_embeddings()
    table = embedding.weight
    if probs.shape[-1] != table.shape[0]:
        raise ValueError(f"probs over {probs.shape[-1]} tokens; this model embeds {table.shape[0]}")
    mixed = probs.to(table.dtype) @ table
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return mixed
    return mixed * (scale.to(table.dtype) if isinstance(scale, Tensor) else scale)


def gumbel_softmax_tokens(
    logits: Float[Tensor, "*token vocab"], tau: float = 1.0, hard: bool = False
) -> Float[Tensor, "*token vocab"]:
    """A differentiable sample of one token per position (Jang et al. 2017, Maddison et al. 2017).

    `hard` gives one-hots forward and the soft gradient backward. Noise comes from torch's generator. ValueError if
    `tau` is not positive.
    """
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return torch.nn.functional.gumbel_softmax(logits, tau=tau, hard=hard, dim=-1)


class LinearBridge(nn.Module):
    """A linear map from the space of one model, [..., d_a], to another's, [..., d_b].

    Starts as the identity where widths are equal, else as a map with orthonormal rows or columns.
    """

    def __init__(self, d_a: int, d_b: int, bias: bool = False):
        super().__init__()
        self.linear = nn.Linear(d_a, d_b, bias=bias)
        with torch.no_grad():
            if d_a == d_b:
                nn.init.eye_(self.linear.weight)
            else:
                nn.init.orthogonal_(self.linear.weight)
            if bias:
                nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*row a"]) -> Float[Tensor, "*row b"]:
        """Vectors [..., d_a] as vectors [..., d_b]."""
        return self.linear(hidden)

    @torch.no_grad()
    def fit(self, a: Float[Tensor, "row a"], b: Float[Tensor, "row b"]) -> LinearBridge:
        """Set the map to the least-squares solution from rows of `a` to rows of `b` (float64). Returns itself."""
        inputs, outputs = a.double(), b.double()
        if self.linear.bias is not None:
            mean_a, mean_b = inputs.mean(0), outputs.mean(0)
            inputs, outputs = inputs - mean_a, outputs - mean_b
        weight = torch.linalg.lstsq(inputs, outputs, driver="gelsd" if inputs.device.type == "cpu" else None).solution.T
        self.linear.weight.copy_(weight)
        if self.linear.bias is not None:
            self.linear.bias.copy_(mean_b - weight @ mean_a)
        return self
