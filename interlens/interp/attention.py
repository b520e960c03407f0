"""Attention patterns. They exist only where attention is computed the plain way, so they are asked for by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import UnknownSite, UnsupportedIntervention
from ..given import Given, wholes
from .activation_cache import OffloadLocation, offload_to_cpu
from .locate import locator, num_layers
from .packing import pack
from .sites import text_config


class AttentionPattern(NamedTuple):
    """Attention weights of one layer."""

    layer: int
    pattern: Tensor | list[Tensor]
    """[H, S, S] for one row (row q: how much query q attends each key; sums to 1, or less with attention sinks of its
    own), [B, H, S, S] for several, a list of [H, S_i, S_i] where a mask was given."""


def attention_patterns(
    model: nn.Module,
    input_ids: Int[Tensor, "row token"] | Int[Tensor, " token"],
    layers: Given = None,
    attention_mask: Tensor | None = None,
    offload: OffloadLocation = "cpu",
) -> list[AttentionPattern]:
    """Attention weights after the softmax, by layer, from one no-grad forward; on the CPU, or where they
    were formed with `offload=None`.

    Needs the eager attention backend, which materialises them: load with `attention="eager"` or call
    `model.set_attn_implementation("eager")`; UnsupportedIntervention otherwise. UnknownSite for a layer that does not
    attend (linear attention) or does not exist. Memory grows with layers x heads x S squared.
    """
    used = getattr(text_config(model), "_attn_implementation", None)
    if used != "eager":
        raise UnsupportedIntervention(
            f"attention patterns need the eager attention backend, this model runs {used!r}, which never forms them; "
            "call model.set_attn_implementation('eager') or load with attention='eager'"
        )
    have, count = _attending(model), num_layers(model)
    wanted = have if layers is None else wholes(layers, "layers (None: all)")
    if not wanted:
        raise UnknownSite("no layer given; give at least one, or None for all")
    for layer in wanted:
        if not -count <= layer < count or layer % count not in have:
            raise UnknownSite(
                f"layer {layer} has no attention pattern; layers that have one: {', '.join(map(str, have))}"
            )
    ids, lengths = pack(input_ids[None] if input_ids.dim() == 1 else input_ids, attention_mask)
    with torch.no_grad():
        device = next(model.parameters()).device
        found = model(input_ids=ids.to(device), use_cache=False, output_attentions=True).attentions
    found = [pattern for pattern in found if pattern is not None]
    if len(found) != len(have):
        raise UnsupportedIntervention(f"{type(model).__name__} reports {len(found)} patterns for {len(have)} layers")
    result = []
    for layer in dict.fromkeys(layer % count for layer in wanted):
        pattern = found[have.index(layer)]
        cut = [pattern[row, :, :n, :n] for row, n in enumerate(lengths)]
        parts = offload_to_cpu(cut) if offload == "cpu" else [part.clone() for part in cut]
        if attention_mask is not None:
            result.append(AttentionPattern(layer, parts))
        else:
            result.append(AttentionPattern(layer, parts[0] if len(parts) == 1 else torch.stack(parts)))
    return result


def _attending(model: nn.Module) -> list[int]:
    kinds = getattr(text_config(model), "layer_types", None)
    layers = range(len(locator(model).layers))
    return [n for n in layers if not kinds or (kinds[n].endswith("attention") and not kinds[n].startswith("linear"))]
