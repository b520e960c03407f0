"""The sums most aggregates are: named Moments, folded on the replica, merged in any order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from interlens.statistics import CHUNK_VALUES, GroupedMoments, Moments

from .base import CellResult, State
from .columns import cell_columns, columns, grouped, record_columns
from .source import UNCOUNTED, Source
from .vectors import Place, taken

if TYPE_CHECKING:
    from torch import Tensor

    from .shards import Shard


def rms_norm(moments: Moments) -> float:
    """Root mean square norm of the rows: the scale a coefficient is to be compared with."""
    squares = np.trace(moments.m2) if moments.has_covariance else moments.m2.sum()
    return float(np.sqrt(moments.mean @ moments.mean + squares / moments.count)) if moments.count else float("nan")


Keyed = Iterable[tuple[Any, ...]]

PARTS = ("count", "non_finite", "mean", "m2")

REMOVED = "|removed"

LIES = ("|file", "|key")
"""Names of what says where a record lies, beside columns of any name."""


class MomentsSum:
    """A Sum whose state is Moments by key. A subclass names keys and rows in `contribution`, and reads `finish`."""

    name: str
    covariance = False

    def contribution(self, result: CellResult) -> Keyed:
        """(key, rows [N, D] or [D]) of one cell, or (key, rows, weights [N]). Keys hold no `:`."""
        raise NotImplementedError

    def zero(self) -> State:
        return {}

    def add(self, state: State, result: CellResult) -> None:
        added: dict[str, Moments] = {}
        for key, rows, *weights in self.contribution(result):
            self.fold(added, key, rows, *weights)
        for key, moments in added.items():
            put(state, key, moments)

    def fold(self, found: dict[str, Moments], key: str, rows: Any, weights: Any = None) -> None:
        """Add rows to the Moments under a key."""
        if key not in found:
            found[key] = Moments(rows.shape[-1], self.covariance_of(key))
        found[key].update(rows, weights)

    def merge(self, a: State, b: State) -> State:
        merged = {**b, **a}
        for name in b:
            key, _, part = name.rpartition(":")
            if part == "count" and name in a:
                put(merged, key, cast(Moments, read(b, key)))
        return merged

    def covariance_of(self, key: str) -> bool:
        """Whether the Moments under `key` keep a covariance."""
        return self.covariance and not key.endswith(REMOVED)


class RecordSum(MomentsSum):
    """A MomentsSum over captured rows. A subclass says under which key a record's rows go.

    What `source.max_norm` left out is counted under `<key>|removed`, with the mean of its norms. `labels` is known only
    after a run.
    """

    source: Source
    labels: str | None = None

    @property
    def streams(self) -> bool:
        """Whether replicas can add to it."""
        return self.labels is None

    def reads_state(self, state: State) -> bool:
        """False for a recorded state of an earlier version, whose places had no selection: it is recomputed."""
        return all("#" in key for key in state)

    def names(self) -> set[str]:
        """The columns that `key_of` looks at, besides those of a Place."""
        raise NotImplementedError

    def key_of(self, row: Mapping[str, Any]) -> str | None:
        """Where the rows of a record with these columns go; None: nowhere."""
        raise NotImplementedError

    def contribution(self, result: CellResult) -> Keyed:
        if not self.streams:
            return
        cell = cell_columns(result)
        for record in result.records:
            row = {**cell, **record_columns(result, record)}
            if self.source.takes(row) and (key := self.key_of(row)) is not None:
                yield from self._kept(key, *self.source.of_record(record))

    def add_shard(self, state: State, shard: Shard) -> None:
        """Add one unit's stored records: expressions once per distinct row, tensors in blocks."""
        wanted = {*self.names(), *Place.COLUMNS}
        index = shard.index({*wanted, *self.source.columns}, [self.source.pool])
        if not index.num_rows:
            return
        named = columns(shard, index, wanted, self.labels)
        codes, firsts = grouped(pa.table([*named.columns, index["file"], index["key"]], [*named.column_names, *LIES]))
        distinct = named.take(pa.array(firsts)).to_pylist()
        keys = [self.key_of(row) if self.source.takes(row) else None for row in distinct]
        held: dict[tuple[str, str], dict[int, str]] = {}
        """Of each stored tensor: which distinct rows lie in it, and under which key they count."""
        for number, at in enumerate(index.select(["file", "key"]).take(pa.array(firsts)).to_pylist()):
            if (key := keys[number]) is not None:
                held.setdefault((at["file"], at["key"]), {})[number] = key
        starts, stops = self.source.spans(index)
        pooled = index["num_pooled"].to_numpy() if "num_pooled" in index.column_names else None
        found: dict[str, Moments] = {}
        for (file, tensor), members in held.items():
            names = {name: i for i, name in enumerate(dict.fromkeys(members.values()))}
            numbers = np.full(len(keys), -1)
            numbers[list(members)] = [names[key] for key in members.values()]
            numbers = numbers[codes]
            at = np.flatnonzero((numbers >= 0) & (stops > starts))
            if len(at):
                rows = _Rows(
                    tensor=shard.base.matrix(file, tensor), starts=starts[at], stops=stops[at], names=numbers[at],
                    num_pooled=None if pooled is None else pooled[at],
                )  # fmt: skip
                self._fold_tensor(found, list(names), rows)
        for name, moments in found.items():
            put(state, name, moments)

    def _fold_tensor(self, found: dict[str, Moments], names: list[str], rows: _Rows) -> None:
        """Add the rows of one stored tensor; `rows.names` are numbers in `names`, -1 for none of them."""
        if self.covariance or self.source.max_norm is not None or self.source.averages:
            for number, name in enumerate(names):
                mine = np.flatnonzero(rows.names == number)
                counts = None if rows.num_pooled is None else rows.num_pooled[mine]
                for values, lengths, part in blocks(rows.tensor, rows.starts[mine], rows.stops[mine]):
                    some = None if counts is None else counts[part]
                    for target, *weighed in self._kept(name, *self.source.weighed(values, lengths, some)):
                        self.fold(found, target, *weighed)
            return
        groups, weights = rows.by_row()
        sums = GroupedMoments(rows.tensor.shape[1], len(names))
        sums.update(rows.tensor[int(rows.starts.min()) : int(rows.stops.max())], groups, weights)
        for number, name in enumerate(names):
            found[name] = found[name].merge(sums[number]) if name in found else sums[number]

    @staticmethod
    def _kept(key: str, rows: Any, weights: Any, removed: Any) -> Keyed:
        if len(rows) or removed is not None:
            yield key, rows, weights
        if removed is not None:
            yield key + REMOVED, removed


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Records of one stored tensor, in order."""

    tensor: Tensor
    starts: np.ndarray
    stops: np.ndarray
    names: np.ndarray
    """What each record counts under, as a number; -1: nothing."""
    num_pooled: np.ndarray | None

    def by_row(self) -> tuple[np.ndarray, np.ndarray | None]:
        """`names` and, where it is known, `num_pooled` of every row from the first start to the last stop."""
        first, lengths = self.starts.min(), self.stops - self.starts
        single = lengths.max() == 1
        at = self.starts - first if single else spread(self.starts - first, lengths)
        groups = np.full(self.stops.max() - first, -1)
        groups[at] = self.names if single else np.repeat(self.names, lengths)
        if self.num_pooled is None:
            return groups, None
        if np.isnan(self.num_pooled.astype(float)).any():
            raise ValueError(UNCOUNTED)
        weights = np.zeros(len(groups))
        weights[at] = np.repeat(self.num_pooled, lengths)
        return groups, weights


def spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Every number of many half-open spans, one span after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def blocks(tensor: Tensor, starts: np.ndarray, stops: np.ndarray) -> Iterator[tuple[Any, np.ndarray, slice]]:
    """Rows of many spans of a tensor, a chunk at a time and no span cut: (rows, how many of each span, which spans)."""
    limit = max(CHUNK_VALUES // max(tensor.shape[1], 1), 1)
    lengths = stops - starts
    ends = np.cumsum(lengths)
    first = 0
    while first < len(starts):
        before = ends[first] - lengths[first]
        last = max(int(np.searchsorted(ends, before + limit, side="right")), first + 1)
        part = slice(first, last)
        yield taken(tensor, spread(starts[part], lengths[part])), lengths[part], part
        first = last


def put(state: State, key: str, moments: Moments) -> None:
    """Merge Moments into a state under a key."""
    held = read(state, key)
    for part, array in (held.merge(moments) if held else moments).state().items():
        state[f"{key}:{part}"] = array


def read(state: State, key: str) -> Moments | None:
    """The Moments under a key, or None."""
    if f"{key}:count" not in state:
        return None
    return Moments.from_state({part: np.asarray(state[f"{key}:{part}"]) for part in PARTS})


def moments_of(state: State) -> dict[str, Moments]:
    """All Moments of a state by key."""
    keys = [name.rpartition(":")[0] for name in state if name.endswith(":count")]
    return {key: found for key in keys if (found := read(state, key)) is not None}


def places_in(moments: Mapping[str, Moments]) -> list[Place]:
    """The places whose keys `<place>|...` occur, in order."""
    return sorted({Place.of(key.partition("|")[0]) for key in moments}, key=Place.order)


def by_key(values: dict[str, Any]) -> str:
    """Some columns' values as one stable text."""
    return json.dumps(values, sort_keys=True, default=str)
