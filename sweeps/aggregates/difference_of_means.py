"""Difference of means: one direction per captured place, with its counts, norms, held-out AUROC and controls.

    directions: {contrast: "framing == 'warm' vs framing == 'cold'", split: item, controls: [shuffled, random]}

The means stream on the replicas; the evaluation is one pass over the stored pooled vectors. Rows are messages: each
pooled record counts once (`weight: token` counts it once per pooled token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interlens.probes import cosine_map, evaluate
from interlens.statistics import Moments, as_float64

from . import CellResult, State
from .columns import cell_columns, check_known
from .expressions import parse_contrast
from .places import Labelled, Place, labelled_places
from .streaming import Keyed, MomentsSum, moments_of, put

CONTROLS = ("shuffled", "random")


class DifferenceOfMeans(MomentsSum):
    """Sum and Fit. Result: `directions`, one entry per place, and tensors: positive minus negative mean, [D] each.

    A tensor is named `<site>.<layer>`, followed by `@<participant>.<pool>` where a run has several of those.
    """

    def __init__(
        self,
        name: str,
        *,
        contrast: str,
        split: str = "item",
        controls: Sequence[str] = CONTROLS,
        participant: str | None = None,
        pool: str = "mean",
        folds: int = 5,
        draws: int = 1000,
        permutations: int = 20,
        max_rows: int = 50_000,
    ):
        unknown = sorted(set(controls) - set(CONTROLS))
        if unknown:
            raise ValueError(f"no control {unknown[0]!r}; there are: {', '.join(CONTROLS)}")
        self.name = name
        self.contrast = parse_contrast(contrast)
        self.split, self.controls, self.participant, self.pool = split, tuple(controls), participant, pool
        self.folds, self.draws, self.permutations, self.max_rows = folds, draws, permutations, max_rows

    def check(self, config: Any) -> None:
        """ValueError if the contrast or the split names a column that no cell of `config` will have."""
        axes = [axis.path for axis in config.grid]
        check_known(self.contrast.names, axes, self.contrast.source)
        check_known(frozenset([self.split]), axes, f"split: {self.split}")
        if self.split in ("cell", "branch_seed", "message_idx"):
            raise ValueError(f"split: {self.split} is finer than a trunk, so siblings would leak; use item or trunk")

    def contribution(self, result: CellResult) -> Keyed:
        columns = cell_columns(result)
        for record in result.records:
            place = Place(participant=record.participant, site=record.site, layer=record.layer, pool=record.pool)
            if record.pool != self.pool or self.participant not in (None, record.participant):
                continue
            side = self.contrast.side({**columns, **place.columns(), "message_idx": record.message_idx})
            yield f"{place.key}|{side or 'neither'}", as_float64(record.tensor)

    def finish(self, state: State) -> dict[str, Any]:
        moments = moments_of(state)
        places = sorted({Place.of(key.rpartition("|")[0]) for key in moments}, key=Place.order)
        entries, tensors = [], {}
        plain = len({(place.participant, place.pool) for place in places}) == 1
        for place in places:
            sides = {side: moments.get(f"{place.key}|{side}") for side in ("pos", "neg", "neither")}
            entry, direction = _entry(place, sides)
            entries.append(entry)
            if direction is not None:
                entry["tensor"] = f"{place.site}.{place.layer}" if plain else place.key
                tensors[entry["tensor"]] = direction
        return {
            "kind": "difference_of_means",
            "contrast": self.contrast.source,
            "positive": self.contrast.positive.source,
            "negative": self.contrast.negative.source,
            "split": self.split,
            "pool": self.pool,
            "directions": entries,
            "tensors": tensors,
        }

    def fit(self, run: Any, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on held-out groups; without streamed sums, recompute them from the stored vectors first."""
        labelled = {
            data.place.key: data
            for data in labelled_places(
                run, self.contrast, pool=self.pool, participant=self.participant, split=self.split
            )
        }
        if finished is None:
            finished = self.finish(_recompute(labelled.values()))
        for entry in finished["directions"]:
            entry.update(self._evaluate(labelled.get(entry["key"])))
        if len(finished["tensors"]) > 1:
            names, cosines = cosine_map(finished["tensors"])
            finished["cosines"] = {"names": names, "values": cosines.tolist()}
        return finished

    def _evaluate(self, data: Labelled | None) -> dict[str, Any]:
        if data is None or not len(data.y):
            return {"evaluation": None, "why": "no stored vectors of either side"}
        rows = data.sample(self.max_rows)
        try:
            found = evaluate(
                data.x[rows],
                data.y[rows],
                [data.groups[i] for i in rows],
                folds=self.folds,
                draws=self.draws,
                permutations=self.permutations if "shuffled" in self.controls else 0,
                random_directions=20 if "random" in self.controls else 0,
            )
        except ValueError as error:
            return {"evaluation": None, "why": str(error)}
        return {"evaluation": {**found.summary(), "rows": len(rows), "rows_stored": len(data.y)}}


def _entry(place: Place, sides: dict[str, Moments | None]) -> tuple[dict[str, Any], np.ndarray | None]:
    """One direction's numbers, and the direction itself where both sides have rows and differ."""
    counts = {f"num_{side}": sides[side].count if sides[side] else 0 for side in sides}
    entry = {
        "key": place.key,
        **place.columns(),
        **counts,
        "non_finite": sum(m.non_finite for m in sides.values() if m),
        "norm": None,
    }
    pos, neg = sides["pos"], sides["neg"]
    if not (pos and neg and pos.count and neg.count):
        return entry, None
    direction = pos.mean - neg.mean
    norm = float(np.linalg.norm(direction))
    entry |= {"norm": norm, "norm_pos": _rms_norm(pos), "norm_neg": _rms_norm(neg)}
    return entry, direction if norm > 0 else None


def _rms_norm(moments: Moments) -> float:
    """Root mean square norm of the rows: the scale a coefficient is to be compared with."""
    return float(np.sqrt(moments.mean @ moments.mean + moments.m2.sum() / moments.count))


def _recompute(labelled: Any) -> State:
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
