"""Places: where vectors of a run come from, and the stored vectors of a place with their labels."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from .columns import columns, evaluated, grouped
from .expressions import Contrast, Expression
from .shards import ShardedRun
from .source import Source, means

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """One participant's site, layer, pool and selection of tokens. Its `key` is unique within a run."""

    COLUMNS = ("participant", "site", "layer", "pool", "selection")

    participant: str
    site: str
    layer: int
    pool: str | None
    selection: str = ""

    @property
    def key(self) -> str:
        """`<site>.<layer>@<participant>.<pool>#<selection>`, with `+` where a selection has `|`."""
        return f"{self.site}.{self.layer}@{self.participant}.{self.pool}#{self.selection.replace('|', '+')}"

    @classmethod
    def of(cls, key: str) -> Place:
        """The inverse of `key`."""
        where, _, who = key.partition("@")
        site, _, layer = where.rpartition(".")
        who, _, selection = who.partition("#")
        participant, _, pool = who.rpartition(".")
        return cls(participant=participant, site=site, layer=int(layer), pool=None if pool == "None" else pool,
                   selection=selection.replace("+", "|"))  # fmt: skip

    @classmethod
    def at(cls, row: Mapping[str, Any]) -> Place:
        """The place of a record with these columns."""
        return cls(**{name: row[name] for name in cls.COLUMNS})

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a record with these columns is of this place."""
        return all(row[name] == getattr(self, name) for name in self.COLUMNS)

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.COLUMNS}

    def order(self) -> tuple:
        return (self.participant, self.site, str(self.pool), self.selection, self.layer)


def places(run: ShardedRun, source: Source) -> list[Place]:
    """Places that a run has records of cells of, ordered by participant, site, pool, selection and layer."""
    found: set[Place] = set()
    for shard in run.shards():
        index = shard.index(Place.COLUMNS).select(list(Place.COLUMNS))
        if index.num_rows:
            distinct = index.take(pa.array(grouped(index)[1])).to_pylist()
            found |= {Place.at(row) for row in distinct if source.takes(row)}
    return sorted(found, key=Place.order)


def tensor_names(found: Iterable[Place]) -> dict[Place, str]:
    """The name of each place's direction in a file: `<site>.<layer>`, or the whole key where that is ambiguous."""
    found = list(found)
    plain = len({(place.participant, place.pool, place.selection) for place in found}) <= 1
    several = len({place.selection for place in found}) > 1
    return {p: f"{p.site}.{p.layer}" if plain else p.key if several else p.key.partition("#")[0] for p in found}


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """The stored vectors of a place that a contrast puts on one of its sides."""

    place: Place
    x: np.ndarray
    """[N, D] float32: of a pooled record its vector, of an unpooled one the mean of its rows."""
    y: np.ndarray
    """bool [N], true for the positive side."""
    groups: list[Hashable]
    weights: np.ndarray | None
    """[N]: tokens in each vector, where those are to be counted."""
    num_neither: int
    """Vectors of cells on neither side."""
    num_excluded: int
    """Vectors that `where` left out."""
    non_finite: int
    """Vectors of either side with a NaN or an infinity, left out."""
    num_stored: int
    """Vectors on either side in the run; more than rows here where the budget was smaller."""
    removed: int
    """Token rows of unpooled records (vectors of pooled ones) above `max_norm`, left out."""
    removed_at_capture: int
    """Token rows that the capture's own `max_norm` had left out of these records."""
    table: Any
    """The index rows of `x` (pyarrow), with the columns of `Question.also`."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the stored vectors: sides of a contrast, groups, and how many rows at most."""

    contrast: Contrast
    source: Source = field(default_factory=Source)
    split: str = "item"
    where: Expression | None = None
    labels: str | None = None
    also: tuple[str, ...] = ()
    """Further columns to keep."""
    max_rows: int | None = None
    """Above it, the rows with the smallest hash of their cell and message: the same ones however the run grew."""

    def side(self, row: Mapping[str, Any]) -> str:
        """ "pos", "neg", "neither" or "excluded"."""
        if self.where is not None and not self.where(row):
            return "excluded"
        return self.contrast.side(row) or "neither"


