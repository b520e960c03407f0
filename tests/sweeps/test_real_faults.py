"""Faults of a real sweep: a float32 model, its own processes, and results equal to those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sweeps import driver, store
from sweeps.folder import enter
from sweeps.planfile import PlanFile
from sweeps.replica import Replica
from sweeps.units import pack
from sweeps.verify import verify
from tests.sweeps import apart
from tests.sweeps.small import contents, same, settings


def run(model, folder):
    return driver.run(settings(model, num_items=8, unit_cells=2), folder)


def is_whole(folder, undisturbed):
    assert verify(folder, deep=True).ok
    same(contents(folder), undisturbed)
    held = [cell for commit in store.list_commits(folder) for cell in commit.cells]
    trunks = [trunk for commit in store.list_commits(folder) for trunk in commit.trunks]
    assert len(held) == len(set(held)) == 32 and len(trunks) == len(set(trunks)) == 8


PHASES = ["driver.leased", "driver.planned", "driver.connected", "driver.dispatched", "replica.loaded",
          "replica.in_forward@3", "writer.in_file", "writer.linked", "writer.before_commit", "writer.committed",
          "driver.acked", "driver.dispatched@2", "driver.complete", "driver.aggregated"]  # fmt: skip


@pytest.mark.slow
def test_a_driver_killed_at_every_phase_one_after_the_other_ends_as_undisturbed(model, undisturbed, tmp_path):
    """Each start but the first is a resume, which is killed in its turn."""
    committed = set()
    for phase in PHASES:
        name, _, nth = phase.partition("@")
        killed = apart.start(run, model, tmp_path / "run", SWEEPS_FAILPOINTS=f"{name}=kill@{nth or 1}")
        assert apart.wait(killed) == -signal.SIGKILL, phase
        if (tmp_path / "run" / "_commits").exists():
            now = {commit.unit for commit in store.list_commits(tmp_path / "run")}
            assert committed <= now, "the committed set never shrinks"
            committed = now
    assert apart.wait(apart.start(run, model, tmp_path / "run")) == 0
    is_whole(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_of_two_drivers_on_one_folder_the_second_is_refused_and_changes_nothing(model, undisturbed, tmp_path):
    first = apart.start(run, model, tmp_path / "run", SWEEPS_FAILPOINTS="driver.acked=hang")
    apart.until(lambda: list((tmp_path / "run" / "_commits").glob("*.json")))
    assert apart.wait(apart.start(run, model, tmp_path / "run")) == 5
    first.kill()
    first.join()
    assert apart.wait(apart.start(run, model, tmp_path / "run")) == 0
    is_whole(tmp_path / "run", undisturbed)


def play(config, folder, unit):
    """One unit by a replica without a driver: 0 where its commit won."""
    replica = Replica(config.to_dict(), str(folder), unit.cast, 1)
    replica.load()
    return 0 if replica.run(pack(unit, {}, 0))["outcome"] == "won" else 9


@pytest.mark.slow
def test_a_replica_stopped_past_its_retrys_commit_and_continued_loses(model, undisturbed, tmp_path):
    config, folder = settings(model, num_items=8, unit_cells=4), tmp_path / "run"
    enter(config, folder)
    unit = PlanFile(folder).unit("u000000")
    stopped = apart.start(play, config, folder, unit, SWEEPS_FAILPOINTS="writer.before_commit=stop")
    apart.until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
    assert not (folder / "_commits" / "u000000.json").exists()
    assert apart.wait(apart.start(play, config, folder, unit)) == 0
    before = (folder / "_commits" / "u000000.json").read_bytes()
    os.kill(stopped.pid, signal.SIGCONT)
    assert apart.wait(stopped) == 9
    assert (folder / "_commits" / "u000000.json").read_bytes() == before
    assert driver.run(config, folder) == 0
    is_whole(folder, undisturbed)


@pytest.mark.slow
def test_thirty_seconds_of_notice_are_enough_to_hand_over(model, undisturbed, tmp_path):
    running = apart.start(run, model, tmp_path / "run")
    apart.until(lambda: list((tmp_path / "run" / "_commits").glob("*.json")))
    begun = time.monotonic()
    running.terminate()
    assert apart.wait(running) == 4 and time.monotonic() - begun < 30
    assert run(model, tmp_path / "run") == 0
    is_whole(tmp_path / "run", undisturbed)
