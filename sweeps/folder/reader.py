"""Reads a run folder: lazily, memory-mapped, trusting only commits.

What no commit names does not exist here. A cell that failed and was retried is what its deepest commit says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .. import errors
from ..config.schema import SweepConfig
from ..errors import ConfigError, did_you_mean
from . import analyses, names, rows, schemas, tensors
from .commits import Commit, list_commits
from .files import read_json
from .paths import parts
from .plan_reader import PlanFile
from .records import Records
from .store import Remote, Where, open_store, within

if TYPE_CHECKING:
    from torch import Tensor

    from interlens.interp.activation_cache import ActivationCache, ActivationRecord
    from interlens.interp.expert_load import RoutingStats
    from interlens.message import Message


_CHECKED = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)

TABLES = {
    "messages": schemas.MESSAGES,
    "records": schemas.RECORDS,
    "outcomes": schemas.OUTCOMES,
    "failures": schemas.FAILURES,
    "routing": schemas.ROUTING,
}


class RunFolder:
    """One run folder, as far as it is committed when it is first read; `refresh` looks again."""

    def __init__(self, path: Where):
        self.store = open_store(path)
        if not self.store.exists(names.RUN):
            raise ConfigError(f"{str(path)!r} is no run folder: it has no {names.RUN}")
        self.about: dict[str, Any] = read_json(self.store, names.RUN)
        version = self.about.get("schema_version")
        if version not in schemas.READABLE:
            raise ConfigError(
                f"{str(path)!r} has schema version {version}; this version reads {', '.join(map(str, schemas.READABLE))}"
            )

    @property
    def root(self) -> Path | Remote:
        """The folder's path or URL."""
        return self.store.root

    def __repr__(self) -> str:
        counts = self.counts
        return f"{type(self).__name__}({str(self.root)!r}: {', '.join(f'{n} {state}' for state, n in counts.items())} cells)"

    def refresh(self) -> Self:
        """The same folder, looked at again."""
        return type(self)(self.store)

    # ---- what was planned and what became of it

    @cached_property
    def config(self) -> SweepConfig:
        """As the run was last started or extended."""
        found = within(self.store.entries(), "config-", ".yaml")
        if not found:
            raise errors.Damaged(f"{str(self.root)!r} has no config-<k>.yaml; restore it from a copy of the run")
        return self.plan.config(found[-1])

    def config_of(self, part: int) -> SweepConfig:
        """As a part of the plan entered the run."""
        return self.plan.config(part)

    @cached_property
    def plan(self) -> PlanFile:
        return PlanFile(self.store)

    @cached_property
    def _commits(self) -> list[Commit]:
        return list(list_commits(self.store))

    def commits(self) -> Iterator[Commit]:
        """Every commit, in order of unit id: a unit before its children."""
        return iter(self._commits)

    @cached_property
    def _totals(self) -> tuple[list[tuple[str, str]], dict[str, int]]:
        """(table, path) of every committed file, and cells by state, from one look at each commit: no id is kept."""
        files: list[tuple[str, str]] = []
        done, failed = 0, {}
        for commit in self.__dict__.get("_commits") or list_commits(self.store):
            files += [(file["table"], file["path"]) for file in commit.files]
            done += len(commit.cells)
            failed[commit.unit] = len(commit.failed)
        still = sum(count for unit, count in failed.items() if f"{unit}.r" not in failed)
        pending = self.plan.num_cells - done - still
        if pending < 0 and {unit.split(".")[0] for unit in failed} - {*self.plan.unit_names}:
            raise errors.Damaged(f"the plan of {str(self.root)!r} has {-pending} cells fewer than its commits; a part of "
                                "plan/ is missing: restore it from a copy of the run")  # fmt: skip
        return files, {"done": done, "failed": still, "pending": pending}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of the grid: columns of `cells`."""
        return tuple(name for name in self.cells.column_names if name not in (*schemas.PLAN.names, "donors", "state"))

    @cached_property
    def cells(self) -> pa.Table:
        """One row per planned cell: plan columns, every axis, and `state`: done | failed | pending. `.to_pandas()`."""
        table = self.plan.table()
        done = pa.array([cell for c in self._commits for cell in c.cells], pa.string())
        again = {c.unit for c in self._commits if c.unit.endswith(".r")}
        failed = [cell for c in self._commits if f"{c.unit}.r" not in again for cell in c.failed]
        failed = pa.array(failed, pa.string())
        state = pc.if_else(pc.is_in(table["cell"], failed), "failed", "pending")
        return table.append_column("state", pc.if_else(pc.is_in(table["cell"], done), "done", state))

    @property
    def counts(self) -> dict[str, int]:
        """Cells by state: done, failed, pending."""
        return dict(self._totals[1])

    @cached_property
    def analysed(self) -> dict[str, dict[str, Any]]:
        """Cell -> outcomes that `sweeps analyze` computed afterwards; they stand over those the cell was committed with."""
        return analyses.outcomes(self.store)

    @property
    def analyses_failed(self) -> int:
        """How many analyzers and judges have no value on finished cells: text outcomes `failed.<name>` say why."""
        if not self.analysed and not any(commit.counters.get("analyses_failed") for commit in self._commits):
            return 0
        table = self.outcomes()
        return sum(
            len(table) - table[name].null_count for name in table.column_names if name.startswith(analyses.FAILED)
        )

    # ---- tables

    def files(self, table: str) -> list[str]:
        """Absolute paths of the committed files of messages, records, activations, stats, outcomes or failures."""
        return [self.full_path(path) for path in self.paths(table)]

    def paths(self, table: str) -> list[str]:
        """As `files`, relative to the folder."""
        return [path for name, path in self._totals[0] if name == table]

    def full_path(self, path: str) -> str:
        """The absolute path of a file of this folder. Damaged: it lies outside."""
        parts(self.store, path)
        return str(self.root / path)

    def dataset(self, name: str, files: Sequence[str] | None = None) -> ds.Dataset:
        """A committed table as an Arrow dataset with its own schema (records: model and site from the folder names).

        `files`: some of its committed files, relative to the folder.
        """
        if name not in TABLES:
            raise KeyError(f"no table {name!r}{did_you_mean(name, TABLES)}")
        schema, partitioning = TABLES[name], None
        if name == "records":
            schema = pa.schema([*schema, *schemas.RECORD_PARTITIONS])
            partitioning = ds.partitioning(schemas.RECORD_PARTITIONS, flavor="hive")
        if files is None:
            files = self.paths(name)
        found = [self.store.arrow(path) for path in files]
        base = self.store.arrow_base
        return ds.dataset(found, schema=schema, format=_CHECKED, partitioning=partitioning,
                          filesystem=self.store.arrow_fs, partition_base_dir=base)  # fmt: skip

    def table(self, name: str, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """A committed table (messages, records, outcomes, failures) with its schema; `filter`: a pyarrow expression.

        `failures` has only what still is failed.
        """
        table = self.dataset(name).to_table(columns=columns, filter=filter)
        if name == "failures" and columns is None:
            done = pa.array([cell for c in self._commits for cell in c.cells], pa.string())
            held = pa.array(list(self._trunk_holder), pa.string())
            trunk_held = pc.and_(pc.is_null(table["cell"]), pc.is_in(table["trunk"], held))
            table = table.filter(pc.invert(pc.or_(pc.is_in(table["cell"], done), trunk_held)))
        return table

    def outcomes(self) -> pa.Table:
        """One row per finished cell with outcomes: cell, item, axes, seeds, and every analyzer value as a column."""
        table = self.table("outcomes")
        pairs = zip(*(table[c].to_pylist() for c in ("numbers", "texts")), strict=True)
        found = [dict(numbers or ()) | dict(texts or ()) for numbers, texts in pairs]
        if self.analysed:
            cells, found = analyses.together(
                table["cell"].to_pylist(), found, self.analysed, self.cells["cell"].to_pylist()
            )
            at = pc.index_in(pa.array(cells, pa.string()), self.cells["cell"].combine_chunks())
            table = self.cells.select(["cell", "trunk"]).take(at)
        given = list(dict.fromkeys(name for row in found for name in row))
        joined = self.joined(table.select(["cell", "trunk"]))
        for name in given:
            taken = name if name not in joined.column_names else f"outcome.{name}"
            joined = joined.append_column(taken, pa.array([row.get(name) for row in found]))
        return joined

    def joined(self, table: pa.Table) -> pa.Table:
        """`table` with item, seeds and axes of its cells (of a trunk's own rows: item and trunk seed)."""
        by_cell = self.cells.take(pc.index_in(table["cell"], self.cells["cell"].combine_chunks()))
        first = pc.index_in(table["trunk"], self.cells["trunk"].combine_chunks())
        by_trunk = self.cells.take(first)
        for name in ("item", "trunk_seed"):
            table = table.append_column(name, pc.coalesce(by_cell[name], by_trunk[name]))
        for name in ("branch_seed", *self.axes):
            table = table.append_column(name, by_cell[name])
        return table

    # ---- conversations

    def messages(self, cell: str) -> list[Message]:
        """The whole conversation of a cell, its trunk's messages first, with `fed` restored. KeyError: not finished."""
        commit = self._cell_commit(cell)
        own = self._message_rows(commit, pc.field("cell") == cell)
        return [*self._before(cell), *map(rows.message, own)]

    def num_trunk_messages(self, cell: str) -> int:
        """How many of a cell's messages are its trunk's."""
        return len(self._before(cell))

    def _before(self, cell: str) -> list[Message]:
        """What the trunk of a finished cell says; nothing where there are no trunks. Damaged: its commit is gone."""
        trunk, unit = self._trunk_of(cell), self.plan_row(cell)["unit"]
        if trunk in self._trunk_holder:
            return self.trunk(trunk)
        if self.plan.on_trunks(unit):
            raise errors.Damaged(
                f"cell {cell} stands on trunk {trunk}, and no commit in {str(self.root)!r} holds it; restore _commits/ from "
                "a copy, or let the cell run again: `sweeps verify RUN --reopen`"
            )
        return []

    def trunk(self, trunk: str) -> list[Message]:
        """The committed messages of a trunk, verbatim. KeyError where no commit holds it."""
        if trunk not in self._trunk_holder:
            raise KeyError(f"no commit holds trunk {trunk!r}")
        return self._trunk_messages(self._trunk_holder[trunk], trunk)

    def _trunk_messages(self, commit: Commit, trunk: str) -> list[Message]:
        found = self._message_rows(commit, (pc.field("trunk") == trunk) & pc.field("cell").is_null())
        return [rows.message(row) for row in found]

    def _message_rows(self, commit: Commit, filter: Any) -> list[dict[str, Any]]:
        files = [f["path"] for f in commit.files if f["table"] == "messages"]
        found = self.dataset("messages", files).to_table(filter=filter).to_pylist() if files else []
        return sorted(found, key=lambda row: row["message_idx"])

    def unit_messages(self, unit: str) -> dict[str, list[Message]]:
        """Cell -> its own messages, after its trunk, of the finished cells of a unit of the plan; read at once."""
        found: dict[str, list[Message]] = {}
        for commit in self._cell_units.get(unit, []):
            for row in self._message_rows(commit, pc.field("cell").is_valid()):
                found.setdefault(row["cell"], []).append(rows.message(row))
            found |= {cell: found.get(cell, []) for cell in commit.cells}
        return found

    def unit_outcomes(self, unit: str) -> dict[str, dict[str, Any]]:
        """Cell -> its outcomes, of the finished cells of a unit of the plan that have some."""
        files = [f["path"] for c in self._cell_units.get(unit, []) for f in c.files if f["table"] == "outcomes"]
        table = self.dataset("outcomes", files).to_table() if files else pa.table({})
        return {row["cell"]: dict(row["numbers"]) | dict(row["texts"]) for row in table.to_pylist()}

    @cached_property
    def held_cells(self) -> frozenset[str]:
        """The finished cells."""
        return frozenset(cell for c in self._commits for cell in c.cells)

    @cached_property
    def held_trunks(self) -> frozenset[str]:
        """The trunks that some commit holds."""
        return frozenset(self._trunk_holder)

    @cached_property
    def captures(self) -> list[Self]:
        """What `sweeps capture` added: run folders of the same cells, whose records `query`, `at`, `cache`, `vectors` and
        aggregates over records read along."""
        folders = [names.capture(name) for name in self.store.entries(names.CAPTURES)]
        return [type(self)(self.store.sub(f)) for f in folders if self.store.exists(f"{f}/{names.RUN}")]

    @cached_property
    def _trunk_holder(self) -> dict[str, Commit]:
        found: dict[str, Commit] = {}
        for c in self._commits:
            for trunk in c.trunks:
                found.setdefault(trunk, c)
        return found

    @cached_property
    def _cell_units(self) -> dict[str, list[Commit]]:
        """Unit of the plan -> its commits, the deepest last."""
        found: dict[str, list[Commit]] = {}
        for c in self._commits:
            found.setdefault(c.unit.split(".")[0], []).append(c)
        return found

    def plan_row(self, cell: str) -> dict[str, Any]:
        """The row of `cells` of one cell. KeyError where there is none."""
        at = pc.index(self.cells["cell"], cell).as_py()
        if at < 0:
            raise KeyError(f"no cell {cell!r} in {str(self.root)!r}; `cells` lists them")
        return self.cells.slice(at, 1).to_pylist()[0]

    def find(self, beginning: str) -> str:
        """The one cell whose id begins so. ConfigError where there is none, or several."""
        hits = self.cells.filter(pc.starts_with(self.cells["cell"], beginning))["cell"].to_pylist()
        if len(hits) != 1:
            some = hits or self.cells["cell"].slice(0, 3).to_pylist()
            raise ConfigError(
                f"{len(hits) or 'no'} cells begin with {beginning!r}; "
                f"{'such as' if hits else 'there are'} {', '.join(some[:3])}, ..."
            )
        return hits[0]

    def _trunk_of(self, cell: str) -> str:
        return self.plan_row(cell)["trunk"]

    def _cell_commit(self, cell: str) -> Commit:
        row = self.plan_row(cell)
        for commit in reversed(self._cell_units.get(row["unit"], [])):
            if cell in commit.cells:
                return commit
        raise KeyError(f"cell {cell!r} is {row['state']}; only finished cells have messages")

    # ---- activations and routing

    @property
    def planned_columns(self) -> tuple[str, ...]:
        """Columns of `cells` that say what a cell is: item, seeds and axes."""
        left = ("cell", "trunk", "unit", "cast", "owned", "state")
        return tuple(name for name in self.cells.column_names if name not in left)

    @cached_property
    def records(self) -> Records:
        """Where activations and routing are found."""
        return Records(self)

    def query(self, *, where: Any = None, **filters: Any) -> list[ActivationRecord]:
        """Records that match, in stored order, their tensors memory-mapped.

        Filters: cell, trunk, participant, message_idx, layer, site, model, pool, selection, source; a value, a list of
        values, or None where None is a value (cell: the trunk's own; pool: unpooled). `where`: a pyarrow expression
        besides. KeyError, saying what there is, for a value that none of them has.
        """
        return self.records.query(where=where, **filters)

    def records_of(self, **filters: Any) -> list[ActivationRecord]:
        """As `query`, where there may be none."""
        return self.records.records_of(**filters)

    def at(self, **filters: Any) -> Tensor:
        """The tensor of exactly one record, else KeyError saying how many and what distinguishes them."""
        return self.records.at(**filters)

    def cache(self, cell: str) -> ActivationCache:
        """An ActivationCache of a cell's records, its trunk's included."""
        return self.records.cache(cell)

    def matrix(self, file: str, key: str) -> Tensor:
        """A whole stored tensor [rows, D], memory-mapped. `file` and `key`: as in the table `records`."""
        return self.records.matrix(file, key)

    def routing_stats(self, *, where: Any = None, **filters: Any) -> RoutingStats:
        """Routing of everything that matches, merged. Filters: columns of `routing`, item, seeds and axes
        (`framing="warm"`); `where`: a pyarrow expression.

        A trunk's own rows have cell None; filters by item, seeds or axes name cells, and so leave them out. KeyError
        where nothing matches. Rows of one message and rows of whole cells are not mixed: without message_idx only the
        latter count where there are any.
        """
        return self.records.routing_stats(where=where, **filters)

    def sums(self, name: str) -> Iterator[Mapping[str, np.ndarray]]:
        """The committed states of a sum, one per unit that has it, in order of unit id."""
        for path in self.paths("stats"):
            mapped = tensors.open_file(self.store, path)
            keys = [key for key in mapped.entries if key.startswith(f"{name}/")]
            if keys:
                yield {key[len(name) + 1 :]: mapped.rows(key, 0, mapped.entries[key].shape[0]).numpy() for key in keys}
