"""One vector per message of a rendered conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..given import Given
from ..interp.gradients.forward import GradCaptureSpec, forward_with_grad
from ..interp.pooling import span_pool
from ..views.render import message_token_ids


def span_pooled_residuals(
    model: nn.Module,
    tokenizer: Any,
    view: Any,
    *,
    layers: Given,
    sites: Sequence[str] = ("residual",),
    pool: str = "mean",
    grad: bool = False,
) -> dict[tuple[str, int], Float[Tensor, "message width"]]:
    """Hidden states pooled over each message of `view`, role markup included: {(site, layer): [n_messages, D]} float32.

    view: what `conversation.view(...)` gave, or role/content dicts. One forward over the rendered messages; `grad=True`
    keeps the graph. ValueError if a message has no token of its own.
    """
    ids, spans = message_token_ids(tokenizer, view)
    device = next(model.parameters()).device
    with torch.set_grad_enabled(grad):
        input_ids = torch.tensor([ids], device=device)
        output = forward_with_grad(model, input_ids=input_ids, capture=GradCaptureSpec(tuple(sites), layers))
        pooled = {key: span_pool(value[0], spans, pool) for key, value in output.hidden.items()}
    return pooled if grad else {key: value.detach() for key, value in pooled.items()}
