"""Laws of probes: right where scikit-learn or the truth is known, 0.5 on noise, and no test row's group ever seen."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score

from interlens import probes
from interlens.probes import (
    METHODS,
    cosine_map,
    difference_of_means,
    evaluate,
    fit,
    permute_labels,
    project,
    split_by_group,
    transfer,
)


def siblings(seed=0, items=12, each=8, width=32, signal=0.0, within=True):
    """Rows in families: each item has its own offset; `signal` separates the labels along one axis."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(items), each)
    y = (np.arange(items * each) % 2 if within else (rng.permutation(items) % 2)[groups]).astype(bool)
    axis = rng.standard_normal(width)
    axis /= np.linalg.norm(axis)
    x = 2 * rng.standard_normal((items, width))[groups] + rng.standard_normal((len(groups), width))
    return x + signal * np.where(y, 0.5, -0.5)[:, None] * axis, y, groups, axis


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_a_planted_direction_and_points_to_the_positive_class(method):
    x, y, groups, axis = siblings(items=40, each=10, signal=4.0)
    probe = fit(method, x, y, list(groups))
    assert abs(np.linalg.norm(probe.direction) - 1) < 1e-12
    assert probe.direction @ axis > 0.6
    assert (probe.num_pos, probe.num_neg) == (200, 200)
    assert ((probe.score(x) > 0) == y).mean() > 0.75


def test_difference_of_means_is_what_it_says():
    x, y, _, _ = siblings(signal=1.0)
    raw = x[y].mean(0) - x[~y].mean(0)
    probe = probes.difference_of_means(x, y)
    assert np.allclose(probe.direction * probe.norm, raw, atol=1e-12)


def test_lda_is_scikit_learns_decision():
    x, y, _, _ = siblings(signal=2.0)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5]).fit(x, y)
    decision, score = reference.decision_function(x), probes.lda(x, y).score(x)
    assert np.corrcoef(decision, score)[0, 1] > 1 - 1e-10
    assert ((decision > 0) == (score > 0)).all()


@pytest.mark.parametrize("rows, width", [(12, 40), (40, 41), (9, 200)])
def test_lda_with_fewer_rows_than_columns_is_still_scikit_learns(rows, width):
    rng = np.random.default_rng(rows)
    y = np.arange(rows) % 3 == 0
    x = rng.standard_normal((rows, width)) * np.logspace(-2, 2, width) + 3 + y[:, None]
    x[:, 5] = 1.0  # a column that never varies
    fitted = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5]).fit(x, y)
    probe = probes.lda(x, y)
    assert np.allclose(probe.direction * probe.norm, fitted.coef_[0], rtol=1e-6, atol=1e-9 * probe.norm)
    assert np.allclose(probe.score(x) * probe.norm, fitted.decision_function(x), rtol=1e-6, atol=1e-6)


def test_pca_of_pairs_is_the_leading_singular_vector():
    x, y, _, _ = siblings(signal=3.0)
    differences = x[y] - x[~y]
    leading = np.linalg.svd(differences, full_matrices=False)[2][0]
    assert abs(probes.pca_of_differences(x, y).direction @ leading) > 1 - 1e-9


def test_a_zero_direction_or_one_class_is_an_error():
    with pytest.raises(ValueError, match="do not differ"):
        probes.difference_of_means(np.ones((4, 3)), [1, 1, 0, 0])
    with pytest.raises(ValueError, match="both classes"):
        probes.difference_of_means(np.ones((4, 3)), [1, 1, 1, 1])
    with pytest.raises(ValueError, match="there are: difference_of_means"):
        fit("svm", np.ones((4, 3)), [1, 1, 0, 0])


@pytest.mark.parametrize("within", [True, False])
def test_noise_gives_one_half_within_the_interval_with_siblings_present(within):
    covered, values = 0, []
    for seed in range(40):
        x, y, groups, _ = siblings(seed, items=16, within=within)
        found = evaluate(x, y, groups, permutations=0, random_directions=0, draws=200, seed=seed).auroc
        covered += found.contains(0.5)
        values.append(found.value)
    assert covered >= 31, covered
    assert abs(np.mean(values) - 0.5) < 3.5 * np.std(values) / np.sqrt(len(values))


