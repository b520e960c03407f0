"""Replicas as Ray actors. The only file of this package that imports Ray.

Actors are plain: never restarted, never retried, never detached, built from small plain values. Every Ray error means
"may have been executed": the replica is killed, and the folder's commits say what it did. Nothing large passes through
the object store. An instance of Ray is started here only when no address is given, and ended by its own handle.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...config.schema import ClusterConfig
from ...folder.cells import unit_id
from ...redact import redact
from .address import answers
from .base import METRICS, Event, import_replica
from .ray_tasks import _connect

SUSPECT_S = 40.0
"""How long an unavailable actor is asked again until Ray knows whether its process or its node died."""

COUNTERS_PER_S = 200.0
"""Replicas asked for their counters a second, so that a thousand of them leave the driver time for acks."""


class _Actor:
    """A replica in its own process. `run` has as many threads as units in flight; `watch` answers beside it."""

    def __init__(self, replica: str, threads: int, environment: dict[str, str]):
        os.environ.update(environment, OMP_NUM_THREADS=str(threads))
        self._path, self._threads = replica, threads
        self._replica: Any = None

    def where(self) -> dict[str, Any]:
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    def load(self, config: dict[str, Any], run_dir: str, cast: str) -> dict[str, Any]:
        try:
            self._replica = import_replica(self._path)(config, run_dir, cast, threads=self._threads)
            return self._replica.load()
        except Exception:  # with this node's secrets out of it
            raise RuntimeError(redact(traceback.format_exc())) from None

    def run(self, unit: bytes) -> dict[str, Any]:
        return self._replica.run(unit)

    def counters(self) -> dict[str, Any]:
        return self._replica.counters() if self._replica else {}

    def stop(self) -> None:
        if self._replica:
            self._replica.stop()


class _Handle:
    """What the driver's side knows of one actor."""

    def __init__(self, cast: str):
        self.cast = cast
        self.actor: Any = None
        self.group: PlacementGroup | None = None
        self.node: str | None = None
        self.suspect_since: float | None = None
        self.counters: dict[str, Any] = {}
        self.asked: Any = None
        self.asked_at = 0.0


