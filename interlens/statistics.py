"""Statistics of rows: moments that merge, a norm filter that reports, bootstrap intervals, AUROC.

The moments themselves are in `moments`; everything is numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .moments import CHUNK_VALUES, GroupedMoments, Moments, as_float64

__all__ = [
    "CHUNK_VALUES", "GroupedMoments", "Groups", "Interval", "Moments", "NormFilter", "RankedScores", "as_float64", "auroc",
    "bootstrap", "bootstrap_weights", "group_index", "mean_interval", "norm_filter", "recall_at_fpr",
]  # fmt: skip

Groups = Sequence[Hashable] | np.ndarray | None
"""The group of each row, [N]; None: every row is its own."""


def as_labels(labels: Any) -> np.ndarray:
    """Labels as bool [N], from booleans or the numbers 0 and 1. ValueError for others, which would all count as True."""
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    values = np.asarray(labels)
    if values.dtype == bool:
        return values
    numbers = values.dtype.kind in "iuf" or not values.size
    if not numbers and values.dtype == object:
        numbers = all(isinstance(value, (bool, int, float, np.bool_, np.number)) for value in values.ravel())
    if not numbers or not np.isin(values.astype(float), (0, 1)).all():
        raise ValueError(f"labels must be True or False (or 1 and 0) for each row, got {str(labels)[:80]}")
    return values.astype(bool)


def as_hashable(values: Sequence[Hashable] | np.ndarray) -> Sequence[Hashable]:
    """Plain values of an array or tensor, whose elements (torch's) would each be a value of their own."""
    tolist = getattr(values, "tolist", None)
    return tolist() if callable(tolist) else list(values)


@dataclass(frozen=True, kw_only=True)
class NormFilter:
    """Which rows a norm filter keeps, and what it removed: put this next to every result that used it."""

    keep: np.ndarray
    """bool [N]."""
    max_norm: float
    """Rows with a larger norm, or a non-finite one, were removed."""
    median_norm: float
    removed: int
    total: int

    def summary(self) -> dict[str, float | int]:
        """Counts and norms as plain values."""
        return {
            "removed": self.removed,
            "total": self.total,
            "max_norm": self.max_norm,
            "median_norm": self.median_norm,
        }


def norm_filter(values: Any, max_norm: float | None = None, times_median: float = 4.0) -> NormFilter:
    """Find attention sinks among `values` [N, D]: rows whose norm is above `max_norm`, or `times_median` × the median.

    Two per cent of sink tokens (norms 50 times the others') are enough to ruin a difference-of-means direction.
    """
    norms = np.linalg.norm(as_float64(values), axis=1)
    finite = np.isfinite(norms)
    median = float(np.median(norms[finite])) if finite.any() else float("nan")
    limit = times_median * median if max_norm is None else float(max_norm)
    keep = finite & (np.where(finite, norms, np.inf) <= limit)
    return NormFilter(
        keep=keep, max_norm=limit, median_norm=median, removed=int(len(keep) - keep.sum()), total=len(keep)
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with a bootstrap percentile interval."""

    value: float
    low: float
    high: float
    level: float = 0.95
    groups: int = 0
    """Independent units that were resampled. Below about 10, percentile intervals are too narrow."""

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return self.low <= value <= self.high

    def summary(self) -> dict[str, float | int]:
        """Plain values."""
        return {"value": self.value, "low": self.low, "high": self.high, "level": self.level, "groups": self.groups}


def group_index(groups: Groups, length: int) -> tuple[np.ndarray, int]:
    """Groups as whole numbers 0..G-1 in order of appearance, [N], and G. None: every row is its own group."""
    if groups is None:
        return np.arange(length), length
    groups = as_hashable(groups)
    if len(groups) != length:
        raise ValueError(f"{len(groups)} groups given for {length} rows")
    seen: dict[Hashable, int] = {}
    index = np.array([seen.setdefault(group, len(seen)) for group in groups], dtype=np.int64)
    return index, len(seen)


def bootstrap_weights(num_groups: int, draws: int, seed: int = 0) -> np.ndarray:
    """How often each group occurs in each resample: [draws, num_groups], rows sum to `num_groups`."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=draws).astype(np.float64)


def bootstrap(
    statistic: Callable[[np.ndarray], float],
    groups: Groups,
    length: int,
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Cluster bootstrap: whole groups are drawn with replacement, since rows of one group are not independent.

    `statistic(weights [N])` computes the value with each row counted `weights` times; it may return NaN for a resample
    in which it does not exist (one class missing), and that resample is left out.
    """
    if draws < 1 or not 0 < level < 1:
        raise ValueError(f"draws must be at least 1 and level lie in (0, 1), got draws={draws!r}, level={level!r}")
    index, num_groups = group_index(groups, length)
    value = float(statistic(np.ones(length)))
    drawn = np.array([statistic(row[index]) for row in bootstrap_weights(num_groups, draws, seed)])
    drawn = drawn[np.isfinite(drawn)]
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return Interval(value=value, low=float(low), high=float(high), level=level, groups=num_groups)


def mean_interval(values: Any, groups: Groups = None, **options: Any) -> Interval:
    """Mean of `values` [N] with a cluster-bootstrap interval over `groups` (see `bootstrap`)."""
    values = as_float64(values)

    def weighted_mean(weights: np.ndarray) -> float:
        return float(weights @ values / weights.sum()) if weights.sum() else float("nan")

    return bootstrap(weighted_mean, groups, len(values), **options)


class RankedScores:
    """Scores sorted once, so that AUROC under any row weights costs O(N): what a bootstrap needs."""

    def __init__(self, scores: Any, labels: Any):
        scores, self.labels = as_float64(scores), as_labels(labels)
        if scores.shape != self.labels.shape:
            raise ValueError(f"{scores.shape} scores given for {self.labels.shape} labels")
        _refuse_nan(scores)
        self._order = np.argsort(scores, kind="stable")
        ranked = scores[self._order]
        self._bin = np.concatenate([[0], np.cumsum(ranked[1:] != ranked[:-1])]).astype(np.int64)

    def pairs(self, weights: np.ndarray | None = None) -> tuple[float, float]:
        """(pairs won, pairs) of positives against negatives, ties counting one half."""
        weights = np.ones(len(self.labels)) if weights is None else weights
        positive = np.where(self.labels, weights, 0.0)
        wins = np.bincount(self._bin, positive[self._order])
        losses = np.bincount(self._bin, (weights - positive)[self._order])
        below = np.cumsum(losses) - losses
        return float(wins @ (below + 0.5 * losses)), float(wins.sum() * losses.sum())


def _refuse_nan(scores: np.ndarray) -> None:
    missing = int(np.isnan(scores).sum())
    if missing:
        raise ValueError(f"{missing} of {scores.size} scores are NaN, which no order has a place for; drop them first")


def auroc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties one half. NaN if one class."""
    won, pairs = RankedScores(scores, labels).pairs()
    return won / pairs if pairs else float("nan")


def recall_at_fpr(scores: Any, labels: Any, fpr: float = 0.01) -> float:
    """Recall at the lowest threshold at which at most `fpr` of the negatives score at or above it.

    With fewer than 1/fpr negatives this is the share of positives above every negative.
    """
    scores, labels = as_float64(scores), as_labels(labels)
    if scores.shape != labels.shape:
        raise ValueError(f"{scores.shape} scores given for {labels.shape} labels")
    _refuse_nan(scores)
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must lie in [0, 1], got {fpr!r}")
    negatives = np.sort(scores[~labels])[::-1]
    if not labels.any() or not len(negatives):
        return float("nan")
    allowed = int(np.floor(fpr * len(negatives) + 1e-9))
    limit = negatives[allowed] if allowed < len(negatives) else -np.inf
    return float((scores[labels] > limit).mean())
