"""The sums most aggregates are: named Moments, folded on the replica, merged in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch

from interlens.statistics import Moments, as_float64, norm_filter

from . import CellResult, State
from .columns import cell_columns, columns, evaluated, record_columns
from .places import Place

if TYPE_CHECKING:
    from torch import Tensor

    from .shards import Shard

Keyed = Iterable[tuple[str, Any]]
PARTS = ("count", "non_finite", "mean", "m2")
REMOVED = "|removed"
BLOCK = 256
"""Stored rows taken at a time."""


class MomentsSum:
    """A Sum whose state is Moments by key. A subclass names keys and rows in `contribution`, and reads `finish`."""

    name: str
    covariance = False

    def contribution(self, result: CellResult) -> Keyed:
        """(key, rows [N, D] or [D]) of one cell. Keys hold no `:`."""
        raise NotImplementedError

    def zero(self) -> State:
        return {}

    def add(self, state: State, result: CellResult) -> None:
        added: dict[str, Moments] = {}
        for key, rows in self.contribution(result):
            added[key] = added[key].update(rows) if key in added else Moments.of(rows, self.covariance_of(key))
        for key, moments in added.items():
            put(state, key, moments)

    def merge(self, a: State, b: State) -> State:
        merged = dict(a)
        for key, moments in moments_of(b).items():
            put(merged, key, moments)
        return merged

    def covariance_of(self, key: str) -> bool:
        """Whether the Moments under `key` keep a covariance."""
        return self.covariance and not key.endswith(REMOVED)


class RecordSum(MomentsSum):
    """A MomentsSum over captured rows. A subclass says under which key a record's rows go.

    Needs `pool`, `participant`, `max_norm` and `labels`. Rows whose norm is above `max_norm` are left out; what was
    left out is counted under `<key>|removed`, with the mean of its norms. `labels` is known only after a run.
    """

    pool: str | None = "mean"
    participant: str | None = None
    max_norm: float | None = None
    labels: str | None = None

    @property
    def streams(self) -> bool:
        """Whether replicas can add to it."""
        return self.labels is None

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
            if record.pool == self.pool and self.participant in (None, record.participant):
                key = self.key_of({**cell, **record_columns(result, record)})
                if key is not None:
                    yield from self._kept(key, as_float64(record.tensor))

    def add_shard(self, state: State, shard: Shard) -> None:
        """Add one unit's stored records: expressions once per distinct row, tensors in blocks."""
        wanted = pc.field("pool").is_null() if self.pool is None else pc.field("pool") == self.pool
        if self.participant is not None:
            wanted &= pc.field("participant") == self.participant
        index = shard.index(wanted)
        if not index.num_rows:
            return
        place = {"participant", "site", "layer", "pool"}
        keys = evaluated(columns(shard, index, {*self.names(), *place}, self.labels), self.key_of)
        firsts, lasts = index.column("row_start").to_numpy(), index.column("row_end").to_numpy()
        found: dict[str, Moments] = {}
        stored = index.select(["file", "key"])
        where = evaluated(stored, lambda row: (row["file"], row["key"]))
        for file, key in dict.fromkeys(where):
            tensor = shard.tensor(file, key)
            at = np.flatnonzero(np.fromiter((w == (file, key) for w in where), bool, len(where)))
            for name in dict.fromkeys(k for k in keys[at] if k is not None):
                chosen = at[keys[at] == name]
                for block in _blocks(firsts[chosen], lasts[chosen]):
                    for target, rows in self._kept(name, _taken(tensor, block)):
                        if target not in found:
                            found[target] = Moments(rows.shape[1], self.covariance_of(target))
                        found[target].update(rows)
        for name, moments in found.items():
            put(state, name, moments)

    def _kept(self, key: str, rows: Any) -> Keyed:
        if self.max_norm is None:
            yield key, rows
            return
        rows = as_float64(rows)
        found = norm_filter(rows, max_norm=self.max_norm)
        yield key, rows[found.keep]
        if found.removed:
            yield key + REMOVED, np.linalg.norm(rows[~found.keep], axis=1)[:, None]


def _blocks(firsts: np.ndarray, lasts: np.ndarray) -> Iterable[Any]:
    """Row numbers of many short spans, BLOCK at a time; a slice where they are contiguous."""
    lengths = lasts - firsts
    total = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(firsts - total[:-1], lengths) + np.arange(total[-1])
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        contiguous = block[-1] - block[0] + 1 == len(block) and (np.diff(block) == 1).all()
        yield slice(int(block[0]), int(block[-1]) + 1) if contiguous else block


def _taken(tensor: Tensor, rows: Any) -> Any:
    """Some rows of a mapped tensor. numpy gathers several times as fast as torch, but has no bfloat16."""
    if isinstance(rows, slice):
        return tensor[rows]
    if tensor.dtype == torch.bfloat16:
        return torch.from_numpy(np.take(tensor.view(torch.int16).numpy(), rows, axis=0)).view(torch.bfloat16)
    return np.take(tensor.numpy(), rows, axis=0)


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
