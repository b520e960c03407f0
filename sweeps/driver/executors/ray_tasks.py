"""Plain Ray tasks beside the replicas: connecting, and one function over many arguments."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from ...config.schema import ClusterConfig
from ...errors import ConfigError
from .address import address_of, wait_for
from .base import import_replica

JOIN_S = 120.0
"""How long joining a cluster may take once its address answers."""


def spread(function: str, calls: Sequence[tuple], cluster: ClusterConfig) -> Iterator[tuple[int, Any]]:
    """Run `function` (module:name) once per tuple of plain arguments, as Ray tasks; (number, result) as they finish.

    Results must be small. An exception of a task is raised here, and what is left is cancelled.
    """
    own = None if ray.is_initialized() else _connect(cluster)
    waiting: dict[Any, int] = {}
    try:
        at_once = max(2 * int(ray.cluster_resources().get("CPU", 1)), 2)
        task = ray.remote(_call).options(num_cpus=1, max_retries=0)
        for number, arguments in enumerate(calls):
            if len(waiting) >= at_once:
                yield from _collected(waiting)
            waiting[task.remote(function, arguments)] = number
        while waiting:
            yield from _collected(waiting)
    finally:
        for ref in waiting:
            ray.cancel(ref, force=True)
        if own is not None:
            own.disconnect()


def _call(function: str, arguments: tuple) -> Any:
    return import_replica(function)(*arguments)


def _collected(waiting: dict[Any, int]) -> Iterator[tuple[int, Any]]:
    done, _ = ray.wait(list(waiting), num_returns=1)
    for ref in done:
        yield waiting.pop(ref), ray.get(ref)


def _connect(cluster: ClusterConfig) -> Any:
    """Join the cluster at the given address, or start one here. Returns the context of what was started or joined."""
    address = address_of(cluster)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address:
        wait_for(cluster)
        return _beside(lambda: ray.init(address=address, **quiet), JOIN_S, f"Ray at {address!r}")
    cpus = max(math.ceil(cluster.replicas * cluster.num_cpus), os.cpu_count() or 1)
    return _beside(lambda: ray.init(
        address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=cluster.object_store_memory,
        resources={k: v * cluster.replicas for k, v in cluster.resources.items()} or None, **quiet,
    ))  # fmt: skip


def _beside(connect: Callable[[], Any], patience_s: float | None = None, what: str = "Ray") -> Any:
    """What `connect` returns, called in another thread, which stays. ConfigError after `patience_s` without an answer.

    In the main thread Ray installs a handler of its own, and a signal that comes while it connects aborts the process.
    The kernel ends what Ray starts when the thread that started it ends: so that thread waits for the process's end.
    """
    found: list[Any] = []
    done = threading.Event()

    def call() -> None:
        try:
            found.append((connect(), None))
        except BaseException as error:
            found.append((None, error))
        done.set()
        threading.Event().wait()

    threading.Thread(target=call, name="sweeps-connect", daemon=True).start()
    if not done.wait(patience_s):
        raise ConfigError(
            f"{what} did not let this process join in {patience_s:.0f} s; is what listens there a Ray head of this version?"
        )
    value, error = found[0]
    if error is not None:
        raise error
    return value


def read_parquet(files: list[str], filesystem: Any, columns: Any = None) -> Any:
    """Parquet files as a Ray Dataset; folder names such as `model=tiny` become columns."""
    import ray.data

    found = ray.data.read_parquet(files, filesystem=filesystem)
    return found if columns is None else found.select_columns(list(columns))
