"""Laws of routing: what is reported is what each kind of router decides, by a numpy reference for each kind."""

import numpy as np
import pytest
import torch

from interlens.errors import UnknownSite
from interlens.interp import (
    ActivationRecord,
    RouterSteeringSpec,
    Select,
    capture_router_logits,
    js_divergence,
    kl_divergence,
    moe_layer_indices,
    moe_num_experts,
    moe_topk,
    route,
    routing_of,
    routing_stats,
    topk_expert_overlap,
)
from interlens.interp.locate import decoder_layers, locator
from tests.support.tiny import MOE_FAMILIES, tiny, token_ids


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top(x, k):
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    return order, np.take_along_axis(x, order, -1)


def softmax_then_topk(x, config, normed):
    experts, weights = top(softmax(x), config.num_experts_per_tok)
    return experts, weights / weights.sum(-1, keepdims=True) if normed else weights


def topk_then_softmax(x, config):
    experts, chosen = top(x, config.num_experts_per_tok)
    return experts, softmax(chosen)


def grouped_sigmoid(x, config, bias):
    scores = 1 / (1 + np.exp(-x))
    choice = (scores + bias).reshape(len(x), config.n_group, -1)
    groups = np.argsort(-np.sort(choice, -1)[..., -2:].sum(-1), -1)[:, : config.topk_group]
    allowed = np.zeros(choice.shape[:2], dtype=bool)
    np.put_along_axis(allowed, groups, True, -1)
    experts, _ = top(np.where(allowed[..., None], choice, -np.inf).reshape(x.shape), config.num_experts_per_tok)
    weights = np.take_along_axis(scores, experts, -1)
    return experts, weights / weights.sum(-1, keepdims=True) * config.routed_scaling_factor


def grouped_softmax(x, config):
    scores = softmax(x).reshape(len(x), config.n_group, -1)
    groups = np.argsort(-scores.max(-1), -1)[:, : config.topk_group]
    allowed = np.zeros(scores.shape[:2], dtype=bool)
    np.put_along_axis(allowed, groups, True, -1)
    experts, weights = top(np.where(allowed[..., None], scores, 0).reshape(x.shape), config.num_experts_per_tok)
    return experts, weights * config.routed_scaling_factor


def sparse_mixer(x, jitter):
    """PhiMoE: the best expert, weighted among those within a relative distance of it; then again without it."""
    experts, weights, rest = [], [], x.copy()
    for _ in range(2):
        best = rest.max(-1, keepdims=True)
        far = (best - x) / np.maximum(np.abs(x), best) > 2 * jitter
        gates = softmax(np.where(far, -np.inf, rest))
        chosen = rest.argmax(-1)
        experts.append(chosen)
        weights.append(gates[np.arange(len(x)), chosen])
        rest = rest.copy()
        rest[np.arange(len(x)), chosen] = -np.inf
    return np.stack(experts, 1), np.stack(weights, 1)


def reference(family, x, config, router):
    if family in ("gpt_oss", "granitemoe"):
        return topk_then_softmax(x, config)
    if family in ("glm4_moe", "deepseek_v3"):
        return grouped_sigmoid(x, config, router.e_score_correction_bias.double().numpy())
    if family == "deepseek_v2":
        return grouped_softmax(x, config)
    if family == "phimoe":
        return sparse_mixer(x, config.router_jitter_noise)
    return softmax_then_topk(x, config, normed=family == "mixtral" or config.norm_topk_prob)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_picks_equal_numpy_for_every_kind_of_router(family):
    model = tiny(family)
    ids, mask = token_ids(3), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4] = 0  # left padding
    captures = capture_router_logits(model, ids, attention_mask=mask)
    assert tuple(c.layer for c in captures) == moe_layer_indices(model)
    real = [row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True)]
    for capture in captures:
        router = locator(model).place("router", capture.layer).module
        seen = []
        handle = router.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].reshape(-1, 32)))
        for row in real:
            model(row)
        handle.remove()
        hidden = torch.cat(seen).double().numpy()
        bias = router.bias.double().numpy() if family == "gpt_oss" else 0
        logits = hidden @ router.weight.double().numpy().T + bias
        np.testing.assert_allclose(capture.router_logits.numpy(), logits, atol=1e-4)
        experts, weights = reference(family, logits, model.config, router)
        mine = np.argsort(capture.topk_experts.numpy(), -1)
        theirs = np.argsort(experts, -1)
        np.testing.assert_array_equal(
            np.take_along_axis(capture.topk_experts.numpy(), mine, -1), np.take_along_axis(experts, theirs, -1)
        )
        np.testing.assert_allclose(
            np.take_along_axis(capture.topk_probs.float().numpy(), mine, -1),
            np.take_along_axis(weights, theirs, -1),
            atol=2e-3,
        )
        assert capture.topk_experts.dtype == torch.int16 and capture.topk_probs.dtype == torch.float16
        again = route(model, capture.layer, capture.router_logits)
        assert torch.equal(again[0].to(torch.int16), capture.topk_experts)
    assert moe_topk(model) == 2
    assert moe_num_experts(model) == logits.shape[1]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss"])
