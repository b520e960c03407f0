"""Probe evaluation: several methods side by side, with a layer chosen without the test groups, transfer, and warnings.

    probe_eval: {contrast: "framing == 'warm' vs framing == 'cold'", methods: [difference_of_means, lda],
                 transfer: trunk_seed}

`transfer` names a column: probes are fitted where it has one value and tested where it has another, still on groups
that the fit has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interlens.probes import METHODS, evaluate, transfer

from ..columns import check_known
from ..contrasts import MessageFit
from ..shards import ShardedRun
from ..vectors import Labelled, labelled_places, leaks


class ProbeEval(MessageFit):
    """A Fit. Result: `probes`, one entry per participant, site and method; `transfer`; `warnings`."""

    kind = "probe_eval"

    def __init__(
        self,
        name: str,
        *,
        methods: Sequence[str] = ("difference_of_means", "lda", "logistic"),
        transfer: str | None = None,
        **options: Any,
    ):
        super().__init__(name, **options)
        unknown = sorted(set(methods) - set(METHODS))
        if unknown:
            raise ValueError(f"no probe {unknown[0]!r}; there are: {', '.join(METHODS)}")
        self.methods, self.transfer = tuple(methods), transfer

    def check(self, config: Any) -> None:
        super().check(config)
        if self.transfer is not None:
            check_known([self.transfer], config, f"transfer: {self.transfer}")

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        by_site: dict[tuple, list[Labelled]] = {}
        also = () if self.transfer is None else (self.transfer,)
        for data in labelled_places(run, self.question(*also)):
            if data.table is not None:
                place = data.place
                by_site.setdefault((place.participant, place.site, place.selection), []).append(data)
        probes, crossed, warnings = [], [], []
        for (participant, site, selection), layers in by_site.items():
            x, y, groups, table = _aligned(layers)
            warnings += leaks(layers[0], self.split)
            where = {"participant": participant, "site": site, "pool": self.source.pool, "selection": selection}
            for method in self.methods:
                probes.append({**where, "method": method, **self._chosen(x, y, groups, method)})
            if self.transfer is not None and len(y):
                domains = table[f"asked.{self.transfer}"].to_pylist()
                crossed += self._crossed(x, y, groups, domains, where)
        return {**self.described(), "probes": probes, "transfer": crossed, "warnings": list(dict.fromkeys(warnings))}

    def _chosen(self, x: dict, y: np.ndarray, groups: list, method: str) -> dict[str, Any]:
        """The evaluation with the layer chosen inside each fold; None and why, where there is none."""
        shuffled = self.permutations if "shuffled" in self.controls else 0
        try:
            found = evaluate(
                x, y, groups, method=method, folds=self.folds, draws=self.draws, permutations=shuffled,
                random_directions=20 if "random" in self.controls else 0,
                orthogonal_directions=20 if "orthogonal" in self.controls else 0,
            )  # fmt: skip
        except ValueError as error:
            return {"evaluation": None, "why": str(error)}
        return {"evaluation": found.summary()}

    def _crossed(self, x: dict, y: np.ndarray, groups: list, domains: list, where: dict) -> list[dict[str, Any]]:
        found = []
        for layer, rows in x.items():
            for method in self.methods:
                table = transfer(rows, y, groups, domains, method=method, folds=self.folds, draws=self.draws)
                for (fitted, tested), interval in table.items():
                    entry = {"layer": layer, "method": method, "fitted_on": fitted, "tested_on": tested}
                    found.append({**where, **entry, "auroc": interval.summary()})
        return found


def _aligned(layers: list[Labelled]) -> tuple[dict[int, np.ndarray], np.ndarray, list, Any]:
    """The rows that every layer has, in one order: {layer: x}, y, groups, and their index table."""
    keys = [
        list(zip(data.table.column("cell").to_pylist(), data.table.column("message_idx").to_pylist(), strict=True))
        for data in layers
    ]
    common = set(keys[0]).intersection(*keys[1:])
    order = [key for key in keys[0] if key in common]
    rows = [[{key: i for i, key in enumerate(own)}[key] for key in order] if own != order else None for own in keys]
    x = {d.place.layer: d.x if at is None else d.x[at] for d, at in zip(layers, rows, strict=True)}
    first = layers[0]
    at = list(range(len(order))) if rows[0] is None else rows[0]
    return x, first.y[at], [first.groups[i] for i in at], first.table.take(at)


AGGREGATE = ProbeEval
