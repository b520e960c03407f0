"""Laws of streaming statistics: numbers as numpy has them on the whole, whatever the order and the split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from interlens.probes import difference_of_means
from interlens.statistics import (
    GroupedMoments,
    Moments,
    RankedScores,
    auroc,
    bootstrap,
    mean_interval,
    norm_filter,
    recall_at_fpr,
)


def rows(n=500, width=7, seed=0):
    rng = np.random.default_rng(seed)
    return (3.0 + rng.standard_normal((n, width))) * np.logspace(-3, 3, width)


def relative(a, b):
    return np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-300))


def test_two_hundred_thousand_bf16_values_average_exactly():
    values = (3.0 + torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0)) * 0.1).to(torch.bfloat16)
    exact = values.double().mean().item()
    assert abs(Moments.of(values).mean[0] - exact) < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 500), max_size=6), st.integers(0, 2**31), st.booleans())
def test_any_split_and_order_agrees_with_numpy(cuts, seed, covariance):
    whole = rows()
    shuffled = np.random.default_rng(seed).permutation(whole)
    parts = [Moments.of(p, covariance) for p in np.split(shuffled, sorted(cuts)) if len(p)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert merged.count == len(whole)
    assert relative(merged.mean, whole.mean(0)) < 1e-12
    assert relative(merged.variance(), whole.var(0, ddof=1)) < 1e-12
    if covariance:
        reference = np.cov(whole.T)
        scale = np.sqrt(np.outer(np.diag(reference), np.diag(reference)))
        assert np.max(np.abs(merged.covariance() - reference) / scale) < 1e-12


def test_merging_in_any_order_agrees_to_twelve_digits():
    parts = [Moments.of(rows(50 + i, seed=i)) for i in range(8)]

    def fold(order):
        total = parts[order[0]]
        for i in order[1:]:
            total = total.merge(parts[i])
        return total

    forward, backward = fold(range(8)), fold(range(7, -1, -1))
    tree = (
        parts[0]
        .merge(parts[1])
        .merge(parts[2].merge(parts[3]))
        .merge(parts[4].merge(parts[5]).merge(parts[6].merge(parts[7])))
    )
    for other in (backward, tree):
        assert relative(other.mean, forward.mean) < 1e-12
        assert relative(other.m2, forward.m2) < 1e-12


def test_variance_far_from_zero_is_not_negative_in_any_dtype():
    values = (1e4 + torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1))).float()
    variance = Moments.of(values).variance()
    assert relative(variance, values.double().numpy().var(0, ddof=1)) < 1e-9


def test_non_finite_rows_are_left_out_and_counted():
    values = rows(100)
    values[3, 2], values[50, 0], values[51, 1] = np.nan, np.inf, -np.inf
    moments = Moments.of(values)
    kept = values[np.isfinite(values).all(1)]
    assert (moments.count, moments.non_finite) == (97, 3)
    assert relative(moments.mean, kept.mean(0)) < 1e-12


def test_state_round_trips_and_zero_is_neutral():
    moments = Moments.of(rows(), covariance=True)
    again = Moments.from_state(moments.state()).merge(Moments(7, covariance=True))
    assert again.count == moments.count
    assert np.array_equal(again.m2, moments.m2) and np.array_equal(again.mean, moments.mean)


def test_widths_and_kinds_do_not_mix():
    with pytest.raises(ValueError, match=r"\[N, 7\]"):
        Moments(7).update(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="do not merge"):
        Moments(7).merge(Moments(7, covariance=True))


def sinks(seed=4, n=4000, width=64):
    """Two classes apart along a known axis; 2 % of the tokens are attention sinks, more of them in one class."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(width)
    truth /= np.linalg.norm(truth)
    y = np.arange(n) % 2 == 0
    x = rng.standard_normal((n, width)) + np.where(y, 1.0, -1.0)[:, None] * truth * 0.35
    sink = np.concatenate(
        [rng.permutation(np.flatnonzero(y))[: n // 80], rng.permutation(np.flatnonzero(~y))[: 3 * n // 400]]
    )
    x[sink] += 250.0 * rng.standard_normal(width) / width**0.5
    return x, y, truth, sink


def test_norm_filter_saves_a_direction_that_sinks_ruin():
    x, y, truth, sink = sinks()
    found = norm_filter(x)
    naive = difference_of_means(x, y).direction @ truth
    filtered = difference_of_means(x[found.keep], y[found.keep]).direction @ truth
    assert naive < 0.4 and filtered > 0.8, (naive, filtered)
    assert found.removed == len(sink) and not found.keep[sink].any()
    assert found.summary()["total"] == len(x)


def test_norm_filter_takes_a_fixed_limit_and_drops_non_finite_rows():
    x = np.array([[3.0, 4.0], [30.0, 40.0], [np.nan, 0.0]])
    assert norm_filter(x, max_norm=5.0).keep.tolist() == [True, False, False]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_auroc_equals_scikit_learn_with_ties(pairs):
    scores, labels = [p[0] for p in pairs], [p[1] for p in pairs]
    if len(set(labels)) < 2:
        assert np.isnan(auroc(scores, labels))
    else:
        assert abs(auroc(scores, labels) - roc_auc_score(labels, scores)) < 1e-12


def test_weighted_auroc_equals_repeated_rows():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 30), rng.random(30) < 0.5
    weights = rng.integers(0, 4, 30)
    won, pairs = RankedScores(scores, labels).pairs(weights.astype(float))
    assert abs(won / pairs - auroc(np.repeat(scores, weights), np.repeat(labels, weights))) < 1e-12


def test_recall_at_one_percent_counts_false_positives():
    rng = np.random.default_rng(0)
    negatives, positives = rng.standard_normal(1000), rng.standard_normal(500) + 2
    scores = np.concatenate([negatives, positives])
    labels = np.arange(1500) >= 1000
    limit = np.sort(negatives)[-11]
    assert recall_at_fpr(scores, labels) == (positives > limit).mean()
    assert (negatives > limit).mean() <= 0.01


def test_bootstrap_resamples_groups_not_rows():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 50)
    values = rng.standard_normal(20)[groups] + 0.01 * rng.standard_normal(1000)
    by_group, by_row = mean_interval(values, groups), mean_interval(values)
    assert (by_group.groups, by_row.groups) == (20, 1000)
    assert by_group.high - by_group.low > 3 * (by_row.high - by_row.low)


