"""Directions and linear probes in memory, and their honest evaluation.

Rows are [N, D], labels bool [N], groups any hashable per row (the item a row came from). Siblings share a prefix, so
rows of one group never stand on both sides of a split. How probes are fitted is in `fitting`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .fitting import (
    METHODS,
    NoDirection,
    Probe,
    check_rows,
    cosine_map,
    difference_of_means,
    fit,
    lda,
    logistic,
    pca_of_differences,
    project,
)
from .given import whole
from .statistics import (
    Groups,
    Interval,
    RankedScores,
    as_float64,
    as_hashable,
    as_labels,
    auroc,
    bootstrap,
    group_index,
    recall_at_fpr,
)

__all__ = [
    "METHODS", "Evaluation", "NoDirection", "Probe", "cosine_map", "difference_of_means", "evaluate", "fit", "lda",
    "logistic", "pca_of_differences", "permute_labels", "project", "split_by_group", "transfer",
]  # fmt: skip


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


def split_by_group(y: Any, groups: Groups, folds: int = 5, seed: int = 0) -> np.ndarray:
    """Fold of each row, [N]: whole groups together, classes balanced as far as groups allow. At most one per group."""
    from sklearn.model_selection import StratifiedGroupKFold

    y = as_labels(y)
    index, num_groups = group_index(groups, len(y))
    folds = min(whole(folds, "folds"), num_groups)
    if folds < 2:
        raise ValueError(f"a held-out split needs at least 2 groups, got {num_groups}")
    fold_of = np.zeros(len(y), dtype=np.int64)
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    for fold, (_, test) in enumerate(splitter.split(np.zeros((len(y), 1)), y, index)):
        fold_of[test] = fold
    return fold_of


def permute_labels(y: Any, groups: Groups, rng: np.random.Generator) -> np.ndarray:
    """Labels shuffled as groups allow: within groups that have both classes; whole groups among those with one."""
    y = as_labels(y)
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


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """One cross-validated fit: rows of each layer, labels, group and fold of each row, and how to fit."""

    layers: Mapping[Hashable, np.ndarray]
    y: np.ndarray
    index: np.ndarray
    fold_of: np.ndarray
    method: str
    options: Mapping[str, Any]
    seed: int

    def held_out(self) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
        """Out-of-fold scores, right-side flags, and the layer each fold chose. NaN where a fold has no training class."""
        y, chosen = self.y, []
        scores, right = np.full(len(y), np.nan), np.zeros(len(y), dtype=bool)
        for fold in np.unique(self.fold_of):
            test = self.fold_of == fold
            train = ~test
            if y[train].all() or not y[train].any():
                continue
            layer = next(iter(self.layers)) if len(self.layers) == 1 else self._best_layer(train)
            chosen.append(layer)
            rows = self.layers[layer]
            try:
                probe = fit(self.method, rows[train], y[train], self.index[train], **_of_rows(self.options, train))
            except (
                NoDirection
            ):  # copies on both sides, as shuffled labels can have them: every test row scores the same
                scores[test] = 0.0
                continue
            spread = probe.score(rows[train]).std() or 1.0
            scores[test] = probe.score(rows[test]) / spread
            right[test] = (scores[test] > 0) == y[test]
        return scores, right, chosen

    def _best_layer(self, train: np.ndarray) -> Hashable:
        """The layer with the best held-out AUROC among the training groups alone."""
        y, index, options = self.y[train], self.index[train], _of_rows(self.options, train)
        inner = split_by_group(y, index, folds=3, seed=self.seed)
        values = {
            layer: replace(self, layers={layer: rows[train]}, y=y, index=index, fold_of=inner, options=options).auroc()
            for layer, rows in self.layers.items()
        }
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def auroc(self) -> float:
        """Held-out AUROC, over pairs of rows of one fold."""
        return _within_folds(self.held_out()[0], self.y, self.fold_of)(np.ones(len(self.y)))

    def shuffled(self, permutations: int, rng: np.random.Generator) -> list[float]:
        """AUROC of the whole procedure on permuted labels, where it exists."""
        values = (replace(self, y=permute_labels(self.y, self.index, rng)).auroc() for _ in range(permutations))
        return [value for value in values if np.isfinite(value)]

    def random(self, directions: int, rng: np.random.Generator) -> list[float]:
        """AUROC of random directions on all rows of the first layer."""
        rows = next(iter(self.layers.values()))
        return [auroc(project(rows, rng.standard_normal(rows.shape[1])), self.y) for _ in range(directions)]

    def orthogonal(self, directions: int, rng: np.random.Generator) -> list[float]:
        """AUROC of random directions orthogonal to the one fitted on all rows of the first layer."""
        if not directions:
            return []
        rows = next(iter(self.layers.values()))
        found = fit(self.method, rows, self.y, self.index, **self.options).direction
        drawn = rng.standard_normal((directions, rows.shape[1]))
        return [auroc(project(rows, draw - (draw @ found) * found), self.y) for draw in drawn]


def _of_rows(options: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Options of a fit with the weights of some rows."""
    weights = {"weights": as_float64(options["weights"])[rows]} if options.get("weights") is not None else {}
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
    groups: Groups = None,
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
    layers = {layer: check_rows(rows, y)[0] for layer, rows in (x if isinstance(x, Mapping) else {None: x}).items()}
    y = as_labels(y)
    index, num_groups = group_index(groups, len(y))
    fold_of = split_by_group(y, index, folds, seed)
    trial = _Trial(layers=layers, y=y, index=index, fold_of=fold_of, method=method, options=options, seed=seed)
    scores, right, chosen = trial.held_out()
    tested = np.isfinite(scores)
    interval = bootstrap(_within_folds(scores, y, fold_of), index, len(y), draws=draws, seed=seed)
    rng = np.random.default_rng([seed, 1])
    shuffled = trial.shuffled(permutations, rng)
    random, orthogonal = trial.random(random_directions, rng), trial.orthogonal(orthogonal_directions, rng)
    return Evaluation(
        method=method, auroc=interval, recall_at_1_fpr=recall_at_fpr(scores[tested], y[tested]),
        accuracy=float(right[tested].mean()) if tested.any() else float("nan"),
        shuffled=_permutation_summary(shuffled, interval.value) if shuffled else None,
        random=_spread(random) if random else None, orthogonal=_spread(orthogonal) if orthogonal else None,
        num_pos=int(y.sum()), num_neg=int((~y).sum()), num_groups=num_groups, folds=len(np.unique(fold_of)),
        layers=tuple(chosen) if len(layers) > 1 else (), scores=scores,
    )  # fmt: skip


