"""Causal tracing: which hidden state, restored to what it was on a clean prompt, restores the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..given import Given, wholes
from ..interp.activation_cache import CaptureSpec
from ..interp.capture import capture_activations
from ..interp.hooks import attached
from ..interp.locate import require_site, resolve_layers

Metric = Callable[[Float[Tensor, "one token vocab"]], Tensor | float]


def causal_trace(
    model: nn.Module,
    clean_ids: Int[Tensor, " token"] | Int[Tensor, "1 token"],
    corrupt_ids: Int[Tensor, " corrupt_token"] | Int[Tensor, "1 corrupt_token"],
    metric: Metric,
    *,
    site: str = "residual",
    layers: Given = None,
    positions: Given = None,
    batch_rows: int = 32,
) -> Float[Tensor, "layer position"]:
    """`metric` of the corrupt prompt's run with one (layer, position) of `site` patched from the clean prompt's run.

    clean_ids, corrupt_ids: [S] or [1, S], of equal length. metric: logits [1, S, V] -> a number, called for each
    patched run. positions: None is all; negatives count from the end. Result [layers, positions] float32. All patched
    runs are rows of batches of `batch_rows`. Source: Meng et al., "Locating and editing factual associations in GPT"
    (2022). ValueError or UnknownSite before the first patched run.
    """
    clean, corrupt = (torch.as_tensor(ids).reshape(-1) for ids in (clean_ids, corrupt_ids))
    length = len(clean)
    if len(corrupt) != length:
        raise ValueError(f"the clean prompt has {length} tokens, the corrupt one {len(corrupt)}; they must be as long")
    site, rows = require_site(model, site), resolve_layers(model, layers, site)
    columns = list(range(length)) if positions is None else list(wholes(positions, "positions (None: all)"))
    for position in columns:
        if not -length <= position < length:
            raise ValueError(f"no position {position} in a prompt of {length} tokens")
    columns = [position % length for position in columns]
    spec = CaptureSpec((site,), None if site in ("embed", "final_norm", "logits") else rows, offload=None)
    source: dict[int, Any] = {c.layer: c.tensor for c in capture_activations(model, clean[None], spec)}
    pairs = [(layer, position) for layer in rows for position in columns]
    device = next(model.parameters()).device
    values: list[float] = []
    for start in range(0, len(pairs), batch_rows):
        batch = pairs[start : start + batch_rows]
        taps = {(layer, site): _patch(source[layer], layer, batch) for layer in {layer for layer, _ in batch}}
        with torch.no_grad(), attached(model, taps):
            logits = model(input_ids=corrupt.expand(len(batch), -1).to(device), use_cache=False).logits
        values += [float(metric(logits[row : row + 1])) for row in range(len(batch))]
    return torch.tensor(values, dtype=torch.float32).view(len(rows), len(columns))


def _patch(clean: Tensor, layer: int, batch: list[tuple[int, int]]):
    rows = [row for row, (own, _) in enumerate(batch) if own == layer]
    columns = [batch[row][1] for row in rows]

    def tap(value: Tensor) -> Tensor:
        new = value.clone()
        new[rows, columns] = clean[columns].to(value.dtype)
        return new

    return tap
