"""Sums and fits computed again from stored shards, here or one unit at a time in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ..config.schema import AggregateConfig
from ..folder import commits
from .base import Spread, State, Sum
from .registry import build
from .shards import Shard, ShardedRun
from .vectors import Place


def at_place(root: str, name: str, options: dict[str, Any], what: str, key: str) -> Any:
    """A method of a fit at one place, from plain values, for another process."""
    run = opened(root)
    made: Any = build([AggregateConfig(name=name, options=options)], run.config)[0]
    return getattr(made, what)(run, Place.of(key))


def added(state: State, shard: Shard, aggregate: Sum) -> State:
    """A sum's state with one unit's stored data: what the replica streamed, to rounding."""
    if add_shard := getattr(aggregate, "add_shard", None):
        add_shard(state, shard)
        return state
    for result in shard.results(records=getattr(aggregate, "reads_records", True)):
        aggregate.add(state, result)
    return state


def shards_of(run: ShardedRun, aggregate: Sum) -> Iterator[Shard]:
    """The units a sum is taken over: of what `sweeps capture` added, too, where it is a sum over records."""
    return run.shards(added=hasattr(aggregate, "add_shard"))


def recompute(run: ShardedRun, aggregate: Sum) -> State:
    """A sum's state over all committed data, unit by unit, in order of unit id."""
    state = aggregate.zero()
    for shard in shards_of(run, aggregate):
        state = added(state, shard, aggregate)
    return state


def unit_state(root: str, unit: str, name: str, options: dict[str, Any]) -> State:
    """A sum's state over one unit, from plain values, for another process."""
    run = opened(root)
    commit = commits.read_commit(root, unit)
    assert commit is not None, f"unit {unit} has no commit"
    aggregate: Any = build([AggregateConfig(name=name, options=options)], run.config)[0]
    return added(aggregate.zero(), Shard(run, commit), aggregate)


@lru_cache(maxsize=2)
def opened(root: str) -> ShardedRun:
    """A run folder, read once per process."""

    return ShardedRun(root)


def recompute_apart(run: ShardedRun, aggregate: Sum, options: dict[str, Any], spread: Spread) -> State:
    """`recompute` with one call of `spread` per unit; the states are merged in order of unit id as they arrive."""

    calls = [
        (shard.run.store.address, shard.commit.unit, aggregate.name, options) for shard in shards_of(run, aggregate)
    ]
    state, early, next_one = aggregate.zero(), {}, 0
    for number, found in spread("sweeps.aggregates.recompute:unit_state", calls):
        early[number] = found
        while next_one in early:
            state = aggregate.merge(state, early.pop(next_one))
            next_one += 1
    return state
