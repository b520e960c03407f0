"""Faults of real sweeps on three real Ray nodes: a float32 model, nothing mocked.

Each ends with a folder that `verify --deep` finds whole and with results equal to those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from sweeps import run as sweeps_run
from sweeps.cli import main
from sweeps.driver import driver, entry
from sweeps.folder import commits
from sweeps.folder.lease import Lease
from sweeps.folder.results import read_results
from tests.support import apart
from tests.support.nodes import Beside, add_node, on_nodes
from tests.support.small import build_model, contents, same, settings, trouble

pytestmark = pytest.mark.slow


def run(folder, address, model, changes=(), **where):
    """The 32 cells of `undisturbed` over 8 trunks, a unit each, as a process of its own would run them."""
    cluster = on_nodes(address, in_flight=1, **where)
    return entry.run(settings(model, cluster=cluster, **{"num_items": 8, **dict(changes)}), folder)


def armed(failpoints):
    """The environment of a process that meets these, whoever met them before."""
    return {"SWEEPS_FAILPOINTS": failpoints, "SWEEPS_FAILPOINTS_ONCE": ""}


def is_whole(sweep, undisturbed):
    assert sweep.settled()[1] == set()
    same(contents(sweep.folder), undisturbed)


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


# ---- replicas and nodes


def test_replicas_killed_at_every_step_of_a_unit(sweep, model, tmp_path, monkeypatch):
    """Of two models, which talk to each other in one replica."""
    people = {"alice": {"model": "tiny", "max_new_tokens": 5}, "bob": {"model": "other", "max_new_tokens": 6}}
    sources = {"tiny": str(model), "other": str(build_model(tmp_path / "other", seed=5))}
    two = {
        "scenario__participants": people,
        "models": {k: {"source": v, "dtype": "float32"} for k, v in sources.items()},
    }
    assert entry.run(settings(model, **two), tmp_path / "undisturbed") == 0
    points = ("replica.loaded", "replica.started@2", "replica.in_forward@5", "writer.in_file", "writer.linked",
              "writer.before_commit", "writer.committed")  # fmt: skip
    armed = [f"{name}=kill@{nth or 1}" for name, _, nth in (point.partition("@") for point in points)]
    monkeypatch.setenv("SWEEPS_FAILPOINTS", ",".join(armed))
    assert sweep(model, unit_cells=2, **two) == 0
    assert len(sweep.said("lost")) == len(points)
    is_whole(sweep, contents(tmp_path / "undisturbed"))
    close(*(read_results(folder) for folder in (sweep.folder, tmp_path / "undisturbed")))


def test_a_node_goes_and_another_comes(sweep, cluster, model, undisturbed):
    running = Beside(lambda: sweep(model, num_items=8, unit_cells=2))
    sweep.wait_for("dispatched", 3)
    cluster.remove_node(cluster.workers.pop(0), allow_graceful=False)
    cluster.workers.append(add_node(cluster))
    assert running.join() == 0
    is_whole(sweep, undisturbed)
    assert len({event["node"] for event in sweep.said("placed")}) >= 2
    assert not any(event["counts"] for event in sweep.said("lost"))


def test_a_machine_that_stands_still_past_its_retrys_commit_and_goes_on_loses(
    sweep, cluster, model, undisturbed, monkeypatch
):  # fmt: skip
    """Its worker is stopped just before its commit, and its raylet with it, so that nobody can kill the worker."""
    monkeypatch.setenv("SWEEPS_FAILPOINTS", "writer.before_commit=stop")

    def freeze():
        placed = apart.until(lambda: [event for event in sweep.said("placed") if state(event["pid"]) == "T"])[0]
        worker = placed["pid"]
        (frozen,) = [node for node in cluster.workers if node.node_id == placed["node"]]
        raylet = frozen.all_processes["raylet"][0].process.pid
        os.kill(raylet, signal.SIGSTOP)
        try:
            sweep.wait_for("lost")
            apart.until(lambda: len(list(commits.list_commits(sweep.folder))) == 8)
            assert state(worker) == "T", "stopped, and not killed"
            os.kill(worker, signal.SIGCONT)
            time.sleep(2)
            assert state(worker) in ("R", "S"), "it went on"
        finally:
            os.kill(raylet, signal.SIGCONT)

    frozen = Beside(freeze)
    assert sweep(model, {"stall_s": 6}, num_items=8, unit_cells=4) == 0
    frozen.join()
    is_whole(sweep, undisturbed)


def state(pid):
    """One letter: R, S, T (stopped), or nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_random_kills_for_a_minute(sweep, model, tmp_path):
    """Replicas are killed a moment after they are ready, for as long as there is work."""
    much = {"num_items": 48, "seeds": 4, "unit_cells": 8}
    assert entry.run(settings(model, **much), tmp_path / "undisturbed") == 0
    stop = threading.Event()

    def kill():
        rng, until = random.Random(0), time.monotonic() + 60
        while time.monotonic() < until and not stop.wait(rng.uniform(0.5, 2.5)):
            ready = {e["replica"] for e in sweep.said("ready")} - {e["replica"] for e in sweep.said("lost")}
            alive = [e["pid"] for e in sweep.said("placed") if e["replica"] in ready]
            if alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)

    killing = Beside(kill)
    code = sweep(model, {"max_deaths": 100}, **much)
    stop.set()
    killing.join()
    assert len(sweep.said("lost")) >= 3
    if code == 3:  # a cell that was killed three times by chance
        code = sweep(model, **much, run={"progress": "none", "retry_failed": True})
    assert code == 0
    is_whole(sweep, contents(tmp_path / "undisturbed"))


