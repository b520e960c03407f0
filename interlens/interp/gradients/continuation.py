"""The log-probability of a continuation, differentiable with respect to its prefix and the weights."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .forward import Packing, forward_with_grad

REDUCTIONS = ("mean", "sum", "none")


def continuation_logprob(
    model: nn.Module,
    *,
    target_ids: Int[Tensor, "target_row target"] | Int[Tensor, " target"],
    prefix_ids: Int[Tensor, "prefix_row prefix"] | None = None,
    prefix_embeds: Float[Tensor, "prefix_row prefix width"] | None = None,
    attention_mask: Tensor | None = None,
    target_mask: Tensor | None = None,
    reduction: str = "mean",
    checkpoint: bool = False,
) -> Tensor:
    """log p(target | prefix) in nats, from raw logits.

    target_ids: [B, T], or [T] for all rows of the prefix. A prefix of one row serves all targets.
    attention_mask: [B, P + T], or [B, P] (the targets then all count); pads may be anywhere. Each target is predicted
        from the real token before it.
    target_mask: [B, T], which targets count; by default the real ones.
    reduction: "mean" over counted tokens; "sum" over tokens, mean over rows; "none" gives [B, T], 0 where not counted.
    ValueErrors come before the forward.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"no reduction {reduction!r}; possible: {', '.join(REDUCTIONS)}")
    given = prefix_ids if prefix_embeds is None else prefix_embeds
    if given is None or (prefix_ids is not None and prefix_embeds is not None):
        raise ValueError("give exactly one of prefix_ids and prefix_embeds")
    prefix, targets = _together(given, target_ids)
    (rows, width), before = targets.shape, prefix.shape[1]
    mask = _whole_mask(attention_mask, rows, before, width, targets.device)
    if not bool(mask[:, :before].any(1).all()):
        raise ValueError("a row has no real prefix token to predict its target from")
    counted = _counted(target_mask, mask[:, before:])
    if reduction != "none" and not bool(counted.any()):
        raise ValueError("target_mask counts no token")
    packing = Packing.of(mask)
    real = int(mask.sum(1).max())
    kind, rest = "input_ids", targets
    if prefix_embeds is not None:
        whole: Any = model
        kind, rest = "inputs_embeds", whole.get_input_embeddings()(targets).to(prefix.dtype)
    inputs: dict[str, Any] = {kind: packing.pack(torch.cat([prefix, rest], 1))[:, :real]}
    logits = forward_with_grad(model, checkpoint=checkpoint, **inputs).logits
    source = (packing.place[:, before:] - 1).clamp(max=real - 1)  # the packed column before each target
    chosen = logits[torch.arange(rows, device=logits.device)[:, None], source.to(logits.device)]
    log_p = torch.log_softmax(chosen.to(torch.promote_types(chosen.dtype, torch.float32)), dim=-1)
    values = log_p.gather(-1, targets.to(log_p.device)[..., None])[..., 0]
    counted = counted.to(values.device)
    values = torch.where(counted, values, torch.zeros_like(values))
    if reduction == "none":
        return values
    return values.sum() / counted.sum() if reduction == "mean" else values.sum(1).mean()


def _together(prefix: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Prefix [B, P, ...] and targets [B, T] with the same number of rows."""
    targets = targets[None] if targets.dim() == 1 else targets
    prefix = prefix[None] if prefix.dim() == (1 if not prefix.is_floating_point() else 2) else prefix
    if prefix.shape[1] == 0 or targets.shape[1] == 0:
        raise ValueError(f"a prefix of {prefix.shape[1]} and a target of {targets.shape[1]} tokens; both need one")
    if prefix.shape[0] != targets.shape[0]:
        if 1 not in (prefix.shape[0], targets.shape[0]):
            raise ValueError(f"{prefix.shape[0]} prefix rows for {targets.shape[0]} targets; give as many, or one")
        rows = max(prefix.shape[0], targets.shape[0])
        prefix = prefix.expand(rows, *prefix.shape[1:])
        targets = targets.expand(rows, -1)
    return prefix, targets.to(prefix.device)


def _counted(target_mask: Tensor | None, real: Bool[Tensor, "row target"]) -> Bool[Tensor, "row target"]:
    """Which target tokens count: those of `target_mask`, else all that are real."""
    if target_mask is None:
        return real
    counted = target_mask.bool().to(real.device).expand(len(real), -1)
    if counted.shape != real.shape:
        raise ValueError(f"target_mask is {tuple(counted.shape)}, target_ids {tuple(real.shape)}")
    if bool((counted & ~real).any()):
        raise ValueError("target_mask counts a token that attention_mask says is a pad")
    return counted


def _whole_mask(mask: Tensor | None, rows: int, prefix: int, target: int, device) -> Tensor:
    if mask is None:
        return torch.ones(rows, prefix + target, dtype=torch.bool, device=device)
    mask = mask.bool().to(device)
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape[0] not in (1, rows) or mask.shape[1] not in (prefix, prefix + target):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; it must be [{rows}, {prefix + target}] or [{rows}, {prefix}]"
        )
    mask = mask.expand(rows, -1)
    if mask.shape[1] == prefix:
        mask = torch.cat([mask, torch.ones(rows, target, dtype=torch.bool, device=device)], 1)
    return mask