def labelled_places(run: ShardedRun, question: Question) -> Iterator[Labelled]:
    """The labelled vectors of each place, one place in memory at a time as far as the caller lets go of them."""
    for place in places(run, question.source):
        yield labelled(run, place, question)


def labelled(run: ShardedRun, place: Place, question: Question) -> Labelled:
    """The labelled vectors of one place, unit by unit. Trunk records, which belong to no cell, are left out.

    What is held at a time is one unit's index and the rows that are kept, at most about twice `max_rows`.
    """
    asked = {*question.contrast.names, *(question.where.names if question.where else ())}
    extra = (question.split, *question.also)
    counts, sample = dict.fromkeys(("pos", "neg", "neither", "excluded"), 0), _Sample(question.max_rows)
    for shard in run.shards():
        index = shard.index(
            {*asked, *extra, *Place.COLUMNS, *question.source.columns, "trunk", "message_idx", "removed"}, [place.pool]
        )
        if not index.num_rows:
            continue
        index = index.filter(pa.array(evaluated(index.select(list(Place.COLUMNS)), place.holds).astype(bool)))
        named = columns(shard, index, asked, question.labels)
        codes, firsts = grouped(named)
        sides = [question.side(row) for row in named.take(pa.array(firsts)).to_pylist()]
        for side, count in zip(sides, np.bincount(codes, minlength=len(sides)), strict=True):
            counts[side] += int(count)
        kept = pa.array(np.flatnonzero(np.array([side in ("pos", "neg") for side in sides], bool)[codes]))
        positive = np.array([side == "pos" for side in sides], bool)[codes][kept.to_numpy()]
        rows = index.take(kept)
        added = {f"asked.{n}": columns(shard, rows, [n], question.labels).column(n) for n in dict.fromkeys(extra)}
        for name, column in {**added, "asked.pos": pa.array(positive)}.items():
            rows = rows.append_column(name, plain(column))
        sample.add(rows)
    return _gathered(run, place, question, counts, sample.table())


def plain(column: Any) -> Any:
    """A column without its dictionary, so that tables of different units can be joined."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _gathered(run: ShardedRun, place: Place, question: Question, counts: Mapping[str, int], table: Any) -> Labelled:
    if table is None:
        x, tokens, removed = np.zeros((0, 0), np.float32), np.zeros(0), 0
    else:
        x, tokens, removed = gather(run, table, question.source)
    finite = np.flatnonzero(np.isfinite(x).all(axis=1) & (tokens > 0)) if len(x) else np.zeros(0, dtype=np.int64)
    table = None if table is None else table.take(pa.array(finite))
    return Labelled(
        place=place,
        x=x if len(finite) == len(x) else x[finite],
        y=np.zeros(0, bool) if table is None else table["asked.pos"].to_numpy(),
        groups=[] if table is None else table[f"asked.{question.split}"].to_pylist(),
        weights=tokens[finite] if question.source.counted == "token" else None,
        num_neither=counts["neither"],
        num_excluded=counts["excluded"],
        non_finite=int((tokens > 0).sum()) - len(finite),
        num_stored=counts["pos"] + counts["neg"],
        removed=removed,
        removed_at_capture=0
        if table is None or "removed" not in table.column_names
        else pc.sum(table["removed"]).as_py() or 0,
        table=table,
    )


def _sum(table: Any, column: str) -> int:
    return 0 if table is None or column not in table.column_names else pc.sum(table[column]).as_py() or 0


def gather(run: ShardedRun, table: Any, source: Source) -> tuple[np.ndarray, np.ndarray, int]:
    """Vectors [N, D] float32 of the records of an index table, tokens in each [N] (0: none is left), rows left out.

    One copy, tensor by tensor.
    """
    codes, firsts = grouped(table.select(["file", "key"]))
    starts, stops = source.spans(table)
    pooled = table["num_pooled"].to_numpy() if "num_pooled" in table.column_names else np.ones(len(codes))
    out, removed, tokens = None, 0, np.zeros(len(codes))
    for number, row in enumerate(table.take(pa.array(firsts)).select(["file", "key"]).to_pylist()):
        tensor = run.matrix(row["file"], row["key"])
        if out is None:
            out = np.zeros((len(codes), tensor.shape[1]), np.float32)
        if tensor.shape[1] != out.shape[1]:
            raise ValueError(
                f"vectors of widths {out.shape[1]} and {tensor.shape[1]} at one place; aggregate runs apart"
            )
        at = np.flatnonzero(codes == number)
        if source.pool is not None:
            out[at] = taken(tensor, starts[at])
            above = np.linalg.norm(out[at], axis=1) > (np.inf if source.max_norm is None else source.max_norm)
            tokens[at] = np.where(above, 0, pooled[at])
            removed += int(above.sum())
            continue
        for i in at:
            rows = tensor[int(starts[i]) : int(stops[i])].double().numpy()
            if source.max_norm is not None:
                keep = np.linalg.norm(rows, axis=1) <= source.max_norm
                removed += int(len(keep) - keep.sum())
                rows = rows[keep]
            tokens[i] = len(rows)
            if len(rows):
                out[i] = means(rows, np.array([len(rows)]))[0]
    assert out is not None
    return out, tokens, removed


def taken(tensor: Tensor, rows: np.ndarray) -> Any:
    """Some rows of a mapped tensor. numpy gathers several times as fast as torch, but has no bfloat16."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    if tensor.dtype == torch.bfloat16:
        return torch.from_numpy(np.take(tensor.view(torch.int16).numpy(), rows, axis=0)).view(torch.bfloat16)
    return torch.from_numpy(np.take(tensor.numpy(), rows, axis=0))


