"""Difference of means: one direction per captured place, with its counts, norms, held-out AUROC and controls.

    directions: {contrast: "framing == 'warm' vs framing == 'cold'", split: item, controls: [shuffled, random]}

The means stream on the replicas; the evaluation is one pass over the stored vectors. With a pool every message counts
once, with `pool: null` every recorded token (`weight: token | message` says otherwise); `max_norm` leaves out attention
sinks and counts them. What is evaluated are messages: pooled vectors, or the means of recorded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from interlens.statistics import Moments

from ..base import State
from ..contrasts import ContrastFit, summary
from ..shards import ShardedRun
from ..sums import REMOVED, RecordSum, moments_of, places_in, rms_norm
from ..vectors import Place, tensor_names

SIDES = ("pos", "neg", "neither")


class DifferenceOfMeans(ContrastFit, RecordSum):
    """Sum and Fit. Result: `directions`, one entry per place, and tensors: positive minus negative mean, [D] each."""

    kind = method = "difference_of_means"

    def names(self) -> set[str]:
        return {*self.contrast.names, *(self.where.names if self.where else ())}

    def key_of(self, row: Mapping[str, Any]) -> str | None:
        if self.where is not None and not self.where(row):
            return None
        return f"{Place.at(row).key}|{self.contrast.side(row) or 'neither'}"

    def finish(self, state: State) -> dict[str, Any]:
        moments = moments_of(state)
        found = places_in(moments)
        names = tensor_names(found)
        entries, tensors = [], {}
        for place in found:
            sides = {side: moments.get(f"{place.key}|{side}") for side in SIDES}
            removed = [moments.get(f"{place.key}|{side}{REMOVED}") for side in SIDES]
            entry, direction = _entry(place, sides)
            entry["removed"] = sum(m.count for m in removed if m)
            entry["non_finite"] += sum(m.non_finite for m in removed if m)
            entries.append(entry)
            if direction is not None:
                entry["tensor"] = names[place]
                tensors[entry["tensor"]] = direction
        return {**self.described(), "directions": entries, "tensors": tensors}

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate the directions of `finished` on held-out groups."""
        if finished is None:
            raise ValueError(f"{self.name}: the means come first (aggregates.finalize does both)")
        entries = {entry["key"]: entry for entry in finished["directions"]}
        for place, evaluation in self.each_place(run, "evaluated"):
            if (entry := entries.pop(place.key, None)) is not None:
                entry.update(evaluation)
        for entry in entries.values():
            entry.update(self.evaluation(None))
        return summary(finished)


def _entry(place: Place, sides: Mapping[str, Moments | None]) -> tuple[dict[str, Any], np.ndarray | None]:
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


AGGREGATE = DifferenceOfMeans
