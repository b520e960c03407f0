"""What one unit has committed, as aggregates read it: in memory that does not grow with the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from .. import rows, store, tensors
from ..config import AggregateConfig, ClusterConfig
from . import CellResult, State, Sum, build

if TYPE_CHECKING:
    from torch import Tensor

    from ..store import Commit

INDEX = ["cell", "trunk", "participant", "message_idx", "layer", "site", "pool", "file", "key", "row_start", "row_end"]


class Shard:
    """The committed tables and tensors of one unit, with the cells of the plan they belong to.

    It answers what `columns` asks of a run, for these cells only.
    """

    def __init__(self, run: Any, commit: Commit):
        self.run, self.commit, self.config = run, commit, run.config

    @property
    def _planned(self) -> str:
        """The unit of the plan: children and retries carry its name."""
        return self.commit.unit.split(".")[0]

    @cached_property
    def unit(self) -> Any:
        return self.run.plan.unit(self._planned)

    @cached_property
    def cells(self) -> dict[str, Any]:
        """Cell id -> cell, of the cells this commit holds."""
        held = set(self.commit.cells)
        return {cell.id: cell for cell in self.unit.cells if cell.id in held}

    @property
    def item_rows(self) -> dict[str, Any]:
        return dict(self.unit.items)

    def table(self, name: str, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """One of the tables (messages, records, outcomes), this unit's rows."""
        files = [str(self.run.root / f["path"]) for f in self.commit.files if f["table"] == name]
        return self.run.dataset(name, files).to_table(columns=columns, filter=filter)

    def outcomes(self) -> pa.Table:
        """Cell and one column per analyzer value."""
        table = self.table("outcomes")
        pairs = zip(table.column("numbers").to_pylist(), table.column("texts").to_pylist(), strict=True)
        found = [dict(numbers or ()) | dict(texts or ()) for numbers, texts in pairs]
        names = dict.fromkeys(name for row in found for name in row)
        values = {name: pa.array([row.get(name) for row in found]) for name in names}
        return pa.table({"cell": table.column("cell"), **values})

    def index(self, filter: Any = None) -> pa.Table:
        """The records of cells (a trunk's own left out), with each cell's item, seeds and axes."""
        wanted = pc.field("cell").is_valid() if filter is None else pc.field("cell").is_valid() & filter
        table = self.table("records", columns=INDEX, filter=wanted)
        plan = self.run.plan.rows(self._planned)
        at = pc.index_in(table.column("cell"), plan.column("cell").combine_chunks())
        for name in ("item", "trunk_seed", "branch_seed", *(axis.path for axis in self.config.grid)):
            table = table.append_column(name, plan.column(name).take(at))
        return table

    def tensor(self, file: str, key: str) -> Tensor:
        """A whole stored tensor [rows, D], memory-mapped."""
        mapped = _mapped(str(self.run.root / file))
        return mapped.rows(key, 0, mapped.entries[key].shape[0])

    def results(self, records: bool = True) -> Iterator[CellResult]:
        """Every held cell as the replica handed it to the sums: its own messages, outcomes and, if asked, records."""
        messages: dict[str, list] = {}
        for row in self.table("messages", filter=pc.field("cell").is_valid()).to_pylist():
            messages.setdefault(row["cell"], []).append(row)
        outcomes = {row.pop("cell"): row for row in self.outcomes().to_pylist()}
        routing: dict[str, list] = {}
        recorded = any(f["table"] == "routing" for f in self.commit.files)
        for row in self.table("routing").to_pylist() if recorded else ():
            routing.setdefault(row["cell"], []).append(row)
        for cell in self.cells.values():
            own = sorted(messages.get(cell.id, []), key=lambda row: row["message_idx"])
            start = own[0]["message_idx"] if own else 0
            before = self.run.trunk(cell.trunk) if start else []
            yield CellResult(
                cell=cell,
                item_row=self.unit.items[cell.item],
                messages=[*before, *map(rows.message, own)],
                records=self.run.query(cell=cell.id) if records else [],
                outcomes={name: value for name, value in outcomes.get(cell.id, {}).items() if value is not None},
                num_trunk_messages=start,
                routing=routing.get(cell.id, []) if recorded else None,
            )


@lru_cache(maxsize=8)
def _mapped(path: str) -> tensors.MappedFile:
    return tensors.MappedFile(path)


def shard_state(run: Any, commit: Commit, aggregate: Sum) -> State:
    """A sum's state over one unit's stored data: what the replica streamed, to rounding."""
    shard, state = Shard(run, commit), aggregate.zero()
    if add_shard := getattr(aggregate, "add_shard", None):
        add_shard(state, shard)
        return state
    for result in shard.results(records=getattr(aggregate, "reads_records", True)):
        aggregate.add(state, result)
    return state


def recompute(run: Any, aggregate: Sum) -> State:
    """A sum's state over all committed data, unit by unit, in order of unit id."""
    state = aggregate.zero()
    for commit in run.commits():
        state = aggregate.merge(state, shard_state(run, commit, aggregate))
    return state


def unit_state(root: str, unit: str, name: str, options: dict[str, Any]) -> State:
    """`shard_state` from plain values, for another process."""
    run = _opened(root)
    commit = store.read_commit(root, unit)
    assert commit is not None, f"unit {unit} has no commit"
    aggregate: Any = build([AggregateConfig(name=name, options=options)], run.config)[0]
    return shard_state(run, commit, aggregate)


@lru_cache(maxsize=1)
def _opened(root: str) -> Any:
    from .. import run

    return run.open(root)


def recompute_on_ray(run: Any, aggregate: Sum, options: dict[str, Any], cluster: ClusterConfig) -> State:
    """`recompute` with one Ray task per unit; the states are merged in order of unit id as they arrive."""
    from ..executors.ray import spread

    units = [commit.unit for commit in run.commits()]
    calls = [(str(run.root.absolute()), unit, aggregate.name, options) for unit in units]
    state, early, next_one = aggregate.zero(), {}, 0
    for number, found in spread("sweeps.aggregates.shards:unit_state", calls, cluster):
        early[number] = found
        while next_one in early:
            state = aggregate.merge(state, early.pop(next_one))
            next_one += 1
    return state


def by_key(values: dict[str, Any]) -> str:
    """Some columns' values as one stable text."""
    return json.dumps(values, sort_keys=True, default=str)
