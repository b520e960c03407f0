"""What a model would say if it ended at each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..given import Given
from ..interp.activation_cache import CaptureSpec
from ..interp.capture import capture_activations
from ..interp.lens import logit_lens


class LensTable(NamedTuple):
    """Most probable next tokens by layer and position, and their log-probabilities in nats."""

    layers: tuple[int, ...]
    tokens: Tensor
    """[L, S, top] token ids."""
    logprobs: Tensor
    """[L, S, top] float32."""


def lens_table(
    model: nn.Module,
    input_ids: Int[Tensor, " token"] | Int[Tensor, "1 token"],
    *,
    layers: Given = None,
    top: int = 5,
) -> LensTable:
    """The logit lens on every layer's `residual` of one prompt, [S] or [1, S]: one forward and one head per layer."""
    ids = torch.as_tensor(input_ids).reshape(1, -1)
    captured: Any = capture_activations(model, ids, CaptureSpec(layers=layers, offload=None))
    tokens, logprobs = [], []
    with torch.no_grad():
        for _, _, hidden in captured:
            best = logit_lens(model, hidden).float().log_softmax(-1).topk(top, dim=-1)
            tokens.append(best.indices.cpu())
            logprobs.append(best.values.cpu())
    return LensTable(tuple(c.layer for c in captured), torch.stack(tokens), torch.stack(logprobs))
