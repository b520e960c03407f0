"""Moments: count, mean and variance (or covariance) of captured rows, per place and per value of some columns.

moments: {by: [framing], pool: mean, covariance: false, max_norm: null}

Which rows, and how each counts: the options of `Source`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..base import State
from ..columns import check_known
from ..expressions import parse
from ..source import Source
from ..sums import REMOVED, RecordSum, by_key, moments_of, rms_norm
from ..vectors import Place


class RowMoments(RecordSum):
    """A Sum. Result: one entry per place and value of `by`; arrays `<entry>.mean`, `.variance` (or `.covariance`)."""

    def __init__(
        self,
        name: str,
        *,
        by: Sequence[str] | str = (),
        pool: str | None = "mean",
        participant: str | None = None,
        tokens: str | None = None,
        phase: str | None = None,
        max_norm: float | None = None,
        weight: str | None = None,
        where: str | None = None,
        covariance: bool = False,
        labels: str | None = None,
    ):
        self.name = name
        self.by = (by,) if isinstance(by, str) else tuple(by)
        self.covariance = covariance
        self.source = Source(
            pool=pool, participant=participant, tokens=tokens, phase=phase, max_norm=max_norm, weight=weight
        )
        self.where = None if where is None else parse(where)
        self.labels = labels

    def check(self, config: Any) -> None:
        """ValueError if a column is one that no cell of `config` will have."""
        check_known(
            self.names(),
            config,
            self.where.source if self.where else f"by: {', '.join(self.by)}",
            self.labels is not None,
        )

    def names(self) -> set[str]:
        return {*self.by, *(self.where.names if self.where else ())}

    def key_of(self, row: Mapping[str, Any]) -> str | None:
        if self.where is not None and not self.where(row):
            return None
        return f"{Place.at(row).key}|{by_key({name: row[name] for name in self.by})}"

    def finish(self, state: State) -> dict[str, Any]:
        moments = moments_of(state)
        entries, arrays = [], {}
        keys = [key for key in moments if not key.endswith(REMOVED)]
        for key in sorted(keys, key=lambda key: (Place.of(key.partition("|")[0]).order(), key)):
            place, found, removed = Place.of(key.partition("|")[0]), moments[key], moments.get(key + REMOVED)
            spread = found.covariance() if self.covariance else found.variance()
            entries.append(
                {
                    "key": key,
                    **place.columns(),
                    "by": json.loads(key.partition("|")[2]),
                    "count": found.count,
                    "non_finite": found.non_finite + (removed.non_finite if removed else 0),
                    "removed": removed.count if removed else 0,
                    "removed_mean_norm": float(removed.mean[0]) if removed and removed.count else None,
                    "norm_of_mean": float(np.linalg.norm(found.mean)),
                    "rms_norm": rms_norm(found),
                    "total_variance": float(np.trace(spread) if self.covariance else spread.sum()),
                }
            )
            arrays[f"{key}.mean"] = found.mean
            arrays[f"{key}.{'covariance' if self.covariance else 'variance'}"] = spread
        return {"kind": "moments", **self.source.described(), "moments": entries, "arrays": arrays}


AGGREGATE = RowMoments
