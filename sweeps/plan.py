"""From a configuration to units of cells: pure, streamed, and the home of every id.

A trunk's id hashes what its text depends on; a cell's id hashes its trunk, its resolved settings and its branch seed.
Labels, paths, cluster and report settings are in no id. Units hold whole trunks and never depend on who runs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import SweepConfig


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values (JSON-able), for actors and for children in commits."""
        return {
            "id": self.id,
            "cells": [[c.id, c.item, c.trunk, dict(c.condition), c.trunk_seed, c.branch_seed] for c in self.cells],
            "trunks": [[t.id, t.item, t.seed, dict(t.condition)] for t in self.trunks],
            "owns": list(self.owns),
            "items": {key: dict(row) for key, row in self.items.items()},
            "cast": self.cast,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unit:
        """The inverse of `to_dict`."""
        cells = tuple(
            Cell(id=i, item=item, trunk=t, condition=c, trunk_seed=ts, branch_seed=bs, unit=data["id"])
            for i, item, t, c, ts, bs in data["cells"]
        )
        trunks = tuple(Trunk(id=i, item=item, seed=s, condition=c) for i, item, s, c in data["trunks"])
        return cls(id=data["id"], cells=cells, trunks=trunks, owns=tuple(data["owns"]), items=data["items"],
                   cast=data["cast"])  # fmt: skip


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, numbers by value (6 == 6.0), no NaN."""
    plain = _canonical(value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """20 hex digits of blake2b over canonical JSON."""
    return hashlib.blake2b(canonical(value), digest_size=10).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def expand(config: SweepConfig) -> Iterator[Unit]:
    """The units of a configuration, in plan order, streamed. Raises ConfigError where two cells share an id."""
    raise NotImplementedError


def applied(config: SweepConfig, condition: Mapping[str, Any]) -> SweepConfig:
    """The configuration under a condition (axis path -> label): what a replica runs a cell or trunk with."""
    raise NotImplementedError


def write_plan(config: SweepConfig, root: str) -> int:
    """Write `plan/part-0.parquet` (one row per cell) and return the number of cells."""
    raise NotImplementedError


def read_units(config: SweepConfig, root: str) -> Iterator[Unit]:
    """The units of a run folder's plan, streamed in plan order (part after part)."""
    raise NotImplementedError
