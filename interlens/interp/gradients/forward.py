"""A forward whose logits and hidden states are connected to the graph, with optional true recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute_later

from ...given import Given
from ..attach import replaced_forward
from ..hooks import attached, attached_within
from ..locate import locator, require_site, resolve_layers
from ..sites import ROOT_SITES

Key = tuple[str, int]
_AT_LAYER_EDGES = ("resid_pre", "residual")


@dataclass(frozen=True)
class GradCaptureSpec:
    """Which hidden states a differentiable forward returns."""

    sites: Sequence[str] = ("residual",)
    layers: Given = None


class GradForwardOutput(NamedTuple):
    """`logits` [B, S, V] and `hidden` {(site, layer): [B, S, W]}, all connected to the graph."""

    logits: Tensor
    hidden: Mapping[Key, Tensor]


class Packing(NamedTuple):
    """Real tokens of each row moved to the front, so that a causal model needs no mask and attends to no pad."""

    order: Tensor
    """[B, S]: the original column of each packed column."""
    place: Tensor
    """[B, S]: the packed column of each original column."""

    @classmethod
    def of(cls, attention_mask: Tensor) -> Packing:
        """Of a mask [B, S]; ValueError for a row without any token."""
        if not bool(attention_mask.bool().any(1).all()):
            raise ValueError("attention_mask leaves a row without any token")
        order = (~attention_mask.bool()).long().argsort(dim=1, stable=True)
        return cls(order, order.argsort(dim=1))

    def pack(self, values: Tensor) -> Tensor:
        """Values [B, S, ...] with the real tokens in front."""
        return _take(values, self.order)

    def unpack(self, values: Tensor) -> Tensor:
        """The inverse of `pack`."""
        return _take(values, self.place)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, S, ...] with columns taken per row by `index` [B, S]."""
    rows = torch.arange(len(index), device=values.device)[:, None]
    return values[rows, index.to(values.device)]


def forward_with_grad(
    model: nn.Module,
    *,
    input_ids: Int[Tensor, "row token"] | None = None,
    inputs_embeds: Float[Tensor, "row token width"] | None = None,
    attention_mask: Tensor | None = None,
    capture: GradCaptureSpec | None = None,
    checkpoint: bool = False,
) -> GradForwardOutput:
    """Logits and the hidden states `capture` names, differentiable with respect to weights and embeddings.

    Exactly one of `input_ids` and `inputs_embeds`. Of a frozen model fed ids, the embeddings are made to need
    gradients, so that hidden states are connected all the same. `attention_mask` [B, S] may pad anywhere; values at
    pads mean nothing. `checkpoint=True` keeps only the layers' inputs and computes each layer again in the backward
    pass, in eval mode too. No setting of the model changes. ValueError, UnknownSite before the forward.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if attention_mask is not None and attention_mask.shape != given.shape[:2]:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, the input {tuple(given.shape[:2])}")
    packing = None if attention_mask is None or bool(attention_mask.all()) else Packing.of(attention_mask)
    given = given if packing is None else packing.pack(given)
    keys = _keys(model, capture)
    hidden: dict[Key, Tensor] = {}
    with torch.enable_grad():
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        logits = _run(model, {name: given}, keys, hidden, checkpoint)
        if packing is not None:
            logits = packing.unpack(logits)
            hidden = {key: packing.unpack(value) for key, value in hidden.items()}
    return GradForwardOutput(logits, {key: hidden[key] for key in keys})


def _keys(model: nn.Module, capture: GradCaptureSpec | None) -> list[Key]:
    if capture is None:
        return []
    sites = (capture.sites,) if isinstance(capture.sites, str) else capture.sites
    return [
        (require_site(model, site), layer) for site in sites for layer in resolve_layers(model, capture.layers, site)
    ]


def _run(model: nn.Module, inputs: dict[str, Tensor], keys: list[Key], hidden: dict[Key, Tensor], checkpoint: bool):
    def keep(key: Key):
        def tap(value: Tensor) -> None:
            hidden.setdefault(key, value)  # the first time; a recomputation passes here again

        return tap

    taps = {(layer, site): keep((site, layer)) for site, layer in keys}
    if "input_ids" in inputs:
        taps[0, "embed"] = _connect(taps.get((0, "embed")))
    elif ("embed", 0) in keys:
        hidden["embed", 0] = _given_embedding(model, inputs["inputs_embeds"])
        del taps[0, "embed"]
    with ExitStack() as stack:
        outer = taps
        if checkpoint:
            outer = {k: tap for k, tap in taps.items() if k[1] in (*ROOT_SITES, *_AT_LAYER_EDGES)}
            inner = {k: tap for k, tap in taps.items() if k not in outer}
            for number, layer in enumerate(locator(model).layers):
                own = {k: tap for k, tap in inner.items() if k[0] == number}
                stack.enter_context(replaced_forward(layer, _checkpointed(model, layer, own)))
        stack.enter_context(attached(model, outer))
        return model(**inputs, use_cache=False).logits


def _connect(tap):
    """Embeddings that need gradients, so that what follows is connected although every weight is frozen."""

    def connect(value: Tensor) -> Tensor | None:
        new = None if value.requires_grad else value.detach().requires_grad_(True)
        if tap is not None:
            tap(value if new is None else new)
        return new

    return connect


def _given_embedding(model: nn.Module, embeds: Tensor) -> Tensor:
    place = locator(model).place("embed", 0)
    assert place is not None
    return embeds if place.point.scale is None else embeds * place.point.scale(place.owner, embeds)


def _checkpointed(model: nn.Module, layer: nn.Module, taps):
    """Taps inside the layer are attached inside what is recomputed, so that both passes are the same computation."""

    def around(forward, *args, **kwargs):
        shape = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[:2]

        def run(*args, **kwargs):
            with attached_within(model, layer, shape, taps):
                return forward(*args, **kwargs)

        return recompute_later(run, *args, use_reentrant=False, **kwargs)

    return around
