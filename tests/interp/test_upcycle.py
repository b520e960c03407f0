"""The sparse upcycle is the dense model without noise, and a language model with real routing with it."""

import pytest
import torch

from interlens.interp import capture_router_logits, moe_num_experts, moe_topk, routing_stats
from interlens.loading import load
from interlens.upcycle import upcycle
from tests.support.tiny import tiny, token_ids


@pytest.mark.parametrize("tied", [True, False])
def test_without_noise_it_is_the_dense_model(tied):
    model, ids = tiny("llama", tie_word_embeddings=tied), token_ids(2)
    sparse = upcycle(model, num_experts=5, top_k=3, noise=0.0)
    torch.testing.assert_close(sparse(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert moe_num_experts(sparse) == 5 and moe_topk(sparse) == 3
    assert not torch.allclose(upcycle(model)(ids).logits, model(ids).logits, atol=1e-4)
    first, again = upcycle(model).state_dict(), upcycle(model).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_only_what_mixtral_can_hold_is_upcycled():
    with pytest.raises(ValueError, match="'gpt2'"):
        upcycle(tiny("gpt2"))
    with pytest.raises(ValueError, match="top_k 5 of 4"):
        upcycle(tiny("llama"), top_k=5)


def test_the_embedded_upcycle_talks_and_routes():
    sparse, tokenizer = load("smollm2-moe", device="cpu")
    dense = load("smollm2", device="cpu").model
    text = "The capital of France is Paris, and the river that flows through it is the Seine."
    ids = tokenizer(text, return_tensors="pt").input_ids
    means = []
    for model in (sparse, dense):
        log_p = model(ids).logits[0, :-1].float().log_softmax(-1)
        means.append(log_p.gather(-1, ids[0, 1:, None]).mean().item())
    assert means[0] == pytest.approx(means[1], abs=0.2) and means[0] > -3
    stats = routing_stats(capture_router_logits(sparse, ids), 4)
    assert stats.expert_load.shape == (30, 4)
    assert (stats.expert_load > 0).double().mean() > 0.9 and stats.expert_load.std() > 0.02
