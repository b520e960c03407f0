"""Faults on a real Ray cluster of three nodes: every cell is committed once, failed, or still pending."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections import Counter

import pytest

from sweeps import driver, store
from sweeps import run as reader
from sweeps.aggregates.results import read_results
from sweeps.metrics import METRICS
from sweeps.planfile import PlanFile
from sweeps.verify import verify
from tests.sweeps import apart
from tests.sweeps.fakes import config, items
from tests.sweeps.small import Switch, build_model, contents, same, settings

pytestmark = pytest.mark.slow
FAKE = "tests.sweeps.fakes:FakeReplica"


@pytest.fixture(scope="module")
def cluster():
    """A head without room for replicas, and two nodes with a slot each, standing in for two machines with a GPU."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (as Ray spells it)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000,
            "_system_config": {"metrics_report_interval_ms": 500}}  # fmt: skip
    made = Cluster(initialize_head=True, head_node_args=head)
    made.workers = [add_node(made), add_node(made)]
    yield made
    made.shutdown()


def add_node(cluster):
    return cluster.add_node(num_cpus=1, resources={"slot": 1}, object_store_memory=100_000_000)


def nodes(address, **changes):
    return {"executor": "ray", "address": address, "replicas": 2, "resources": {"slot": 1}, "rows": 8, **changes}


@pytest.fixture
def sweep(cluster, tmp_path, monkeypatch):
    """`sweep(items, ...)` runs a fake sweep on the cluster; `.settled()` and `.events` tell what it did."""
    monkeypatch.setenv("SWEEPS_FAILPOINTS_ONCE", str(tmp_path / "once"))
    (tmp_path / "once").mkdir()
    return Sweep(cluster, tmp_path / "run")


class Sweep:
    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def __call__(self, rows, **options):
        wanted = {
            "address": self.cluster.address,
            "replicas": 2,
            "resources": {"slot": 1},
            **options.pop("cluster", {}),
        }
        settings = config(rows, executor="ray", cluster=wanted, **options)
        return driver.run(settings, self.folder, replica=FAKE)

    def real(self, model, **changes):
        """A real sweep with a tiny model on the cluster."""
        return driver.run(
            settings(model, cluster=nodes(self.cluster.address, **changes.pop("nodes", {})), **changes), self.folder
        )

    @property
    def events(self):
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, kind, count=1, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [event for event in self.events if event["event"] == kind]
            if len(found) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {count} {kind} events; there are {Counter(e['event'] for e in self.events)}")

    def settled(self):
        """Each cell of the plan belongs to one commit: (held, failed), after checking it."""
        commits = {commit.unit: commit for commit in store.list_commits(self.folder)}
        held = Counter(cell for commit in commits.values() for cell in commit.cells)
        failed = Counter(cell for commit in commits.values() for cell in commit.failed)
        cells = set(PlanFile(self.folder).table(["cell"])["cell"].to_pylist())
        assert set(held) | set(failed) == cells and not set(held) & set(failed)
        assert set((held + failed).values()) == {1}
        trunks = Counter(trunk for commit in commits.values() for trunk in commit.trunks)
        assert set(trunks.values()) <= {1}
        assert verify(self.folder, deep=True).ok
        return held, failed

    def later(self, action):
        """Run `action(self)` beside the sweep; its failure fails the test."""
        self.error = None

        def run():
            try:
                action(self)
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.mark.parametrize("point", ["replica.loaded", "replica.started"])
def test_a_replica_killed_anywhere_loses_nothing(sweep, monkeypatch, point):
    monkeypatch.setenv("SWEEPS_FAILPOINTS", f"{point}=kill")
    assert sweep(items(12), turns=2, unit_cells=4) == 0
    assert sweep.settled()[1] == {}
    assert len([e for e in sweep.events if e["event"] == "lost"]) == 1


def test_a_cell_that_kills_its_process_ends_alone_and_the_others_as_undisturbed(sweep, model, tmp_path, monkeypatch):
    rows = [{"id": f"i{n}", "topic": f"topic {n}", "do": do} for n, do in enumerate(("", "kill"))]
    one_each = {"scenario__items": rows, "seeds": 1, "grid": {"framing": {"warm": "Be warm."}}, "unit_cells": 8}
    monkeypatch.setattr(Switch, "obey", False)
    assert driver.run(settings(model, **one_each), tmp_path / "undisturbed") == 0
    assert sweep.real(model, **one_each) == 3
    held, failed = sweep.settled()
    assert len(held) == len(failed) == 1
    run = reader.open(sweep.folder)
    (row,) = run.table("failures").to_pylist()
    assert next(c["item"] for c in run.cells.to_pylist() if c["cell"] == row["cell"]) == "i1"
    assert row["attempts"] == 3 and "died" in row["error"]
    (failing,) = [commit for commit in store.list_commits(sweep.folder) if commit.failed]
    assert failing.unit.startswith("u000000.") and not failing.cells
    talk, values = contents(tmp_path / "undisturbed")
    fine = {cell: said for cell, said in talk.items() if cell in held}
    same(contents(sweep.folder), (fine, {at: value for at, value in values.items() if at[0] in held}))