class RayExecutor:
    """Replicas spread over the nodes of a Ray cluster."""

    def __init__(self, config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str):
        self._arguments, self._cluster, self._path = (config, _absolute(run_dir)), cluster, replica
        self._handles: dict[str, _Handle] = {}
        self._refs: dict[Any, tuple[str, str, str | None]] = {}
        """Awaited result -> (what, replica, unit)."""
        self._gauges: dict[str, Gauge] = {}
        self._warm: list[_Handle] = []
        """Loaded actors of a finished run, for the next one of this process."""
        self._own = None if ray.is_initialized() else _connect(cluster)

    def start(self, replica: str, cast: str) -> None:
        if warm := next((handle for handle in self._warm if handle.cast == cast), None):
            self._warm.remove(warm)
            self._handles[replica] = warm
            self._await(warm.actor.load.remote(*self._arguments, cast), "load", replica)
            return
        if self._warm:  # of another cast: it holds the place of the new one
            self._end(self._warm.pop())
        handle = self._handles[replica] = _Handle(cast)
        if self._cluster.num_gpus > 1:
            bundle = {"CPU": self._cluster.num_cpus, "GPU": self._cluster.num_gpus, **self._cluster.resources}
            handle.group = placement_group([bundle], strategy="STRICT_PACK")
            self._await(handle.group.ready(), "group", replica)
        else:
            self._create(replica, handle)

    def submit(self, replica: str, unit: bytes) -> None:

        self._await(self._handles[replica].actor.run.remote(unit), "run", replica, unit_id(unit))

    def events(self, timeout_s: float) -> list[Event]:
        if not self._refs:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(self._refs), num_returns=1, timeout=timeout_s, fetch_local=True)
        if done:  # whatever else is there already
            done, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=True)
        events = [event for ref in done if (event := self._outcome(ref))]
        return [*events, *self._overdue_suspects()]

    def counters(self) -> dict[str, dict[str, Any]]:
        now, rest_s = time.monotonic(), len(self._handles) / COUNTERS_PER_S
        for replica, handle in self._handles.items():
            if handle.node and handle.asked is None and now - handle.asked_at >= rest_s:
                handle.asked_at = now
                handle.asked = handle.actor.counters.options(concurrency_group="watch").remote()
                self._await(handle.asked, "counters", replica)
        return {replica: handle.counters for replica, handle in self._handles.items() if handle.counters}

    def stop(self) -> None:
        for handle in self._handles.values():
            if handle.node:
                handle.actor.stop.options(concurrency_group="watch").remote()

    def kill(self, replica: str) -> None:
        self._forget(replica)

    def describe(self) -> str:
        wanted = {"CPU": self._cluster.num_cpus, "GPU": self._cluster.num_gpus, **self._cluster.resources}
        have = ray.cluster_resources()
        shown = {key: value for key, value in have.items() if not key.startswith(("node:", "object_store", "memory"))}
        nodes = sum(node["Alive"] for node in ray.nodes())
        return f"a replica needs {_amounts(wanted)}; {nodes} live nodes have {_amounts(shown)} in all"

    def publish(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"sweeps_{name}", description=METRICS[name])
            self._gauges[name].set(value)

    def rebind(self, config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str) -> bool:
        """Serve another run with the replicas that are warm. False if they do not fit it."""
        if (cluster, replica) != (self._cluster, self._path):
            return False
        self._arguments = (config, _absolute(run_dir))
        return True

    def release(self) -> None:
        """End the replicas that are loading or have a unit in flight, and keep the others warm."""
        busy = {replica for what, replica, _ in self._refs.values() if what != "counters"}
        for replica in busy:
            self._forget(replica)
        for handle in self._handles.values():
            handle.counters, handle.asked = {}, None
            self._warm.append(handle)
        self._handles.clear()
        self._refs.clear()

    def close(self) -> None:
        for handle in self._warm:
            self._end(handle)
        self._warm.clear()
        for replica in list(self._handles):
            self._forget(replica)
        if self._own is not None:
            self._own.disconnect()
            self._own = None

    # ---- inside

    def _create(self, replica: str, handle: _Handle) -> None:
        cluster = self._cluster
        options: dict[str, Any] = {
            "num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus, "resources": dict(cluster.resources) or None,
            "max_restarts": 0, "max_task_retries": 0, "max_concurrency": max(cluster.in_flight, 1),
            "scheduling_strategy": "SPREAD",
        }  # fmt: skip
        if handle.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(handle.group, 0)
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={"watch": 2})(_Actor)
        handle.actor = actor_class.options(**options).remote(self._path, cluster.threads, _environment())
        self._await(handle.actor.where.options(concurrency_group="watch").remote(), "where", replica)

    def _await(self, ref: Any, what: str, replica: str, unit: str | None = None) -> None:
        self._refs[ref] = (what, replica, unit)

    def _outcome(self, ref: Any) -> Event | None:
        entry = self._refs.pop(ref, None)
        if entry is None:
            return None
        what, replica, unit = entry
        handle = self._handles[replica]
        if what == "counters":
            handle.asked = None
        try:
            value = ray.get(ref)
        except RayTaskError as error:
            if what == "counters":
                return None
            return self._lost(replica, str(error), counts=True, raised=True)
        except ActorUnavailableError as error:
            return self._suspect(replica, str(error))
        except ActorDiedError as error:
            return self._lost(replica, str(error), counts=self._node_is_alive(handle, str(error)))
        except RayError as error:
            return self._lost(replica, "".join(traceback.format_exception_only(error)), counts=False)
        return self._answered(what, replica, handle, unit, value)

    def _answered(self, what: str, replica: str, handle: _Handle, unit: str | None, value: Any) -> Event | None:
        if what == "group":
            self._create(replica, handle)
        elif what == "where":
            handle.node = value["node"]
            self._await(handle.actor.load.remote(*self._arguments, handle.cast), "load", replica)
            return Event(kind="placed", replica=replica, ack=value)
        elif what == "load":
            return Event(kind="ready", replica=replica, ack=value)
        elif what == "counters":
            handle.counters = value
        elif what == "run":
            return Event(kind="done", replica=replica, unit=unit, ack=value)
        elif what == "suspect":  # it answers again, but a call of ours is lost: what it did is in the folder
            return self._lost(replica, "the replica was unreachable for a while", counts=False)
        return None

    def _suspect(self, replica: str, error: str) -> None:
        """Ask an unreachable actor again until Ray knows what happened to it."""
        handle = self._handles[replica]
        if handle.suspect_since is None:
            handle.suspect_since = time.monotonic()
        for ref in [ref for ref, entry in self._refs.items() if entry[1] == replica]:
            del self._refs[ref]
        self._await(handle.actor.where.options(concurrency_group="watch").remote(), "suspect", replica)

    def _overdue_suspects(self) -> list[Event]:
        now = time.monotonic()
        overdue = [n for n, h in self._handles.items() if h.suspect_since and now - h.suspect_since > SUSPECT_S]
        return [self._lost(replica, "the replica is unreachable", counts=False) for replica in overdue]

    def _lost(self, replica: str, error: str, *, counts: bool, raised: bool = False) -> Event:
        self._forget(replica)
        return Event(kind="lost", replica=replica, error=error, counts=counts, raised=raised)

    def _forget(self, replica: str) -> None:
        handle = self._handles.pop(replica, None)
        if handle is None:
            return
        for ref in [ref for ref, entry in self._refs.items() if entry[1] == replica]:
            del self._refs[ref]
        self._end(handle)

    @staticmethod
    def _end(handle: _Handle) -> None:
        if handle.actor is not None:
            ray.kill(handle.actor, no_restart=True)
        if handle.group is not None:
            remove_placement_group(handle.group)

    def _node_is_alive(self, handle: _Handle, error: str) -> bool:
        if "node has died" in error or "preempt" in error.lower():
            return False
        node = next((node for node in ray.nodes() if node["NodeID"] == handle.node), None)
        # Ray itself notices a dead raylet only after many missed heartbeats
        return bool(node and node["Alive"]) and answers(node["NodeManagerAddress"], node["NodeManagerPort"])


def _absolute(run_dir: str) -> str:
    """A run folder as workers find it, whatever their working directory."""
    return run_dir if "://" in run_dir else os.path.abspath(run_dir)


def _environment() -> dict[str, str]:
    """What replicas inherit of this process's environment: our own switches, which nodes do not have otherwise."""
    return {key: value for key, value in os.environ.items() if key.startswith("SWEEPS_")}


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items() if value) or "nothing"
