"""Pooling hidden states over spans and groups of tokens, accumulated in at least float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MODES = ("mean", "last", "max")


def pool_rows(rows: Float[Tensor, "row width"], mode: str) -> Float[Tensor, "1 width"]:
    """One row from several, [1, W], at least float32. Differentiable. ValueError for no row or an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"no pool {mode!r}; possible: {', '.join(MODES)}")
    if not len(rows):
        raise ValueError("there is no row to pool")
    wide = torch.promote_types(rows.dtype, torch.float32)
    if mode == "mean":
        return rows.to(wide).mean(0, keepdim=True)
    if mode == "last":
        return rows[-1:].to(wide)
    return rows.amax(0, keepdim=True).to(wide)


def span_pool(
    hidden: Float[Tensor, "token width"], spans: Sequence[tuple[int, int]], mode: str = "mean"
) -> Float[Tensor, "span width"]:
    """Pool each half-open span (python slices) of `hidden` [S, D] to one row: [len(spans), D], at least float32.

    ValueError names a span that holds no token, or an unknown mode.
    """
    pooled = []
    for number, (start, end) in enumerate(spans):
        rows = hidden[start:end]
        if not len(rows):
            raise ValueError(f"span {number}, ({start}, {end}), holds none of {len(hidden)} tokens")
        pooled.append(pool_rows(rows, mode))
    return torch.cat(pooled) if pooled else hidden.new_zeros((0, hidden.shape[-1]), dtype=torch.float32)


def group_pool(
    hidden: Float[Tensor, "token width"],
    groups: Sequence[Sequence[int] | Sequence[tuple[int, int]] | Tensor],
    mode: str = "mean",
    empty: str = "raise",
) -> tuple[Float[Tensor, "group width"], Bool[Tensor, " group"]]:
    """Pool groups of tokens of `hidden` [S, D]: (pooled [G, D], present [G]).

    A group is a sequence of row indices, of half-open spans, an index tensor, or a bool mask [S]; rows count once, in
    order. A group without rows: `empty="raise"` is a ValueError, "zero" and "nan" fill it; `present` is then False.
    """
    if empty not in ("raise", "zero", "nan"):
        raise ValueError(f"empty={empty!r}; possible: 'raise', 'zero', 'nan'")
    rows, present = [], []
    for number, group in enumerate(groups):
        index = _row_index(group, len(hidden))
        present.append(bool(len(index)))
        if len(index):
            rows.append(pool_rows(hidden[index.to(hidden.device)], mode))
        elif empty == "raise":
            raise ValueError(f"group {number} holds no token; empty='zero' or 'nan' lets it pass")
        else:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            fill = 0.0 if empty == "zero" else float("nan")
            rows.append(torch.full((1, hidden.shape[-1]), fill, dtype=wide, device=hidden.device))
    pooled = torch.cat(rows) if rows else hidden.new_zeros((0, hidden.shape[-1]), dtype=torch.float32)
    return pooled, torch.tensor(present, dtype=torch.bool, device=hidden.device)


def _row_index(group, length: int) -> Tensor:
    if isinstance(group, Tensor) and group.dtype == torch.bool:
        if group.shape != (length,):
            raise ValueError(f"a mask of shape {tuple(group.shape)} for {length} tokens")
        return group.nonzero()[:, 0]
    rows: list[int] = []
    for item in group.tolist() if isinstance(group, Tensor) else group:
        rows += range(*slice(*item).indices(length)) if isinstance(item, (tuple, list)) else [int(item)]
    for row in rows:
        if not -length <= row < length:
            raise ValueError(f"row {row} of a group is outside {length} tokens")
    return torch.tensor(sorted({row % length for row in rows}), dtype=torch.long)