def test_a_cell_that_hangs_is_found_by_its_stillness(sweep):
    assert sweep(items(3, i1="hang"), seeds=1, unit_cells=1, cluster={"stall_s": 1.5}) == 3
    held, failed = sweep.settled()
    assert len(held) == 2 and len(failed) == 1


def test_a_trunk_that_kills_its_process_fails_its_cells_only(sweep):
    assert sweep(items(3, i1="kill_trunk"), turns=1, seeds=2, unit_cells=8) == 3
    held, failed = sweep.settled()
    assert len(held) == 4 and len(failed) == 2


def test_a_node_goes_and_another_comes(sweep, cluster, model, undisturbed):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(sweep.real(model, num_items=8, unit_cells=2)))
    thread.start()
    sweep.wait_for("dispatched", 3)
    cluster.remove_node(cluster.workers.pop(0), allow_graceful=False)
    cluster.workers.append(add_node(cluster))
    thread.join()
    assert codes == [0] and sweep.settled()[1] == {}
    same(contents(sweep.folder), undisturbed)
    assert len({e["node"] for e in sweep.events if e["event"] == "placed"}) >= 2
    assert all(not e["counts"] for e in sweep.events if e["event"] == "lost")


def test_no_replica_and_none_coming_ends_in_bounded_time_and_says_why(sweep, capsys):
    begun = time.monotonic()
    assert sweep(items(2), cluster={"resources": {"unobtainium": 1}, "load_s": 2}) == 1
    assert time.monotonic() - begun < 30
    said = capsys.readouterr().err
    assert "none coming" in said and "unobtainium" in said and "slot" in said
    assert sweep(items(2)) == 0


def test_random_kills_for_a_minute(sweep, model, tmp_path):
    """Replicas are killed a moment after they are ready, for as long as there is work."""
    much = {"num_items": 24, "seeds": 4, "unit_cells": 8}
    assert driver.run(settings(model, **much), tmp_path / "undisturbed") == 0
    stop = threading.Event()

    def killer(sweep):
        rng, until = random.Random(0), time.monotonic() + 60
        while time.monotonic() < until and not stop.wait(rng.uniform(0.2, 0.8)):
            lost = {e["replica"] for e in sweep.events if e["event"] == "lost"}
            ready = {e["replica"] for e in sweep.events if e["event"] == "ready"} - lost
            alive = [e["pid"] for e in sweep.events if e["event"] == "placed" and e["replica"] in ready]
            if alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)

    thread = sweep.later(killer)
    code = sweep.real(model, nodes={"max_deaths": 100}, **much)
    stop.set()
    thread.join()
    assert code == 0 and sweep.error is None
    assert sweep.settled()[1] == {} and sum(e["event"] == "lost" for e in sweep.events) >= 3
    same(contents(sweep.folder), contents(tmp_path / "undisturbed"))


def test_killed_at_every_step_of_a_real_unit_equals_undisturbed(sweep, model, tmp_path, monkeypatch):
    assert driver.run(settings(model), tmp_path / "undisturbed") == 0
    points = ("replica.in_forward=kill@5", "writer.in_file=kill", "writer.linked=kill", "writer.before_commit=kill",
              "writer.committed=kill")  # fmt: skip
    monkeypatch.setenv("SWEEPS_FAILPOINTS", ",".join(points))
    assert sweep.real(model, unit_cells=2) == 0
    assert len([e for e in sweep.events if e["event"] == "lost"]) == len(points)
    assert verify(sweep.folder, deep=True).ok
    same(contents(sweep.folder), contents(tmp_path / "undisturbed"))
    close(*(read_results(folder) for folder in (sweep.folder, tmp_path / "undisturbed")))


