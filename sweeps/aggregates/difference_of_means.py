"""Difference of means: one direction per captured place, with its counts, norms, held-out AUROC and controls.

    directions: {contrast: "framing == 'warm' vs framing == 'cold'", split: item, controls: [shuffled, random]}

The means stream on the replicas; the evaluation is one pass over the stored pooled vectors. Rows are messages: each
pooled record counts once (`weight: token` counts it once per pooled token).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from interlens.statistics import Moments, as_float64

from . import CellResult, State
from .columns import cell_columns, record_columns
from .contrasts import ContrastFit, summary
from .places import Labelled, Place, tensor_names
from .streaming import Keyed, MomentsSum, moments_of, put


class DifferenceOfMeans(ContrastFit, MomentsSum):
    """Sum and Fit. Result: `directions`, one entry per place, and tensors: positive minus negative mean, [D] each."""

    kind = method = "difference_of_means"

    def contribution(self, result: CellResult) -> Keyed:
        if self.labels is not None:
            return
        cell = cell_columns(result)
        for record in result.records:
            if record.pool != self.pool or self.participant not in (None, record.participant):
                continue
            place = Place(participant=record.participant, site=record.site, layer=record.layer, pool=record.pool)
            row = {**cell, **record_columns(result, record)}
            if self.where is not None and not self.where(row):
                continue
            yield f"{place.key}|{self.contrast.side(row) or 'neither'}", as_float64(record.tensor)

    def finish(self, state: State) -> dict[str, Any]:
        moments = moments_of(state)
        found = sorted({Place.of(key.rpartition("|")[0]) for key in moments}, key=Place.order)
        names = tensor_names(found)
        entries, tensors = [], {}
        for place in found:
            sides = {side: moments.get(f"{place.key}|{side}") for side in ("pos", "neg", "neither")}
            entry, direction = _entry(place, sides)
            entries.append(entry)
            if direction is not None:
                entry["tensor"] = names[place]
                tensors[entry["tensor"]] = direction
        return {**self.described(), "directions": entries, "tensors": tensors}

    def fit(self, run: Any, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on held-out groups; without streamed sums, recompute them from the stored vectors first."""
        labelled = {data.place.key: data for data in self.places(run)}
        if finished is None or self.labels is not None:
            finished = self.finish(_recompute(labelled.values()))
        for entry in finished["directions"]:
            entry.update(self.evaluation(labelled.get(entry["key"])))
        return summary(finished)


def _entry(place: Place, sides: dict[str, Moments | None]) -> tuple[dict[str, Any], np.ndarray | None]:
    """One direction's numbers, and the direction itself where both sides have rows and differ."""
    counts = {f"num_{side}": found.count if found else 0 for side, found in sides.items()}
    non_finite = sum(found.non_finite for found in sides.values() if found)
    entry = {"key": place.key, **place.columns(), **counts, "non_finite": non_finite, "norm": None}
    pos, neg = sides["pos"], sides["neg"]
    if not (pos and neg and pos.count and neg.count):
        return entry, None
    direction = pos.mean - neg.mean
    norm = float(np.linalg.norm(direction))
    entry |= {"norm": norm, "norm_pos": rms_norm(pos), "norm_neg": rms_norm(neg)}
    return entry, direction if norm > 0 else None


def rms_norm(moments: Moments) -> float:
    """Root mean square norm of the rows: the scale a coefficient is to be compared with."""
    return float(np.sqrt(moments.mean @ moments.mean + moments.m2.sum() / moments.count))


def _recompute(labelled: Iterable[Labelled]) -> State:
    state: State = {}
    for data in labelled:
        for side, rows in (("pos", data.x[data.y]), ("neg", data.x[~data.y])):
            if len(rows):
                put(state, f"{data.place.key}|{side}", Moments.of(rows))
        if data.num_neither:
            neither = Moments(data.x.shape[1])
            neither.count = data.num_neither
            put(state, f"{data.place.key}|neither", neither)
    return state
