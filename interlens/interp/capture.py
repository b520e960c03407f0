"""Activations of given tokens from one plain forward: no generation, no conversation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .activation_cache import CaptureSpec, offload_to_cpu
from .attention import attention_patterns
from .hooks import attached
from .locate import require_site, resolve_layers
from .packing import pack, run_forward
from .pooling import pool_rows
from .select import Select, TokenSequence
from .sites import PATTERN


class CapturedSite(NamedTuple):
    """One site of one layer."""

    layer: int
    site: str
    tensor: Tensor | list[Tensor]
    """[S, W] for one row, [B, S, W] for several, a list of [S_i, W] where a mask was given; of the site "pattern"
    [H, S, S], [B, H, S, S], a list of [H, S_i, S_i]."""


def capture_activations(
    model: nn.Module,
    input_ids: Int[Tensor, "row token"] | Int[Tensor, " token"],
    spec: CaptureSpec,
    attention_mask: Tensor | None = None,
) -> list[CapturedSite]:
    """What `spec` asks for, by layer, then by `spec.sites`, from one no-grad forward over `input_ids` [1 or B, S].

    `spec.tokens` sees the whole row as prompt (selections that need a conversation match nothing and are refused), and
    with `spec.pool` each row's tensor is [1, W] float32. UnknownSite or ValueError before the forward.

    The site "pattern" (attention weights, see `attention_patterns`) takes a forward of its own, whole rows (ValueError
    with `tokens` or `pool`), and the eager attention backend (else UnsupportedIntervention, before any forward).
    """
    if spec.max_norm is not None:
        raise ValueError(
            f"max_norm={spec.max_norm} is for captures of conversations; filter the rows of this one yourself"
        )
    input_ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    ids, lengths = pack(input_ids, attention_mask)
    rows = [_selected_rows(spec, length) for length in lengths]
    names = [site for site in spec.sites if site != PATTERN]
    wanted = [
        (layer, require_site(model, site)) for site in names for layer in resolve_layers(model, spec.layers, site)
    ]
    order = {site if site == PATTERN else require_site(model, site): rank for rank, site in enumerate(spec.sites)}
    keys = sorted(dict.fromkeys(wanted), key=lambda key: (key[0], order[key[1]]))
    kept: dict[tuple[int, str], list[Tensor]] = {}

    def keep(key):
        def tap(value: Tensor) -> None:
            parts = [value[i, index.to(value.device)] for i, index in enumerate(rows)]
            kept[key] = [pool_rows(part, spec.pool) if spec.pool else part for part in parts]

        return tap

    patterns = _patterns(model, input_ids, spec, attention_mask) if PATTERN in spec.sites else []
    if not keys:
        return patterns
    with torch.no_grad(), attached(model, {key: keep(key) for key in keys}):
        run_forward(model, ids.to(next(model.parameters()).device), logits=any(site == "logits" for _, site in keys))
    flat = [part for key in keys for part in kept[key]]
    flat = offload_to_cpu(flat) if spec.offload == "cpu" else flat
    result = []
    for number, (layer, site) in enumerate(keys):
        parts = flat[number * len(rows) : (number + 1) * len(rows)]
        whole = parts if attention_mask is not None else parts[0] if len(parts) == 1 else torch.stack(parts)
        result.append(CapturedSite(layer, site, whole))
    return sorted(result + patterns, key=lambda captured: (captured.layer, order[captured.site]))


def _patterns(
    model: nn.Module, input_ids: Tensor, spec: CaptureSpec, attention_mask: Tensor | None
) -> list[CapturedSite]:
    if spec.tokens != Select.all() or spec.pool:
        raise ValueError(
            f"the site 'pattern' is [heads, S, S] of whole rows, tokens={spec.tokens} and pool={spec.pool!r} do not apply "
            "to it; capture it with a CaptureSpec of its own without them, and index the result"
        )
    found = attention_patterns(model, input_ids, spec.layers, attention_mask, spec.offload)
    return sorted((CapturedSite(layer, PATTERN, pattern) for layer, pattern in found), key=lambda at: at.layer)


def _selected_rows(spec: CaptureSpec, length: int) -> Tensor:
    sequence = TokenSequence([0] * length)
    spec.tokens.check(sequence)
    mask = spec.tokens.mask(sequence)
    if not mask.any():
        raise ValueError(f"{spec.tokens} selects none of {length} prompt tokens")
    return torch.from_numpy(mask.nonzero()[0])