def test_logits_equal_what_transformers_outputs(family):
    model, ids = tiny(family), token_ids(2)
    reported = model(ids, output_router_logits=True).router_logits
    for capture, logits in zip(capture_router_logits(model, ids), reported, strict=True):
        torch.testing.assert_close(capture.router_logits, logits.reshape(-1, logits.shape[-1]), rtol=0, atol=0)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_records_of_router_logits_give_the_same_routing_as_replay(family):
    model, ids = tiny(family), token_ids(1)
    replay = capture_router_logits(model, ids)
    records = [ActivationRecord("", 0, c.layer, "router", c.router_logits, (12, 12)) for c in replay]
    for mine, theirs in zip(routing_of(model, records), replay, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == b if isinstance(a, int) else torch.equal(a, b)
        assert mine.score_function == theirs.score_function


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_router_steering_moves_picks_and_coef_zero_does_not(family):
    model, ids = tiny(family), token_ids(1)
    layer, experts = moe_layer_indices(model)[0], moe_num_experts(model)
    before = capture_router_logits(model, ids)
    plain = model(ids).logits
    bias = torch.zeros(experts)
    bias[4] = 50.0
    with RouterSteeringSpec(bias, layer, 0.0).register(model):
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)
    with RouterSteeringSpec(bias, layer, tokens=Select.positions(2, 5)).register(model):
        after = capture_router_logits(model, ids)
    picked = (after[0].topk_experts == 4).any(-1)
    was = (before[0].topk_experts == 4).any(-1)
    assert picked[[2, 5]].all()
    untouched = [p for p in range(12) if p not in (2, 5)]
    assert torch.equal(picked[untouched], was[untouched])


def test_steering_toward_a_load_approaches_it():
    model, ids = tiny("mixtral"), token_ids(4, 40)
    target = torch.tensor([0.7, 0.1, 0.1, 0.05, 0.03, 0.02])
    layers = moe_layer_indices(model)
    spec = RouterSteeringSpec.toward_load(target.expand(3, -1), layers, coef=3.0)
    before = routing_stats(capture_router_logits(model, ids), 6)
    with spec.register(model):
        after = routing_stats(capture_router_logits(model, ids), 6)
    goal = target.expand(3, -1)
    assert (js_divergence(after.expert_load, goal) < js_divergence(before.expert_load, goal)).all()


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_stats_equal_numpy_and_merge_by_tokens(family):
    model, ids = tiny(family), token_ids(1, 30)
    experts = moe_num_experts(model)
    captures = capture_router_logits(model, ids)
    whole = routing_stats(captures, experts)
    for row, capture in enumerate(captures):
        load = np.bincount(capture.topk_experts.numpy().ravel(), minlength=experts) / capture.topk_experts.numel()
        np.testing.assert_allclose(whole.expert_load[row].numpy(), load, atol=1e-12)
        logits = capture.router_logits.double().numpy()
        scores = softmax(logits) if family == "mixtral" else 1 / (1 + np.exp(-logits))
        mass = (scores / scores.sum(-1, keepdims=True)).mean(0)
        np.testing.assert_allclose(whole.expert_mass[row].numpy(), mass, atol=1e-12)
    parts = routing_stats(captures, experts, [(0, 7)]).merge(routing_stats(captures, experts, [(7, 20), (15, 30)]))
    torch.testing.assert_close(parts.expert_load, whole.expert_load, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.expert_mass, whole.expert_mass, rtol=0, atol=1e-12)
    assert parts.n_tokens == 30 and whole.top_k == 2
    assert routing_stats(capture_router_logits(model, ids, top_k_only=True), experts).expert_mass is None
    tail = routing_stats(captures, experts, [(-5, 30)])
    assert tail.n_tokens == 5
    for bad, why in [([], "no routing captures"), ([captures[0], captures[0]], "one per layer")]:
        with pytest.raises(ValueError, match=why):
            routing_stats(bad, experts)
    with pytest.raises(ValueError, match="none of 30 tokens"):
        routing_stats(captures, experts, [(4, 4)])


def test_divergences_equal_scipy_definitions():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), 3), rng.dirichlet(np.ones(6), 3)
    from scipy.spatial.distance import jensenshannon
    from scipy.stats import entropy

    np.testing.assert_allclose(kl_divergence(p, q).numpy(), entropy(p, q, axis=-1), atol=1e-5)
    np.testing.assert_allclose(js_divergence(p, q).numpy(), jensenshannon(p, q, axis=-1) ** 2, atol=1e-12)  # ty: ignore[unknown-argument]
    one, other = np.eye(6)[:1], np.eye(6)[1:2]
    assert abs(float(js_divergence(one, other)) - np.log(2)) < 1e-12
    assert torch.isfinite(kl_divergence(one, other)).all()
    assert topk_expert_overlap(p, p, k=8).tolist() == [1.0] * 3
    a, b = np.array([[4, 3, 2, 1, 0.0, 0]]), np.array([[4, 0, 2, 3, 0.0, 1]])
    assert topk_expert_overlap(a, b, k=3).tolist() == [2 / 3]


def test_dense_models_and_dense_layers_are_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM is a dense model"):
        moe_layer_indices(tiny("llama"))
    model = tiny("deepseek_v3")
    assert moe_layer_indices(model) == (1, 2)
    with pytest.raises(UnknownSite, match="layer 0 has no site 'router'; layers that have it: 1, 2"):
        capture_router_logits(model, token_ids(), layers=[0])
    assert not any(m._forward_hooks for layer in decoder_layers(model) for m in layer.modules())
    with pytest.raises(ValueError, match="over 3 experts does not fit a router over 8"):
        RouterSteeringSpec(torch.ones(3), 1).register(model)
