"""What runs on Ray owes to Ray: placement, sharing, metrics, signals. Most of it needs no model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections import Counter

import pytest

from sweeps.driver import entry
from sweeps.driver.executors import pool
from sweeps.driver.executors.base import METRICS
from sweeps.folder import commits
from tests.support import apart
from tests.support.fakes import config, items
from tests.support.nodes import SCRIPTED, Beside, Sweep, add_node, on_nodes
from tests.support.small import build_model

pytestmark = pytest.mark.slow


def test_a_trunk_that_kills_its_process_fails_its_cells_only(sweep):
    assert sweep.scripted(items(3, i1="kill_trunk"), turns=1, seeds=2, unit_cells=8) == 3
    held, failed = sweep.settled()
    assert len(held) == 4 and len(failed) == 2


def test_a_stop_hands_the_rest_over_and_the_same_command_continues(sweep, monkeypatch):
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.3")

    def stop():
        sweep.wait_for("dispatched", 2)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = Beside(stop)
    assert sweep.scripted(items(40), turns=1, seeds=1, unit_cells=20) == 4
    stopping.join()
    handed = [child["id"] for commit in commits.list_commits(sweep.folder) for child in commit.children]
    assert handed and all(name.endswith(".0") for name in handed)
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0")
    assert sweep.scripted(items(40), turns=1, seeds=1, unit_cells=20) == 0
    assert sweep.settled()[1] == set()


def terminated(folder, address, after_s):
    before = entry.reach

    def reach(point):
        if point == "driver.planned":
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
        before(point)

    entry.reach = reach
    return entry.run(config(items(4), cluster=on_nodes(address)), folder, replica=SCRIPTED)


def test_sigterm_while_the_driver_connects_to_ray_is_a_clean_stop(sweep, cluster):
    """Without care Ray aborts the process there."""
    process = apart.start(terminated, sweep.folder, cluster.address, 0.3, SWEEPS_FAKE_PAUSE_S="1")
    assert apart.wait(process, 60) == 4
    assert sweep.events[-1]["reason"] == "received SIGTERM"


def test_replicas_share_gpus_or_have_several_of_one_node(cluster, tmp_path, monkeypatch):
    """Placement only: Ray's word for GPUs that do not exist."""
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.3")

    def gpus(name, count, **amounts):
        """The GPUs of each replica of a run."""
        (tmp_path / name).mkdir()
        sweep = Sweep(cluster, tmp_path / name / "run")
        assert sweep.scripted(items(count), {**amounts, "resources": {}}, seeds=1, unit_cells=1) == 0
        ran = (tmp_path / name / "ran").read_text().splitlines()
        return [line.split("gpus=")[1] for line in ran if "gpus=" in line]

    node = add_node(cluster, num_cpus=4, num_gpus=2)
    try:
        assert Counter(gpus("shared", 8, replicas=4, num_gpus=0.5)) == {"0": 2, "1": 2}, "two replicas a GPU"
        assert gpus("whole", 4, replicas=2, num_gpus=2) == ["0,1"], "one fits; the other waits for room: no error"
    finally:
        cluster.remove_node(node)


def test_every_metric_can_be_scraped_while_a_sweep_runs(sweep, cluster, monkeypatch):
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.1")
    found = {}

    def scrape():
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

    scraping = Beside(scrape)
    assert sweep.scripted(items(140), seeds=1, unit_cells=3) == 0
    scraping.join()
    assert found.keys() == METRICS.keys()
    assert found["cells_committed"] > 0 and found["replicas_ready"] > 0 and found["cells_failed"] == 0


def test_runs_of_one_process_share_loaded_replicas(cluster, tmp_path):
    with pool.shared():
        for name in ("a", "b", "c"):
            assert Sweep(cluster, tmp_path / name).scripted(items(4), turns=1) == 0
    lines = (tmp_path / "ran").read_text().splitlines()
    loads = [line.split()[1] for line in lines if line.startswith("load")]
    assert len(loads) >= 3 and len(set(loads)) <= 2, "three runs, at most two processes"


def test_a_secret_of_a_node_stays_there(sweep, capsys):
    wanted = config(items(2), cluster=on_nodes(sweep.cluster.address, replicas=1))
    assert entry.run(wanted, sweep.folder, replica="tests.support.fakes:Leaking") == 1
    said = capsys.readouterr().err + "".join(p.read_text() for p in sweep.folder.rglob("*.json*"))
    assert "no answer from https://hub.example?key=<NODE_API_KEY>" in said and "correct-horse" not in said


def test_what_only_loading_shows_ends_the_run_with_its_reason(sweep, tmp_path, capsys):
    """The model's files are there and whole, and the weights are of another shape."""
    model = build_model(tmp_path / "model")
    about = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**about, "intermediate_size": about["intermediate_size"] + 8}))
    capsys.readouterr()
    assert sweep(model) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("stopped: 3 replicas could not load") and "\n" not in said
    assert f"cannot load '{model}' as a model folder" in said and "another shape than its config.json says" in said
    assert list(commits.list_commits(sweep.folder)) == []
