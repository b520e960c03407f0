"""The replicas of a run: how many are wanted, who is loading, who may take a unit, who has stalled.

Replicas come and go: one is asked for while fewer exist than wanted and there is work for its cast; after a death the
next waits (1, 2, 4, ... 30 s while deaths follow each other). A replica is asked for and placed when there is room;
that fewer fit than are wanted is no error. No replica at all, and none coming, is `hopeless` after `load_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config.schema import ClusterConfig
from .executors.base import Event, Executor

MAX_BACKOFF_S = 30.0

MAX_FAILED_LOADS = 3


@dataclass
class Member:
    """One replica, as the driver knows it."""

    name: str
    cast: str
    state: str
    """asked | loading | ready."""
    since: float
    moved: dict[str, tuple[Any, float]] = field(default_factory=dict)
    """Unit in flight -> (its movement counter, when that was first seen)."""


class Crew:
    """Keeps the wanted number of replicas alive on an executor."""

    def __init__(self, executor: Executor, cluster: ClusterConfig, clock=time.monotonic):
        self.executor, self.cluster, self._clock = executor, cluster, clock
        self.members: dict[str, Member] = {}
        self.deaths = 0
        self.deaths_in_a_row = 0
        """Without a commit between them."""
        self.failed_loads = 0
        """Replicas whose loading raised, since one was last ready."""
        self.last_error = ""
        self._started = 0
        self._not_before = 0.0
        self._alone_since = clock()
        """Since when no replica has been ready."""

    def tend(self, demand: Mapping[str, int]) -> None:
        """Start what is missing. `demand`: open units by cast; a replica whose cast has none makes room for others."""
        for member in list(self.members.values()):
            if not demand.get(member.cast) and not member.moved and any(demand.values()):
                self.dismiss(member.name)
        wanted = min(self.cluster.replicas, sum(demand.values()))
        while len(self.members) < wanted and self._clock() >= self._not_before:
            have = {cast: sum(m.cast == cast for m in self.members.values()) for cast in demand}
            cast = max(demand, key=lambda c: (demand[c] > have[c], demand[c] / (have[c] + 1)))
            name = f"r{self._started}"
            self._started += 1
            self.members[name] = Member(name, cast, "asked", self._clock())
            self.executor.start(name, cast)
            if self.deaths_in_a_row:
                self._not_before = self._clock() + self._backoff()

    def on_event(self, event: Event) -> None:
        """Keep up with what happened to a replica."""
        member = self.members.get(event.replica)
        if member is None:
            return
        if event.kind == "placed":
            member.state, member.since = "loading", self._clock()
        elif event.kind == "ready":
            member.state, member.since = "ready", self._clock()
            self.failed_loads = 0
        elif event.kind == "done" and event.unit:
            member.moved.pop(event.unit, None)
        elif event.kind == "lost":
            self.failed_loads += member.state == "loading" and event.raised
            self._count_death(member, event.error)

    def sent(self, name: str, unit: str) -> None:
        """A unit is in flight on this replica."""
        self.members[name].moved[unit] = (None, self._clock())

    def free(self) -> Iterator[Member]:
        """Ready replicas with room for another unit, the least busy first."""
        ready = [m for m in self.members.values() if m.state == "ready" and len(m.moved) < self.cluster.in_flight]
        return iter(sorted(ready, key=lambda m: len(m.moved)))

    def watch(self, counters: Mapping[str, Mapping[str, Any]]) -> list[Member]:
        """Members with a unit that has not moved for `stall_s`, or that have been loading for `load_s`."""
        now, stalled = self._clock(), []
        for member in self.members.values():
            ticks = counters.get(member.name, {}).get("units", {})
            for unit, (seen, since) in list(member.moved.items()):
                if unit in ticks and ticks[unit] != seen:
                    member.moved[unit] = (ticks[unit], now)
                elif now - since > self.cluster.stall_s and member not in stalled:
                    stalled.append(member)
            if member.state == "loading" and now - member.since > self.cluster.load_s:
                stalled.append(member)
        return stalled

    def dismiss(self, name: str, error: str | None = None) -> None:
        """End a replica. With `error` it counts as a death."""
        member = self.members[name]
        self.executor.kill(name)
        if error is None:
            del self.members[name]
        else:
            self._count_death(member, error)

    def progress_made(self) -> None:
        """A unit was closed: deaths are no longer in a row."""
        self.deaths_in_a_row = 0

    @property
    def num_ready(self) -> int:
        return sum(m.state == "ready" for m in self.members.values())

    def hopeless(self) -> str | None:
        """Why this run cannot go on, if it cannot."""
        if self.deaths_in_a_row >= self.cluster.max_deaths:
            return (
                f"{self.deaths_in_a_row} replicas died without a unit being closed between them (cluster.max_deaths); "
                f"the last one: {last_line(self.last_error)}"
            )
        if self.failed_loads >= MAX_FAILED_LOADS:
            why = last_line(self.last_error)
            return f"{self.failed_loads} replicas could not load, and none could; the last one: {why}"
        if any(m.state != "asked" for m in self.members.values()):
            self._alone_since = self._clock()
        elif self._clock() - self._alone_since > self.cluster.load_s:
            return (
                f"no replica for {self.cluster.load_s:.0f} s (cluster.load_s) and none coming: "
                f"{self.executor.describe()}; change cluster.num_cpus, num_gpus or resources, or add nodes"
            )
        return None

    def _count_death(self, member: Member, error: str) -> None:
        del self.members[member.name]
        self.deaths += 1
        self.deaths_in_a_row += 1
        self.last_error = error
        self._not_before = self._clock() + self._backoff()

    def _backoff(self) -> float:
        return min(MAX_BACKOFF_S, 2.0 ** (self.deaths_in_a_row - 1)) if self.deaths_in_a_row > 1 else 0.0


def last_line(error: str) -> str:
    """The last line of a traceback that says anything: usually the exception and its message."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
