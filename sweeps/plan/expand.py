"""From a configuration to units of cells: pure, streamed, and the home of every id.

A trunk's id hashes what its text depends on; a cell's id hashes its trunk, its resolved settings and its branch seed.
Labels, paths, cluster and report settings are in no id. Units hold whole trunks and never depend on who runs them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.digest import digest
from ..config.schema import SweepConfig
from ..folder.cells import Cell, Trunk, Unit
from . import items
from .casts import cast_of
from .ids import Identities
from .loads import default_unit_cells
from .patches import ties_trunks


def expand(config: SweepConfig) -> Iterator[Unit]:
    """The units of a configuration, in plan order, streamed: items, trunk settings, trunk seeds, conditions, seeds.

    Raises ConfigError, naming both sources, where two cells share an id.
    """
    return pack(config, trunks(config))


@dataclass(frozen=True, kw_only=True)
class Branches:
    """A trunk and the cells that continue it, by cast."""

    trunk: Trunk
    row: Mapping[str, Any]
    cells: Mapping[str, list[Cell]]
    """Cast -> cells, without their unit."""


def trunks(config: SweepConfig) -> Iterator[Branches]:
    """Every trunk with its cells, streamed in plan order."""
    ids = Identities(config)
    trunk_seeds, branch_seeds = seeds(config.scenario.trunk.seeds), seeds(config.scenario.branch.seeds)
    for row in items.read(config.scenario.source):
        row_digest = digest(row)
        for shared, points in ids.by_trunk:
            for seed in trunk_seeds:
                trunk = Trunk(
                    id=ids.trunk(row_digest, shared, seed), item=row["id"], seed=seed, condition=shared.condition
                )
                cells: dict[str, list[Cell]] = {}
                for point in points:
                    cells.setdefault(point.cast, []).extend(
                        Cell(id=ids.cell(trunk.id, point, branch_seed), item=trunk.item, trunk=trunk.id,
                             condition=point.condition, trunk_seed=seed, branch_seed=branch_seed, unit="",
                             donors=ids.donors(point, row_digest, seed, branch_seed) if point.sources else ())
                        for branch_seed in branch_seeds
                    )  # fmt: skip
                yield Branches(trunk=trunk, row=row, cells=cells)


def seeds(given: int | tuple[int, ...]) -> tuple[int, ...]:
    """How many, or which."""
    return tuple(range(given)) if isinstance(given, int) else tuple(given)


def pack(
    config: SweepConfig, branches: Iterable[Branches], first: int = 0, held: Container[str] = ()
) -> Iterator[Unit]:
    """Units from number `first` on: blocks of whole trunks, at most `plan.unit_cells` cells or one trunk, cut by cast.
    Trunks of one item stay together where patches may reach from one into another.

    The piece with the trunk's own cast owns the trunk, if need be without cells; those in `held` have an owner already.
    """
    limit = config.plan.unit_cells or default_unit_cells(config)
    own, tied = cast_of(config), ties_trunks(config)
    number, size = first, 0
    block: list[Branches] = []
    for entry in branches:
        count = sum(map(len, entry.cells.values()))
        goes_on = tied and block and block[-1].trunk.item == entry.trunk.item
        if block and size + count > limit and not goes_on:
            for unit in _cut(config, block, own, number, held):
                yield unit
                number += 1
            block, size = [], 0
        block.append(entry)
        size += count
    if block:
        yield from _cut(config, block, own, number, held)


def _cut(config: SweepConfig, block: list[Branches], own: str, number: int, held: Container[str]) -> Iterator[Unit]:
    has_trunk = config.scenario.trunk.turns > 0 or any(axis.is_trunk for axis in config.grid)
    casts = dict.fromkeys(cast for entry in block for cast in entry.cells)
    owned = [entry.trunk.id for entry in block if has_trunk and entry.trunk.id not in held]
    if owned or own in casts:
        casts = {own: None, **casts}
    for cast in casts:
        name = f"u{number:06d}"
        number += 1
        needed = [entry for entry in block if entry.cells.get(cast) or (cast == own and entry.trunk.id in owned)]
        yield Unit(
            id=name,
            cells=tuple(replace(cell, unit=name) for entry in needed for cell in entry.cells.get(cast, ())),
            trunks=tuple(entry.trunk for entry in needed) if has_trunk else (),
            owns=tuple(owned) if cast == own else (),
            items={entry.trunk.item: entry.row for entry in needed},
            cast=cast,
        )
