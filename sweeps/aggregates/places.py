"""Places: where pooled vectors of a run come from, and the stored vectors of a place with their labels."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import columns, evaluated
from .expressions import Contrast, Expression


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

    @classmethod
    def at(cls, row: Mapping[str, Any]) -> Place:
        """The place of a record with these columns."""
        return cls(participant=row["participant"], site=row["site"], layer=row["layer"], pool=row["pool"])

    def columns(self) -> dict[str, Any]:
        return {"participant": self.participant, "site": self.site, "layer": self.layer, "pool": self.pool}

    def order(self) -> tuple:
        return (self.participant, self.site, str(self.pool), self.layer)


def places(run: Any, *, pool: str | None = None, participant: str | None = None) -> list[Place]:
    """Places a run has committed records of, ordered by participant, site, pool and layer."""
    names = ["participant", "site", "layer", "pool"]
    table = run.table("records", columns=names).group_by(names).aggregate([])
    found = [Place(**row) for row in table.to_pylist()]
    kept = [p for p in found if p.pool == pool and participant in (None, p.participant)]
    return sorted(kept, key=Place.order)


def tensor_names(found: list[Place]) -> dict[Place, str]:
    """The name of each place's direction in a file: `<site>.<layer>`, or the whole key where that is ambiguous."""
    plain = len({(place.participant, place.pool) for place in found}) <= 1
    return {place: f"{place.site}.{place.layer}" if plain else place.key for place in found}


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
    num_excluded: int
    """Vectors that `where` left out."""
    non_finite: int
    """Vectors of either side with a NaN or an infinity, left out."""
    table: Any
    """The index rows of `x` (pyarrow)."""

    def sample(self, max_rows: int, seed: int = 0) -> np.ndarray:
        """Row indices: all, or a seeded sample of `max_rows`, in order."""
        if len(self.y) <= max_rows:
            return np.arange(len(self.y))
        return np.sort(np.random.default_rng(seed).choice(len(self.y), max_rows, replace=False))


def labelled_places(
    run: Any,
    contrast: Contrast,
    *,
    pool: str | None,
    participant: str | None,
    split: str,
    where: Expression | None = None,
    labels: str | None = None,
) -> Iterator[Labelled]:
    """The labelled vectors of each place, one place in memory at a time as far as the caller lets go of them.

    Trunk records, which belong to no cell, are left out.
    """
    for place in places(run, pool=pool, participant=participant):
        yield labelled(run, place, contrast, split=split, where=where, labels=labels)


def labelled(
    run: Any,
    place: Place,
    contrast: Contrast,
    *,
    split: str,
    where: Expression | None = None,
    labels: str | None = None,
) -> Labelled:
    """The labelled vectors of one place."""
    x, table = run.vectors(site=place.site, layer=place.layer, participant=place.participant, pool=place.pool)
    names = {"cell", split, *contrast.names, *(where.names if where else ())}
    values = columns(run, table, names, labels)
    wanted = np.array(
        evaluated(values, lambda row: row["cell"] is not None and (where is None or where(row))), dtype=bool
    )
    excluded = int(table.num_rows - table.column("cell").null_count - wanted.sum())
    sides = evaluated(values.select(sorted(contrast.names)), contrast.side)
    on_side = wanted & np.isin(sides.astype(str), ("pos", "neg"))
    finite = np.isfinite(x).all(axis=1) if len(x) else np.zeros(0, dtype=bool)
    kept = np.flatnonzero(on_side & finite)
    return Labelled(
        place=place,
        x=np.asarray(x)[kept],
        y=sides[kept] == "pos",
        groups=values.column(split).take(kept).to_pylist(),
        num_neither=int((wanted & ~on_side).sum()),
        num_excluded=excluded,
        non_finite=int((on_side & ~finite).sum()),
        table=table.take(kept),
    )