# ---- the driver


def test_a_driver_killed_at_every_phase_one_after_the_other_and_two_at_once(sweep, cluster, model, undisturbed):
    """Each start but the first is a resume, which is killed in its turn."""

    def start(failpoints=""):
        return apart.start(run, sweep.folder, cluster.address, model, **armed(failpoints))

    def killed(point):
        assert apart.wait(start(f"driver.{point}")) == -signal.SIGKILL, point
        committed.append({c.unit for c in commits.list_commits(sweep.folder)} if sweep.folder.exists() else set())

    committed = [set()]
    for point in ("leased=kill", "planned=kill", "connected=kill", "dispatched=kill", "acked=kill"):
        killed(point)
    first = start("driver.acked=hang")
    apart.until(lambda: len(list(commits.list_commits(sweep.folder))) > len(committed[-1]))
    assert apart.wait(start()) == 5, "of two drivers the second is refused"
    first.kill()
    first.join()
    for point in ("dispatched=kill@2", "complete=kill", "aggregated=kill"):
        killed(point)
    assert all(before <= after for before, after in itertools.pairwise(committed))
    assert 0 < len(committed[5]) < 8 == len(committed[-1])
    assert apart.wait(start()) == 0
    is_whole(sweep, undisturbed)


def test_thirty_seconds_of_notice_are_enough_to_hand_over(sweep, cluster, model, undisturbed):
    running = apart.start(run, sweep.folder, cluster.address, model, SWEEPS_FAILPOINTS="")
    sweep.wait_for("dispatched", 3)
    begun = time.monotonic()
    running.terminate()
    assert apart.wait(running) == 4 and time.monotonic() - begun < 30
    assert run(sweep.folder, cluster.address, model) == 0
    is_whole(sweep, undisturbed)


def test_no_replica_and_none_coming_ends_in_bounded_time_and_says_why(sweep, cluster, model, undisturbed, capsys):
    begun = time.monotonic()
    assert sweep(model, {"resources": {"unobtainium": 1}, "load_s": 2}, num_items=8) == 1
    assert time.monotonic() - begun < 30
    said = capsys.readouterr().err
    assert "none coming" in said and "unobtainium" in said and "slot" in said
    assert run(sweep.folder, cluster.address, model) == 0
    is_whole(sweep, undisturbed)


# ---- cells and trunks


def test_cells_that_kill_hang_and_raise_and_a_trunk_that_fails_end_alone(sweep, cluster, model, tmp_path):
    """The driver is killed too, where it divides a unit and where it opens failed ones. Without the cause all is well."""
    broken, calm = tmp_path / "broken", {"id": "i0", "topic": "tea"}
    items = [calm, {"id": "killer", "topic": "rain", **trouble("kill", broken)},
             {"id": "hanger", "topic": "sleep", **trouble("hang", broken)},
             {"id": "raiser", "topic": "salt", **trouble("raise", broken)},
             {"id": "long", "topic": "and so on " * 200}]  # fmt: skip
    plan = {"scenario__items": [{"do": "", "while": "", **item} for item in items], "seeds": 1, "unit_cells": 2,
            "grid": {"framing": {"warm": "Be warm."}}}  # fmt: skip
    assert entry.run(settings(model, **plan), tmp_path / "undisturbed") == 3
    undisturbed = contents(tmp_path / "undisturbed")
    assert len(undisturbed[0]) == 4, "all but those of the trunk that does not fit"

    def start(failpoints="", **changes):
        wanted = {**plan, "run": {"progress": "none", "interval_s": 0.2, **changes}}
        return apart.start(poisoned, sweep.folder, cluster.address, model, wanted, **armed(failpoints))

    broken.touch()
    assert apart.wait(start("driver.split=kill")) == -signal.SIGKILL
    assert apart.wait(start()) == 3
    held, failed = sweep.settled()
    found = sweeps_run.open(sweep.folder)
    item_of = {row["cell"]: row["item"] for row in found.cells.to_pylist()}
    assert {item_of[cell] for cell in held} == {"i0"} and len(failed) == 4
    errors = {item_of[row["cell"]]: row["error"] for row in found.table("failures").to_pylist() if row["cell"]}
    for item, error in {"killer": "died", "hanger": "no movement", "raiser": "it was told to", "long": "fit"}.items():
        assert error in errors[item]
    broken.unlink()
    assert apart.wait(start("driver.reopened=kill", retry_failed=True)) == -signal.SIGKILL
    assert apart.wait(start(retry_failed=True)) == 3
    assert {item_of[cell] for cell in sweep.settled()[1]} == {"long"}
    same(contents(sweep.folder), undisturbed)


