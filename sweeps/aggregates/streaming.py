"""The sum most aggregates are: named Moments, folded on the replica, merged in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from interlens.statistics import Moments

from . import CellResult, State

Keyed = Iterable[tuple[str, Any]]
PARTS = ("count", "non_finite", "mean", "m2")


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
        added: State = {}
        for key, rows in self.contribution(result):
            put(added, key, Moments.of(rows, self.covariance))
        for key, moments in moments_of(added).items():
            put(state, key, moments)

    def merge(self, a: State, b: State) -> State:
        merged = dict(a)
        for key, moments in moments_of(b).items():
            put(merged, key, moments)
        return merged


def put(state: State, key: str, moments: Moments) -> None:
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