def test_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    covered = 0
    for seed in range(100):
        values = np.random.default_rng(seed).standard_normal(60)
        covered += mean_interval(values, draws=300, seed=seed).contains(0.0)
    assert 87 <= covered <= 99


def test_bootstrap_is_a_function_of_its_seed():
    values = np.random.default_rng(0).standard_normal(30)
    statistic = lambda w: float(w @ values / w.sum())  # noqa: E731
    assert bootstrap(statistic, None, 30, seed=1) == bootstrap(statistic, None, 30, seed=1)
    assert bootstrap(statistic, None, 30, seed=1) != bootstrap(statistic, None, 30, seed=2)


def test_moments_of_groups_in_one_pass_equal_moments_of_each():
    """Far from zero, with weights, with rows of no group and rows that are not finite."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2000, 9)) + np.where(np.arange(9) % 4 == 0, 1e4, 0)).astype(np.float32)
    x[5, 3], x[9, 1], x[20, 0] = np.nan, np.inf, -np.inf
    groups, weights = rng.integers(-1, 3, 2000), rng.integers(1, 5, 2000).astype(float)
    for times in (None, weights):
        found = GroupedMoments(9, 3)
        for part in (slice(0, 700), slice(700, 2000)):
            found.update(x[part], groups[part], None if times is None else times[part])
        for group in range(3):
            rows = x[groups == group]
            repeated = rows if times is None else np.repeat(rows, weights[groups == group].astype(int), axis=0)
            finite = repeated[np.isfinite(repeated).all(axis=1)].astype(np.float64)
            one = found[group]
            assert one.count == len(finite) and one.non_finite == (~np.isfinite(rows).all(axis=1)).sum()
            assert np.allclose(one.mean, finite.mean(0), rtol=1e-12, atol=1e-12)
            assert np.allclose(one.variance(), finite.var(0, ddof=1), rtol=1e-9)
            alone = Moments(9).update(rows, None if times is None else times[groups == group])
            assert np.allclose(one.m2, alone.m2, rtol=1e-12) and alone.count == one.count
    with pytest.raises(ValueError, match="weights of shape"):
        Moments(9).update(x, weights[:3])


def as_given(values, kind):
    return {"numpy": np.asarray, "torch": torch.as_tensor, "list": lambda v: np.asarray(v).tolist()}[kind](values)


@pytest.mark.parametrize("kind", ["numpy", "torch", "list"])
@pytest.mark.parametrize("labels", [bool, int, float])
def test_auroc_is_scikit_learns_for_labels_of_every_kind(kind, labels):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    for _ in range(20):
        scores, y = rng.integers(0, 6, 30).astype(float), rng.random(30) < 0.4
        y[:2] = True, False
        assert auroc(as_given(scores, kind), as_given(y.astype(labels), kind)) == pytest.approx(
            metrics.roc_auc_score(y, scores), abs=1e-12
        )


def test_scores_that_have_no_order_and_labels_that_are_none_are_refused():
    nan = float("nan")
    for scores in ([nan, nan, 1, 2], [1, 2, 3, nan], torch.tensor([nan, 0, 0, 0])):
        for measure in (auroc, recall_at_fpr):
            with pytest.raises(ValueError, match="NaN"):
                measure(scores, [True, True, False, False])
    for labels in (["yes", "no"] * 2, [-1, 1, 1, -1], [2, 0, 0, 0], [nan, 1, 0, 0], [None, True, False, True], "TTFF"):
        with pytest.raises(ValueError, match=r"labels must be True or False|labels"):
            auroc([1, 2, 3, 4], labels)
    assert auroc([float("inf"), 1, 0, -float("inf")], [True, True, False, False]) == 1.0


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.07, 0.29, 0.57, 0.58, 1.0, 0.0])
def test_recall_at_a_false_positive_rate_is_that_of_scikit_learns_curve(fpr):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    y = np.repeat([True, False], [80, 100])
    scores = rng.standard_normal(180) + y
    rates, recalls, _ = metrics.roc_curve(y, scores, drop_intermediate=False)
    assert recall_at_fpr(scores, y, fpr) == pytest.approx(recalls[rates <= fpr + 1e-12].max(), abs=1e-12)


def test_groups_in_a_tensor_are_groups_by_value():
    values, groups = torch.arange(6.0), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = mean_interval(values, [0, 0, 1, 1, 2, 2], seed=1)
    assert expected.groups == 3
    assert mean_interval(values, groups, seed=1) == expected == mean_interval(values, groups.numpy(), seed=1)


def test_what_a_bootstrap_and_moments_cannot_take_is_refused():
    for bad in (dict(draws=0), dict(level=0), dict(level=1), dict(level=95)):
        with pytest.raises(ValueError, match="draws must be"):
            mean_interval([1.0, 2.0], **bad)
    for weights in ([0.5, 1], [-1, 1], [float("nan"), 1]):
        with pytest.raises(ValueError, match="whole numbers"):
            Moments(2).update(np.ones((2, 2)), weights)
