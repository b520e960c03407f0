"""Mixture-of-experts routing as the router decided it: which experts, with which weights, from which logits.

Nothing here imitates a router. Experts and weights are what the router module returned; from recorded logits they are
what that same module returns when its linear map gives those logits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import HookDidNotFire, UnknownSite
from ..given import Given, real, wholes
from .activation_cache import ActivationRecord, offload_to_cpu
from .locate import locator, resolve_layers
from .packing import pack, run_forward
from .registration import Registration, register
from .routers import read_output, replay, score_function, why_unread
from .select import Select
from .sites import Locator, Place

_ALL = Select.all()


class _Capture(NamedTuple):
    layer: int
    router_logits: Tensor | None
    """[S, E] float32."""
    topk_experts: Tensor
    """[S, K] int16: the experts the router returned."""
    topk_probs: Tensor
    """[S, K] float16: the weights the router returned."""


class RoutingCapture(_Capture):
    """Routing of S tokens in one layer, `(layer, router_logits, topk_experts, topk_probs)`.

    `score_function` is no part of the tuple, but `_replace`, copies and pickles keep it.
    """

    score_function: str | None
    """How this router turns logits into scores, before bias and selection: "softmax", "sigmoid", None: not known."""

    def __new__(cls, layer, router_logits, topk_experts, topk_probs, score_function: str | None = None):
        capture = super().__new__(cls, layer, router_logits, topk_experts, topk_probs)
        capture.score_function = score_function
        return capture

    def _replace(self, **changes) -> RoutingCapture:
        """A capture with other values of some fields, `score_function` among them."""
        values = {**self._asdict(), "score_function": self.score_function, **changes}
        if unknown := values.keys() - {*self._fields, "score_function"}:
            raise ValueError(f"no fields {sorted(unknown)}; there are: {', '.join(self._fields)}, score_function")
        return RoutingCapture(**values)


def moe_layer_indices(model: nn.Module) -> tuple[int, ...]:
    """Layers that have a router. ValueError names the class of a model without any, and why none can be read."""
    at = locator(model)
    layers = at.layers_with("router")
    if not layers:
        reason = why_unread(at)
        if reason is not None:
            raise ValueError(
                f"no router of {type(at.base).__name__} can be read: {reason}; it has: {', '.join(at.sites())}"
            )
        raise ValueError(f"{type(model).__name__} is a dense model: none of its layers has a router")
    return layers


def moe_num_experts(model: nn.Module) -> int:
    """How many experts the routers choose from (the largest, if layers differ)."""
    return max(locator(model).width("router", layer) for layer in moe_layer_indices(model))


def moe_topk(model: nn.Module) -> int:
    """How many experts a token is given, from what a router returns."""
    layer = moe_layer_indices(model)[0]
    logits = torch.zeros(1, locator(model).width("router", layer))
    return route(model, layer, logits)[0].shape[1]


def capture_router_logits(
    model: nn.Module,
    input_ids: Int[Tensor, "row token"],
    layers: Given = None,
    top_k_only: bool = False,
    offload: str | None = "cpu",
    attention_mask: Tensor | None = None,
) -> list[RoutingCapture]:
    """Routing of the real tokens of all rows, in row order, at `layers` (None: all that have a router).

    One no-grad forward. `top_k_only` leaves the logits out. ValueError for a dense model, UnknownSite for a layer
    without a router, both before the forward.
    """
    moe_layer_indices(model)
    wanted = sorted(resolve_layers(model, layers, "router"))
    at = locator(model)
    ids, lengths = pack(input_ids[None] if input_ids.dim() == 1 else input_ids, attention_mask)
    real = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    handles = []
    try:
        for layer in wanted:
            handles.append(_router(at, layer).module.register_forward_hook(_keep(layer, real, kept)))
        with torch.no_grad():
            run_forward(model, ids.to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    if missing := [layer for layer in wanted if layer not in kept]:
        raise HookDidNotFire(f"the routers of layers {missing} were never reached")
    flat = [part for layer in wanted for part in kept[layer]]
    flat = offload_to_cpu(flat) if offload == "cpu" else flat
    return [
        _capture(at, layer, None if top_k_only else flat[3 * n], flat[3 * n + 1], flat[3 * n + 2])
        for n, layer in enumerate(wanted)
    ]


def route(model: nn.Module, layer: int, logits: Float[Tensor, "token expert"]) -> tuple[Tensor, Tensor]:
    """(experts [S, K], weights [S, K]) that this layer's router picks when its linear map gives `logits`."""
    return replay(_router(locator(model), layer), logits)


def routing_of(model: nn.Module, records: Iterable[ActivationRecord], top_k_only: bool = False) -> list[RoutingCapture]:
    """Routing captures of records of site `router`, in their order: what the routers decided during a generation."""
    at, captures = locator(model), []
    for record in records:
        if record.site != "router" or record.pool is not None:
            raise ValueError(
                f"a record of {record.site!r} pooled by {record.pool!r} holds no routing; capture 'router'"
            )
        experts, weights = route(model, record.layer, record.tensor)
        logits = None if top_k_only else record.tensor.float()
        captures.append(_capture(at, record.layer, logits, experts.cpu(), weights.cpu()))
    return captures


