"""Divergences are scipy's and broadcast; statistics of routing refuse a wrong number of experts and keep scores."""

import copy
import pickle

import numpy as np
import pytest
import torch

from interlens.interp import (
    RoutingCapture,
    capture_router_logits,
    js_divergence,
    kl_divergence,
    moe_num_experts,
    routing_stats,
    topk_expert_overlap,
)
from tests.support.tiny import MOE_FAMILIES, tiny, token_ids

distance = pytest.importorskip("scipy.spatial.distance")
special = pytest.importorskip("scipy.special")
SHAPES = [((8,), (8,)), ((3, 8), (8,)), ((8,), (3, 8)), ((3, 8), (1, 8)), ((2, 3, 8), (3, 8)), ((2, 1, 8), (3, 8))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_divergences_broadcast_and_are_scipys(left, right):
    rng = np.random.default_rng(1)
    p, q = rng.random(left), rng.random(right)
    mine, theirs = np.broadcast_arrays(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True))
    shape = mine.shape[:-1] or (1,)
    kl = kl_divergence(torch.tensor(p), torch.tensor(q), eps=0.0)
    np.testing.assert_allclose(kl, special.rel_entr(mine, theirs).sum(-1).reshape(shape), atol=1e-12)
    js = js_divergence(p, torch.tensor(q))
    np.testing.assert_allclose(js, (distance.jensenshannon(mine, theirs, axis=-1) ** 2).reshape(shape), atol=1e-12)
    assert topk_expert_overlap(p, q, np.int64(3)).shape == shape


def test_what_is_no_distribution_or_over_other_experts_is_refused():
    p = torch.rand(3, 8)
    for other in (torch.rand(3, 7), torch.rand(3, 1), torch.rand(2, 8), torch.rand(1), torch.tensor(1.0)):
        for measure in (kl_divergence, js_divergence, topk_expert_overlap):
            with pytest.raises(ValueError, match="distributions of shapes"):
                measure(p, other)
    for bad in (torch.zeros(8), -torch.rand(8), torch.full((8,), float("nan"))):
        with pytest.raises(ValueError, match="finite and at least 0"):
            kl_divergence(p, bad)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_wrong_number_of_experts_is_refused(family):
    model = tiny(family)
    right = moe_num_experts(model)
    for top_k_only in (False, True):
        captures = capture_router_logits(model, token_ids(2, 20), top_k_only=top_k_only)
        stats = routing_stats(captures, np.int64(right))
        assert stats.expert_load.shape[1] == right
        assert stats.expert_mass is None if top_k_only else stats.expert_mass.shape == stats.expert_load.shape
        for wrong in (right - 4, 1, 0, -1, *([] if top_k_only else [right + 1, 64])):
            with pytest.raises(ValueError, match="does not fit these captures"):
                routing_stats(captures, wrong)
        with pytest.raises(ValueError, match="whole number"):
            routing_stats(captures, str(right))


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_a_capture_keeps_its_score_function_however_it_is_rebuilt(family):
    captures = capture_router_logits(tiny(family), token_ids(2, 9))
    first, count = captures[0], captures[0].router_logits.shape[1]
    scores = first.router_logits.double().numpy()
    scores = 1 / (1 + np.exp(-scores)) if family == "deepseek_v3" else special.softmax(scores, -1)
    expected = (scores / scores.sum(-1, keepdims=True)).mean(0)
    for again in (
        first, first._replace(layer=0), first._replace(topk_probs=first.topk_probs.float()), copy.copy(first),
        copy.deepcopy(first), pickle.loads(pickle.dumps(first)),
        RoutingCapture(*first, score_function=first.score_function),
    ):  # fmt: skip
        assert again.score_function == first.score_function
        np.testing.assert_allclose(routing_stats([again], count).expert_mass[0], expected, atol=1e-6)
    bare = RoutingCapture(*first)
    with pytest.raises(ValueError, match="does not say how its router makes scores"):
        routing_stats([bare], count)
    assert routing_stats([bare._replace(score_function=first.score_function)], count).expert_mass is not None
    with pytest.raises(ValueError, match="no fields"):
        first._replace(logits=None)
