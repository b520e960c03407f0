"""Statistics of routing: how load and score mass spread over experts, and how two spreads differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..given import Given, whole
from .routing import RoutingCapture

Loads = Float[Tensor, "..."] | Float[np.ndarray, "..."]
"""One or more distributions, [E] or [..., E]."""


@dataclass(frozen=True)
class RoutingStats:
    """Load and mass over experts per MoE layer, float64."""

    expert_load: Float[Tensor, "layer expert"]
    """Share of the picks that went to each expert; rows sum to 1."""
    expert_mass: Float[Tensor, "layer expert"] | None
    """Mean over tokens of the router's own scores, normalised per token; None where logits were not kept."""
    layers: tuple[int, ...]
    n_tokens: int
    top_k: int

    def merge(self, other: RoutingStats) -> RoutingStats:
        """Statistics of both together, weighted by tokens. ValueError if layers, experts or top_k differ."""
        mine, theirs = (
            (self.layers, self.expert_load.shape, self.top_k),
            (other.layers, other.expert_load.shape, other.top_k),
        )
        if mine != theirs:
            raise ValueError(f"statistics over (layers, shape, top_k) {mine} and {theirs} do not merge")
        total = self.n_tokens + other.n_tokens
        share, rest = self.n_tokens / total, other.n_tokens / total
        mass = None
        if self.expert_mass is not None and other.expert_mass is not None:
            mass = share * self.expert_mass + rest * other.expert_mass
        return RoutingStats(share * self.expert_load + rest * other.expert_load, mass, self.layers, total, self.top_k)


def routing_stats(
    captures: Sequence[RoutingCapture], n_experts: Given, spans: Sequence[tuple[int, int]] | None = None
) -> RoutingStats:
    """Load and mass of captures (one per layer, all of the same tokens) over the union of `spans` (python slices).

    `n_experts`: of the widest router (`moe_num_experts`); narrower layers have zeros at the end. ValueError without
    captures, without tokens, for another number of experts, for layers given twice or of different lengths.
    """
    if not captures:
        raise ValueError("there are no routing captures")
    n_experts = _num_experts(captures, n_experts)
    layers = tuple(capture.layer for capture in captures)
    lengths = {len(capture.topk_experts) for capture in captures}
    if len(set(layers)) != len(layers) or len(lengths) > 1:
        raise ValueError(
            f"captures of layers {list(layers)} with {sorted(lengths)} tokens; give one per layer, of the same"
        )
    chosen = torch.ones(lengths.pop(), dtype=torch.bool)
    if spans is not None:
        chosen[:] = False
        for start, end in spans:
            chosen[start:end] = True
    tokens = int(chosen.sum())
    if not tokens:
        raise ValueError(f"spans {spans} hold none of {len(chosen)} tokens")
    loads, masses = [], []
    for capture in captures:
        experts = capture.topk_experts[chosen.to(capture.topk_experts.device)].long().cpu()
        loads.append(torch.bincount(experts.reshape(-1), minlength=n_experts).double() / experts.numel())
        if capture.router_logits is not None:
            scores = expert_scores(capture)[chosen.to(capture.router_logits.device)].cpu()
            masses.append(torch.nn.functional.pad(scores.mean(0), (0, n_experts - scores.shape[-1])))
    mass = torch.stack(masses) if len(masses) == len(captures) else None
    return RoutingStats(torch.stack(loads), mass, layers, tokens, captures[0].topk_experts.shape[1])


def _num_experts(captures: Sequence[RoutingCapture], n_experts: Given) -> int:
    """`n_experts` as an int. ValueError where the captures show another number."""
    n_experts = whole(n_experts, "n_experts")
    widths = {c.router_logits.shape[-1] for c in captures if c.router_logits is not None}
    highest = max((int(c.topk_experts.max()) for c in captures if c.topk_experts.numel()), default=-1)
    if n_experts < 1 or (widths and max(widths) != n_experts) or highest >= n_experts:
        known = f"their routers have {max(widths)}" if widths else f"they pick expert {highest}"
        raise ValueError(f"n_experts={n_experts} does not fit these captures: {known}; see moe_num_experts(model)")
    return n_experts


def expert_scores(capture: RoutingCapture) -> Float[Tensor, "token expert"]:
    """The router's own scores of every expert in float64, normalised per token: softmax, or sigmoid over its sum."""
    if capture.router_logits is None:
        raise ValueError(
            "this capture kept no logits (top_k_only), and scores of experts that were not picked need them"
        )
    logits = capture.router_logits.double()
    if capture.score_function not in ("softmax", "sigmoid"):
        raise ValueError(
            f"this capture does not say how its router makes scores of logits (score_function="
            f"{capture.score_function!r}): keep it with capture._replace(...), or give score_function='softmax' or "
            "'sigmoid'"
        )
    if capture.score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _distributions(p, q) -> tuple[Tensor, Tensor]:
    p, q = (torch.as_tensor(x).double() for x in (p, q))
    shapes = f"distributions of shapes {tuple(p.shape)} and {tuple(q.shape)}"
    p, q = (x[None] if x.dim() == 1 else x for x in (p, q))
    if not p.dim() or not q.dim() or p.shape[-1] != q.shape[-1]:
        raise ValueError(f"{shapes}; both must be [E] or [..., E], over the same experts")
    try:
        p, q = torch.broadcast_tensors(p, q)
    except RuntimeError:
        raise ValueError(f"{shapes}; give as many layers of both, or one [E] for all layers") from None
    for x in (p, q):
        if not bool(((x >= 0) & x.isfinite()).all()) or not bool((x.sum(-1) > 0).all()):
            raise ValueError(f"{shapes}; every value must be finite and at least 0, and every row have some mass")
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def kl_divergence(p: Loads, q: Loads, eps: float = 1e-8) -> Float[Tensor, "*layer"]:
    """KL(p || q) per layer [L], in nats; p and q broadcast ([E] serves all layers).

    `eps` is added inside both logarithms, so that it is finite.
    """
    p, q = _distributions(p, q)
    return (p * ((p + eps).log() - (q + eps).log())).sum(-1)


def js_divergence(p: Loads, q: Loads) -> Float[Tensor, "*layer"]:
    """Jensen-Shannon divergence per layer [L], in nats: symmetric, 0 for equal, ln 2 for disjoint distributions."""
    p, q = _distributions(p, q)
    middle = (p + q) / 2
    return sum(torch.special.xlogy(x, x / middle.clamp_min(1e-300)).sum(-1) for x in (p, q)) / 2


def topk_expert_overlap(p: Loads, q: Loads, k: Given = 8) -> Float[Tensor, "*layer"]:
    """Share of the k most used experts that p and q have in common, per layer [L]; k is at most E."""
    p, q = _distributions(p, q)
    k = min(whole(k, "k"), p.shape[-1])
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    tops = [torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(k, dim=-1).indices, True) for x in (p, q)]
    return (tops[0] & tops[1]).sum(-1).double() / k
