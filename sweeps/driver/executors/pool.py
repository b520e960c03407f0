"""Where replicas live. The driver speaks to an `Executor` only: `ray` is many processes and machines, `inline` this.

A replica is started, says it is ready, is given units, acks each or is lost. An executor never retries, restarts or
decides anything: it reports. Acks are small; data goes from the replica to files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...config.schema import ClusterConfig
from ...errors import ConfigError
from .base import REPLICA, Executor
from .inline import InlineExecutor


def make(config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str = REPLICA) -> Executor:
    """The executor that `cluster.executor` names. `replica`: import path of the replica class."""
    if cluster.executor == "inline":
        return InlineExecutor(config, run_dir, cluster, replica)
    if cluster.executor == "ray":
        from .ray import RayExecutor  # a run in this process never loads Ray

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
