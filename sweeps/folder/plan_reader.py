"""The plan of a run folder: `plan/part-<k>.parquet`, one row per cell in plan order, one part per extension.

A part's rows stand unit by unit; a row without a cell is a trunk that its unit samples for others. Item rows lie beside
it in `inputs/items-<k>.jsonl`; the part's footer holds the sha256 of these and of `config-<k>.yaml`, so that no cell can
be run from others than its id was made of. A part appears when both are there. `plan/retries-<k>.json` names the units
that a `run.retry_failed` reopened, so that every later driver holds them open too. Nothing here is ever rewritten.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import errors
from ..config.schema import SweepConfig
from ..errors import ConfigError
from . import files, names, schemas
from .cells import Cell, Trunk, Unit
from .schemas import CONFIG_SHA256, ITEMS_SHA256
from .store import Where, open_store, within


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """A unit of the plan without its cells."""

    id: str
    num_cells: int
    cast: str
    outside: tuple[str, ...]
    """Trunks it needs that another unit of the plan owns."""
    shared: tuple[str, ...] = ()
    """Trunks it needs that another unit of the plan needs too, whoever owns them."""
    part: int = 0
    """With which it entered the plan."""
    donors: Mapping[str, int] = field(default_factory=dict)
    """Other unit -> bitmap of its cells that give activations to cells of this one."""


class PlanFile:
    """Reads a run folder's plan, unit by unit, without holding the cells."""

    def __init__(self, root: Where):
        self.store = open_store(root)
        self._fs = self.store.arrow_fs
        parts = within(self.store.entries(names.PLAN), "part-", ".parquet")
        self.parts = [names.part(number) for number in parts]
        if lost := {*range(len(parts))} - {*parts}:
            raise errors.Damaged(
                f"{names.part(min(lost))} of {str(self.store)!r} is missing; restore it from a copy of the run"
            )

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Every row that is a cell, all parts as one table; an axis that a part did not have is null there."""
        found = []
        if not self.parts:
            raise ConfigError(f"{str(self.store)!r} holds no plan; is it a run folder?")
        for path in self.parts:
            known = self._file(path).schema_arrow.names
            table = self._read(path, None if columns is None else [c for c in columns if c in known])
            found.append(table.filter(pc.is_valid(table["cell"])) if "cell" in table.column_names else table)
        return pa.concat_tables(found, promote_options="permissive")

    @property
    def num_cells(self) -> int:
        """Of all parts."""
        groups = (table["cell"] for part in range(len(self.parts)) for table in self._groups(part, ["cell"]))
        return sum(len(cells) - cells.null_count for cells in groups)

    @property
    def num_items(self) -> int:
        """How many items the cells of all parts are about."""
        found = [self._items(part)[1] for part in range(len(self.parts))]
        return len(np.unique(np.concatenate(found))) if found else 0

    def cell_ids(self) -> np.ndarray:
        """The ids of all cells in plan order, 10 bytes each: see `packed`."""
        rows = sum(self._file(part).metadata.num_rows for part in self.parts)
        found, at = np.empty(rows, "S10"), 0
        for part in range(len(self.parts)):
            for table in self._groups(part, ["cell"]):
                cells = table["cell"].combine_chunks().drop_null()
                if len(cells):
                    begin = np.frombuffer(cells.buffers()[1], np.int32)[cells.offset]
                    found[at : at + len(cells)] = packed(
                        np.frombuffer(cells.buffers()[2], "S20", len(cells), int(begin))
                    )
                    at += len(cells)
        return found[:at]

    def trunk_ids(self) -> set[str]:
        """The ids of all trunks."""
        tables_ = (table for part in range(len(self.parts)) for table in self._groups(part, ["trunk"]))
        return {trunk for table in tables_ for trunk in table["trunk"].unique().to_pylist()}

    def infos(self) -> Iterator[UnitInfo]:
        """The units in plan order, read one row group at a time."""
        outside = self._outside_donors()
        for info in self._infos():
            yield replace(info, donors=outside[info.id]) if info.id in outside else info

    def _infos(self) -> Iterator[UnitInfo]:
        foreign = self._foreign()
        for part in range(len(self.parts)):
            info: UnitInfo | None = None
            for table in self._heads(part):
                for piece in _pieces(table, foreign, part):
                    if info is not None and info.id != piece.id:
                        yield info
                        info = None
                    info = piece if info is None else _joined(info, piece)
            if info is not None:
                yield info

    def _outside_donors(self) -> dict[str, dict[str, int]]:
        """Unit -> other unit -> bitmap of its cells that cells of the first need."""
        wanted: dict[str, set[str]] = {}
        for part in range(len(self.parts)):
            if "donors" not in self._file(self.parts[part]).schema_arrow.names:
                continue
            table = self._read(self.parts[part], ["unit", "cell", "donors"])
            own = dict(zip(table["cell"].to_pylist(), table["unit"].to_pylist(), strict=True))
            for unit, donors in zip(table["unit"].to_pylist(), table["donors"].to_pylist(), strict=True):
                if outside := {d for d in donors or () if d and own.get(d) != unit}:
                    wanted.setdefault(unit, set()).update(outside)
        at = self.locate({donor for donors in wanted.values() for donor in donors})
        found: dict[str, dict[str, int]] = {}
        for unit, donors in wanted.items():
            needed = found.setdefault(unit, {})
            for root, position in (at[donor] for donor in donors):
                needed[root] = needed.get(root, 0) | 1 << position
        return found

    def locate(self, cells: Collection[str]) -> dict[str, tuple[str, int]]:
        """Cell id -> (unit, its position there). KeyError for a cell that the plan does not have."""
        found: dict[str, tuple[str, int]] = {}
        for part in range(len(self.parts)) if cells else ():
            table = self._read(self.parts[part], ["cell", "unit"])
            for row in np.flatnonzero(pc.is_in(table["cell"], value_set=pa.array(list(cells), pa.string()))):
                unit = table["unit"][row].as_py()
                found[table["cell"][row].as_py()] = (unit, int(row) - self._where[unit][1])
        if missing := set(cells) - set(found):
            raise KeyError(f"the plan of {str(self.store)!r} does not have the cells {sorted(missing)[:3]}")
        return found

    def _foreign(self) -> pa.Array:
        """Trunks that some unit needs and does not own."""
        found = [
            table["trunk"].filter(pc.invert(table["owned"])).unique()
            for part in range(len(self.parts))
            if self._has_trunks(part)
            for table in self._heads(part)
        ]
        return pa.concat_arrays(found).unique() if found else pa.array([], pa.string())

    def _heads(self, part: int) -> Iterator[pa.Table]:
        """What `infos` looks at, row group by row group."""
        return self._groups(part, ["unit", "cell", "trunk", "cast", "owned"])

    def _groups(self, part: int, columns: list[str]) -> Iterator[pa.Table]:
        with self._file(self.parts[part]) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=columns)

    def units(self) -> Iterator[Unit]:
        """Every unit whole, in plan order, streamed."""
        for name in self.unit_names:
            yield self.unit(name)

    def on_trunks(self, unit: str) -> list[tuple[str, str]]:
        """(cell, trunk) of the cells of a unit that continue a trunk."""
        part, first, last = self._where[unit]
        if not self._has_trunks(part):
            return []
        rows = self._slice(part, first, last)
        return [
            (c, t) for c, t in zip(rows["cell"].to_pylist(), rows["trunk"].to_pylist(), strict=True) if c is not None
        ]

    @property
    def unit_names(self) -> Iterator[str]:
        """In plan order."""
        return (str(name) for units, _ in self._index for name in units)

    def unit(self, name: str) -> Unit:
        """One unit whole. KeyError where the plan has none of that name."""
        part, first, last = self._where[name]
        rows = self._slice(part, first, last)
        axes = [c for c in rows.column_names if c not in (*schemas.PLAN.names, "donors")]
        donors = rows["donors"].to_pylist() if "donors" in rows.column_names else itertools.repeat(None)
        cells, trunks, owns, needed = [], {}, {}, set()
        on_trunk = [a for a in axes if a.startswith(("trunk.", "scenario.trunk."))]
        columns = {name: rows[name].to_pylist() for name in rows.column_names}
        fixed = zip(*(columns[c] for c in ("cell", "item", "trunk", "trunk_seed", "branch_seed", "owned")), strict=True)
        points = zip(*(columns[axis] for axis in axes), strict=True) if axes else itertools.repeat(())
        known: dict[tuple, dict[str, Any]] = {}
        for (cell, item, trunk, trunk_seed, branch_seed, owned), point, given in zip(
            fixed, points, donors, strict=False
        ):
            condition = known.get(point)
            if condition is None:
                condition = known[point] = {a: v for a, v in zip(axes, point, strict=True) if v is not None}
            if cell is not None:
                cells.append(Cell(id=cell, item=item, trunk=trunk, condition=condition, trunk_seed=trunk_seed,
                                  branch_seed=branch_seed, unit=name, donors=tuple(given or ())))  # fmt: skip
            if trunk not in trunks:
                needed.add(item)
                shared = {a: condition[a] for a in on_trunk if a in condition}
                trunks[trunk] = Trunk(id=trunk, item=item, seed=trunk_seed, condition=shared)
            if owned:
                owns[trunk] = None
        has_trunk = bool(owns) or self._has_trunks(part)
        return Unit(id=name, cells=tuple(cells), trunks=tuple(trunks.values()) if has_trunk else (), owns=tuple(owns),
                    items={item: self.item(part, item) for item in needed}, cast=rows["cast"][0].as_py(),
                    part=part)  # fmt: skip

    def retries(self) -> list[tuple[int, list[str]]]:
        """Every round of retries: the last part of the plan when it began, and the units it reopened."""
        rounds = within(self.store.entries(names.PLAN), "retries-", ".json")
        found = [files.read_json(self.store, names.retries(number)) for number in rounds]
        return [(entry["part"], entry["units"]) for entry in found]

    def reopen(self, units: Sequence[str]) -> None:
        """Write down another round of retries. FileExistsError where another driver does so too."""
        content = {"part": len(self.parts) - 1, "units": list(units)}
        self.store.write_new(names.retries(len(self.retries())), files.dump_json(content))

    def config(self, part: int) -> SweepConfig:
        """The configuration with which a part entered the run. Damaged: it is not what it was then."""
        name = names.config(part)
        plain = files.read_yaml(self.store, name)
        wanted = self._sealed(part).get(CONFIG_SHA256)
        if wanted and hashlib.sha256(self.store.read(name)).hexdigest() != wanted:
            raise errors.Damaged(f"{name} of {str(self.store)!r} was changed; restore it from a copy of the run")
        try:
            return SweepConfig.from_dict(plain)
        except ConfigError as error:
            raise files.damaged(self.store, name, error) from None

    def check_items(self, part: int) -> None:
        """Read a part's items. Damaged: they are not what they were when it was planned."""
        self._items(part)

    def _sealed(self, part: int) -> dict[str, str]:
        """What the footer of a part says of its other files."""
        if part >= len(self.parts):
            return {}
        found = self._file(self.parts[part]).metadata.metadata or {}
        return {key.decode(): value.decode() for key, value in found.items() if key.endswith(b"_sha256")}

    def rows(self, name: str) -> pa.Table:
        """The rows of one unit: the plan's columns and every axis. KeyError where the plan has none of that name."""
        return self._slice(*self._where[name])

    def item(self, part: int, name: str) -> dict[str, Any]:
        """The row of an item."""
        file, hashes, offsets = self._items(part)
        first, last = np.searchsorted(hashes, hash(name)), np.searchsorted(hashes, hash(name), "right")
        with self.store.open(file) as rows:
            for offset in offsets[first:last]:
                rows.seek(int(offset))
                if (row := files.parsed(rows.readline()))["id"] == name:
                    return row
        raise KeyError(f"part {part} of the plan has no item {name!r}")

    @functools.cached_property
    def _index(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per part: unit names in order, and where each starts (one more at the end)."""
        found = []
        for path in self.parts:
            found_names, starts, at = [], [], 0
            with self._file(path) as file:
                for group in range(file.num_row_groups):
                    units = file.read_row_group(group, columns=["unit"])["unit"].combine_chunks().dictionary_encode()
                    first = np.flatnonzero(np.diff(units.indices.to_numpy(), prepend=-1))
                    for start, name in zip(first, units.take(pa.array(first)).to_pylist(), strict=True):
                        if not found_names or found_names[-1] != name:
                            found_names.append(name)
                            starts.append(at + int(start))
                    at += len(units)
            found.append((np.array(found_names, object), np.array([*starts, at])))
        return found

    @functools.cached_property
    def _where(self) -> dict[str, tuple[int, int, int]]:
        return {
            str(name): (part, int(starts[i]), int(starts[i + 1]))
            for part, (units, starts) in enumerate(self._index)
            for i, name in enumerate(units)
        }

    @functools.lru_cache(maxsize=64)  # noqa: B019 (one plan per run)
    def _has_trunks(self, part: int) -> bool:
        config = self.config(part)
        return config.scenario.trunk.turns > 0 or any(axis.is_trunk for axis in config.grid)

    def _slice(self, part: int, first: int, last: int) -> pa.Table:
        groups = range(first // schemas.ROWS, (last - 1) // schemas.ROWS + 1)
        table = pa.concat_tables([self._group(part, group) for group in groups])
        return table.slice(first - groups[0] * schemas.ROWS, last - first)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (one plan per run)
    def _items(self, part: int) -> tuple[str, np.ndarray, np.ndarray]:
        """The file of a part's items; of each the hash of its id, sorted, and where its row begins: 16 bytes an item."""
        name, at, digest = names.items(part), 0, hashlib.sha256()
        hashes, offsets = array("q"), array("q")
        with self.store.open(name) as rows:
            for line in rows:
                try:
                    hashes.append(hash(files.parsed(line)["id"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise files.damaged(self.store, name, error) from None
                offsets.append(at)
                at += len(line)
                digest.update(line)
        if digest.hexdigest() != self._sealed(part).get(ITEMS_SHA256, digest.hexdigest()):
            raise errors.Damaged(f"{name} of {str(self.store)!r} was changed; restore it from a copy of the run")
        found = np.frombuffer(hashes, np.int64) if hashes else np.array([], np.int64)
        order = np.argsort(found, kind="stable")
        return name, found[order], (np.frombuffer(offsets, np.int64) if offsets else found)[order]

    @functools.lru_cache(maxsize=2)  # noqa: B019 (one plan per run; a unit may stand in two)
    def _group(self, part: int, group: int) -> pa.Table:
        with self._file(self.parts[part]) as file:
            return file.read_row_group(group)

    def _file(self, path: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.store.arrow(path), filesystem=self._fs, page_checksum_verification=True)

    def _read(self, path: str, columns: Sequence[str] | None) -> pa.Table:
        return pq.read_table(self.store.arrow(path), columns=columns, filesystem=self._fs,
                             page_checksum_verification=True)  # fmt: skip


def packed(ids: np.ndarray) -> np.ndarray:
    """Ids of 20 hexadecimal digits ("S20") as 10 bytes each ("S10"), in the same order when sorted."""
    digits = ids.view(np.uint8).reshape(len(ids), 20)
    values = (digits & 15) + 9 * (digits >> 6)
    return np.ascontiguousarray(values[:, 0::2] << 4 | values[:, 1::2]).view("S10").reshape(len(ids))


def _pieces(table: pa.Table, foreign: pa.Array, part: int) -> Iterator[UnitInfo]:
    """The units of a row group, as far as they stand in it. `foreign`: trunks that some unit needs and does not own."""
    codes = table["unit"].combine_chunks().dictionary_encode().indices.to_numpy()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    is_cell = table["cell"].is_valid().to_numpy()
    common = pc.is_in(table["trunk"], value_set=foreign).to_numpy() if len(foreign) else np.zeros(len(codes), bool)
    for first, last in zip(starts, [*starts[1:], len(codes)], strict=True):
        where = np.flatnonzero(common[first:last]) + first
        trunks, owned = (table[name].take(pa.array(where)).to_pylist() for name in ("trunk", "owned"))
        yield UnitInfo(
            id=table["unit"][first].as_py(), num_cells=int(is_cell[first:last].sum()),
            cast=table["cast"][first].as_py(),
            outside=tuple(dict.fromkeys(trunk for trunk, mine in zip(trunks, owned, strict=True) if not mine)),
            shared=tuple(dict.fromkeys(trunks)), part=part,
        )  # fmt: skip


def _joined(a: UnitInfo, b: UnitInfo) -> UnitInfo:
    """One unit whose rows stand in two row groups."""
    return UnitInfo(
        id=a.id, num_cells=a.num_cells + b.num_cells, cast=a.cast, part=a.part,
        outside=tuple(dict.fromkeys((*a.outside, *b.outside))), shared=tuple(dict.fromkeys((*a.shared, *b.shared))),
    )  # fmt: skip
