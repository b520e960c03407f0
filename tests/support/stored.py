"""A run in memory with the reader's interface, for laws of aggregates that need thousands of cells in a moment."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from interlens.interp.activation_cache import ActivationRecord
from sweeps.aggregates import CellResult
from sweeps.aggregates.registry import build
from sweeps.config.schema import AxisConfig, InterventionConfig, ParticipantConfig, ScenarioConfig, SweepConfig
from sweeps.folder.cells import Cell
from sweeps.folder.schemas import FAILURES, MESSAGES
from sweeps.folder.store import open_store


def record(vector, participant="bob", layer=16, message_idx=4, pool="mean", num_pooled=5):
    tensor = torch.tensor(np.asarray(vector)[None], dtype=torch.float32)
    return ActivationRecord(
        participant, message_idx, layer, "residual", tensor, (0, 1),
        {"answer": (0, 1)}, pool=pool, num_pooled=num_pooled,
    )  # fmt: skip


def results(axis="framing", labels=("warm", "cold"), items=10, trunk_seeds=2, branch_seeds=2, layers=(8, 16), width=24,
            signal=3.0, seed=0, dose=False):  # fmt: skip
    """Finished cells: every item and trunk has its own offset; the axis moves vectors and the outcome `score`."""
    rng = np.random.default_rng(seed)
    axis_vector = rng.standard_normal((len(layers), width))
    axis_vector /= np.linalg.norm(axis_vector, axis=1, keepdims=True)
    made = []
    for item in range(items):
        for trunk_seed in range(trunk_seeds):
            family = 2 * rng.standard_normal((len(layers), width))
            for branch_seed in range(branch_seeds):
                noise = rng.standard_normal()
                for label in labels:
                    dose_at = float(label) if dose else {labels[0]: 0.5, labels[-1]: -0.5}.get(label, 0.0)
                    cell = Cell(id=f"c{len(made)}", item=f"i{item}", trunk=f"t{item}.{trunk_seed}",
                                condition={axis: label}, trunk_seed=trunk_seed, branch_seed=branch_seed,
                                unit=f"u{len(made) // 16}")  # fmt: skip
                    rows = family + rng.standard_normal((len(layers), width)) + signal * dose_at * axis_vector
                    made.append(CellResult(
                        cell=cell, item_row={"id": f"i{item}", "even": item % 2 == 0}, messages=[],
                        records=[record(row, layer=layer) for layer, row in zip(layers, rows, strict=True)],
                        outcomes={"score": 10 + 2 * dose_at + noise + 0.1 * rng.standard_normal()},
                    ))  # fmt: skip
    return made, axis_vector


PLANNED = ("cell", "item", "trunk", "trunk_seed", "branch_seed", "framing", "state")
EMPTY_PLAN = pa.table({name: pa.array([], pa.string()) for name in PLANNED})


@dataclass
class StoredRun:
    """What an aggregate reads of a run, answered from finished cells."""

    results: list
    axis: str = "framing"
    labels: tuple = ("warm", "cold")
    interventions: tuple = ()
    root: Path = Path("/nowhere")
    states: dict = field(default_factory=dict)
    item_rows: dict = field(default_factory=dict)
    aggregate: tuple = ()
    texts: tuple = ("I love it!",)
    failures: tuple = ()
    more_axes: tuple = ()
    captures: tuple = ()

    @property
    def store(self):
        return open_store(self.root)

    @property
    def config(self):
        return SweepConfig(
            experiment="stored",
            scenario=ScenarioConfig(participants={name: ParticipantConfig(model="tiny") for name in ("alice", "bob")}),
            grid=(AxisConfig(path=self.axis, labels=self.labels, values=self.labels), *self.more_axes),
            intervention=self.interventions,
            aggregate=self.aggregate,
        )

    def _plan(self, result):
        cell = result.cell
        return {"cell": cell.id, "item": cell.item, "trunk": cell.trunk, "trunk_seed": cell.trunk_seed,
                "branch_seed": cell.branch_seed, "unit": cell.unit, **cell.condition}  # fmt: skip

    @property
    def cells(self):
        failed = {row["cell"] for row in self.failures}
        rows = [{**self._plan(r), "state": "failed" if r.cell.id in failed else "done"} for r in self.results]
        return pa.Table.from_pylist(rows) if rows else EMPTY_PLAN

    @property
    def counts(self):
        states = self.cells.column("state").to_pylist()
        return {state: states.count(state) for state in ("done", "failed", "pending")}

    @property
    def plan(self):
        return SimpleNamespace(table=self.cells.select, num_items=len(self.cells["item"].unique()))

    def outcomes(self):
        return pa.Table.from_pylist([{**self._plan(r), **r.outcomes} for r in self.results])

    def _records(self):
        for result in self.results:
            for rec in result.records:
                yield {**self._plan(result), "participant": rec.participant, "message_idx": rec.message_idx,
                       "layer": rec.layer, "site": rec.site, "pool": rec.pool, "selection": rec.selection,
                       "num_pooled": rec.num_pooled, "tensor": rec.tensor}  # fmt: skip

    def shards(self, added=True):
        """All of it is one unit."""
        return [self]

    def index(self, names, pools=None):
        rows = [{**row, "file": "memory", "key": f"{row['layer']}", "tensor": None} for row in self._records()]
        seen = {}
        for row in rows:
            row["row_start"] = seen[row["key"]] = seen.get(row["key"], -1) + 1
            row["row_end"] = row["row_start"] + 1
        return pa.Table.from_pylist(rows)

    def matrix(self, file, key):
        return torch.cat([row["tensor"] for row in self._records() if str(row["layer"]) == key])

    def table(self, name, columns=None, filter=None):
        if name == "records":
            return pa.Table.from_pylist([{key: row[key] for key in columns} for row in self._records()])
        schema = {"messages": MESSAGES, "failures": FAILURES}[name]
        rows = list(self._messages()) if name == "messages" else list(self.failures)
        table = pa.Table.from_pylist(rows, schema=schema)
        return (table.filter(filter) if filter is not None else table).select(columns or schema.names)

    def _messages(self):
        seen = set()
        for i, result in enumerate(self.results):
            cell, text = result.cell, self.texts[i % len(self.texts)]
            if cell.trunk not in seen:
                seen.add(cell.trunk)
                yield {"trunk": cell.trunk, "message_idx": 0, "author": "moderator", "content": f"About {cell.item}."}
                yield {
                    "trunk": cell.trunk,
                    "message_idx": 1,
                    "author": "alice",
                    "content": text,
                    "finish_reason": "length",
                }
            yield {"trunk": cell.trunk, "cell": cell.id, "message_idx": 2, "author": "bob", "content": text,
                   "finish_reason": "stop"}  # fmt: skip

    def vectors(self, *, site="residual", layer=None, participant=None, pool="mean", where=None):
        wanted = {"site": site, "layer": layer, "participant": participant, "pool": pool}
        rows = [row for row in self._records() if wanted.items() <= row.items()]
        tensors = torch.cat([row.pop("tensor") for row in rows]).numpy()
        table = pa.Table.from_pylist(rows)
        return tensors, table

    def sums(self, name):
        if name in self.states or not self.results:
            return iter(self.states.get(name, []))
        made = build([entry for entry in self.aggregate if entry.name == name])[0]
        state = made.zero()
        for result in self.results:
            made.add(state, result)
        return iter([state])


def steer(direction, layers=(16,)):
    return InterventionConfig(kind="steer", participants=("bob",), layers=layers, direction=direction)
