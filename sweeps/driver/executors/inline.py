"""Everything in this process: replicas are objects, units run on one thread each. For debugging and small runs."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...config.schema import ClusterConfig
from .base import Event, import_replica


class InlineExecutor:
    """Replicas of one process. A unit that raises loses its replica, as a crash would on Ray."""

    def __init__(self, config: dict[str, Any], run_dir: str, cluster: ClusterConfig, replica: str):
        self._arguments, self._cluster = (config, run_dir), cluster
        self._make = import_replica(replica)
        self._replicas: dict[str, Any] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def start(self, replica: str, cast: str) -> None:
        self._threads[replica] = ThreadPoolExecutor(max(self._cluster.in_flight, 1), thread_name_prefix=replica)
        self._events.put(Event(kind="placed", replica=replica))
        self._threads[replica].submit(self._load, replica, cast)

    def submit(self, replica: str, unit: bytes) -> None:
        self._threads[replica].submit(self._run, replica, unit)

    def events(self, timeout_s: float) -> list[Event]:
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return [event for event in found if event.replica in self._threads]

    def counters(self) -> dict[str, dict[str, Any]]:
        return {name: replica.counters() for name, replica in list(self._replicas.items())}

    def stop(self) -> None:
        for replica in list(self._replicas.values()):
            replica.stop()

    def kill(self, replica: str) -> None:
        self._replicas.pop(replica, None)
        if threads := self._threads.pop(replica, None):
            threads.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> str:
        return "replicas of this process"

    def publish(self, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self.stop()
        hurried = isinstance(sys.exception(), KeyboardInterrupt)  # a second Ctrl-C: what units hold is not waited for
        for threads in self._threads.values():
            threads.shutdown(wait=not hurried, cancel_futures=True)
        self._threads.clear()
        self._replicas.clear()

    def _raised(self, replica: str) -> None:
        """Report a replica as lost with the exception that is being handled."""
        error = traceback.format_exc()
        self._events.put(Event(kind="lost", replica=replica, error=error, counts=True, raised=True))

    def _load(self, replica: str, cast: str) -> None:
        try:
            made = self._make(*self._arguments, cast)
            loaded = made.load()
        except BaseException:
            self._raised(replica)
            return
        self._replicas[replica] = made
        self._events.put(Event(kind="ready", replica=replica, ack=loaded))

    def _run(self, replica: str, unit: bytes) -> None:
        try:
            ack = self._replicas[replica].run(unit)
        except BaseException:
            self._raised(replica)
            return
        self._events.put(Event(kind="done", replica=replica, unit=ack["unit"], ack=ack))
