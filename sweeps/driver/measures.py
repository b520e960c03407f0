"""How far a run is: totals of commits, and the motion that replicas count. Nothing decides by these but `max_cost`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..config.schema import SweepConfig
from ..folder.commits import Commit
from .ledger import Ledger
from .progress import Snapshot
from .supervisor import Crew


class Measures:
    """Keeps the `snapshot` of one driver."""

    def __init__(self, config: SweepConfig):
        self._config = config
        self.snapshot = Snapshot()
        self.started = time.monotonic()
        self.held_before = 0
        """Cells that were committed when this driver began."""
        self._tokens: dict[str, int] = {}
        self._committed_tokens = 0
        """In units that were closed since this driver started: counters come once a second, the last ones too late."""
        self._costs: dict[str, float] = {}
        """Dollars by replica; "" are commits of earlier drivers."""
        self._last_rate = (self.started, 0)

    @property
    def spent(self) -> float:
        """Dollars, by this driver and those before it."""
        return sum(self._costs.values())

    def found(self, commit: Commit) -> None:
        """A commit that stood in the folder when this driver began."""
        self.snapshot.bytes += _bytes(commit)
        self._costs[""] = self._costs.get("", 0.0) + commit.counters.get("cost", 0.0)

    def committed(self, commit: Commit) -> None:
        """A commit of this driver's replicas, told once."""
        self.snapshot.bytes += _bytes(commit)
        self._committed_tokens += commit.counters.get("tokens", 0)

    def count(self, counters: Mapping[str, Mapping[str, Any]]) -> None:
        """Take tokens and dollars from the replicas' counters."""
        for replica, values in counters.items():
            self._tokens[replica] = values.get("tokens", 0)
            self._costs[replica] = values.get("cost", 0.0)

    def measure(self, now: float, crew: Crew, counters: Mapping[str, Mapping[str, Any]], ledger: Ledger) -> None:
        """Bring the snapshot up to now. counters: what each replica last said of itself."""
        snapshot = self.snapshot
        loading = not crew.num_ready and snapshot.state == "starting"
        snapshot.state, snapshot.elapsed_s = "starting" if loading else "running", now - self.started
        snapshot.cells, snapshot.held, snapshot.failed = ledger.num_cells, ledger.num_held, ledger.num_failed
        snapshot.units_open = sum(ledger.open_by_cast().values())
        snapshot.replicas_ready, snapshot.replicas_wanted = crew.num_ready, self._config.cluster.replicas
        snapshot.replica_deaths, snapshot.tokens = crew.deaths, sum(self._tokens.values())
        snapshot.underway = sum(sum(v.get("turns", {}).values()) for v in counters.values())
        new = max(ledger.num_held - self.held_before, 0) + snapshot.underway
        snapshot.cells_per_s = new / max(snapshot.elapsed_s, 1e-9)
        snapshot.cost = self.spent
        snapshot.finished = sum(sum(v.get("cells", {}).values()) for v in counters.values())
        snapshot.utilisation = {name: dict(v["seconds"]) for name, v in counters.items() if "seconds" in v}
        since, tokens = self._last_rate
        over = now - since >= self._config.run.interval_s
        if over or since == self.started:
            snapshot.tokens_per_s = (snapshot.tokens - tokens) / max(now - since, 1e-9)
        if over:
            self._last_rate = (now, snapshot.tokens)

    def metrics(self) -> dict[str, float]:
        """The snapshot as gauges, by the names of `executors.base.METRICS`."""
        s = self.snapshot
        return {
            "cells_committed": s.held, "cells_failed": s.failed, "cells_pending": s.pending,
            "tokens_generated": s.tokens, "tokens_per_s": s.tokens_per_s, "bytes_written": s.bytes,
            "replicas_ready": s.replicas_ready, "replica_deaths": s.replica_deaths, "api_cost": s.cost,
        }  # fmt: skip

    def total(self, ledger: Ledger) -> None:
        """Bring the snapshot to what it is when no replica runs any more."""
        snapshot = self.snapshot
        snapshot.cells, snapshot.held, snapshot.failed = ledger.num_cells, ledger.num_held, ledger.num_failed
        snapshot.finished, snapshot.underway = 0, 0.0
        snapshot.units_open, snapshot.elapsed_s = sum(ledger.open_by_cast().values()), time.monotonic() - self.started
        snapshot.tokens = max(snapshot.tokens, self._committed_tokens)
        if self._last_rate[0] == self.started:  # shorter than an interval
            snapshot.tokens_per_s = snapshot.tokens / max(snapshot.elapsed_s, 1e-9)


def _bytes(commit: Commit) -> int:
    return sum(int(file.get("bytes", 0)) for file in commit.files)