class _Sample:
    """Index rows as units bring them; above `most` only those with the smallest hash of cell and message."""

    def __init__(self, most: int | None):
        self.most, self._tables, self._rows = most, [], 0

    def add(self, table: Any) -> None:
        self._tables.append(pa.table({name: plain(table[name]) for name in table.column_names}))
        self._rows += table.num_rows
        if self.most is not None and self._rows > 2 * self.most:
            self._trim()

    def table(self) -> Any:
        """All rows that are kept, or None."""
        if self.most is not None and self._rows > self.most:
            self._trim()
        return pa.concat_tables(self._tables, promote_options="permissive") if self._rows else None

    def _trim(self) -> None:
        whole = pa.concat_tables(self._tables, promote_options="permissive")
        kept = whole.take(pa.array(keyed_sample(whole, self.most or 0)))
        self._tables, self._rows = [kept], kept.num_rows


def keyed_sample(table: Any, count: int) -> np.ndarray:
    """`count` row numbers, in order: those with the smallest hash of cell and message."""
    rows = zip(table.column("cell").to_pylist(), table.column("message_idx").to_pylist(), strict=True)
    keys = np.array([_hash(f"{cell}/{message}") for cell, message in rows], dtype=np.uint64)
    return np.sort(np.argpartition(keys, count - 1)[:count])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def leaks(data: Labelled, split: str) -> list[str]:
    """Warnings: trunks cut by the split, copies across groups, and labels that a group decides."""
    found = []
    trunks: dict[Any, set] = {}
    for trunk, group in zip(data.table.column("trunk").to_pylist(), data.groups, strict=True):
        trunks.setdefault(trunk, set()).add(group)
    cut = sum(len(groups) > 1 for groups in trunks.values())
    if cut:
        found.append(f"siblings leak: {cut} trunks have cells in several groups of {split}")
    copies: dict[bytes, set] = {}
    for row, group in zip(data.x, data.groups, strict=True):
        copies.setdefault(row.tobytes(), set()).add(group)
    shared = sum(len(groups) > 1 for groups in copies.values())
    if shared:
        found.append(f"copies leak: {shared} vectors are exactly equal across groups of {split}")
    sides: dict[Any, set] = {}
    for group, side in zip(data.groups, data.y, strict=True):
        sides.setdefault(group, set()).add(bool(side))
    if sides and all(len(kinds) == 1 for kinds in sides.values()):
        found.append(f"every group of {split} has one label only, so {len(sides)} groups are the whole sample size")
    return found
