"""Cells, trunks and units as the plan has them, and a unit as bytes for a replica. Imports nothing of ours."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_HEADER = 256


def pack(unit: Unit, trunk_units: Mapping[str, str], attempts: int) -> bytes:
    """A unit as a replica receives it: small enough to travel beside the object store.

    `trunk_units`: trunk -> unit whose shard holds it; the unit samples its other trunks. `attempts`: tries so far.
    """
    data = {**unit.to_dict(), "trunk_units": dict(trunk_units), "attempts": attempts}
    body = zlib.compress(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(), 1)
    return unit.id.encode().ljust(_HEADER, b"\0") + body


def unpack(packed: bytes) -> tuple[Unit, dict[str, str], int]:
    """The inverse of `pack`."""
    data = json.loads(zlib.decompress(packed[_HEADER:]))
    return Unit.from_dict(data), data["trunk_units"], data["attempts"]


def unit_id(packed: bytes) -> str:
    """The id of a packed unit, without unpacking it."""
    return packed[:_HEADER].rstrip(b"\0").decode()


def part_of(unit: Unit, name: str, cells: set[str], trunks: Iterable[str] = ()) -> Unit:
    """A unit `name` with these cells of `unit` (ids), the trunks they need, and `trunks` to sample besides."""
    mine = tuple(replace(cell, unit=name) for cell in unit.cells if cell.id in cells)
    needed = {cell.trunk for cell in mine} | set(trunks)
    kept = tuple(trunk for trunk in unit.trunks if trunk.id in needed)
    touched = {cell.item for cell in mine} | {trunk.item for trunk in kept}
    rows = {key: row for key, row in unit.items.items() if key in touched}
    owns = tuple(trunk.id for trunk in kept if trunk.id in unit.owns)
    return replace(unit, id=name, cells=mine, trunks=kept, owns=owns, items=rows)


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """The shared beginning of some cells: (item, trunk seed) and the settings under `trunk:`."""

    id: str
    item: str
    seed: int
    condition: Mapping[str, Any] = field(default_factory=dict)
    """Labels of the trunk axes only."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The smallest thing that is run, committed, retried, counted."""

    id: str
    item: str
    trunk: str
    condition: Mapping[str, Any]
    """Axis path -> label."""
    trunk_seed: int
    branch_seed: int
    unit: str
    donors: tuple[str, ...] = ()
    """Per patch of its condition the cell that it comes from (its own id: itself); "" for a cell of another run."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A block of cells that one replica runs and one commit closes. Self-contained: an actor needs nothing else."""

    id: str
    cells: tuple[Cell, ...]
    trunks: tuple[Trunk, ...] = ()
    """The trunks its cells need; empty when the scenario has no trunk."""
    owns: tuple[str, ...] = ()
    """Ids of the trunks this unit samples itself; the others must be committed before it is dispatched."""
    items: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Item id -> row, for the items it touches."""
    cast: str = ""
    """Equal for units that the same set of loaded models can run."""
    part: int = 0
    """The part of the plan it entered with: its conditions are those of `config-<part>.yaml`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values (JSON-able), for actors and for children in commits."""
        return {
            "id": self.id,
            "cells": [
                [
                    c.id,
                    c.item,
                    c.trunk,
                    dict(c.condition),
                    c.trunk_seed,
                    c.branch_seed,
                    *([c.donors] if c.donors else []),
                ]
                for c in self.cells
            ],
            "trunks": [[t.id, t.item, t.seed, dict(t.condition)] for t in self.trunks],
            "owns": list(self.owns),
            "items": {key: dict(row) for key, row in self.items.items()},
            "cast": self.cast,
            "part": self.part,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unit:
        """The inverse of `to_dict`."""
        cells = tuple(
            Cell(
                id=i,
                item=item,
                trunk=t,
                condition=c,
                trunk_seed=ts,
                branch_seed=bs,
                unit=data["id"],
                donors=tuple(*donors),
            )
            for i, item, t, c, ts, bs, *donors in data["cells"]
        )
        trunks = tuple(Trunk(id=i, item=item, seed=s, condition=c) for i, item, s, c in data["trunks"])
        return cls(id=data["id"], cells=cells, trunks=trunks, owns=tuple(data["owns"]), items=data["items"],
                   cast=data["cast"], part=data["part"])  # fmt: skip
