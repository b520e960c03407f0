"""Directions and linear probes fitted between two classes of rows.

Rows are [N, D], labels bool [N], groups any hashable per row (the item a row came from). Estimators are scikit-learn's
where it has them. How well a probe does on rows it has not seen is for `probes.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .statistics import Groups, as_float64, as_labels, group_index


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


def check_rows(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows as float64 [N, D] and labels as bool [N]; ValueError for one class, other shapes, NaN or infinity."""
    x, y = as_float64(x), as_labels(y)
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


def difference_of_means(x: Any, y: Any, groups: Groups = None, weights: Any = None) -> Probe:
    """Mean of the positive rows minus mean of the negative ones ("mass mean", Marks and Tegmark 2023).

    `weights` [N]: how much each row counts in its mean, such as the tokens that are in it.
    """
    x, y = check_rows(x, y)
    times = np.ones(len(y)) if weights is None else as_float64(weights)
    if times.shape != y.shape or not (np.isfinite(times) & (times >= 0)).all():
        raise ValueError(f"weights must be {len(y)} finite numbers of at least 0, one per row, got {weights!r}")
    if not (times[y].sum() > 0 and times[~y].sum() > 0):
        raise ValueError("weights leave a class without any row; each needs one with a weight above 0")
    means = [np.average(x[side], axis=0, weights=times[side]) for side in (y, ~y)]
    return _probe("difference_of_means", means[0] - means[1], x, y)


def lda(x: Any, y: Any, groups: Groups = None, shrinkage: str | float = "auto") -> Probe:
    """Whitened mass mean: inverse within-class covariance (Ledoit-Wolf shrinkage) times the difference of means."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = check_rows(x, y)
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


def logistic(x: Any, y: Any, groups: Groups = None, C: float = 0.1) -> Probe:
    """Logistic regression on standardised columns with balanced classes; the direction is in the rows' own units."""
    from sklearn.linear_model import LogisticRegression

    x, y = check_rows(x, y)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    fitted = LogisticRegression(C=C, max_iter=1000, class_weight="balanced").fit((x - mean) / scale, y)
    raw = fitted.coef_[0] / scale
    offset = float(raw @ mean - fitted.intercept_[0])
    return _probe("logistic", raw, x, y, offset / max(float(np.linalg.norm(raw)), 1e-300))


def pca_of_differences(x: Any, y: Any, groups: Groups = None) -> Probe:
    """First principal axis of paired differences (Zou et al. 2023), oriented from negative to positive.

    A pair is the mean of a group's positive rows and the mean of its negative rows. Without groups, the i-th positive
    row is paired with the i-th negative one. Differences enter with both signs, so the axis is about zero.
    """
    from sklearn.decomposition import PCA

    x, y = check_rows(x, y)
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


def fit(method: str, x: Any, y: Any, groups: Groups = None, **options: Any) -> Probe:
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
    norms = np.linalg.norm(rows, axis=1)
    if bad := [name for name, norm in zip(names, norms, strict=True) if not (np.isfinite(norm) and norm > 0)]:
        raise ValueError(f"the directions {bad} are zero or not finite, and have no cosine with any other")
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return names, rows @ rows.T