def transfer(
    x: Any,
    y: Any,
    groups: Groups,
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
    x, y = check_rows(x, y)
    index, _ = group_index(groups, len(y))
    domains = as_hashable(domains)
    if len(domains) != len(y):
        raise ValueError(f"{len(domains)} domains given for {len(y)} rows; give one per row")
    names = list(dict.fromkeys(domains))
    domain = np.array([names.index(d) for d in domains])
    fold_of = split_by_group(y, index, folds, seed)
    found = {}
    for a, fitted in enumerate(names):
        scores = {b: np.full(len(y), np.nan) for b in range(len(names))}
        for fold in np.unique(fold_of):
            train = (fold_of != fold) & (domain == a)
            if y[train].any() and not y[train].all():
                probe = fit(method, x[train], y[train], index[train], **_of_rows(options, train))
                for b in scores:
                    test = (fold_of == fold) & (domain == b)
                    scores[b][test] = probe.score(x[test])
        for b, tested in enumerate(names):
            value = _within_folds(scores[b], y, fold_of)
            if np.isfinite(value(np.ones(len(y)))):
                found[fitted, tested] = bootstrap(value, index, len(y), draws=draws, seed=seed)
    return found


def _permutation_summary(shuffled: list[float], value: float) -> dict[str, float]:
    p_value = (1 + sum(s >= value for s in shuffled)) / (1 + len(shuffled))
    return {**_spread(shuffled), "p_value": float(p_value)}
