"""Drawing: the intended distribution, the same token for the same key wherever and whenever it is drawn."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.engine.sampling import NoiseKey, draw, uniform
from tests.support.reference import choose, drain, kept, model_of, prompt, same, uniforms

SETTINGS = [
    dict(temperature=1.0, top_p=None), dict(temperature=0.5, top_p=None), dict(temperature=1.7, top_p=0.8),
    dict(temperature=1.0, top_p=None, top_k=4), dict(temperature=0.8, top_p=0.7, top_k=6), dict(temperature=0.0),
    dict(temperature=1.0, top_p=1.0), dict(temperature=2.0, top_p=0.999, top_k=1), dict(temperature=1.0, top_p=1e-9),
]  # fmt: skip


def test_uniforms_are_splitmix64():
    for step, key in enumerate([(), (0, "a"), (7, ["item", 3], 2, 0), ("é", None, True)]):
        seeds = torch.full((500,), NoiseKey(key).at(step))
        ours = uniform(seeds, torch.arange(500)).numpy()
        np.testing.assert_array_equal(ours, uniforms(key, step, 500))
        assert (ours > 0).all() and (ours < 1).all()


@pytest.mark.parametrize("sampling", [s for s in SETTINGS if s["temperature"]], ids=str)
def test_draws_follow_the_intended_distribution(sampling):
    sampling, draws = Sampling(**sampling), 20_000
    logits = np.array([2.0, 1.5, 1.4, 0.3, 0.0, 0.0, -0.5, -1.0, -2.0, 1.0, -30.0, -np.inf])
    p = np.where(kept(logits, sampling), np.exp(logits / sampling.temperature), 0)
    p /= p.sum()
    rows = torch.tensor(logits).expand(500, -1)
    counts = np.zeros(len(logits))
    for block in range(draws // 500):
        seeds = [NoiseKey((block,)).at(i) for i in range(500)]
        tokens = draw(rows, [sampling] * 500, seeds).tokens
        counts += np.bincount(tokens, minlength=len(logits))
    assert counts[p == 0].sum() == 0
    likely = p * draws > 5
    if likely.sum() > 1:
        observed = np.append(counts[likely], counts[~likely].sum())
        expected = np.append(p[likely], p[~likely].sum()) * draws
        keep = expected > 0
        assert chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_noise_of_two_steps_or_keys_is_independent():
    rows = torch.zeros(2000, 5, dtype=torch.float64)
    sampling = [Sampling(temperature=1.0, top_p=None)] * 2000
    pairs = [
        [NoiseKey((0, i)).at(0) for i in range(2000)], [NoiseKey((0, i)).at(1) for i in range(2000)],
        [NoiseKey((1, i)).at(0) for i in range(2000)],
    ]  # fmt: skip
    drawn = [np.array(draw(rows, sampling, seeds).tokens) for seeds in pairs]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        counts = np.bincount(drawn[a] * 5 + drawn[b], minlength=25)
        assert chisquare(counts).pvalue > 1e-3


@st.composite
def rows_of_logits(draw_):
    vocab = draw_(st.sampled_from([1, 2, 7, 300, 700]))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw_(st.integers(1, 5))):
        logits = rng.standard_normal(vocab) * draw_(st.sampled_from([0.01, 1.0, 8.0]))
        step = draw_(st.sampled_from([0, 0, 0.25]))
        logits = np.round(logits / step) * step if step else logits
        if draw_(st.booleans()):
            logits[rng.random(vocab) < 0.3] = -np.inf
            logits[rng.integers(vocab)] = 1.0
        rows.append(logits)
    options = st.builds(
        Sampling, temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_p=st.sampled_from([None, 1e-6, 0.3, 0.9, 0.999, 0.9999999, 1.0]),
        top_k=st.sampled_from([None, 1, 2, 40, 299, 5000]),
    )  # fmt: skip
    return np.stack(rows), [draw_(options) for _ in rows], draw_(st.sampled_from([torch.float32, torch.float64]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows_of_logits())
def test_draws_equal_a_sort_over_the_whole_vocabulary(case):
    logits, samplings, dtype = case
    rows = torch.tensor(logits, dtype=dtype)
    keys = [("h", i) for i in range(len(rows))]
    drawn = draw(rows, samplings, [NoiseKey(key).at(3) for key in keys], logprobs=True)
    for i, sampling in enumerate(samplings):
        exact = rows[i].double().numpy()
        token, expected = drawn.tokens[i], choose(exact, sampling, keys[i], 3)
        if sampling.temperature == 0:
            assert token == expected and drawn.sampling_logprobs[i] == 0
            continue
        p = np.exp((exact - exact.max()) / sampling.temperature)
        left = kept(exact, sampling)
        if token != expected:  # only where the cut itself is a matter of rounding
            nearly = [kept(exact, replace(sampling, top_p=(sampling.top_p or 1) * f)) for f in (1 - 1e-5, 1 + 1e-5)]
            assert left.sum() != nearly[0].sum() or left.sum() != nearly[1].sum(), (token, expected)
            continue
        assert left[token]
        assert drawn.sampling_logprobs[i] == pytest.approx(np.log(p[token] / p[left].sum()), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_is_the_first_largest_in_any_company(dtype):
    """In bfloat16 the largest logit is often not alone."""
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row in logits:
        row[torch.randperm(50, generator=torch.Generator().manual_seed(1))[:5]] = 9.0
    first = [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    greedy, warm = Sampling(temperature=0.0), Sampling(temperature=1.0)
    for seed in range(5):
        seeds = [NoiseKey((seed,)).at(i) for i in range(8)]
        assert draw(logits, [greedy] * 8, seeds).tokens == first
        assert draw(logits, [greedy] * 7 + [warm], seeds).tokens[:7] == first[:7]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_one_key_is_one_text_alone_in_a_crowd_in_another_order_and_after_a_requeue(family):
    model = model_of(family)
    requests = [
        Request(
            tokens=prompt(3 + i % 9, i % 5), key=("crowd", i, 0), logprobs=True,
            sampling=Sampling(**{**SETTINGS[i % len(SETTINGS)], "max_new_tokens": 3 + i % 5}),
        )
        for i in range(64)
    ]  # fmt: skip
    crowd = Engine(model, rows=64, reuse=False).run(requests)
    assert len({reply.tokens for reply in crowd}) > 40
    for i in range(0, 64, 9):
        same(Engine(model).run([requests[i]])[0], crowd[i], model)
    order = list(range(64))
    random.Random(0).shuffle(order)
    for one, i in zip(Engine(model, rows=17).run([requests[i] for i in order]), order, strict=True):
        same(one, crowd[i], model)
    narrow = Engine(model, rows=16, budget=110)
    tickets = [narrow.submit(request) for request in requests]
    for _ in range(3):
        narrow.step()
    narrow.rewind()
    for one, other in zip(drain(narrow, tickets), crowd, strict=True):
        same(one, other, model)
    assert narrow.counters["requeued"] > 0


def test_the_key_alone_decides():
    model = model_of("llama")
    warm = Sampling(temperature=1.0, top_p=None, max_new_tokens=12)
    keys = [(0, "a", 1, 0), (0, "a", 1, 1), (0, "a", 2, 0), (0, "b", 1, 0), (1, "a", 1, 0), (0, "a", 1, 0)]
    replies = Engine(model).run([Request(tokens=prompt(6), key=key, sampling=warm) for key in keys])
    assert replies[0].tokens == replies[5].tokens and len({reply.tokens for reply in replies}) == 5
    reply = Engine(model).run([Request(tokens=prompt(6), key=(object(),), sampling=warm)])[0]
    assert isinstance(reply.error, TypeError)
