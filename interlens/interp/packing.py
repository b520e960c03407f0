"""Rows of different length for one plain forward, and that forward."""

from __future__ import annotations

import inspect

from jaxtyping import Bool, Int
from torch import Tensor, nn

from .sites import unwrap


def pack(input_ids: Int[Tensor, "row token"], attention_mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Real tokens of every row moved to the front, and how many there are.

    In a causal model pads that follow the real tokens change none of them, need no mask, and attend to something.
    """
    rows, columns = input_ids.shape
    if attention_mask is None:
        return input_ids, [columns] * rows
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
    real: Bool[Tensor, "row token"] = attention_mask.bool()
    lengths = real.sum(1).tolist()
    if min(lengths) == 0:
        raise ValueError("attention_mask leaves a row without any token")
    order = (~real).long().argsort(dim=1, stable=True)[:, : max(lengths)]
    return input_ids.gather(1, order), lengths


def run_forward(model: nn.Module, input_ids: Tensor, logits: bool = False):
    """One forward of the whole model without a cache; only the last position's logits unless asked for."""
    options: dict = {"use_cache": False}
    if not logits and "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters:
        options["logits_to_keep"] = 1
    return model(input_ids=input_ids, **options)
