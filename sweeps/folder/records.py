"""Finds activations and routing of a run folder: by address, memory-mapped, or as one array."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch

from interlens.interp.activation_cache import ActivationCache
from interlens.interp.expert_load import RoutingStats

from ..errors import did_you_mean
from . import names, rows, schemas, tensors

if TYPE_CHECKING:
    from torch import Tensor

    from interlens.interp.activation_cache import ActivationRecord

    from .store import Store


FILTERS = ("cell", "trunk", "participant", "message_idx", "layer", "site", "model", "pool", "selection", "source")


class Committed(Protocol):
    """What records are read from: a run folder."""

    @property
    def store(self) -> Store: ...

    @property
    def captures(self) -> Sequence[Committed]:
        """Run folders inside this one whose records are read along."""
        ...

    @property
    def cells(self) -> pa.Table: ...

    @property
    def planned_columns(self) -> tuple[str, ...]: ...

    def dataset(self, name: str, files: Sequence[str] | None = None) -> ds.Dataset: ...

    def plan_row(self, cell: str) -> dict[str, Any]: ...


class Records:
    """The activations and routing of a run folder."""

    def __init__(self, run: Committed):
        self.run = run

    def query(self, *, where: Any = None, **filters: Any) -> list[ActivationRecord]:
        """Records that match, in stored order, their tensors memory-mapped: see `RunFolder.query`."""
        return [self._record(row) for row in self.matching(where, filters).to_pylist()]

    def records_of(self, **filters: Any) -> list[ActivationRecord]:
        """As `query`, where there may be none."""
        return [self._record(row) for row in self._index(None, filters).to_pylist()]

    def matching(self, where: Any, filters: Mapping[str, Any]) -> pa.Table:
        table = self._index(where, filters)
        if not table.num_rows:
            for name, value in filters.items():
                self._check_exists(name, value)
        return table

    def _check_exists(self, name: str, value: Any) -> None:
        """KeyError where no record (a cell or trunk: no row of the plan) has this value; a run without any has none."""
        planned = name in ("cell", "trunk") and value is not None
        known = pc.unique(self.run.cells[name] if planned else self._index(None, {})[name]).to_pylist()
        given = list(value) if isinstance(value, (list, tuple, set)) else [value]
        if known and not set(given) & set(known):
            shown = sorted((str(k) for k in known), key=lambda k: (len(k), k))
            more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
            raise KeyError(
                f"no {name} {', '.join(map(str, given))} in {self.run.store}; it has: {', '.join(shown[:8])}{more}"
            )

    def at(self, **filters: Any) -> Tensor:
        """The tensor of exactly one record, else KeyError saying how many and what distinguishes them."""
        table = self._index(filters.pop("where", None), filters)
        if table.num_rows == 1:
            return self._record(table.to_pylist()[0]).tensor
        differ = [
            f"{name}: {', '.join(map(str, values[:6]))}"
            for name in FILTERS
            if name in table.column_names and len(values := pc.unique(table[name]).to_pylist()) > 1
        ]
        given = ", ".join(f"{k}={v!r}" for k, v in filters.items()) or "no filter"
        hint = f"; they differ in {'; '.join(differ)}" if differ else ""
        raise KeyError(f"{table.num_rows} records for {given}{hint}")

    def cache(self, cell: str) -> ActivationCache:
        """An ActivationCache of a cell's records, its trunk's included."""

        trunk = self.run.plan_row(cell)["trunk"]
        cache = ActivationCache()
        cache.add_batch([*self.records_of(trunk=trunk, cell=None), *self.records_of(cell=cell)])
        return cache

    def matrix(self, file: str, key: str) -> Tensor:
        """A whole stored tensor [rows, D], memory-mapped. `file` and `key`: as in `records`."""
        mapped = self._mapped(file)
        return mapped.rows(key, 0, mapped.entries[key].shape[0])

    def _index(self, where: Any, filters: Mapping[str, Any]) -> pa.Table:
        expression = _expression(where, filters, FILTERS)
        found = [self.run.dataset("records").to_table(filter=expression)]
        for added in self.run.captures:
            table = added.dataset("records").to_table(filter=expression)
            inside = f"{names.capture(added.store.name)}/"
            column = pc.binary_join_element_wise(inside, table["file"], "")
            found.append(table.set_column(table.column_names.index("file"), "file", column))
        return pa.concat_tables(found) if len(found) > 1 else found[0]

    def _record(self, row: Mapping[str, Any]) -> ActivationRecord:
        return rows.record(row, self._mapped(row["file"]).rows(row["key"], row["row_start"], row["row_end"]))

    @functools.lru_cache(maxsize=256)  # noqa: B019 (maps live as long as somebody uses their tensors)
    def _mapped(self, file: str) -> tensors.TensorFile:
        return tensors.open_file(self.run.store, file)

    def routing_stats(self, *, where: Any = None, **filters: Any) -> RoutingStats:
        """Routing of everything that matches, merged: see `RunFolder.routing_stats`."""

        if planned := {name: filters.pop(name) for name in list(filters) if name in self.run.planned_columns}:
            filters["cell"] = self.run.cells.filter(_expression(None, planned, self.run.planned_columns))[
                "cell"
            ].to_pylist()
        expression = _expression(where, filters, (*schemas.ROUTING.names, *self.run.planned_columns))
        table = self.run.dataset("routing").to_table(filter=expression)
        whole = table.filter(pc.is_null(table["message_idx"]))
        table = whole if whole.num_rows and "message_idx" not in filters else table
        if not table.num_rows:
            raise KeyError(
                f"no routing for {filters | planned}; this run has {self.run.dataset('routing').count_rows()} rows"
            )
        layers = tuple(sorted(pc.unique(table["layer"]).to_pylist()))
        load, mass, tokens = [], [], set()
        for layer in layers:
            part = table.filter(pc.equal(table["layer"], layer))
            each = part["tokens"].to_numpy()
            counts = np.stack(part["counts"].to_numpy(zero_copy_only=False)).sum(0)
            load.append(counts / counts.sum())
            scores = (
                None
                if part["mass"].null_count
                else np.stack([np.asarray(m, np.float64) for m in part["mass"].to_pylist()])
            )
            mass.append(None if scores is None else (scores * each[:, None]).sum(0) / each.sum())
            tokens.add(int(each.sum()))
        kept = None if any(m is None for m in mass) else torch.from_numpy(np.stack(mass))
        top_k = pc.unique(table["top_k"]).to_pylist()
        if len(tokens) > 1 or len(top_k) > 1:
            raise ValueError(f"layers with {sorted(tokens)} tokens and top_k {top_k} do not merge; filter by model")
        return RoutingStats(torch.from_numpy(np.stack(load)), kept, layers, tokens.pop(), top_k[0])


def _expression(where: Any, filters: Mapping[str, Any], known: Sequence[str]) -> Any:
    """Filters as a pyarrow expression: a value, any of several, or None for null."""
    if where is not None and not isinstance(where, pc.Expression):
        raise TypeError(
            f"where is {where!r}; it must be a pyarrow expression, such as pyarrow.compute.field('layer') > 8 "
            "(texts as in `sweeps export --where` choose there, and in aggregates)"
        )
    expression = where
    for name, value in filters.items():
        if name not in known:
            raise KeyError(f"no filter {name!r}{did_you_mean(name, known)}")
        field = pc.field(name)
        many = isinstance(value, (list, tuple, set))
        part = field.is_null() if value is None else field.isin(list(value)) if many else field == value
        expression = part if expression is None else expression & part
    return expression
