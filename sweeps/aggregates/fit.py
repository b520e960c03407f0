"""What an aggregate over stored data is."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from .shards import ShardedRun


@runtime_checkable
class Fit(Protocol):
    """An aggregate over stored data, after it is in. `finished` is the same aggregate's sum, if it has one."""

    name: str

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]: ...
