"""Routing statistics: how often each expert was picked and how much score it got, per speaker, phase and condition.

    routing_stats: {by: [framing], phases: [answer], k: 4}

Needs unpooled captures of the site `router`. It sums the rows of the table `routing`, which replicas fill while the model
is at hand: live, or again from the table, without a model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlens.interp.expert_load import js_divergence, topk_expert_overlap

from ...config.limits import PHASES
from ..base import CellResult, State
from ..columns import cell_columns, check_known
from ..sums import by_key

PARTS = ("picks", "mass", "tokens")


class RoutingSums:
    """A Sum. Result: `routing` (load and mass [E] per participant, layer, phase and `by`) and `comparisons` of them.

    `by`: columns of a cell (None: every axis). `k`: how many top experts the overlap compares.
    """

    reads_records = False

    def __init__(
        self, name: str, *, by: Sequence[str] | str | None = None, phases: Sequence[str] = ("answer",), k: int = 8
    ):
        unknown = sorted(set(phases) - set(PHASES))
        if unknown:
            raise ValueError(f"no phase {unknown[0]!r}; there are: {', '.join(PHASES)}")
        self.name = name
        self.by = (by,) if isinstance(by, str) else None if by is None else tuple(by)
        self.phases, self.k = tuple(phases), k

    def check(self, config: Any) -> None:
        """ValueError if no unpooled `router` site will be captured, or `by` names a column that no cell will have."""
        if not any("router" in c.sites and c.pool is None for c in config.capture):
            raise ValueError("no routing will be recorded; capture site router without a pool")
        if self.by is not None:
            check_known(self.by, config, f"by: {', '.join(self.by)}")

    def zero(self) -> State:
        return {}

    def add(self, state: State, result: CellResult) -> None:
        if result.routing is None:
            raise ValueError(
                f"{self.name}: no routing was recorded for cell {result.cell.id}; runs of an earlier version have none"
            )
        columns = cell_columns(result)
        by = by_key(dict(result.cell.condition) if self.by is None else {name: columns[name] for name in self.by})
        for key, value in _sums(result, self.phases, by).items():
            state[key] = state[key] + value if key in state else value

    def merge(self, a: State, b: State) -> State:
        merged = dict(a)
        for key, value in b.items():
            merged[key] = merged[key] + value if key in merged else value
        return merged

    def finish(self, state: State) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        for key in sorted(name[: -len(":tokens")] for name in state if name.endswith(":tokens")):
            participant, layer, phase, by = key.split("|", 3)
            picks, mass, tokens = (state[f"{key}:{part}"] for part in PARTS)
            entries.append(
                {
                    "participant": participant,
                    "layer": int(layer),
                    "phase": phase,
                    "by": json.loads(by),
                    "tokens": int(tokens[0]),
                    "top_k": round(float(picks.sum() / tokens[0])),
                    "load": (picks / picks.sum()).tolist(),
                    "mass": (mass / tokens[0]).tolist(),
                }
            )
        entries.sort(key=lambda e: (e["participant"], e["phase"], by_key(e["by"]), e["layer"]))
        return {"kind": "routing_stats", "routing": entries, "comparisons": self._comparisons(entries)}

    def _comparisons(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """JS divergence (nats) and top-k overlap of loads between every two values of `by`, per layer."""

        groups: dict[tuple, list[dict[str, Any]]] = {}
        for entry in entries:
            groups.setdefault((entry["participant"], entry["phase"], entry["layer"]), []).append(entry)
        found = []
        for (participant, phase, layer), members in groups.items():
            for a, b in itertools.combinations(members, 2):
                p: Any = np.array([a["load"]])
                q: Any = np.array([b["load"]])
                found.append(
                    {
                        "participant": participant,
                        "phase": phase,
                        "layer": layer,
                        "a": a["by"],
                        "b": b["by"],
                        "js_divergence": float(js_divergence(p, q)[0]),
                        "topk_overlap": float(topk_expert_overlap(p, q, k=self.k)[0]),
                        "k": min(self.k, p.shape[1]),
                    }
                )
        return found


def _sums(result: CellResult, phases: Sequence[str], by: str) -> State:
    """Picks, scores and tokens of one cell, summed by participant, layer and phase."""
    found: State = {}
    for row in result.routing or ():
        if row["phase"] not in phases:
            continue
        key = f"{row['participant']}|{row['layer']}|{row['phase']}|{by}"
        tokens = np.array([float(row["tokens"])])
        parts = (np.asarray(row["counts"], np.float64), np.asarray(row["mass"], np.float64) * tokens, tokens)
        for part, value in zip(PARTS, parts, strict=True):
            name = f"{key}:{part}"
            found[name] = found[name] + value if name in found else value
    return found


AGGREGATE = RoutingSums