def close(a, b):
    """Equal results of aggregates: other units, replicas and batches change the last digits of float32 only."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close(x, y)
    else:
        assert a == (pytest.approx(b, rel=1e-4, abs=1e-5) if isinstance(b, float) else b)


def test_a_stop_hands_the_rest_over_and_the_same_command_continues(sweep, monkeypatch):
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.3")

    def stop(sweep):
        sweep.wait_for("dispatched", 2)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = sweep.later(stop)
    assert sweep(items(40), turns=1, seeds=1, unit_cells=20) == 4
    thread.join()
    handed = [child["id"] for commit in store.list_commits(sweep.folder) for child in commit.children]
    assert handed and all(name.endswith(".0") for name in handed)
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0")
    assert sweep(items(40), turns=1, seeds=1, unit_cells=20) == 0
    assert sweep.settled()[1] == {}


def signalled(folder, address):
    two = {"address": address, "replicas": 2, "resources": {"slot": 1}}
    wanted = config(items(40), turns=1, seeds=1, unit_cells=20, executor="ray", cluster=two)
    return driver.run(wanted, folder, replica=FAKE)


def test_sigterm_stops_a_driver_that_is_connected_to_ray(sweep, cluster):
    process = apart.start(signalled, sweep.folder, cluster.address, SWEEPS_FAKE_PAUSE_S="0.3")
    sweep.wait_for("dispatched", 2)
    time.sleep(1)
    process.terminate()
    assert apart.wait(process, 30) == 4
    assert any(commit.children for commit in store.list_commits(sweep.folder))


def real_run(folder, address, model):
    return driver.run(settings(model, num_items=8, unit_cells=2, cluster=nodes(address)), folder)


def test_a_driver_killed_on_ray_leaves_nothing_that_a_second_one_does_twice(sweep, cluster, model, undisturbed):
    """Its replicas may go on for a while, and commit."""
    first = apart.start(real_run, sweep.folder, cluster.address, model)
    sweep.wait_for("dispatched", 3)
    first.kill()
    first.join()
    assert real_run(sweep.folder, cluster.address, model) == 0
    assert sweep.settled()[1] == {}
    same(contents(sweep.folder), undisturbed)


def terminated(folder, address, after_s):
    before = driver.reach

    def reach(point):
        if point == "driver.planned":
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
        before(point)

    driver.reach = reach
    one = {"replicas": 1, "address": address, "resources": {"slot": 1}}
    return driver.run(config(items(4), executor="ray", cluster=one), folder, replica=FAKE)


@pytest.mark.parametrize("after_s", [0.3])
def test_sigterm_while_the_driver_connects_to_ray_is_a_clean_stop(sweep, cluster, after_s):
    """Without care Ray aborts the process there."""
    process = apart.start(terminated, sweep.folder, cluster.address, after_s, SWEEPS_FAKE_PAUSE_S="1")
    assert apart.wait(process, 60) == 4
    assert sweep.events[-1]["reason"] == "received SIGTERM"


def test_replicas_share_gpus_or_have_several_of_one_node(sweep, cluster, monkeypatch):
    """Placement only: Ray's word for GPUs that do not exist."""
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.3")
    node = cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=100_000_000)
    try:
        assert sweep(items(8), seeds=1, unit_cells=1, cluster={"replicas": 4, "num_gpus": 0.5, "resources": {}}) == 0
        where = [
            line.split("gpus=")[1] for line in (sweep.folder.parent / "ran").read_text().splitlines() if "gpus" in line
        ]
        assert Counter(where) == {"0": 2, "1": 2}, "two replicas a GPU"
        (sweep.folder.parent / "ran").unlink()
        whole = Sweep(cluster, sweep.folder.parent / "whole")
        assert whole(items(4), seeds=1, unit_cells=1, cluster={"replicas": 2, "num_gpus": 2, "resources": {}}) == 0
        where = [
            line.split("gpus=")[1] for line in (sweep.folder.parent / "ran").read_text().splitlines() if "gpus" in line
        ]
        assert where == ["0,1"], "one fits; the other waits for room, which is no error"
    finally:
        cluster.remove_node(node)


def test_every_metric_can_be_scraped_while_a_sweep_runs(sweep, cluster, monkeypatch):
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.1")
    found = {}

    def scrape(sweep):
        import ray

        sweep.wait_for("dispatched", 4)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and found.get("cells_committed", 0) == 0:
            for node in ray.nodes():
                with contextlib.suppress(OSError):
                    page = urllib.request.urlopen(
                        f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=5
                    ).read()
                    lines = re.findall(r"^ray_sweeps_(\w+)\{.*\} ([\d.e+]+)$", page.decode(), re.MULTILINE)
                    found.update((name, float(value)) for name, value in lines)
            time.sleep(0.3)

    thread = sweep.later(scrape)
    assert sweep(items(140), seeds=1, unit_cells=3) == 0
    thread.join()
    assert sweep.error is None
    assert found.keys() == METRICS.keys()
    assert found["cells_committed"] > 0 and found["replicas_ready"] > 0 and found["cells_failed"] == 0


def test_runs_of_one_process_share_loaded_replicas(cluster, tmp_path):
    from sweeps import executors

    with executors.shared():
        for name in ("a", "b", "c"):
            assert Sweep(cluster, tmp_path / name)(items(4), turns=1) == 0
    lines = (tmp_path / "ran").read_text().splitlines()
    loads = [line.split()[1] for line in lines if line.startswith("load")]
    assert len(loads) >= 3 and len(set(loads)) <= 2, "three runs, at most two processes"


def test_what_only_loading_shows_ends_the_run_with_its_reason(cluster, tmp_path, capsys):
    """The model's files are there and whole, and the weights are of another shape."""
    model, folder = build_model(tmp_path / "model"), tmp_path / "run"
    about = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**about, "intermediate_size": about["intermediate_size"] + 8}))
    capsys.readouterr()
    assert driver.run(settings(model, cluster=nodes(cluster.address)), folder) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("stopped: 3 replicas could not load") and "\n" not in said
    assert f"cannot load '{model}' as a model folder" in said and "another shape than its config.json says" in said
    assert list(store.list_commits(folder)) == []
