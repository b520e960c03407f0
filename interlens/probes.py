"""Directions and linear probes in memory, and their honest evaluation.

Rows are [N, D], labels bool [N], groups any hashable per row (the item a row came from). Siblings share a prefix, so
rows of one group never stand on both sides of a split. Estimators are scikit-learn's where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .statistics import Interval, RankedScores, as_float64, auroc, bootstrap, group_index, recall_at_fpr


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A direction with a threshold: `score(x) = x @ direction - threshold`, positive for the positive class."""

    method: str
    direction: np.ndarray
    """[D], unit norm, pointing from negative to positive."""
    threshold: float
    """Where the two classes part, along `direction`, from the training rows alone."""
    norm: float
    """Norm of the raw direction before scaling: for difference of means the distance of the class means."""
    num_pos: int
    num_neg: int

    def score(self, x: Any) -> np.ndarray:
        """Signed distance from the threshold, [N]."""
        return as_float64(x) @ self.direction - self.threshold


class NoDirection(ValueError):
    """The classes do not differ: a direction between them would be zero."""


def _check(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = as_float64(x), np.asarray(y, dtype=bool)
    if x.ndim != 2 or y.shape != (len(x),):
        raise ValueError(f"a probe takes rows [N, D] and labels [N], got {x.shape} and {y.shape}")
    if y.all() or not y.any():
        raise ValueError(f"a probe needs both classes, got {int(y.sum())} positive and {int((~y).sum())} negative rows")
    if not np.isfinite(x).all():
        raise ValueError("rows hold NaN or infinity; drop them first (statistics.norm_filter counts them)")
    return x, y


def _probe(method: str, raw: np.ndarray, x: np.ndarray, y: np.ndarray, threshold: float | None = None) -> Probe:
    norm = float(np.linalg.norm(raw))
    if not norm > 0:
        raise NoDirection(f"{method}: the classes do not differ, the direction would be zero")
    direction = raw / norm
    if threshold is None:
        projected = x @ direction
        threshold = float((projected[y].mean() + projected[~y].mean()) / 2)
    return Probe(
        method=method,
        direction=direction,
        threshold=threshold,
        norm=norm,
        num_pos=int(y.sum()),
        num_neg=int((~y).sum()),
    )


def difference_of_means(x: Any, y: Any, groups: Sequence[Hashable] | None = None, weights: Any = None) -> Probe:
    """Mean of the positive rows minus mean of the negative ones ("mass mean", Marks and Tegmark 2023).

    `weights` [N]: how much each row counts in its mean, such as the tokens that are in it.
    """
    x, y = _check(x, y)
    times = np.ones(len(y)) if weights is None else as_float64(weights)
    means = [np.average(x[side], axis=0, weights=times[side]) for side in (y, ~y)]
    return _probe("difference_of_means", means[0] - means[1], x, y)


def lda(x: Any, y: Any, groups: Sequence[Hashable] | None = None, shrinkage: str | float = "auto") -> Probe:
    """Whitened mass mean: inverse within-class covariance (Ledoit-Wolf shrinkage) times the difference of means."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = _check(x, y)
    if len(x) < 4:
        raise ValueError(f"lda needs at least 4 rows for a covariance, got {len(x)}")
    if shrinkage == "auto" and 2 <= y.sum() <= len(y) - 2 and len(x) < x.shape[1]:
        means = x[y].mean(axis=0), x[~y].mean(axis=0)
        raw = _whitened(x, y, means[0] - means[1])
        offset = float(raw @ (means[0] + means[1])) / 2
    else:
        fitted = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=[0.5, 0.5]).fit(x, y)
        raw, offset = fitted.coef_[0], float(-fitted.intercept_[0])
    return _probe("lda", raw, x, y, offset / max(float(np.linalg.norm(raw)), 1e-300))


def _whitened(x: np.ndarray, y: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """Inverse shrunk covariance times `difference` [D], as scikit-learn's LDA has it, for fewer rows than columns.

    The covariance is a diagonal plus one term per row, so its inverse takes a matrix of rows x rows (Woodbury) and
    never one of D x D, which would cost hundreds of times as much.
    """
    from sklearn.covariance import ledoit_wolf_shrinkage

    diagonal, parts = np.zeros(x.shape[1]), []
    for side in (y, ~y):
        scale = x[side].std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        rows = (x[side] - x[side].mean(axis=0)) / scale
        share = ledoit_wolf_shrinkage(rows)
        diagonal += 0.5 * share * (rows**2).mean() * scale**2
        parts.append(np.sqrt(0.5 * (1 - share) / len(rows)) * rows * scale)
    low = np.concatenate(parts)
    scaled = low / diagonal
    inner = np.eye(len(low)) + scaled @ low.T
    return difference / diagonal - scaled.T @ np.linalg.solve(inner, scaled @ difference)


def logistic(x: Any, y: Any, groups: Sequence[Hashable] | None = None, C: float = 0.1) -> Probe:
    """Logistic regression on standardised columns with balanced classes; the direction is in the rows' own units."""
    from sklearn.linear_model import LogisticRegression

    x, y = _check(x, y)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    fitted = LogisticRegression(C=C, max_iter=1000, class_weight="balanced").fit((x - mean) / scale, y)
    raw = fitted.coef_[0] / scale
    offset = float(raw @ mean - fitted.intercept_[0])
    return _probe("logistic", raw, x, y, offset / max(float(np.linalg.norm(raw)), 1e-300))


def pca_of_differences(x: Any, y: Any, groups: Sequence[Hashable] | None = None) -> Probe:
    """First principal axis of paired differences (Zou et al. 2023), oriented from negative to positive.

    A pair is the mean of a group's positive rows and the mean of its negative rows. Without groups, the i-th positive
    row is paired with the i-th negative one. Differences enter with both signs, so the axis is about zero.
    """
    from sklearn.decomposition import PCA

    x, y = _check(x, y)
    if groups is None:
        if y.sum() * 2 != len(y):
            raise ValueError(f"pairs need equal counts, got {int(y.sum())} and {int((~y).sum())}; or give groups")
        differences = x[y] - x[~y]
    else:
        index, num_groups = group_index(groups, len(x))
        both = [g for g in range(num_groups) if y[index == g].any() and not y[index == g].all()]
        if not both:
            raise ValueError("no group has rows of both classes, so there are no pairs")
        differences = np.stack([x[(index == g) & y].mean(0) - x[(index == g) & ~y].mean(0) for g in both])
    axis = PCA(n_components=1, svd_solver="full").fit(np.concatenate([differences, -differences])).components_[0]
    mean = differences.mean(axis=0)
    return _probe("pca_of_differences", axis * (np.sign(axis @ mean) or 1.0), x, y)


METHODS: dict[str, Callable[..., Probe]] = {
    "difference_of_means": difference_of_means,
    "lda": lda,
    "logistic": logistic,
    "pca_of_differences": pca_of_differences,
}


def fit(method: str, x: Any, y: Any, groups: Sequence[Hashable] | None = None, **options: Any) -> Probe:
    """Fit one of `METHODS` by name; ValueError naming them for another."""
    if method not in METHODS:
        raise ValueError(f"no probe {method!r}; there are: {', '.join(METHODS)}")
    return METHODS[method](x, y, groups, **options)


def project(x: Any, direction: Any) -> np.ndarray:
    """Projection of rows [N, D] (or one [D]) on the unit vector along `direction` [D], in the rows' units: [N]."""
    direction = as_float64(direction)
    norm = np.linalg.norm(direction)
    if not (np.isfinite(norm) and norm > 0):
        raise ValueError("cannot project on a zero or non-finite direction")
    return as_float64(x) @ (direction / norm)


def cosine_map(directions: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    """Names and cosines [n, n] of named directions [D]."""
    names = list(directions)
    rows = np.stack([as_float64(directions[name]) for name in names])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return names, rows @ rows.T


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a direction separates rows of groups that nothing about it has seen."""

    method: str
    auroc: Interval
    """Over pairs of test rows of one fold, so that folds' scales never mix."""
    accuracy: float
    """Share of test rows on the right side of the threshold found on the training rows."""
    recall_at_1_fpr: float
    shuffled: dict[str, float] | None
    """AUROC of the whole procedure on permuted labels: mean, low, high, p_value, draws."""
    random: dict[str, float] | None
    """AUROC of random directions on the same test rows: mean, low, high, draws."""
    orthogonal: dict[str, float] | None
    """AUROC of random directions orthogonal to the one fitted on all rows, likewise."""
    num_pos: int
    num_neg: int
    num_groups: int
    folds: int
    layers: tuple[Hashable, ...] = ()
    """With several layers: the one chosen in each fold, on its training groups only."""
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)
    """Out-of-fold scores of all rows, in units of each fold's training spread."""

    def summary(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "method": self.method,
            "auroc": self.auroc.summary(),
            "accuracy": self.accuracy,
            "recall_at_1_fpr": self.recall_at_1_fpr,
            "shuffled": self.shuffled,
            "random": self.random,
            "orthogonal": self.orthogonal,
            "num_pos": self.num_pos,
            "num_neg": self.num_neg,
            "num_groups": self.num_groups,
            "folds": self.folds,
            "layers": list(self.layers),
        }


def split_by_group(y: Any, groups: Sequence[Hashable] | None, folds: int = 5, seed: int = 0) -> np.ndarray:
    """Fold of each row, [N]: whole groups together, classes balanced as far as groups allow. At most one per group."""
    from sklearn.model_selection import StratifiedGroupKFold

    y = np.asarray(y, dtype=bool)
    index, num_groups = group_index(groups, len(y))
    folds = min(folds, num_groups)
    if folds < 2:
        raise ValueError(f"a held-out split needs at least 2 groups, got {num_groups}")
    fold_of = np.zeros(len(y), dtype=np.int64)
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    for fold, (_, test) in enumerate(splitter.split(np.zeros((len(y), 1)), y, index)):
        fold_of[test] = fold
    return fold_of


def permute_labels(y: Any, groups: Sequence[Hashable] | None, rng: np.random.Generator) -> np.ndarray:
    """Labels shuffled as groups allow: within groups that have both classes; whole groups among those with one."""
    y = np.asarray(y, dtype=bool)
    index, num_groups = group_index(groups, len(y))
    shuffled, single = y.copy(), []
    for group in range(num_groups):
        rows = np.flatnonzero(index == group)
        if y[rows].any() and not y[rows].all():
            shuffled[rows] = rng.permutation(y[rows])
        else:
            single.append(rows)
    for rows, label in zip(single, rng.permutation([y[rows[0]] for rows in single]), strict=True):
        shuffled[rows] = label
    return shuffled


def _held_out(layers: dict, y, index, fold_of, method, options, seed) -> tuple[np.ndarray, np.ndarray, list]:
    """Out-of-fold scores, right-side flags, and the layer each fold chose. NaN where a fold has no training class."""
    scores, right, chosen = np.full(len(y), np.nan), np.zeros(len(y), dtype=bool), []
    for fold in np.unique(fold_of):
        test = fold_of == fold
        train = ~test
        if y[train].all() or not y[train].any():
            continue
        layer = next(iter(layers)) if len(layers) == 1 else _choose(layers, y, index, train, method, options, seed)
        chosen.append(layer)
        try:
            probe = fit(method, layers[layer][train], y[train], list(index[train]), **_of_rows(options, train))
        except NoDirection:  # copies on both sides, as shuffled labels can have them: every test row scores the same
            scores[test] = 0.0
            continue
        spread = probe.score(layers[layer][train]).std() or 1.0
        scores[test] = probe.score(layers[layer][test]) / spread
        right[test] = (scores[test] > 0) == y[test]
    return scores, right, chosen


def _choose(layers: dict, y, index, train, method, options, seed) -> Hashable:
    """The layer with the best held-out AUROC among the training groups alone."""
    inner = split_by_group(y[train], list(index[train]), folds=3, seed=seed)
    values = {}
    for layer, rows in layers.items():
        own = _of_rows(options, train)
        scores, _, _ = _held_out({layer: rows[train]}, y[train], index[train], inner, method, own, seed)
        values[layer] = _within_folds(scores, y[train], inner)(np.ones(int(train.sum())))
    return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))


