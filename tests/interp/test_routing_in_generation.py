"""Routing captured while generating, with KV reuse and neighbours in the batch, equals routing by replay."""

import pytest
import torch

from interlens.engine import Engine, Request, Sampling
from interlens.interp import CaptureSpec, capture_router_logits, routing_of
from tests.support.tiny import MOE_FAMILIES, tiny, token_ids


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_generation_and_replay_agree(family):
    model = tiny(family)
    requests = [
        Request(
            tokens=tuple(token_ids(1, length, seed=length)[0].tolist()),
            sampling=Sampling(max_new_tokens=6, temperature=1.0),
            key=(length,),
            capture=(CaptureSpec("router"),),
        )
        for length in (5, 9, 12)
    ]
    for request, reply in zip(requests, Engine(model, rows=3).run(requests), strict=True):
        assert reply.error is None, reply.error
        sequence = torch.tensor([request.tokens + reply.tokens])
        replayed = capture_router_logits(model, sequence)
        generated = routing_of(model, sorted(reply.records, key=lambda record: record.layer))
        assert [c.layer for c in generated] == [c.layer for c in replayed]
        for mine, theirs in zip(generated, replayed, strict=True):
            torch.testing.assert_close(mine.router_logits, theirs.router_logits, rtol=1e-3, atol=1e-4)
            assert torch.equal(mine.topk_experts.sort(-1).values, theirs.topk_experts.sort(-1).values)
            torch.testing.assert_close(
                mine.topk_probs.sort(-1).values, theirs.topk_probs.sort(-1).values, rtol=1e-2, atol=2e-3
            )
