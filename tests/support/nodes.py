"""Sweeps on a Ray cluster of three real nodes, and what became of them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

from sweeps.driver import entry
from sweeps.folder import commits as folder_commits
from sweeps.folder.plan_reader import PlanFile
from sweeps.folder.store import open_store
from sweeps.folder.verify import verify
from tests.support.fakes import config
from tests.support.small import settings

SCRIPTED = "tests.support.fakes:FakeReplica"


def start():
    """A head without room for replicas, and two nodes with a slot each, standing in for two machines with a GPU."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000,
            "_system_config": {"metrics_report_interval_ms": 500}}  # fmt: skip
    made = Cluster(initialize_head=True, head_node_args=head)
    made.workers = [add_node(made), add_node(made)]
    return made


def add_node(cluster, **amounts):
    amounts = amounts or {"num_cpus": 1, "resources": {"slot": 1}}
    return cluster.add_node(**amounts, object_store_memory=100_000_000)


def on_nodes(address, **changes):
    """The section `cluster` of a sweep with a replica on each node."""
    return {"executor": "ray", "address": address, "replicas": 2, "resources": {"slot": 1}, "rows": 8, **changes}


class Sweep:
    """`sweep(model, ...)` runs `small.settings` on the cluster, `.scripted(items, ...)` a sweep without a model."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def __call__(self, model, nodes=None, **changes):
        where = on_nodes(self.cluster.address, **(nodes or {}))
        return entry.run(settings(model, cluster=where, **changes), self.folder)

    def scripted(self, rows, nodes=None, **options):
        where = on_nodes(self.cluster.address, **(nodes or {}))
        return entry.run(config(rows, cluster=where, **options), self.folder, replica=SCRIPTED)

    @property
    def events(self):
        path = open_store(self.folder).root / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, kind):
        return [event for event in self.events if event["event"] == kind]

    def wait_for(self, kind, count=1, timeout_s=90):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if len(found := self.said(kind)) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {count} {kind} events; there are {Counter(e['event'] for e in self.events)}")

    def settled(self):
        """Cells that are held and cells that failed, after checking that each belongs to one commit, and every file."""
        commits = {commit.unit: commit for commit in folder_commits.list_commits(self.folder)}
        held = Counter(cell for commit in commits.values() for cell in commit.cells)
        failed = Counter(
            cell for commit in commits.values() if f"{commit.unit}.r" not in commits for cell in commit.failed
        )
        cells = set(PlanFile(self.folder).table(["cell"])["cell"].to_pylist())
        assert set(held + failed) == cells and {*(held + failed).values()} == {1}
        trunks = Counter(trunk for commit in commits.values() for trunk in commit.trunks)
        assert set(trunks.values()) <= {1}
        assert verify(self.folder, deep=True).problems == []
        return set(held), set(failed)


class Beside(threading.Thread):
    """`action()` in a thread; `join` gives what it returned, or raises."""

    def __init__(self, action):
        super().__init__()
        self.action, self.error, self.result = action, None, None
        self.start()

    def run(self):
        try:
            self.result = self.action()
        except BaseException as error:
            self.error = error

    def join(self, timeout=None):
        super().join(timeout)
        if self.error is not None:
            raise self.error
        return self.result