def _of_rows(options: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Options of a fit with the weights of some rows."""
    weights = {"weights": options["weights"][rows]} if options.get("weights") is not None else {}
    return {**options, **weights}


def _within_folds(scores: np.ndarray, y: np.ndarray, fold_of: np.ndarray) -> Callable[[np.ndarray], float]:
    """AUROC over pairs of rows of one fold, as a function of row weights."""
    parts = []
    for fold in np.unique(fold_of):
        rows = np.flatnonzero((fold_of == fold) & np.isfinite(scores))
        if len(rows):
            parts.append((rows, RankedScores(scores[rows], y[rows])))

    def value(weights: np.ndarray) -> float:
        won, pairs = np.sum([ranked.pairs(weights[rows]) for rows, ranked in parts], axis=0) if parts else (0, 0)
        return float(won / pairs) if pairs else float("nan")

    return value


def _spread(values: list[float]) -> dict[str, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high), "draws": len(values)}


def evaluate(
    x: Any | Mapping[Hashable, Any],
    y: Any,
    groups: Sequence[Hashable] | None = None,
    *,
    method: str = "difference_of_means",
    folds: int = 5,
    draws: int = 1000,
    permutations: int = 20,
    random_directions: int = 20,
    orthogonal_directions: int = 0,
    seed: int = 0,
    **options: Any,
) -> Evaluation:
    """Cross-validated separation of two classes, every test score from a probe that never saw the test row's group.

    `x`: rows [N, D], or {layer: [N, D]} to choose the layer too (inside each fold's training groups). AUROC counts only
    pairs of test rows of the same fold: pooling folds biases noise below 0.5. The interval resamples groups.
    ValueError with fewer than two groups or one class.
    """
    layers = {layer: _check(rows, y)[0] for layer, rows in (x if isinstance(x, Mapping) else {None: x}).items()}
    y = np.asarray(y, dtype=bool)
    index, num_groups = group_index(groups, len(y))
    fold_of = split_by_group(y, list(index), folds, seed)
    scores, right, chosen = _held_out(layers, y, index, fold_of, method, options, seed)
    tested = np.isfinite(scores)
    interval = bootstrap(_within_folds(scores, y, fold_of), list(index), len(y), draws=draws, seed=seed)

    rng = np.random.default_rng([seed, 1])
    shuffled, ones = [], np.ones(len(y))
    for _ in range(permutations):
        labels = permute_labels(y, list(index), rng)
        value = _within_folds(_held_out(layers, labels, index, fold_of, method, options, seed)[0], labels, fold_of)(
            ones
        )
        if np.isfinite(value):
            shuffled.append(value)
    widest = next(iter(layers.values()))
    randoms = [auroc(project(widest, rng.standard_normal(widest.shape[1])), y) for _ in range(random_directions)]
    orthogonal = []
    if orthogonal_directions:
        found = fit(method, widest, y, list(index), **options).direction
        drawn = rng.standard_normal((orthogonal_directions, widest.shape[1]))
        orthogonal = [auroc(project(widest, draw - (draw @ found) * found), y) for draw in drawn]
    return Evaluation(
        method=method,
        auroc=interval,
        accuracy=float(right[tested].mean()) if tested.any() else float("nan"),
        recall_at_1_fpr=recall_at_fpr(scores[tested], y[tested]),
        shuffled=_permutation_summary(shuffled, interval.value) if shuffled else None,
        random=_spread(randoms) if randoms else None,
        orthogonal=_spread(orthogonal) if orthogonal else None,
        num_pos=int(y.sum()),
        num_neg=int((~y).sum()),
        num_groups=num_groups,
        folds=len(np.unique(fold_of)),
        layers=tuple(chosen) if len(layers) > 1 else (),
        scores=scores,
    )


def transfer(
    x: Any,
    y: Any,
    groups: Sequence[Hashable] | None,
    domains: Sequence[Hashable],
    *,
    method: str = "difference_of_means",
    folds: int = 5,
    draws: int = 1000,
    seed: int = 0,
    **options: Any,
) -> dict[tuple[Hashable, Hashable], Interval]:
    """AUROC of probes fitted in one domain and tested in another, always on groups the fit has not seen.

    `domains`: one per row of `x` [N, D]. Returns {(fitted on, tested on): interval}; pairs without both classes in the
    training rows, or without test pairs, are left out.
    """
    x, y = _check(x, y)
    index, _ = group_index(groups, len(y))
    names = list(dict.fromkeys(domains))
    domain = np.array([names.index(d) for d in domains])
    fold_of = split_by_group(y, list(index), folds, seed)
    found = {}
    for a, fitted in enumerate(names):
        scores = {b: np.full(len(y), np.nan) for b in range(len(names))}
        for fold in np.unique(fold_of):
            train = (fold_of != fold) & (domain == a)
            if y[train].any() and not y[train].all():
                probe = fit(method, x[train], y[train], list(index[train]), **options)
                for b in scores:
                    test = (fold_of == fold) & (domain == b)
                    scores[b][test] = probe.score(x[test])
        for b, tested in enumerate(names):
            value = _within_folds(scores[b], y, fold_of)
            if np.isfinite(value(np.ones(len(y)))):
                found[fitted, tested] = bootstrap(value, list(index), len(y), draws=draws, seed=seed)
    return found


def _permutation_summary(shuffled: list[float], value: float) -> dict[str, float]:
    p_value = (1 + sum(s >= value for s in shuffled)) / (1 + len(shuffled))
    return {**_spread(shuffled), "p_value": float(p_value)}