def _router(at: Locator, layer: int) -> Place:
    place = at.place("router", layer % len(at.layers))
    if place is None:
        raise UnknownSite(f"layer {layer} has no router; layers that have one: {at.layers_with('router')}")
    return place


def _keep(layer: int, real: Tensor, kept: dict):
    def hook(module, args, output):
        mask = real.reshape(-1).to(output[0].device)
        kept[layer] = tuple(part.reshape(len(mask), -1)[mask] for part in read_output(output))

    return hook


def _capture(at: Locator, layer: int, logits: Tensor | None, experts: Tensor, weights: Tensor) -> RoutingCapture:
    logits = None if logits is None else logits.float()
    return RoutingCapture(
        layer,
        logits,
        experts.to(torch.int16),
        weights.to(torch.float16),
        score_function(_router(at, layer)),
    )


@dataclass(frozen=True, eq=False, init=False)
class RouterSteeringSpec:
    """Add coef x bias [layers, E] (or [E] for one layer) to router logits before the router selects."""

    bias: Tensor
    layers: tuple[int, ...]
    coef: float = 1.0
    tokens: Select = field(default_factory=Select.all)

    site = "router"
    rank = 1
    per_position = False

    def __init__(self, bias: Tensor, layers: Given, coef: Given = 1.0, tokens: Select | str | Any = _ALL):
        layers, coef, tokens = wholes(layers, "layers"), real(coef, "coef"), Select.of(tokens)
        bias = torch.as_tensor(bias).detach().to(torch.float32, copy=True).cpu()
        bias = bias[None] if bias.dim() == 1 else bias
        if layers and min(layers) < 0:
            raise ValueError(f"name true (non-negative) layers, got {list(layers)}")
        if not layers or bias.dim() != 2 or len(bias) != len(layers) or len(set(layers)) != len(layers):
            raise ValueError(f"bias of shape {tuple(bias.shape)} for layers {list(layers)}; it must be [layers, E]")
        if not bool(bias.isfinite().all()):
            raise ValueError("bias and coef must be finite")
        for name, value in dict(bias=bias, layers=layers, coef=coef, tokens=tokens).items():
            object.__setattr__(self, name, value)

    @classmethod
    def toward_load(
        cls, load: Tensor, layers: Given, coef: Given = 1.0, eps: float = 1e-6, **options: Any
    ) -> RouterSteeringSpec:
        """Bias toward a distribution over experts, `load` [layers, E] (>= 0): log(load + eps), centred per layer."""
        load = torch.as_tensor(load).double()
        load = load[None] if load.dim() == 1 else load
        if bool((load < 0).any()) or not bool((load.sum(-1) > 0).all()):
            raise ValueError("load must be non-negative, with some mass in every layer")
        bias = (load / load.sum(-1, keepdim=True) + eps).log()
        names = wholes(layers, "layers")
        return cls((bias - bias.mean(-1, keepdim=True)).float(), names, coef, **options)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of bias, layers, coef and tokens."""
        digest = hashlib.blake2b(
            json.dumps(["router", self.layers, self.coef, str(self.tokens)]).encode(), digest_size=16
        )
        digest.update(self.bias.numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def edit_key(self) -> Hashable:
        """All router biases are applied together."""
        return type(self)

    def is_noop(self) -> bool:
        """Whether it changes nothing: coef 0, or a bias of zeros."""
        return self.coef == 0 or not bool(self.bias.any())

    def check(self, num_layers: int, width: int) -> None:
        """ValueError where the number of experts or the layers do not fit the model."""
        if self.bias.shape[1] != width:
            raise ValueError(f"a bias over {self.bias.shape[1]} experts does not fit a router over {width}")
        if not all(layer < num_layers for layer in self.layers):
            raise ValueError(f"layers {list(self.layers)}: this model has layers 0 to {num_layers - 1}")

    def required_positions(self, num_prompt: int) -> tuple[int, ...]:
        """None: it acts wherever it selects."""
        return ()

    def parameters(self, layer: int, positions: np.ndarray, num_prompt: int | None = None) -> Mapping[str, Tensor]:
        """The scaled bias of a layer: [1, E]."""
        return {"bias": self.coef * self.bias[self.layers.index(layer)][None]}

    def edit(self, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Router logits with each row's bias added."""
        return hidden + parameters["bias"].to(hidden.dtype)

    def summary(self) -> dict[str, Any]:
        """Plain values for a message's metadata."""
        return {
            "mode": "router",
            "site": "router",
            "layers": list(self.layers),
            "coef": self.coef,
            "tokens": str(self.tokens),
            "fingerprint": self.fingerprint,
        }

    def register(self, model: nn.Module) -> Registration:
        """Put this edit on `model` until `.remove()` or the end of a with-block. See `registration`."""
        return register(model, [self])