def test_splitting_siblings_would_lie_and_splitting_by_group_does_not():
    x, y, groups, _ = siblings(3, items=30, within=False, width=200)
    honest = evaluate(x, y, groups, permutations=0, random_directions=0, draws=100)
    leaking = evaluate(x, y, None, permutations=0, random_directions=0, draws=100)
    assert leaking.auroc.value > 0.9 > 0.75 > honest.auroc.value


def test_no_group_is_on_both_sides_of_a_split():
    _, y, groups, _ = siblings(items=11, within=False)
    fold_of = split_by_group(y, list(groups), folds=5)
    for group in np.unique(groups):
        assert len(np.unique(fold_of[groups == group])) == 1


def test_a_test_rows_score_ignores_its_own_group():
    x, y, groups, _ = siblings(signal=2.0)
    fold_of = split_by_group(y, list(groups))
    changed = x.copy()
    held_out = fold_of == fold_of[0]
    row = np.flatnonzero(held_out)[0]
    changed[row] += 100.0
    before = evaluate(x, y, groups, permutations=0, random_directions=0, draws=10).scores
    after = evaluate(changed, y, groups, permutations=0, random_directions=0, draws=10).scores
    others = held_out & (np.arange(len(y)) != row)
    assert np.allclose(before[others], after[others], atol=1e-12)
    assert before[row] != after[row]


def test_layer_choice_sees_training_groups_only():
    """Many layers of pure noise: choosing the best one on all data looks good, choosing inside the folds does not."""
    best, nested = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        _, y, groups, _ = siblings(seed, items=10, each=4)
        layers = {layer: rng.standard_normal((len(y), 8)) for layer in range(12)}
        quick = {"permutations": 0, "random_directions": 0, "draws": 10, "folds": 4}
        best.append(max(evaluate(rows, y, groups, **quick).auroc.value for rows in layers.values()))
        found = evaluate(layers, y, groups, **quick)
        assert len(found.layers) == 4 and set(found.layers) <= set(layers)
        nested.append(found.auroc.value)
    assert np.mean(best) > 0.62
    assert np.mean(nested) < np.mean(best) - 0.08


def test_a_real_direction_beats_its_controls():
    x, y, groups, _ = siblings(items=24, signal=4.0)
    found = evaluate(x, y, groups)
    assert found.auroc.low > 0.8 > found.shuffled["high"]
    assert found.shuffled["p_value"] == 1 / 21
    assert abs(found.random["mean"] - 0.5) < 0.15
    assert found.accuracy > 0.8 and found.orthogonal is None
    assert found.summary()["num_groups"] == 24
    beside = evaluate(x, y, groups, permutations=0, draws=10, random_directions=0, orthogonal_directions=20)
    assert abs(beside.orthogonal["mean"] - 0.5) < 0.15 and beside.orthogonal["draws"] == 20 and beside.random is None


def test_a_weighted_difference_of_means_is_that_of_repeated_rows():
    x, y, groups, _ = siblings(items=12, signal=2.0)
    weights = np.random.default_rng(0).integers(1, 6, len(y))
    weighted = fit("difference_of_means", x, y, groups, weights=weights)
    repeated = fit("difference_of_means", np.repeat(x, weights, axis=0), np.repeat(y, weights))
    assert np.allclose(weighted.direction, repeated.direction, atol=1e-12)
    found = evaluate(x, y, groups, permutations=1, draws=10, weights=weights)
    assert not np.allclose(found.scores, evaluate(x, y, groups, permutations=1, draws=10).scores), "in every fold"


def test_permuted_labels_keep_counts_in_every_mixed_group():
    _, y, groups, _ = siblings()
    shuffled = permute_labels(y, list(groups), np.random.default_rng(0))
    assert (shuffled != y).any()
    for group in np.unique(groups):
        assert shuffled[groups == group].sum() == y[groups == group].sum()


