"""Count, mean and variance of rows in one float64 pass, mergeable in any order.

numpy only; torch tensors of any dtype are accepted and converted chunk by chunk. Nothing here accumulates in less than
float64: a bf16 running mean of 200 000 values around 3.0 comes out as 0.01.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

CHUNK_VALUES = 1 << 18
"""Values converted to float64 at a time: two megabytes, so that a chunk stays in cache between its passes."""


CHUNKS = 16
"""Chunks whose plain sums are taken together before they enter the pairwise update."""


CANCELLED = 64.0
"""A sum of squares about zero is redone about the mean where it is more than this many times larger."""


def as_float64(values: Any) -> np.ndarray:
    """A float64 numpy copy or view of a numpy array, a nested list, or a torch tensor of any dtype and device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


class _Scratch(threading.local):
    """Memory that is written again and again: fresh pages for every chunk would cost more than the arithmetic."""

    def __init__(self):
        self.values = np.empty(0)

    def shaped(self, shape: tuple[int, ...]) -> np.ndarray:
        """Unset float64 rows [N, D], good until the next call."""
        size = shape[0] * shape[1]
        if self.values.size < size:
            self.values = np.empty(size)
        return self.values[:size].reshape(shape)

    def float64(self, values: Any) -> np.ndarray:
        """A float64 copy of rows [N, D], good until the next call."""
        copy = self.shaped(tuple(values.shape))
        if hasattr(values, "detach"):
            import torch

            if values.is_cpu and values.dtype in (torch.float32, torch.float64):
                np.copyto(copy, values.detach().numpy())  # a little faster
            else:
                torch.from_numpy(copy).copy_(values.detach())
        else:
            np.copyto(copy, values)
        return copy


_scratch = _Scratch()


