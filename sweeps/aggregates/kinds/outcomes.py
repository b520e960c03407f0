"""Outcomes: how what was said, and where the activations lie, change along one axis of the grid (dose-response).

    outcomes: {axis: intervention.coef, baseline: 0}

Every number of an analyzer or judge is compared between the levels of the axis, and so is the projection of the captured
vectors on the direction that a steering intervention adds. Cells are paired: same item, trunk, branch seed and other axes.
Intervals are by bootstrap over items. At the layer that is steered, the projection moves by the coefficient by
construction; what says something are the layers after it, and the text. `by` names axes whose values are kept apart, one
response for each: where the direction is an axis (`controls:` of an intervention makes it one), it is.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from interlens.probes import project
from interlens.statistics import mean_interval

from ...plan.directions import parse_direction
from ..base import CellResult, State
from ..columns import axes_of, evaluated, short_names
from ..direction_files import direction_of
from ..shards import ShardedRun
from ..source import Source
from ..sums import Keyed, MomentsSum, moments_of
from ..vectors import Place, gather, places

Pair = tuple[str, dict[Any, float]]
"""Item, and level -> value of cells that differ in nothing but the level."""


class Outcomes(MomentsSum):
    """Sum (means per condition) and Fit (paired comparison along `axis`). `measures`: names, or None for all."""

    reads_records = False

    def __init__(
        self,
        name: str,
        *,
        axis: str | None = None,
        baseline: Any = None,
        by: Sequence[str] | str | None = None,
        measures: Sequence[str] | None = None,
        project: str | bool = True,
        draws: int = 1000,
    ):
        self.name = name
        self.axis, self.baseline, self.draws = axis, baseline, draws
        self.by = (by,) if isinstance(by, str) else None if by is None else tuple(by)
        self.measures = None if measures is None else tuple(measures)
        self.project = project
        if isinstance(project, str):
            parse_direction(project)

    def check(self, config: Any) -> None:
        """ValueError if the axis or the baseline is not in the grid."""
        if config.grid:
            axis = self._axis(config)
            self._baseline(axis.labels)
            self._apart(config, axis)

    def contribution(self, result: CellResult) -> Keyed:
        condition = json.dumps(dict(result.cell.condition), sort_keys=True)
        for measure, value in result.outcomes.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and self._wanted(measure):
                yield f"{measure}|{condition}", np.array([float(value)])

    def finish(self, state: State) -> dict[str, Any]:
        rows = []
        for key, moments in sorted(moments_of(state).items()):
            measure, _, condition = key.partition("|")
            rows.append(
                {
                    "measure": measure,
                    "condition": json.loads(condition),
                    "count": moments.count,
                    "mean": float(moments.mean[0]),
                    "std": None if moments.count < 2 else float(moments.variance()[0] ** 0.5),
                }
            )
        return {"kind": "outcomes", "means": rows}

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Pair cells along the axis and compare every measure with the baseline level."""
        finished = finished or {"kind": "outcomes"}
        if not run.config.grid:
            return {**finished, "axis": None, "responses": []}
        axis = self._axis(run.config)
        others = [path for path in axes_of(run) if path != axis.path]
        plan = ["cell", "item", "trunk", "trunk_seed", "branch_seed", axis.path, *others]
        cells = {row["cell"]: row for row in run.cells.select(plan).to_pylist()}
        baseline = self._baseline(axis.labels)
        names = {str(label): label for label in axis.labels}  # an axis of mixed labels is stored as text
        for row in cells.values():
            row[axis.path] = names.get(str(row[axis.path]), row[axis.path])

        apart = self._apart(run.config, axis)

        def responses(what: Mapping[str, Any], values: Mapping[str, float]) -> Iterator[dict[str, Any]]:
            groups: dict[tuple, dict[str, float]] = {}
            for cell, value in values.items():
                groups.setdefault(tuple(cells[cell][path] for path in apart), {})[cell] = value
            for point in sorted(groups, key=lambda point: [value != "found" for value in point]):  # controls after it
                pairs = _paired(axis.path, others, cells, groups[point])
                by = dict(zip(apart, point, strict=True))
                yield {**what, "by": by, **self._response(axis.labels, baseline, pairs)}

        measured = self._text(run, plan).items()
        text = [one for name, values in measured for one in responses({"measure": name, "of": "text"}, values)]
        projected = ((what | {"of": "projection"}, values) for what, values in self._projections(run))
        projections = [one for what, values in projected for one in responses(what, values)]
        return {
            **finished,
            "axis": axis.path,
            "baseline": baseline,
            "levels": list(axis.labels),
            "responses": text + projections,
        }

    def _wanted(self, measure: str) -> bool:
        return self.measures is None or measure in self.measures or measure.partition(".")[0] in self.measures

    def _apart(self, config: Any, axis: Any) -> list[str]:
        """Paths of the axes whose values are not averaged over."""
        paths = [a.path for a in config.grid if a.path != axis.path]
        if self.by is None:
            return [path for path in paths if path.startswith("intervention") and path.endswith(".direction")]
        known = {**{path: path for path in paths}, **short_names(paths)}
        if unknown := [name for name in self.by if name not in known]:
            raise ValueError(f"by: no other axis {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
        return [known[name] for name in self.by]

    def _axis(self, config: Any) -> Any:
        """The axis that was asked for, else a coefficient's, else the first."""
        if self.axis is not None:
            matches = [a for a in config.grid if self.axis in (a.path, a.path.rsplit(".", 1)[-1])]
            if len(matches) != 1:
                raise ValueError(f"no axis {self.axis!r}; the grid has: {', '.join(a.path for a in config.grid)}")
            return matches[0]
        coefs = [a for a in config.grid if a.path.endswith("coef")]
        return (coefs or list(config.grid))[0]

    def _baseline(self, labels: Sequence[Any]) -> Any:
        if self.baseline is None:
            return next((label for label in labels if label == 0 and not isinstance(label, bool)), labels[0])
        if self.baseline not in labels:
            raise ValueError(f"no level {self.baseline!r} on this axis; it has: {', '.join(map(str, labels))}")
        return self.baseline

    def _text(self, run: ShardedRun, plan: Sequence[str]) -> dict[str, dict[str, float]]:
        """Measure -> cell -> value, of every number an analyzer gave."""
        table = run.outcomes()
        names = [name for name in table.column_names if name not in {*plan, "unit", "attempt"} and self._wanted(name)]
        values: dict[str, dict[str, float]] = {}
        for name in names:
            for cell, value in zip(table.column("cell").to_pylist(), table.column(name).to_pylist(), strict=True):
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    values.setdefault(name, {})[cell] = float(value)
        return values

    def _projections(self, run: ShardedRun) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
        """Per captured place: the mean projection of each cell's vectors on the direction that was steered along."""
        steers = [i for i in run.config.intervention if i.kind == "steer" and i.direction]
        reference = self.project if isinstance(self.project, str) else steers[0].direction if steers else None
        if reference is None or not self.project:
            return
        source, site = Source(pool="mean"), parse_direction(reference).site
        for place in (p for p in places(run, source) if p.site == site):
            direction, per_cell = None, defaultdict(list)
            for shard in run.shards():
                index = shard.index(Place.COLUMNS)
                index = index.filter(pa.array(evaluated(index.select(list(Place.COLUMNS)), place.holds).astype(bool)))
                if index.num_rows:
                    x, _, _ = gather(run, index, source)
                    direction = direction_of(run, reference, x.shape[1]) if direction is None else direction
                    for cell, value in zip(index["cell"].to_pylist(), project(x, direction), strict=True):
                        per_cell[cell].append(float(value))
            what = {
                "measure": f"projection.{place.participant}.{place.layer}",
                "participant": place.participant,
                "layer": place.layer,
                "direction": reference,
                "steered_here": any(place.layer in s.layers and place.participant in s.participants for s in steers),
            }
            yield what, {cell: float(np.mean(values)) for cell, values in per_cell.items()}

    def _response(self, labels: Sequence[Any], baseline: Any, pairs: list[Pair]) -> dict[str, Any]:
        """Level means, paired differences from the baseline, and the slope over numeric levels."""
        levels = []
        for level in labels:
            at = [(item, pair[level]) for item, pair in pairs if level in pair]
            both = [(item, pair[level] - pair[baseline]) for item, pair in pairs if level in pair and baseline in pair]
            levels.append(
                {
                    "level": level,
                    "count": len(at),
                    "mean": self._interval(at),
                    "pairs": len(both),
                    "difference": self._interval(both) if level != baseline else None,
                }
            )
        return {"levels": levels, "slope": self._slope(labels, pairs)}

    def _slope(self, labels: Sequence[Any], pairs: list[Pair]) -> dict[str, float] | None:
        """Least-squares change per unit of the axis within pairs, averaged over complete pairs."""
        if len(labels) < 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in labels):
            return None
        dose = np.array(labels, dtype=float) - np.mean(labels)
        complete = [(item, pair) for item, pair in pairs if all(level in pair for level in labels)]
        slopes = [(item, float(dose @ [pair[level] for level in labels] / (dose @ dose))) for item, pair in complete]
        return self._interval(slopes)

    def _interval(self, rows: list[tuple[str, float]]) -> dict[str, float] | None:
        if not rows:
            return None
        items, values = zip(*rows, strict=True)
        return mean_interval(np.array(values), items, draws=self.draws).summary()


def _paired(axis: str, others: Sequence[str], cells: Mapping[str, Any], values: Mapping[str, float]) -> list[Pair]:
    """(item, level -> value) of cells that agree in everything but the axis."""
    same = ["item", "trunk_seed", "branch_seed", *others]
    if not axis.startswith(("trunk.", "scenario.trunk.")):
        same.append("trunk")
    pairs: dict[tuple, dict[Any, float]] = {}
    for cell, value in values.items():
        row = cells[cell]
        pairs.setdefault(tuple(row[name] for name in same), {})[row[axis]] = value
    return [(key[0], pair) for key, pair in pairs.items()]


AGGREGATE = Outcomes
