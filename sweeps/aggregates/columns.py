"""Names that expressions may use, and their values: the same on replicas and over stored tables.

Every record has `FIXED`, every axis by its path (and by its last part where that is unambiguous), `item.<column>` of
the scenario row, `outcome.<name>` of the cell, and `message.<field>` of the message it belongs to. Over stored data
also `label.<column>` of a user's table, joined by `cell` and, where it has one, `message_idx`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from ..config.grid import conditions
from ..config.schema import SweepConfig
from ..errors import ConfigError
from ..plan.items import find as items_file
from ..plan.items import read as read_items
from .expressions import Expression

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord

    from .base import CellResult


FIXED = (
    "cell", "trunk", "item", "trunk_seed", "branch_seed", "participant", "message_idx", "layer", "site", "pool", "selection",
)  # fmt: skip

MESSAGE = ("author", "content", "finish_reason", "num_tokens")
"""Fields of `message.<field>`."""

PREFIXES = ("item.", "outcome.", "message.", "label.")


def cell_columns(result: CellResult) -> dict[str, Any]:
    """Columns of a cell: its axes, item, seeds, `item.<column>` and `outcome.<name>`."""
    cell = result.cell
    row: dict[str, Any] = {
        "cell": cell.id,
        "trunk": cell.trunk,
        "item": cell.item,
        "trunk_seed": cell.trunk_seed,
        "branch_seed": cell.branch_seed,
    }
    row.update({f"item.{name}": value for name, value in result.item_row.items()})
    row.update({f"outcome.{name}": value for name, value in result.outcomes.items()})
    row.update(with_short_names(cell.condition))
    return row


def record_columns(result: CellResult, record: ActivationRecord) -> dict[str, Any]:
    """Columns that a record adds to its cell's."""
    row: dict[str, Any] = {
        "participant": record.participant,
        "message_idx": record.message_idx,
        "layer": record.layer,
        "site": record.site,
        "pool": record.pool,
        "selection": record.selection,
    }
    if 0 <= record.message_idx < len(result.messages):
        message = result.messages[record.message_idx]
        values = (
            message.author,
            message.content,
            message.metadata.get("finish_reason"),
            message.metadata.get("n_tokens"),
        )
        row.update({f"message.{name}": value for name, value in zip(MESSAGE, values, strict=True)})
    return row