def poisoned(folder, address, model, wanted):
    return run(folder, address, model, wanted, stall_s=6.0)


# ---- disks and object stores


def test_a_disk_that_fills_stops_the_run_and_loses_nothing(sweep, model, undisturbed, tmp_path, monkeypatch, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        monkeypatch.setattr(driver, "MIN_FREE_BYTES", 0)
        # No room to say that the lease is free: the second driver has to see that it is, and need not take a minute.
        monkeypatch.setattr(entry, "Lease", lambda *place, **say: Lease(*place, **say, takeover_s=3.0))
        sweep.folder = disk / "run"
        wanted = {"num_items": 8, "run": {"progress": "none", "interval_s": 0.2, "force": True}}
        assert sweep(model, **wanted) == 4
        assert "disk is full" in capsys.readouterr().err
        kept = {commit.unit for commit in commits.list_commits(sweep.folder)}
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        assert sweep(model, **wanted) == 0
        assert kept < {commit.unit for commit in commits.list_commits(sweep.folder)}
        is_whole(sweep, undisturbed)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_object_store_that_refuses_is_silent_and_loses_replies(sweep, faulty, model, undisturbed, tmp_path):
    """The driver and both replicas meet it; every commit is stored and the reply to its conditional put lost."""
    seen, lost = {"PUT": 0, "GET": 0}, set()

    def fault(number, method, path, headers):
        if method == "PUT" and "/_commits/" in path and path not in lost:
            assert headers["If-None-Match"] == "*"
            lost.add(path)
            return "lost"
        if method not in seen:
            return None
        seen[method] += 1
        if method == "PUT" and seen[method] in (15, 40):
            return "hang"
        return "503" if seen[method] % {"PUT": 6, "GET": 30}[method] == 0 else None

    sweep.folder = f"s3://runs/{tmp_path.name}"
    with faulty.failing(fault):
        assert sweep(model, num_items=8) == 0
        assert len(lost) >= 8 and faulty.met["503"] >= 5 and faulty.met["hang"] == 2
    is_whole(sweep, undisturbed)
    assert sweeps_run.open(sweep.folder).table("failures").num_rows == 0


# ---- growth and damage


def test_an_extension_by_other_replicas_over_a_damaged_folder(sweep, model, undisturbed, capsys):
    """Half the grid on one replica; then files are damaged; then all of it on two, which need those trunks."""
    half = {"num_items": 8, "seeds": 1, "unit_cells": 2}
    assert sweep(model, {"replicas": 1}, **half) == 0
    before = {commit.unit: commit for commit in commits.list_commits(sweep.folder)}
    shards = sorted((sweep.folder / "messages").iterdir())
    flip(shards[1], -5000)
    shards[2].write_bytes(shards[2].read_bytes()[:-7])
    shards[3].unlink()
    flip(next((sweep.folder / "activations").rglob("u000004-*")), -100)
    (sweep.folder / "messages" / "notes.txt").write_text("mine")
    whole = {**half, "seeds": 2}
    assert sweep(model, **whole) == 1, "a trunk that cannot be read is not sampled a second time without a word"
    assert "the run folder failed" in capsys.readouterr().err
    assert main(["verify", str(sweep.folder), "--deep", "--reopen"]) == 1
    said = capsys.readouterr().out
    assert all(f"{shard.name} " in said for shard in shards[1:4]) and "notes.txt (left alone)" in said
    left = {commit.unit: commit for commit in commits.list_commits(sweep.folder)}
    assert before.keys() - left.keys() == {"u000001", "u000002", "u000003", "u000004"}
    assert all(before[unit] == left[unit] for unit in left.keys() & before.keys())
    assert sweep(model, **whole) == 0
    assert all(left[unit] == commit for commit in commits.list_commits(sweep.folder) if (unit := commit.unit) in left)
    is_whole(sweep, undisturbed)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
