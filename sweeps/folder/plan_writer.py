"""Writes a part of the plan: one Parquet row per cell, unit by unit, without holding them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..config.schema import AxisConfig
from . import files, names, schemas
from .cells import Unit
from .schemas import CONFIG_SHA256, ITEMS_SHA256
from .store import Where, open_store


def schema(axes: Sequence[AxisConfig], patched: bool = False) -> pa.Schema:
    """The plan's columns, then one per axis: float64, bool or string; `donors` where there are patches."""
    columns = list(schemas.PLAN) + [pa.field(axis.path, _axis_type(axis)) for axis in axes]
    columns += [pa.field("donors", pa.list_(pa.string()))] if patched else []
    return pa.schema(columns, metadata=schemas.PLAN.metadata)


def _axis_type(axis: AxisConfig) -> pa.DataType:
    if all(isinstance(label, bool) for label in axis.labels):
        return pa.bool_()
    numbers = all(isinstance(label, (int, float)) and not isinstance(label, bool) for label in axis.labels)
    return pa.float64() if numbers else pa.string()


def write(root: Where, part: int, axes: Sequence[AxisConfig], units: Iterable[Unit], patched: bool = False) -> int:
    """Write `plan/part-<part>.parquet` and the items of its units; the number of cells. Streamed.

    Where the folder has the part's `config-<part>.yaml`, its hash is kept. patched: cells may have donors.
    """
    columns, kinds = schema(axes, patched), {axis.path: _axis_type(axis) for axis in axes}
    store, sealed = open_store(root), {}
    if store.exists(names.config(part)):
        sealed[CONFIG_SHA256] = hashlib.sha256(store.read(names.config(part))).hexdigest()
    with (
        store.create(names.part(part)) as out,
        pq.ParquetWriter(out, columns, **schemas.LAYOUT) as writer,
    ):
        with store.create(names.items(part)) as rows_out:
            count, sealed[ITEMS_SHA256] = _write_units(writer, rows_out, units, columns, kinds, patched)
        writer.add_key_value_metadata(sealed)
    return count


def _write_units(writer: pq.ParquetWriter, rows_out: IO[bytes], units: Iterable[Unit], columns: pa.Schema,
                 kinds: Mapping[str, pa.DataType], patched: bool) -> tuple[int, str]:  # fmt: skip
    """The number of cells, and the sha256 of the items written."""
    count, written, digest, buffer = 0, {}, hashlib.sha256(), []
    for unit in units:
        for item, row in unit.items.items():
            if (known := hash(item)) not in written:
                written[known] = None
                line = files.dump_json(row) + b"\n"
                digest.update(line)
                rows_out.write(line)
        if len(written) > 2 * schemas.ROWS:  # items come in order: what was written long ago is not asked for again
            written = dict.fromkeys(list(written)[schemas.ROWS :])
        buffer += _rows(unit, kinds, patched)
        count += len(unit.cells)
        while len(buffer) >= schemas.ROWS:  # so that row r stands in row group r // schemas.ROWS
            writer.write_table(_table(buffer[: schemas.ROWS], columns), row_group_size=schemas.ROWS)
            buffer = buffer[schemas.ROWS :]
    if buffer:
        writer.write_table(_table(buffer, columns), row_group_size=schemas.ROWS)
    return count, digest.hexdigest()


def _rows(unit: Unit, kinds: Mapping[str, pa.DataType], patched: bool) -> Iterator[tuple]:
    owned, with_cells = set(unit.owns), {cell.trunk for cell in unit.cells}
    fixed = (unit.id, unit.cast)
    known: dict[tuple, tuple] = {}
    for c in unit.cells:
        point = tuple(c.condition.items())
        labels = known.get(point)
        if labels is None:
            labels = known[point] = tuple(_stored(c.condition.get(path), kind) for path, kind in kinds.items())
        yield (
            c.id,
            c.item,
            c.trunk,
            c.trunk_seed,
            c.branch_seed,
            *fixed,
            c.trunk in owned,
            *labels,
            *([list(c.donors)] if patched else []),
        )
    for t in unit.trunks:
        if t.id not in with_cells:
            labels = tuple(_stored(t.condition.get(path), kind) for path, kind in kinds.items())
            yield (None, t.item, t.id, t.seed, None, *fixed, t.id in owned, *labels, *([None] if patched else []))


def _stored(label: Any, kind: pa.DataType) -> Any:
    return str(label) if kind == pa.string() and label is not None else label


def _table(rows: list[tuple], columns: pa.Schema) -> pa.Table:
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), columns, strict=True)]
    return pa.Table.from_arrays(arrays, schema=columns)
