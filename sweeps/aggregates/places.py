"""Places: where pooled vectors of a run come from, and the stored vectors of a place with their labels."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import table_rows
from .expressions import Contrast


@dataclass(frozen=True, kw_only=True)
class Place:
    """One participant's site, layer and pool. Its `key` is unique within a run."""

    participant: str
    site: str
    layer: int
    pool: str | None

    @property
    def key(self) -> str:
        return f"{self.site}.{self.layer}@{self.participant}.{self.pool}"

    @classmethod
    def of(cls, key: str) -> Place:
        """The inverse of `key`."""
        where, _, who = key.partition("@")
        site, _, layer = where.rpartition(".")
        participant, _, pool = who.rpartition(".")
        return cls(participant=participant, site=site, layer=int(layer), pool=None if pool == "None" else pool)

    def columns(self) -> dict[str, Any]:
        return {"participant": self.participant, "site": self.site, "layer": self.layer, "pool": self.pool}

    def order(self) -> tuple:
        return (self.participant, self.site, str(self.pool), self.layer)


def places(run: Any, *, pool: str | None = None, participant: str | None = None) -> list[Place]:
    """Places a run has committed records of, ordered by participant, site, pool and layer."""
    columns = ["participant", "site", "layer", "pool"]
    table = run.table("records", columns=columns).group_by(columns).aggregate([])
    found = [Place(**row) for row in table.to_pylist()]
    kept = [p for p in found if p.pool == pool and participant in (None, p.participant)]
    return sorted(kept, key=Place.order)


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """The stored vectors of a place that a contrast puts on one of its sides."""

    place: Place
    x: np.ndarray
    """[N, D] float32."""
    y: np.ndarray
    """bool [N], true for the positive side."""
    groups: list[Hashable]
    num_neither: int
    """Vectors of cells on neither side."""

    def sample(self, max_rows: int, seed: int = 0) -> np.ndarray:
        """Row indices: all, or a seeded sample of `max_rows`, in order."""
        if len(self.y) <= max_rows:
            return np.arange(len(self.y))
        return np.sort(np.random.default_rng(seed).choice(len(self.y), max_rows, replace=False))


def axes_of(run: Any) -> list[str]:
    """Paths of the grid's axes."""
    return [axis.path for axis in run.config.grid]


def labelled_places(
    run: Any, contrast: Contrast, *, pool: str | None, participant: str | None, split: str
) -> Iterator[Labelled]:
    """The labelled vectors of each place, one place in memory at a time as far as the caller lets go of them.

    Trunk records, which belong to no cell, are left out.
    """
    for place in places(run, pool=pool, participant=participant):
        x, table = run.vectors(site=place.site, layer=place.layer, participant=place.participant, pool=place.pool)
        rows = list(table_rows(table, axes_of(run)))
        sides = [contrast.side({**place.columns(), **row}) if row.get("cell") else "trunk" for row in rows]
        kept = [i for i, side in enumerate(sides) if side in ("pos", "neg") and np.isfinite(x[i]).all()]
        yield Labelled(
            place=place,
            x=np.asarray(x)[kept],
            y=np.array([sides[i] == "pos" for i in kept], dtype=bool),
            groups=[rows[i][split] for i in kept],
            num_neither=sides.count(None),
        )
