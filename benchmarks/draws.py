"""Rows of `benchmarks/engine.py` about drawing tokens: what a draw costs, and how much noise survives rounding."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from bench import LOGITS, Bench, median, row

from interlens.engine import Engine, Sampling
from interlens.engine.sampling import NoiseKey, draw


@row
def sampling_step(bench: Bench) -> dict:
    """Drawing 32 tokens at top_p 0.95 from real logits over a whole decode step. Reach 10 %."""
    engine = Engine(bench.model, rows=32, reuse=False)
    for request in bench.requests(32, 40):
        engine.submit(request)
    steps = []
    for _ in range(24):
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
    captured = bench.run([replace(r, capture=(LOGITS,)) for r in bench.requests(32, 2)], reuse=False)[2]
    logits = torch.stack([reply.records[0].tensor[1] for reply in captured])
    settings = [Sampling(temperature=0.8, top_p=0.95)] * 32
    seeds = [NoiseKey((0, i)).at(5) for i in range(32)]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        draw(logits, settings, seeds)
        times.append(time.perf_counter() - start)
    return {"share of a step": median(times) / median(steps[3:]), "ms": median(times) * 1e3}


@row
def noise_under_rounding(bench: Bench) -> dict:
    """Tokens that stay the same between cached decode and prefill of one text: the race against an inverse CDF."""
    requests, replies, same_race, same_cdf, total = bench.requests(16, 48), [], 0, 0, 0
    replies = bench.run([replace(r, capture=(LOGITS,)) for r in requests], reuse=False)[2]
    settings = [requests[0].sampling] * 48
    for i, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        decoded = reply.records[0].tensor[:48]
        with torch.no_grad():
            whole = bench.model(torch.tensor([request.tokens + reply.tokens])).logits[0, len(request.tokens) - 1 : -1]
        seeds = [NoiseKey(request.key).at(step) for step in range(48)]
        a, b = draw(decoded, settings, seeds).tokens, draw(whole, settings, seeds).tokens
        assert tuple(a) == reply.tokens
        same_race += sum(x == y for x, y in zip(a, b, strict=True))
        uniform = torch.rand(48, 1, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        c, d = (_inverse_cdf(logits, uniform) for logits in (decoded, whole))
        same_cdf += int((c == d).sum())
        total += 48
    return {"race agrees": same_race / total, "inverse CDF agrees": same_cdf / total, "tokens": total}


def _inverse_cdf(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Nucleus sampling at 0.8 / 0.95 by inverting the cumulative distribution in vocabulary order."""
    probs = (logits.double() / 0.8).softmax(-1)
    ordered = probs.sort(-1, descending=True)
    last = (ordered.values.cumsum(-1) < 0.95).sum(-1, keepdim=True)
    probs = probs * (probs >= ordered.values.gather(-1, last))
    return (probs.cumsum(-1) < uniform * probs.sum(-1, keepdim=True)).sum(-1)