class Moments:
    """Count, mean and variance (or covariance) of rows of width D, in one pass, mergeable in any order.

    Rows with a NaN or an infinity are left out and counted in `non_finite`. Merging uses the pairwise update of Chan,
    Golub and LeVeque (1983), so that the sum of squares is always about a mean, never about zero.
    """

    def __init__(self, width: int, covariance: bool = False):
        self.width = width
        self.count = 0
        self.non_finite = 0
        """Rows left out because they held a NaN or an infinity."""
        self.mean = np.zeros(width)
        self.m2 = np.zeros((width, width) if covariance else width)
        """Sum of squared deviations from the mean, `[D]`; with covariance the scatter matrix, `[D, D]`."""

    @classmethod
    def of(cls, values: Any, covariance: bool = False) -> Moments:
        """Moments of `values`, [N, D] (or [D]: one row)."""
        return cls(values.shape[-1], covariance).update(values)

    @property
    def has_covariance(self) -> bool:
        """Whether `m2` is the scatter matrix."""
        return self.m2.ndim == 2

    def update(self, values: Any, weights: Any = None) -> Moments:
        """Add rows, [N, D] or [D]; `weights` [N]: how many times each counts. ValueError for another width.

        Returns itself.
        """
        values = values if hasattr(values, "shape") else np.asarray(values, dtype=np.float64)
        values = values[None] if len(values.shape) == 1 else values
        if len(values.shape) != 2 or values.shape[1] != self.width:
            raise ValueError(f"rows of shape {tuple(values.shape)} given; these moments take [N, {self.width}]")
        times = None if weights is None else as_float64(weights)
        if times is not None and times.shape != (len(values),):
            raise ValueError(f"weights of shape {times.shape} for {len(values)} rows")
        if times is not None and not ((times >= 0) & (times == np.floor(times))).all():
            raise ValueError("weights say how many times a row counts: whole numbers of at least 0")
        step = max(CHUNK_VALUES // max(self.width, 1), 1)
        if self.has_covariance:
            step = max(step, 1024)
        for start in range(0, values.shape[0], step):
            part = slice(start, start + step)
            self._add_chunk(_scratch.float64(values[part]), None if times is None else times[part])
        return self

    def _add_chunk(self, chunk: np.ndarray, times: np.ndarray | None) -> None:
        weights = np.ones(len(chunk)) if times is None else times
        with np.errstate(invalid="ignore"):
            total = weights @ chunk
        if not np.isfinite(total).all():
            finite = np.isfinite(chunk).all(axis=1)
            self.non_finite += int(len(chunk) - finite.sum())
            chunk, weights = chunk[finite], weights[finite]
            total = weights @ chunk
        count = int(weights.sum())
        if count == 0:
            return
        mean = total / count
        if self.has_covariance:
            centred = chunk - mean
            self._combine(count, mean, (centred * weights[:, None]).T @ centred)
            return
        squares = np.einsum("nd,nd->d", chunk, chunk) if times is None else weights @ (chunk * chunk)
        about_zero = total * mean
        m2 = squares - about_zero
        lost = np.flatnonzero(about_zero > CANCELLED * m2)
        if len(lost):
            centred = chunk[:, lost] - mean[lost]
            m2[lost] = weights @ (centred * centred)
        self._combine(count, mean, m2)

    def _combine(self, count: int, mean: np.ndarray, m2: np.ndarray) -> None:
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        weight = self.count * count / total
        self.m2 = self.m2 + m2 + weight * (np.outer(delta, delta) if self.has_covariance else delta * delta)
        self.mean = self.mean + delta * (count / total)
        self.count = total

    def merge(self, other: Moments) -> Moments:
        """Moments of both together, a new object. ValueError if widths or kinds differ."""
        if self.m2.shape != other.m2.shape:
            raise ValueError(f"moments of shapes {self.m2.shape} and {other.m2.shape} do not merge")
        merged = self.copy()
        merged._combine(other.count, other.mean, other.m2)
        merged.non_finite += other.non_finite
        return merged

    def copy(self) -> Moments:
        """A copy to go on with; this one stays as it is."""
        copied = Moments(self.width, self.has_covariance)
        copied.count, copied.non_finite = self.count, self.non_finite
        copied.mean, copied.m2 = self.mean, self.m2  # replaced when rows are added, never changed
        return copied

    def variance(self, ddof: int = 1) -> np.ndarray:
        """Variance per column, [D]; NaN with `ddof` rows or fewer."""
        squares = np.diagonal(self.m2) if self.has_covariance else self.m2
        return squares / (self.count - ddof) if self.count > ddof else np.full(self.width, np.nan)

    def covariance(self, ddof: int = 1) -> np.ndarray:
        """Covariance, [D, D]. ValueError if these moments were built without it."""
        if not self.has_covariance:
            raise ValueError("these moments hold no covariance; build them with covariance=True")
        return self.m2 / (self.count - ddof) if self.count > ddof else np.full(self.m2.shape, np.nan)

    def state(self) -> dict[str, np.ndarray]:
        """The state as float64 arrays of at least one dimension: count, non_finite, mean, m2."""
        return {
            "count": np.array([float(self.count)]),
            "non_finite": np.array([float(self.non_finite)]),
            "mean": self.mean.copy(),
            "m2": self.m2.copy(),
        }

    @classmethod
    def from_state(cls, state: dict[str, np.ndarray]) -> Moments:
        """The inverse of `state`."""
        moments = cls(len(state["mean"]), covariance=np.ndim(state["m2"]) == 2)
        moments.count, moments.non_finite = int(state["count"][0]), int(state["non_finite"][0])
        moments.mean, moments.m2 = as_float64(state["mean"]), as_float64(state["m2"])
        return moments


class GroupedMoments:
    """Moments of several groups of rows in one pass over rows that lie together: no group's rows are copied out."""

    def __init__(self, width: int, groups: int):
        self.count = np.zeros(groups, dtype=np.int64)
        self.non_finite = np.zeros(groups, dtype=np.int64)
        self.mean, self.m2 = np.zeros((groups, width)), np.zeros((groups, width))

    def __getitem__(self, group: int) -> Moments:
        found = Moments(self.mean.shape[1])
        found.count, found.non_finite = int(self.count[group]), int(self.non_finite[group])
        found.mean, found.m2 = self.mean[group].copy(), self.m2[group].copy()
        return found

    def update(self, values: Any, groups: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add row i of `values` [N, D] to group `groups[i]` (-1: to none), `weights[i]` times."""
        step = max(CHUNK_VALUES // max(values.shape[1], 1), 1)
        for start in range(0, values.shape[0], CHUNKS * step):
            part = slice(start, start + CHUNKS * step)
            of = np.array(groups[part])
            self._add(values[part], of, np.ones(len(of)) if weights is None else weights[part], step)

    def _add(self, values: Any, of: np.ndarray, weights: np.ndarray, step: int) -> None:
        """Sums and sums of squares of some chunks, then one pairwise update. `of` is changed: -1 for what is left out."""
        totals, squares = np.zeros_like(self.mean), np.zeros_like(self.m2)
        counted = np.where(of == np.arange(len(totals))[:, None], weights, 0.0)
        all_wanted = bool((of >= 0).all())
        with np.errstate(invalid="ignore"):
            for start in range(0, len(of), step):
                part = slice(start, start + step)
                rows, times = values[part], counted[:, part]
                wanted = np.flatnonzero(of[part] >= 0) if not all_wanted else None
                if wanted is not None and 2 * len(wanted) < len(rows):
                    rows, times = rows[wanted], times[:, wanted]
                else:
                    wanted = None
                chunk = _scratch.float64(rows)
                found = times @ chunk
                if not np.isfinite(found).all():  # also where a row of no group is not finite
                    bad = np.flatnonzero(~np.isfinite(chunk).all(axis=1))
                    at = start + (bad if wanted is None else wanted[bad])
                    self.non_finite += np.bincount(of[at][of[at] >= 0], minlength=len(totals))
                    of[at] = -1
                    chunk[bad], times[:, bad] = 0, 0
                    found = times @ chunk
                totals += found
                squares += times @ np.square(chunk, out=chunk)
        self._combine(values, of, weights, totals, squares, step)

    def _combine(
        self, values: Any, of: np.ndarray, weights: np.ndarray, totals: np.ndarray, squares: np.ndarray, step: int
    ) -> None:
        counts = np.bincount(of[of >= 0], weights[of >= 0], minlength=len(totals))
        for group in np.flatnonzero(counts):
            mean = totals[group] / counts[group]
            about_zero = totals[group] * mean
            m2 = squares[group] - about_zero
            lost = np.flatnonzero(about_zero > CANCELLED * m2)
            if len(lost):
                m2[lost] = 0
                mine = np.flatnonzero(of == group)
                for start in range(0, len(mine), step):
                    some = mine[start : start + step]
                    centred = as_float64(values[some][:, lost]) - mean[lost]
                    m2[lost] += weights[some] @ (centred * centred)
            total = self.count[group] + counts[group]
            delta = mean - self.mean[group]
            self.m2[group] += m2 + delta * delta * (self.count[group] * counts[group] / total)
            self.mean[group] += delta * (counts[group] / total)
            self.count[group] = total
