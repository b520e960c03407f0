"""What one unit has committed, as aggregates read it: in memory that does not grow with the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..folder import analyses, files, rows, schemas
from ..folder import names as folder_names
from ..folder.reader import RunFolder
from ..folder.store import within
from .base import CellResult
from .columns import short_names
from .source import POOLS

if TYPE_CHECKING:
    from ..folder.commits import Commit


INDEX = (
    "cell", "trunk", "participant", "message_idx", "layer", "pool", "selection", "num_pooled", "removed", "phases", "file",
    "key", "row_start", "row_end",
)  # fmt: skip
"""Columns of `records` that an index has, besides the site."""

TEXTS = ["cell", "trunk", "participant", "pool", "selection", "file", "key"]


class Shard:
    """The committed tables and tensors of one unit, with the cells of the plan they belong to.

    It answers what `columns` asks of a run, for these cells only. `base`: the run to whose `matrix` its index belongs,
    where `run` is what `sweeps capture` added to it.
    """

    def __init__(self, run: RunFolder, commit: Commit, base: RunFolder | None = None):
        self.run, self.commit, self.config = run, commit, run.config
        self.base, self._inside = (run, "") if base is None else (base, f"{folder_names.capture(run.store.name)}/")

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
        files = [f["path"] for f in self.commit.files if f["table"] == name]
        return self.run.dataset(name, files).to_table(columns=columns, filter=filter)

    def outcomes(self) -> pa.Table:
        """Cell and one column per analyzer value."""
        table = self.table("outcomes")
        pairs = zip(table.column("numbers").to_pylist(), table.column("texts").to_pylist(), strict=True)
        found = [dict(numbers or ()) | dict(texts or ()) for numbers, texts in pairs]
        cells = table.column("cell").to_pylist()
        if later := self.run.analysed:
            cells, found = analyses.together(cells, found, later, self.commit.cells)
        names = dict.fromkeys(name for row in found for name in row)
        values = {name: pa.array([row.get(name) for row in found]) for name in names}
        return pa.table({"cell": pa.array(cells, pa.string()), **values})

    def index(self, names: Iterable[str], pools: Sequence[str | None] = POOLS) -> pa.Table:
        """The records of cells (a trunk's own left out): where each lies, and the columns that `names` are found by.

        Texts are dictionaries, so that thousands of records cost little more than their distinct values. With `pools`
        others than these may be left out.
        """
        names = {"cell", "file", "key", "row_start", "row_end", *names}
        if any(name.startswith(("message.", "label.")) for name in names):
            names.add("message_idx")
        table = self._records([name for name in INDEX if name in names], pools)
        plan = self.run.plan.rows(self._planned)
        cells = table["cell"].combine_chunks()
        at = pc.index_in(cells.dictionary, plan["cell"].combine_chunks()).take(cells.indices)
        shorts = short_names([axis.path for axis in self.config.grid])
        if any(name.startswith("item.") for name in names):
            names.add("item")
        for name in sorted({shorts.get(name, name) for name in names}):
            if name in plan.column_names and name not in table.column_names:
                table = table.append_column(name, plan[name].combine_chunks().dictionary_encode().take(at))
        return table

    def _records(self, columns: list[str], pools: Sequence[str | None]) -> pa.Table:
        """Columns of this unit's records of cells, and their site."""
        found = []
        for file in self.commit.files:
            if file["table"] == "records":
                store = self.run.store
                with pq.ParquetFile(
                    store.arrow(file["path"]), filesystem=store.arrow_fs, read_dictionary=TEXTS,
                    page_checksum_verification=True,
                ) as opened:  # fmt: skip
                    groups = _groups(opened.metadata, pools)
                    table = opened.read_row_groups(groups, columns, use_threads=False)  # an older version may lack some
                if self._inside:
                    files = table["file"].combine_chunks()
                    moved = pc.binary_join_element_wise(self._inside, files.dictionary, "")
                    moved = pa.DictionaryArray.from_arrays(files.indices, moved)
                    table = table.set_column(table.column_names.index("file"), "file", moved)
                site = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int32), [_site(file["path"])])
                table = table.append_column("site", site)
                found.append(table.filter(table["cell"].is_valid()) if table["cell"].null_count else table)
        if found:
            return pa.concat_tables(found)
        text = pa.dictionary(pa.int32(), pa.string())
        types = {name: text if name in (*TEXTS, "site") else schemas.RECORDS.field(name).type for name in columns}
        return pa.table({name: pa.array([], kind) for name, kind in {**types, "site": text}.items()})

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
                records=self.run.records_of(cell=cell.id) if records else [],
                outcomes={name: value for name, value in outcomes.get(cell.id, {}).items() if value is not None},
                num_trunk_messages=start,
                routing=routing.get(cell.id, []) if recorded else None,
            )


class ShardedRun(RunFolder):
    """A run folder as aggregates read it: one shard per committed unit."""

    @cached_property
    def item_rows(self) -> dict[str, Any]:
        """Item id -> its row, of all parts of the plan."""
        rows: dict[str, Any] = {}
        for part in within(self.store.entries(folder_names.INPUTS), "items-", ".jsonl"):
            with self.store.open(folder_names.items(part)) as lines:
                rows.update({row["id"]: row for row in map(files.parsed, lines)})
        return rows

    def shards(self, added: bool = True) -> Iterator[Shard]:
        """What each unit holds, one after the other, in order of unit id; then, with `added`, what captures added."""
        for commit in self.commits():
            yield Shard(self, commit)
        for capture in self.captures if added else ():
            for commit in capture.commits():
                yield Shard(capture, commit, base=self)


def _leaves(kind: pa.DataType) -> int:
    """Columns of a Parquet file that a type takes."""
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


POOL = sum(_leaves(field.type) for field in itertools.takewhile(lambda f: f.name != "pool", schemas.RECORDS))
"""Which of a file's columns `pool` is."""


def _groups(about: pq.FileMetaData, pools: Sequence[str | None]) -> list[int]:
    """The row groups that may hold records of these pools."""
    return [
        number for number in range(about.num_row_groups)
        if about.num_columns <= POOL or _may_hold(about.row_group(number).column(POOL), pools)
    ]  # fmt: skip


def _may_hold(column: Any, pools: Sequence[str | None]) -> bool:
    """Whether a column chunk, of `pool` unless the file is of another version, may have one of these values."""
    known = column.statistics
    if column.path_in_schema != "pool" or known is None:
        return True
    if None in pools and known.null_count:
        return True
    return known.has_min_max and any(pool is not None and known.min <= pool <= known.max for pool in pools)


def _site(path: str) -> str:
    """The site in a path `records/model=<m>/site=<s>/...`."""
    return unquote(path.split("/")[2].removeprefix("site="))
