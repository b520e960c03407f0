"""Log-probabilities of generated tokens, in nats, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def entropy(log_p: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Entropy in nats of log-probabilities; entries of -inf contribute 0."""
    return -torch.where(log_p.isneginf(), torch.zeros_like(log_p), log_p.exp() * log_p).sum(-1)


def logprob_rows(
    logits: Float[Tensor, "row vocab"], ids: Int[Tensor, " row"]
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(log-probability of `ids`, entropy) per row, computed in at least float32.

    A single row gets a second one beside it: alone, its sums would be split between threads, to other last bits.
    """
    if len(logits) == 1:
        logprobs, entropies = logprob_rows(logits.expand(2, -1), ids.expand(2))
        return logprobs[:1], entropies[:1]
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    return log_p.gather(-1, ids[:, None])[:, 0], entropy(log_p)


def token_logprobs(scores: Sequence[Tensor] | None, generated_ids) -> dict[str, list]:
    """`logprobs`, `surprisal` (the negative) and `entropy` of generated tokens, in nats, as lists of floats.

    scores: per step the raw logits, [V] or [B, V] (as `generate(output_logits=True)` returns them).
    generated_ids: [T] or [B, T], ids or tensor; ids beyond the scores are ignored. B > 1 gives lists of lists. No
    scores give three empty lists. A token whose logit is -inf has logprob -inf; entropy is never NaN.
    """
    if not scores:
        return {"logprobs": [], "surprisal": [], "entropy": []}
    stacked = torch.stack([step if step.dim() == 2 else step[None] for step in map(torch.as_tensor, scores)])
    steps, rows, _ = stacked.shape
    ids = torch.as_tensor(generated_ids, device=stacked.device).long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"scores hold {rows} rows, generated_ids have shape {tuple(ids.shape)}")
    steps = min(steps, ids.shape[1])
    ids = ids[:, :steps].T
    chosen, spread = logprob_rows(stacked[:steps].reshape(steps * rows, -1), ids.reshape(-1))
    logprobs = chosen.view(steps, rows).T.tolist()
    entropies = spread.view(steps, rows).T.tolist()
    result = {"logprobs": logprobs, "surprisal": [[-v for v in row] for row in logprobs], "entropy": entropies}
    return {name: values[0] if rows == 1 else values for name, values in result.items()}
