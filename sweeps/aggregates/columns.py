"""Names that expressions may use, and the row of values of one record: the same on replicas and over stored tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .expressions import Row

if TYPE_CHECKING:
    import pyarrow as pa

    from . import CellResult

FIXED = ("cell", "trunk", "item", "trunk_seed", "branch_seed", "participant", "message_idx", "layer", "site", "pool")
"""Columns every record has; beside them every axis by its path, and `item.<column>` of the scenario row."""


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


def with_short_names(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Axes by path, and by their last part where that is unambiguous (`coef` for `intervention.coef`)."""
    row = dict(condition)
    shorts = [path.rsplit(".", 1)[-1] for path in condition]
    for path, short in zip(condition, shorts, strict=True):
        if shorts.count(short) == 1 and short not in FIXED:
            row.setdefault(short, condition[path])
    return row


def table_rows(table: pa.Table, axes: Sequence[str]) -> Iterator[Row]:
    """Rows of `Run.vectors`' table with the names expressions know; trunk records (no cell) come as they are."""
    for row in table.to_pylist():
        yield {**row, **with_short_names({path: row.get(path) for path in axes})}


def check_known(names: frozenset[str], axes: Sequence[str], source: str) -> None:
    """ValueError for a name that no cell of this configuration has; item and outcome columns are taken on trust."""
    known = {*FIXED, *with_short_names(dict.fromkeys(axes))}
    for name in sorted(names):
        if name not in known and not name.startswith(("item.", "outcome.")):
            raise ValueError(f"no column {name!r} in {source!r}; there are: {', '.join(sorted(known))}, item.<column>")