def with_short_names(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Axes by path, and by their last part where that is unambiguous (`coef` for `intervention.coef`)."""
    row = dict(condition)
    for short, path in short_names(list(condition)).items():
        row.setdefault(short, condition[path])
    return row


def short_names(axes: Sequence[str]) -> dict[str, str]:
    """Last part of an axis's path -> the path, where only one axis ends so and nothing else has that name."""
    shorts = [path.rsplit(".", 1)[-1] for path in axes]
    pairs = zip(shorts, axes, strict=True)
    return {short: path for short, path in pairs if shorts.count(short) == 1 and short not in (*FIXED, *axes)}


def check_known(names: Iterable[str], config: Any, source: str, labels: bool = False) -> None:
    """ValueError for a name that no cell of this configuration has; outcome columns are taken on trust, and those of
    items whose file is not here."""
    axes = [axis.path for axis in config.grid]
    known = {*FIXED, *axes, *short_names(axes), *(f"message.{name}" for name in MESSAGE)}
    trusted = ("outcome.", "label.") if labels else ("outcome.",)
    names = sorted(names)
    items = _item_columns(config.scenario.source) if any(name.startswith("item.") for name in names) else None
    for name in names:
        if name in known or name.startswith(trusted) or (name.startswith("item.") and items is None):
            continue
        if name.startswith("item.") and items is not None:
            if name.removeprefix("item.") not in items:
                raise ValueError(f"no column {name!r} in {source!r}; items have: {', '.join(sorted(items))}")
            continue
        hint = ", label.<column> (with labels: FILE)" if name.startswith("label.") else ""
        raise ValueError(
            f"no column {name!r} in {source!r}; there are: {', '.join(sorted(known))}, item.<column>{hint}"
        )


def _item_columns(source: Any) -> frozenset[str] | None:
    """Columns that some item has; None where the rows cannot be read now."""
    try:
        if isinstance(source, str) and not source.startswith("run:"):
            path = items_file(source)
            return _columns_of(str(path), path.stat().st_mtime_ns)
        return frozenset().union(*read_items(source))
    except (ConfigError, OSError):
        return None


@lru_cache(maxsize=4)
def _columns_of(path: str, changed: int) -> frozenset[str]:
    return frozenset().union(*read_items(path))


def check_met(expression: Expression, grid: Sequence[Any], most: int = 10_000) -> None:
    """ValueError for an expression over axes alone that none of the grid's (first `most`) conditions meets."""
    axes = {axis.path: axis for axis in grid}
    used = {short_names(list(axes)).get(name, name) for name in expression.names}
    if not used or not used <= set(axes):
        return
    points = conditions(tuple(axes[path] for path in sorted(used)))
    seen = list(itertools.islice(points, most + 1))
    if len(seen) > most or any(expression(with_short_names(point)) for point in seen):
        return
    has = "; ".join(f"{path} has {', '.join(map(repr, axes[path].labels))}" for path in sorted(used))
    raise ValueError(f"no condition of the grid meets {expression.source!r}: {has}")


class Tabled(Protocol):
    """What columns are looked up in: a run, or one unit of it."""

    @property
    def config(self) -> SweepConfig: ...

    @property
    def item_rows(self) -> Mapping[str, Mapping[str, Any]]: ...

    def table(self, name: str, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table: ...

    def outcomes(self) -> pa.Table: ...


def axes_of(run: Tabled) -> list[str]:
    """Paths of the grid's axes."""
    return [axis.path for axis in run.config.grid]


def columns(run: Tabled, table: pa.Table, names: Iterable[str], labels: str | None = None) -> pa.Table:
    """The values of `names` for every row of an index table (as `Run.vectors` gives it): one column per name.

    KeyError for a name that is nowhere, listing what there is.
    """
    found = {}
    for name in sorted(set(names)):
        found[name] = _column(run, table, name, labels)
    return pa.table(found) if found else pa.table({"cell": table.column("cell")})


def _column(run: Tabled, table: pa.Table, name: str, labels: str | None) -> Any:
    shorts = short_names(axes_of(run))
    for known in (name, shorts.get(name)):
        if known is not None and known in table.column_names:
            return table.column(known)
    prefix, _, field = name.partition(".")
    if prefix == "item" and field:
        rows = run.item_rows
        return _looked_up(table.column("item"), {item: row.get(field) for item, row in rows.items()})
    if prefix == "outcome" and field:
        outcomes = run.outcomes()
        column = field if field in outcomes.column_names else name
        if column not in outcomes.column_names:
            raise KeyError(f"no outcome {field!r}; there are: {', '.join(_own(outcomes, run)) or 'none'}")
        values = dict(zip(outcomes.column("cell").to_pylist(), outcomes.column(column).to_pylist(), strict=True))
        return _looked_up(table.column("cell"), values)
    if prefix == "message" and field in MESSAGE:
        return _by_message(table, _messages(run, field))
    if prefix == "label" and labels is not None:
        return _label(table, read_labels(labels), field)
    known = [*table.column_names, *shorts, "item.<column>", "outcome.<name>", "message.<field>"]
    raise KeyError(f"no column {name!r}; there are: {', '.join(known)}")


def _own(outcomes: pa.Table, run: Tabled) -> list[str]:
    planned = {"cell", "item", "trunk", "trunk_seed", "branch_seed", *axes_of(run)}
    return [name for name in outcomes.column_names if name not in planned]


def _looked_up(keys: Any, values: Mapping[Any, Any]) -> pa.Array:
    return pa.array([values.get(key) for key in keys.to_pylist()])


def _messages(run: Tabled, field: str) -> dict[tuple[Any, int], Any]:
    stored = {"num_tokens": "tokens"}.get(field, field)
    table = run.table("messages", columns=["cell", "message_idx", stored], filter=pc.field("cell").is_valid())
    values = pc.list_value_length(table.column(stored)) if field == "num_tokens" else table.column(stored)
    keys = zip(table.column("cell").to_pylist(), table.column("message_idx").to_pylist(), strict=True)
    return dict(zip(keys, values.to_pylist(), strict=True))


def _by_message(table: pa.Table, values: Mapping[tuple[Any, int], Any]) -> pa.Array:
    keys = zip(table.column("cell").to_pylist(), table.column("message_idx").to_pylist(), strict=True)
    return pa.array([values.get(key) for key in keys])


def read_labels(path: str) -> pa.Table:
    """A user's CSV or Parquet of labels. ValueError where it lacks a `cell` column or holds a row twice."""
    if not Path(path).is_file():
        raise ValueError(f"labels: no file {path!r}")
    if str(path).endswith(".parquet"):
        table = pq.read_table(path)
    else:
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types={"cell": pa.string()}))
    if "cell" not in table.column_names:
        raise ValueError(f"labels: {path!r} has no column 'cell'; it has: {', '.join(table.column_names)}")
    keys = [name for name in ("cell", "message_idx") if name in table.column_names]
    if table.group_by(keys).aggregate([]).num_rows < table.num_rows:
        raise ValueError(f"labels: {path!r} has two rows for one {' and '.join(keys)}")
    return table


def _label(table: pa.Table, labels: pa.Table, field: str) -> pa.Array:
    if field not in labels.column_names:
        raise KeyError(f"no label {field!r}; the file has: {', '.join(labels.column_names)}")
    values = labels.column(field).to_pylist()
    cells = labels.column("cell").to_pylist()
    if "message_idx" in labels.column_names:
        keys = zip(cells, labels.column("message_idx").to_pylist(), strict=True)
        return _by_message(table, dict(zip(keys, values, strict=True)))
    return _looked_up(table.column("cell"), dict(zip(cells, values, strict=True)))


def evaluated(table: pa.Table, test: Callable[[Mapping[str, Any]], Any]) -> np.ndarray:
    """`test` of every row, [N] of objects; called once per distinct row, so large tables cost no Python per row."""
    if table.num_rows == 0:
        return np.zeros(0, dtype=object)
    codes, firsts = grouped(table)
    distinct = table.take(pa.array(firsts)).to_pylist()
    results = np.empty(len(distinct), dtype=object)
    for i, row in enumerate(distinct):
        results[i] = test(row)
    return results[codes]


def grouped(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Which distinct row each row is, [N], and where each of them stands first, [G]."""
    codes, size = np.zeros(table.num_rows, dtype=np.int64), 1
    for column in table.columns:
        own, count = _codes(column)
        codes *= count
        codes += own
        size *= count
        if size > 4 * len(codes) + 1024:
            _, codes = np.unique(codes, return_inverse=True)
            size = int(codes.max(initial=0)) + 1
    first = np.full(size, -1)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    present = np.flatnonzero(first >= 0)
    number = np.empty(size, dtype=np.int64)
    number[present] = np.arange(len(present))
    return number[codes], first[present]


def _codes(column: Any) -> tuple[np.ndarray, int]:
    """A column as whole numbers, null among them, and how many there may be."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    count = len(column.dictionary)
    indices = pc.fill_null(column.indices, count) if column.null_count else column.indices
    return indices.to_numpy(), count + 1
