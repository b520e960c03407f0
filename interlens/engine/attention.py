"""Attention whose result for a row does not depend on what else is in the batch.

Three operations: scores, a softmax in float32, a sum over values; heads are grouped by the key head they share, so that
keys and values are not copied. `scaled_dot_product_attention` gives a query other last bits when the number of queries
or the width of the mask changes; these three do not, in bfloat16 on CPUs, if sums run over a multiple of 16 columns and
no product has a single row (`Forward` sees to both).

It is in force inside `rows_apart` only, so that `generate` and whatever else shares the model keep their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

NAME = "interlens_rows_apart"
COLUMNS = 16
"""Widths are rounded up to a multiple of this: shorter sums over values differ between batch sizes."""
BLOCK = 1 << 26
"""At most this many scores are formed at once (256 MB in float32)."""


def attend(
    module,
    query: Float[Tensor, "row head query key_dim"],
    key: Float[Tensor, "row kv column key_dim"],
    value: Float[Tensor, "row kv column value_dim"],
    attention_mask: Float[Tensor, "row 1 query column"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    **_,
) -> tuple[Tensor, None]:
    """What transformers calls in place of a family's eager attention: `[row, query, head, value_dim]` and no weights."""
    rows, heads, queries, dim = query.shape
    kv = key.shape[1]
    grouped = query.reshape(rows, kv, heads // kv, queries, dim)
    scale = dim**-0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.reshape(1, kv, heads // kv, 1, 1)
    step = max(1, BLOCK // (heads * queries * key.shape[2]))
    parts = []
    for first in range(0, rows, step):
        block = slice(first, first + step)
        mask = None if attention_mask is None else attention_mask[block, :, None]
        parts.append(_block(grouped[block], key[block], value[block], mask, scale, softcap, sinks))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.reshape(rows, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def _block(query, key, value, mask, scale, softcap, sinks) -> Float[Tensor, "row kv group query value_dim"]:
    rows, kv, group, queries, dim = query.shape
    scores = query.reshape(rows, kv, group * queries, dim) @ key.transpose(2, 3)
    scores = (scores * scale).view(rows, kv, group, queries, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=wide)
    else:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(rows, kv, group, queries, 1)], -1)
        weights = torch.softmax(scores, -1, dtype=wide)[..., :-1]
    weights = weights.to(value.dtype).reshape(rows, kv, group * queries, -1)
    return (weights @ value).view(rows, kv, group, queries, -1)


AttentionInterface.register(NAME, attend)


@contextmanager
def rows_apart(configs) -> Iterator[None]:
    """`attend` in force for the models of these configurations, while it lasts."""
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
