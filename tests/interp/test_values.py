"""Laws of pooling and log-probabilities, against numpy, scipy and transformers' generate."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import entropy

from interlens.interp import group_pool, span_pool, token_logprobs
from tests.support.tiny import tiny, token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_spans_pool_as_in_numpy(dtype):
    hidden = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = hidden.double().numpy()
    spans = [(0, 3), (2, 10), (-4, -1), (9, 10)]
    for mode, reduce in [("mean", lambda x: x.mean(0)), ("max", lambda x: x.max(0)), ("last", lambda x: x[-1])]:
        expected = np.stack([reduce(rows[a:b]) for a, b in spans])
        pooled = span_pool(hidden, spans, mode)
        assert pooled.dtype == torch.promote_types(dtype, torch.float32)
        np.testing.assert_allclose(pooled.double().numpy(), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"span 1, \(5, 5\), holds none of 10"):
        span_pool(hidden, [(0, 1), (5, 5)])
    with pytest.raises(ValueError, match="no pool 'sum'"):
        span_pool(hidden, [(0, 1)], "sum")


def test_groups_are_indices_spans_or_masks():
    hidden = torch.arange(12.0).view(6, 2)
    mask = torch.tensor([1, 0, 0, 0, 0, 1]).bool()
    pooled, present = group_pool(hidden, [[0, 5, 0], [(0, 2), (1, 3)], mask, torch.tensor([4])])
    torch.testing.assert_close(pooled[:, 0], torch.tensor([5.0, 2.0, 5.0, 8.0]))
    assert present.all()
    with pytest.raises(ValueError, match="group 1 holds no token"):
        group_pool(hidden, [[0], []])
    zero, present = group_pool(hidden, [[0], []], empty="zero")
    assert present.tolist() == [True, False] and zero[1].tolist() == [0, 0]
    assert group_pool(hidden, [[]], empty="nan")[0].isnan().all()
    with pytest.raises(ValueError, match="outside 6 tokens"):
        group_pool(hidden, [[6]])


def test_a_mean_of_many_bf16_values_is_right():
    values = (torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0)) + 3.0).bfloat16()
    assert abs(span_pool(values, [(0, 200_000)]).item() - values.double().mean().item()) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
def test_logprobs_equal_scipy_on_a_generation(rows):
    model = tiny("llama")
    output = model.generate(
        token_ids(rows, 5), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = output.sequences[:, 5:]
    result = token_logprobs(output.logits, ids if rows > 1 else ids[0])
    logits = torch.stack(output.logits, 1).double().numpy()
    log_p = log_softmax(logits, -1)
    expected = np.take_along_axis(log_p, ids.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.array(result["logprobs"]).reshape(rows, 6), expected, atol=1e-5)
    np.testing.assert_allclose(np.array(result["surprisal"]).reshape(rows, 6), -expected, atol=1e-5)
    np.testing.assert_allclose(np.array(result["entropy"]).reshape(rows, 6), entropy(np.exp(log_p), axis=-1), atol=1e-5)


def test_masked_scores_empty_scores_and_extra_ids():
    scores = [torch.tensor([0.0, float("-inf"), 1.0]), torch.tensor([float("-inf"), 5.0, float("-inf")])]
    result = token_logprobs(scores, [2, 1, 0, 0])
    assert len(result["logprobs"]) == 2
    assert np.isfinite(result["entropy"]).all() and result["entropy"][1] == 0.0
    assert token_logprobs(scores[:1], [1])["logprobs"] == [float("-inf")]
    assert token_logprobs((), [1, 2]) == {"logprobs": [], "surprisal": [], "entropy": []}
    assert token_logprobs(None, [])["entropy"] == []
    assert token_logprobs([torch.randn(1, 7)], [[3]])["logprobs"] == pytest.approx(
        token_logprobs([torch.randn(7, generator=torch.Generator().manual_seed(1))], [3])["logprobs"], abs=20
    )
    with pytest.raises(ValueError, match="2 rows"):
        token_logprobs([torch.randn(2, 7)], [1, 2, 3])
