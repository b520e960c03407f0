"""Drawing the next token: an exponential race with keyed noise.

The next token is the argmin over kept tokens v of -log(u_v) / p_v, which draws v with probability p_v. u_v is a hash
of (request key, step, v): it never depends on the batch, the replica or a retry. p_v is the probability after
temperature and before top-k/top-p renormalisation, so that settings are compared under the same noise.

Kept are the tokens that survive top-k and top-p or, without these, those above `NEGLIGIBLE` of the most likely one;
noise is drawn for kept tokens only. Source: exponential race / Gumbel-max (Yellott 1977); the hash is the output
function of SplitMix64 (Steele, Lea & Flood 2014) at counter v of a stream seeded by blake2b(key, step).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .request import Sampling

NEGLIGIBLE = 1e-7
_PREFIX = 128
"""How many of the largest logits are sorted at first when looking for a top-p cut."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class NoiseKey:
    """The noise stream of one request. `at(step)` seeds the draw of generated token `step`, a signed 64-bit integer."""

    def __init__(self, key: tuple):
        text = json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self._hash = hashlib.blake2b(text.encode(), digest_size=8)

    def at(self, step: int) -> int:
        """The seed of the noise of one step."""
        stream = self._hash.copy()
        stream.update(step.to_bytes(8, "little"))
        return int.from_bytes(stream.digest(), "little", signed=True)


def uniform(seeds: Int[Tensor, " n"], counters: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Uniform float64 values in (0, 1), a pure function of (seed, counter); both int64."""
    z = seeds + (counters + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).to(torch.float64) + 0.5) * 2.0**-52


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One drawn token per row; `sampling_logprobs` (nats, under the renormalised kept distribution) on request."""

    tokens: list[int]
    sampling_logprobs: list[float] | None = None


def draw(logits: Float[Tensor, "row vocab"], settings: Sequence[Sampling], seeds: Sequence[int], *, logprobs=False):
    """Draw one token per row.

    logits: raw, any float dtype. seeds: `NoiseKey.at(step)` per row. Returns `Drawn`.
    """
    temperatures = [s.temperature for s in settings]
    if all(t == 0 for t in temperatures):
        return Drawn(
            tokens=logits.max(-1).indices.tolist(), sampling_logprobs=[0.0] * len(settings) if logprobs else None
        )
    device = logits.device
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(t not in (0, 1) for t in temperatures):
        scale = torch.tensor([1.0 / t if t else 1.0 for t in temperatures], dtype=scores.dtype, device=device)
        scores = scores * scale[:, None]
    cut = _cut(scores, settings)
    row, token = (scores >= cut[:, None]).nonzero(as_tuple=True)
    kept = scores[row, token].double()
    noise = uniform(torch.tensor(list(seeds), dtype=torch.int64, device=device)[row], token)
    race = torch.log(-torch.log(noise)) - kept
    best = torch.full((len(settings),), math.inf, dtype=torch.float64, device=device)
    best = best.scatter_reduce(0, row, race, "amin")
    won = race == best[row]
    tokens = torch.zeros(len(settings), dtype=torch.int64, device=device).scatter(0, row[won], token[won])
    greedy = [i for i, t in enumerate(temperatures) if t == 0]
    if greedy:  # equal logits: the first one, as in a batch without noise
        tokens[greedy] = logits[greedy].max(-1).indices
    sampling_logprobs = None
    if logprobs:
        largest = scores.amax(-1).double()
        mass = torch.zeros_like(best).index_add(0, row, torch.exp(kept - largest[row]))
        chosen = scores.gather(1, tokens[:, None])[:, 0].double()
        values = (chosen - largest - torch.log(mass)).tolist()
        sampling_logprobs = [0.0 if t == 0 else v for t, v in zip(temperatures, values, strict=True)]
    return Drawn(tokens=tokens.tolist(), sampling_logprobs=sampling_logprobs)


def _cut(scores: Float[Tensor, "row vocab"], settings: Sequence[Sampling]) -> Float[Tensor, " row"]:
    """Per row the smallest score that is kept. Greedy rows keep their maximum only."""
    vocab = scores.shape[-1]
    largest = scores.amax(-1)
    cut = largest + math.log(NEGLIGIBLE)
    top_k = [0 if s.temperature == 0 or not s.top_k else min(s.top_k, vocab) for s in settings]
    top_p = [1.0 if s.temperature == 0 or s.top_p is None else s.top_p for s in settings]
    if any(top_k) or any(p < 1 for p in top_p):
        _narrow(scores, top_k, top_p, cut)
    greedy = [i for i, s in enumerate(settings) if s.temperature == 0]
    if greedy:
        cut[greedy] = largest[greedy]
    return cut


def _narrow(scores: Tensor, top_k: list[int], top_p: list[float], cut: Tensor) -> None:
    """Raise `cut` in place for the rows with top-k or top-p: top-k first, then top-p of what it leaves.

    Sorts only a prefix of each row, and a longer one for the rows whose prefix holds too little mass.
    """
    vocab = scores.shape[-1]
    todo = [i for i in range(len(top_k)) if top_k[i] or top_p[i] < 1]
    prefix = min(vocab, max(_PREFIX, *top_k))
    while todo:
        index = torch.tensor(todo, device=scores.device)
        part = scores if len(todo) == len(scores) else scores[index]
        values = part.topk(prefix, -1).values
        limit = torch.tensor([top_k[i] or vocab for i in todo], device=scores.device)
        rank = torch.arange(prefix, device=scores.device)
        beyond = rank >= limit[:, None]
        whole = values[:, 0] - part.softmax(-1).amax(-1).log()  # logsumexp, in fewer passes
        total = torch.where(limit < vocab, values.masked_fill(beyond, -math.inf).logsumexp(-1), whole)
        mass = (values - total[:, None]).exp().masked_fill(beyond, 0).cumsum(-1)
        wanted = torch.tensor([top_p[i] for i in todo], dtype=mass.dtype, device=scores.device)
        # The last kept rank is the first at which the mass reaches top_p.
        last = (mass < wanted[:, None]).sum(-1)
        last = torch.minimum(torch.where(wanted < 1, last, prefix), limit - 1)
        found = (last < prefix) | (prefix == vocab)
        last = last.clamp(max=prefix - 1)
        chosen = values.gather(1, last[:, None])[:, 0]
        done = found.nonzero()[:, 0]
        cut[index[done]] = chosen[done]
        todo = [i for i, ok in zip(todo, found.tolist(), strict=True) if not ok]
        prefix = min(vocab, prefix * 8)