def test_permuted_labels_move_whole_groups_of_one_label():
    _, y, groups, _ = siblings(within=False)
    shuffled = permute_labels(y, list(groups), np.random.default_rng(0))
    assert (shuffled != y).any() and shuffled.sum() == y.sum()
    for group in np.unique(groups):
        assert len(set(shuffled[groups == group])) == 1


def test_projection_is_in_the_rows_units_and_cosines_are_symmetric():
    assert project(np.array([[3.0, 4.0]]), np.array([0.0, 10.0])) == pytest.approx([4.0])
    with pytest.raises(ValueError, match="zero or non-finite"):
        project(np.ones((1, 2)), np.zeros(2))
    names, cosines = cosine_map({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [-2.0, 0.0]})
    assert names == ["a", "b", "c"]
    assert np.allclose(cosines, [[1, 0.5**0.5, -1], [0.5**0.5, 1, -(0.5**0.5)], [-1, -(0.5**0.5), 1]])


def test_shuffled_copies_that_cancel_are_chance_not_an_error():
    """Siblings that are equal in all but the label's own part: a shuffle can make both means the same."""
    groups = [item for item in range(6) for _ in range(4)]
    y = np.array([True, True, False, False] * 6)
    x = np.where(y[:, None], 1.0, -1.0) * np.ones((24, 3)) + 0.1 * np.repeat(np.arange(6.0), 4)[:, None]
    found = evaluate(x, y, groups, folds=2, permutations=60, draws=20)
    assert found.auroc.value == 1.0 and found.shuffled["draws"] == 60
    assert abs(found.shuffled["mean"] - 0.5) < 0.2


@pytest.mark.parametrize("kind", [list, np.asarray, torch.as_tensor])
def test_transfer_takes_weights_and_is_scikit_learns_number(kind):
    """Weighted means by numpy on the training rows of each fold, AUROC within each fold by scikit-learn's metric."""
    rng = np.random.default_rng(2)
    y, groups, domains = np.tile([True, False], 40), np.repeat(np.arange(20), 4), np.repeat(["a", "b"], 40)
    x, weights = rng.standard_normal((80, 5)) + y[:, None] * [1, 0.5, 0, 0, 0], rng.integers(1, 9, 80).astype(float)
    found = transfer(x, y, kind(groups.tolist()), list(domains), weights=kind(weights.tolist()), draws=5)
    fold_of = split_by_group(y, groups, 5, 0)
    for fitted, tested in found:
        won = total = 0
        for fold in range(5):
            train, test = (fold_of != fold) & (domains == fitted), (fold_of == fold) & (domains == tested)
            if not (y[test].any() and not y[test].all()):
                continue
            means = [np.average(x[train & side], axis=0, weights=weights[train & side]) for side in (y, ~y)]
            pairs = y[test].sum() * (~y[test]).sum()
            won += roc_auc_score(y[test], x[test] @ (means[0] - means[1])) * pairs
            total += pairs
        assert found[fitted, tested].value == pytest.approx(won / total, abs=1e-12)
    assert set(found) == {(a, b) for a in "ab" for b in "ab"}


def test_weights_domains_and_labels_that_do_not_fit_are_refused():
    x, y = np.random.default_rng(0).standard_normal((8, 3)), np.tile([True, False], 4)
    for weights in (np.ones(3), -np.ones(8), np.where(y, 1, 0), np.full(8, np.nan)):
        with pytest.raises(ValueError, match="weights"):
            difference_of_means(x, y, weights=weights)
    with pytest.raises(ValueError, match="3 domains given for 8 rows"):
        transfer(x, y, None, ["a", "b", "c"])
    for labels in (["warm", "cold"] * 4, [1, -1] * 4, [2.0, 0.0] * 4):
        with pytest.raises(ValueError, match="labels must be"):
            difference_of_means(x, labels)
    with pytest.raises(ValueError, match="zero or not finite"):
        cosine_map({"a": np.ones(3), "b": np.zeros(3)})
