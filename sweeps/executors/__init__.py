"""Where replicas live. The driver speaks to an `Executor` only: `ray` is many processes and machines, `inline` this.

A replica is started, says it is ready, is given units, acks each or is lost. An executor never retries, restarts or
decides anything: it reports. Acks are small; data goes from the replica to files.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..config import ClusterConfig, ConfigError

REPLICA = "sweeps.replica:Replica"
"""Import path of the class that runs units: `Replica(config, run_dir, cast)` with `load`, `run`, `counters`, `stop`."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a replica."""

    kind: Literal["placed", "ready", "done", "lost"]
    replica: str
    unit: str | None = None
    ack: dict[str, Any] = field(default_factory=dict)
    """ready: what was loaded; done: the unit's ack."""
    error: str = ""
    """lost: why, with the traceback's text where there is one."""
    counts: bool = False
    """lost: the process died (or raised) while its node survived."""
    raised: bool = False
    """lost: it raised an exception of its own, which it would raise again."""


class Executor(Protocol):
    """Starts replicas and carries units to them. Not thread safe; nothing here blocks but `events`."""

    def start(self, replica: str, cast: str) -> None:
        """Ask for a new replica; it is placed when there is room, then loads, then is ready."""
        ...

    def submit(self, replica: str, unit: bytes) -> None:
        """Have a ready replica run a unit (see `pack`)."""
        ...

    def events(self, timeout_s: float) -> list[Event]:
        """What happened, waiting up to `timeout_s` for something to."""
        ...

    def counters(self) -> dict[str, dict[str, Any]]:
        """Latest known counters of every replica that has answered so far; asks for newer ones."""
        ...

    def stop(self) -> None:
        """Ask every replica to finish its step, commit what is complete and hand over the rest."""
        ...

    def kill(self, replica: str) -> None:
        """End a replica now. No event follows."""
        ...

    def describe(self) -> str:
        """What a replica needs and what there is, for error messages."""
        ...

    def publish(self, metrics: dict[str, float]) -> None:
        """Export values to whatever monitors this executor has."""
        ...

    def close(self) -> None:
        """End all replicas and whatever this executor started."""
        ...


def make(config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str = REPLICA) -> Executor:
    """The executor that `cluster.executor` names. `replica`: import path of the replica class."""
    if cluster.executor == "inline":
        from .inline import InlineExecutor

        return InlineExecutor(config, run_dir, cluster, replica)
    if cluster.executor == "ray":
        from .ray import RayExecutor

        return RayExecutor(config, run_dir, cluster, replica)
    raise ConfigError(f"no executor {cluster.executor!r}; possible: inline, ray; set cluster.executor")


class Pool:
    """Lets the runs of one process share an executor, its connection and its loaded replicas."""

    def __init__(self) -> None:
        self._executor: Any = None

    def borrow(self, config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str) -> Executor:
        """An executor for one run: the last one's, with its warm replicas, if they fit."""
        if self._executor is not None and not self._executor.rebind(config, run_dir, cluster, replica):
            self.close()
        if self._executor is None:
            made = make(config, run_dir, cluster, replica)
            if not hasattr(made, "rebind"):
                return made
            self._executor = made
        return self._executor

    def give_back(self, executor: Executor) -> None:
        """The run is over."""
        if executor is self._executor:
            self._executor.release()
        else:
            executor.close()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None


_pool: Pool | None = None


@contextlib.contextmanager
def shared() -> Iterator[Pool]:
    """Runs inside this block share one pool of replicas, which reload only when the models change."""
    global _pool
    _pool = Pool()
    try:
        yield _pool
    finally:
        _pool.close()
        _pool = None


@contextlib.contextmanager
def opened(config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str) -> Iterator[Executor]:
    """An executor for one run, from the pool where there is one."""
    if _pool is not None:
        executor = _pool.borrow(config, run_dir, cluster, replica)
        try:
            yield executor
        finally:
            _pool.give_back(executor)
        return
    executor = make(config, run_dir, cluster, replica)
    try:
        yield executor
    finally:
        executor.close()


def import_replica(path: str) -> type:
    """The class at `module:Class`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
