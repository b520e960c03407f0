"""Outcome table: the mean of every outcome at each value of one axis against each value of another.

    outcome_table: {rows: layers, columns: tokens, measures: [clean], by: [item.kind], where: "opening == 'corrupt'"}

What an axis swept together with another shows as a surface: a causal trace over layers and positions, doses by layers.
Intervals are by bootstrap over items. Outcomes that are NaN or infinite are left out and counted (`non_finite`). `by`
makes a table for each value of other columns.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from interlens.statistics import mean_interval

from ..columns import axes_of, check_known, columns, evaluated, short_names
from ..expressions import parse
from ..shards import ShardedRun


class OutcomeTable:
    """A Fit over outcomes. `rows`, `columns`: axes (None: the first, the second); `measures`: None is all."""

    def __init__(
        self, name: str, *, rows: str | None = None, columns: str | None = None, measures: Sequence[str] | None = None,
        by: Sequence[str] = (), where: str | None = None, draws: int = 1000,
    ):  # fmt: skip
        self.name, self.rows, self.columns = name, rows, columns
        self.measures, self.by, self.draws = measures, tuple(by), draws
        self.where = None if where is None else parse(where)

    def check(self, config: Any) -> None:
        """ValueError for a column that no cell has."""
        given = [name for name in (self.rows, self.columns, *self.by) if name is not None]
        check_known(given, config, ", ".join(given))
        if self.where is not None:
            check_known(self.where.names, config, self.where.source)

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Means with intervals, per measure and value of `by` (that of most cells first), in the order of the axes."""
        axes = axes_of(run)
        if self.rows is None and not axes:
            return {"kind": "outcome_table", "rows": None, "columns": None, "tables": []}
        row = self.rows or axes[0]
        column = self.columns or next((axis for axis in axes if axis != self._path(axes, row)), None)
        table = run.outcomes()
        planned = {"cell", "trunk", "item", "trunk_seed", "branch_seed", "unit", "attempt", *axes}
        measures = [
            name for name in table.column_names if name not in planned and pa.types.is_floating(table[name].type)
            and (self.measures is None or name in self.measures)
        ]  # fmt: skip
        names = [name for name in (row, column, *self.by) if name is not None]
        found = columns(run, table, [*names, *(self.where.names if self.where else ())])
        kept = np.ones(table.num_rows, bool) if self.where is None else evaluated(found, self.where).astype(bool)
        values: dict[tuple, list[tuple[str, float]]] = defaultdict(list)
        keys = list(zip(*([_no_nan(v) for v in found[name].to_pylist()] for name in names), strict=True))
        left_out = 0
        for measure in measures:
            for keep, key, item, value in zip(
                kept, keys, table["item"].to_pylist(), table[measure].to_pylist(), strict=True
            ):
                if keep and value is not None and not math.isfinite(value):
                    left_out += 1
                elif keep and value is not None:
                    levels = key if column is not None else (key[0], None, *key[1:])
                    values[measure, *levels].append((item, float(value)))
        sizes = Counter[tuple]()
        for key, of in values.items():
            sizes[key[0], *key[3:]] += len(of)
        groups = sorted(sizes, key=lambda g: (measures.index(g[0]), -sizes[g], *map(str, g[1:])))
        return {
            "kind": "outcome_table", "rows": row, "columns": column, "where": self.where and self.where.source,
            "non_finite": left_out, "row_levels": self._levels(run, axes, row, [key[1] for key in values]),
            "column_levels": self._levels(run, axes, column, [key[2] for key in values]),
            "tables": [
                {"measure": group[0], "by": dict(zip(self.by, group[1:], strict=True)),
                 "cells": [
                     {"row": key[1], "column": key[2], "count": len(of), "mean": self._mean(of)}
                     for key, of in values.items() if (key[0], *key[3:]) == group
                 ]}
                for group in groups
            ],
        }  # fmt: skip

    @staticmethod
    def _path(axes: Sequence[str], name: str) -> str:
        return short_names(axes).get(name, name)

    def _levels(self, run: ShardedRun, axes: Sequence[str], name: str | None, seen: Sequence[Any]) -> list[Any]:
        """In the grid's order where it is an axis."""
        present = list(dict.fromkeys(seen))
        order = next((a.labels for a in run.config.grid if name and a.path == self._path(axes, name)), None)
        if order is None:
            return sorted(present, key=str)
        return sorted(present, key=lambda level: [str(label) for label in order].index(_text(level, order)))

    def _mean(self, of: Sequence[tuple[str, float]]) -> dict[str, float]:
        items, values = zip(*of, strict=True)
        return mean_interval(np.array(values), items, draws=self.draws).summary()


def _no_nan(value: Any) -> Any:
    """None for NaN, which equals nothing, not even itself."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _text(level: Any, labels: Sequence[Any]) -> str:
    """The label that a stored level stands for: numbers come back as floats."""
    return next((str(label) for label in labels if label == level), str(level))


AGGREGATE = OutcomeTable
