"""Places: where pooled vectors of a run come from, and the stored vectors of a place with their labels."""

from __future__ import annotations

import hashlib
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
    num_stored: int
    """Vectors on either side in the run; more than rows here where the budget was smaller."""
    table: Any
    """The index rows of `x` (pyarrow)."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the stored vectors: sides of a contrast, groups, and how many rows at most."""

    contrast: Contrast
    split: str = "item"
    where: Expression | None = None
    labels: str | None = None
    max_rows: int | None = None
    """Above it, the rows with the smallest hash of their cell and message: the same ones however the run grew."""


def labelled_places(run: Any, question: Question, *, pool: str | None, participant: str | None) -> Iterator[Labelled]:
    """The labelled vectors of each place, one place in memory at a time as far as the caller lets go of them."""
    for place in places(run, pool=pool, participant=participant):
        yield labelled(run, place, question)


def labelled(run: Any, place: Place, question: Question) -> Labelled:
    """The labelled vectors of one place. Trunk records, which belong to no cell, are left out; no other row is read."""
    found: dict[str, Any] = {}

    def choose(table: Any) -> np.ndarray:
        contrast, where = question.contrast, question.where
        names = {"cell", question.split, *contrast.names, *(where.names if where else ())}
        values = columns(run, table, names, question.labels)
        of_cells = np.asarray(table.column("cell").is_valid())
        wanted = of_cells
        if where is not None:
            wanted = of_cells & np.array(evaluated(values.select(sorted(where.names)), where), dtype=bool)
        sides = evaluated(values.select(sorted(contrast.names)), contrast.side).astype(str)
        on_side = wanted & np.isin(sides, ("pos", "neg"))
        kept = np.flatnonzero(on_side)
        found.update(neither=int((wanted & ~on_side).sum()), excluded=int((of_cells & ~wanted).sum()), stored=len(kept))
        if question.max_rows is not None and len(kept) > question.max_rows:
            kept = kept[keyed_sample(table.take(kept), question.max_rows)]
        found.update(y=sides[kept] == "pos", groups=values.column(question.split).take(kept).to_pylist())
        return kept

    x, table = run.vectors(
        site=place.site, layer=place.layer, participant=place.participant, pool=place.pool, choose=choose
    )
    finite = np.flatnonzero(np.isfinite(x).all(axis=1)) if len(x) else np.zeros(0, dtype=np.int64)
    return Labelled(
        place=place,
        x=x if len(finite) == len(x) else x[finite],
        y=found["y"][finite],
        groups=[found["groups"][i] for i in finite],
        num_neither=found["neither"],
        num_excluded=found["excluded"],
        non_finite=len(x) - len(finite),
        num_stored=found["stored"],
        table=table.take(finite),
    )


def keyed_sample(table: Any, count: int) -> np.ndarray:
    """`count` row numbers, in order: those with the smallest hash of cell and message."""
    rows = zip(table.column("cell").to_pylist(), table.column("message_idx").to_pylist(), strict=True)
    keys = np.array([_hash(f"{cell}/{message}") for cell, message in rows], dtype=np.uint64)
    return np.sort(np.argpartition(keys, count - 1)[:count])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
