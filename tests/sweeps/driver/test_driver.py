"""Laws of the driver, with a scripted replica in this process."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.driver import entry
from sweeps.folder import commits, files
from sweeps.folder.plan_reader import PlanFile
from sweeps.folder.status import status
from sweeps.folder.verify import verify
from tests.support import apart, small
from tests.support.fakes import config, items

FAKE = "tests.support.fakes:FakeReplica"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def ran(folder, what="cell"):
    """How often each cell (trunk) was run."""
    path = folder.parent / "ran"
    lines = path.read_text().split("\n") if path.exists() else []
    return Counter(line.split()[1] for line in lines if line.startswith(what))


def settled(folder):
    """Every cell of the plan -> the commits that hold it, and those that failed it."""
    held, failed = Counter(), Counter()
    for commit in commits.list_commits(folder):
        held.update(commit.cells)
        failed.update(commit.failed)
    return held, failed


def planned(folder):
    return set(PlanFile(folder).table(["cell"])["cell"].to_pylist())


def run(settings, folder):
    return entry.run(settings, folder, replica=FAKE)


def test_a_run_commits_every_cell_once_and_again_does_nothing(folder, capsys):
    settings = config(items(7), unit_cells=4)
    assert run(settings, folder) == 0
    held, failed = settled(folder)
    assert set(held) == planned(folder) and set(held.values()) == {1} and not failed
    before = sorted(p.name for p in (folder / "_commits").iterdir())
    assert run(settings, folder) == 0
    assert sorted(p.name for p in (folder / "_commits").iterdir()) == before
    assert set(ran(folder).values()) == {1}
    assert "14 of 14 cells committed" in status(folder)[0] and "it ended" in status(folder)[1]
    assert json.loads((folder / "progress.json").read_text())["state"] == "complete"


def test_a_failed_cell_gives_exit_code_3_and_is_tried_again_only_when_asked(folder):
    settings = config(items(4, i2="raise"))
    assert run(settings, folder) == 3
    assert run(settings, folder) == 3
    held, failed = settled(folder)
    assert len(held) == 6 and set(failed.values()) == {1} and len(failed) == 2
    assert run(replace(settings, run=replace(settings.run, retry_failed=True)), folder) == 3
    assert set(settled(folder)[1].values()) == {2} and len(settled(folder)[0]) == 6
    assert (folder / "_commits" / "u000001.r.json").exists()


def test_a_retry_that_was_interrupted_is_continued_by_the_plain_command(folder):
    """Else a late writer of the retry could sample a trunk that another unit samples now."""
    settings = config(items(4, i2="raise"))
    assert run(settings, folder) == 3
    again = replace(settings, run=replace(settings.run, retry_failed=True, max_hours=0.0))
    assert run(again, folder) == 4
    assert PlanFile(folder).retries() == [(0, ["u000001.r"])]
    assert run(settings, folder) == 3 and set(settled(folder)[1].values()) == {2}
    assert run(settings, folder) == 3 and set(settled(folder)[1].values()) == {2}, "each round tries once"
    assert run(again, folder) == 4
    assert PlanFile(folder).retries()[1] == (0, ["u000001.r.r"])


def test_another_configuration_is_refused_and_nothing_changes(folder, capsys):
    assert run(config(items(3)), folder) == 0
    before = sorted(map(str, folder.rglob("*.json")))
    assert run(config([*items(3)[:2], {"id": "other"}]), folder) == 5
    assert "refused" in capsys.readouterr().err
    assert [p for p in sorted(map(str, folder.rglob("*.json"))) if "_lease" not in p] == [
        p for p in before if "_lease" not in p
    ]


def test_an_extended_plan_runs_only_what_is_new_and_keeps_trunks(folder):
    small = config(items(3), turns=2, seeds=2)
    assert run(small, folder) == 0
    trunks, cells = ran(folder, "trunk"), ran(folder)
    large = config(items(4), turns=2, seeds=3)
    assert run(large, folder) == 0
    assert all(ran(folder, "trunk")[t] == 1 for t in trunks) and all(ran(folder)[c] == 1 for c in cells)
    held, _ = settled(folder)
    assert set(held) == planned(folder) and set(held.values()) == {1} and len(held) == 12


@pytest.mark.parametrize("why", ["fail_fast", "max_failures"])
def test_failures_stop_the_run_when_asked(folder, why):
    how = {"on_error": "fail_fast"} if why == "fail_fast" else {"max_failures": 1}
    settings = config(items(30, i1="raise"), unit_cells=2, **how)
    assert run(settings, folder) == 4
    assert len(settled(folder)[0]) < 58
    assert run(replace(settings, run=config([]).run), folder) == 3


def test_max_hours_stops_with_everything_committed_so_far(folder, monkeypatch):
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0.05")
    settings = config(items(40), unit_cells=8, max_hours=0.5 / 3600)
    assert run(settings, folder) == 4
    monkeypatch.setenv("SWEEPS_FAKE_PAUSE_S", "0")
    assert run(config(items(40), unit_cells=8), folder) == 0
    assert set(ran(folder).values()) == {1} and len(ran(folder)) == 80


def test_a_replica_that_cannot_load_ends_the_run_in_bounded_time(folder, capsys):
    settings = config(items(2), cluster={"max_deaths": 2})
    begun = time.monotonic()
    assert entry.run(settings, folder, replica="tests.support.fakes:Missing") in (1, 5)
    assert entry.run(settings, folder, replica="tests.sweeps.driver.test_driver:Broken") == 1
    assert time.monotonic() - begun < 20
    assert "no weights here" in capsys.readouterr().err


class Broken:
    def __init__(self, *args, **kwargs):
        raise OSError("no weights here")


def scripted(folder, count=20, retry_failed=False, **special):
    return run(config(items(count, **special), unit_cells=4, turns=1, retry_failed=retry_failed), folder)


def command(folder, **env):
    return apart.start(scripted, folder, **env)


POINTS = ["driver.leased", "driver.planned", "driver.connected", "driver.dispatched@2", "driver.acked@2",
          "writer.before_commit@2", "writer.committed@2", "driver.complete", "driver.aggregated"]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_driver_is_continued_by_the_same_command(folder, point):
    name, _, nth = point.partition("@")
    killed = command(folder, SWEEPS_FAILPOINTS=f"{name}=kill@{nth or 1}")
    assert apart.wait(killed) == -9
    before = {commit.unit for commit in commits.list_commits(folder)} if (folder / "_commits").exists() else set()
    again = command(folder, SWEEPS_FAKE_PAUSE_S="0")
    assert apart.wait(again) == 0
    held, failed = settled(folder)
    assert set(held) == planned(folder) and set(held.values()) == {1} and not failed
    assert before <= {commit.unit for commit in commits.list_commits(folder)}
    committed_first = {c for commit in commits.list_commits(folder) if commit.unit in before for c in commit.cells}
    assert all(ran(folder)[cell] == 1 for cell in committed_first), "what was committed is not run again"


@pytest.mark.slow
@pytest.mark.parametrize("second", ["driver.planned", "driver.acked"])
def test_a_driver_killed_again_while_it_resumes_is_continued_too(folder, second):
    assert apart.wait(command(folder, SWEEPS_FAILPOINTS="writer.committed=kill@2")) == -9
    assert apart.wait(command(folder, SWEEPS_FAILPOINTS=f"{second}=kill")) == -9
    assert apart.wait(command(folder, SWEEPS_FAKE_PAUSE_S="0")) == 0
    held, failed = settled(folder)
    assert set(held) == planned(folder) and set(held.values()) == {1} and not failed


@pytest.mark.slow
@pytest.mark.parametrize("point", ["driver.reopened", "driver.planned"])
def test_a_retry_or_an_extension_that_is_killed_goes_on(folder, point):
    extends = point == "driver.planned"
    first, then = ((20,), (24,)) if extends else ((20, False), (20, True))
    special = {} if extends else {"i3": "raise"}

    def again(arguments, **env):
        return apart.wait(apart.start(scripted_with, folder, arguments, special, **env))

    run = [again(first), again(then, SWEEPS_FAILPOINTS=f"{point}=kill"), again(then)]
    assert run == ([0, -9, 0] if extends else [3, -9, 3])
    held, failed = settled(folder)
    assert set(held) | set(failed) == planned(folder) and set(held.values()) == {1} and not set(held) & set(failed)
    assert set(failed.values()) == (set() if extends else {2}), "each round of retries tries once"


@pytest.mark.parametrize("file", ["config-1.yaml", "items-1.jsonl", "part-1.parquet"])
def test_an_extension_that_ends_right_after_any_of_its_files_goes_on(folder, file, monkeypatch):
    assert run(config(items(3)), folder) == 0
    link = os.link

    def last(source, target):
        link(source, target)
        if Path(target).name == file:
            raise OSError("cut off")

    monkeypatch.setattr(os, "link", last)
    assert run(config(items(4)), folder) == 1
    monkeypatch.undo()
    assert run(config(items(4)), folder) == 0
    assert set(settled(folder)[0]) == planned(folder) and set(ran(folder).values()) == {1} and len(ran(folder)) == 8


@pytest.mark.parametrize(("file", "old", "new"), [
    ("inputs/items-0.jsonl", b"i2", b"j2"), ("config-0.yaml", b"hello", b"hallo"),
])  # fmt: skip
def test_what_cells_are_made_from_cannot_change_under_their_ids(folder, file, old, new, capsys):
    assert run(config(items(3), max_hours=0), folder) == 4
    path = folder / file
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    assert run(config(items(3)), folder) == 1
    assert f"{file} of" in capsys.readouterr().err and not ran(folder)
    assert any(file in problem for problem in verify(folder, deep=True).problems)


def test_a_run_shorter_than_an_interval_tells_its_tokens_and_their_rate(folder, model):
    settings = small.settings(model, run={"progress": "none", "interval_s": 600})
    assert entry.run(settings, folder) == 0
    shown = files.read_json(folder, "progress.json")
    assert shown["tokens"] == sum(commit.counters["tokens"] for commit in commits.list_commits(folder)) > 0
    assert shown["tokens_per_s"] > 0


def scripted_with(folder, arguments, special):
    return scripted(folder, *arguments, **special)


def test_sigterm_hands_the_rest_to_a_child_and_exits_4(folder):
    process = command(folder, SWEEPS_FAKE_PAUSE_S="0.5")
    apart.until(lambda: ran(folder))
    process.terminate()
    assert apart.wait(process) == 4
    assert any(commit.children for commit in commits.list_commits(folder))
    assert apart.wait(command(folder, SWEEPS_FAKE_PAUSE_S="0")) == 0
    assert set(ran(folder).values()) == {1} and set(ran(folder, "trunk").values()) == {1}
    held, _ = settled(folder)
    assert set(held) == planned(folder) and set(held.values()) == {1}


@pytest.mark.parametrize("point", ["driver.planned", "driver.complete"])
def test_sigterm_where_no_unit_runs_is_a_clean_stop_too(folder, point):
    """While it plans or aggregates, which may take minutes."""
    process = command(folder, SWEEPS_FAKE_PAUSE_S="0", SWEEPS_FAILPOINTS=f"{point}=hang")
    begun = {"driver.planned": "run.json", "driver.complete": "_commits/u000009.json"}[point]
    apart.until((folder / begun).exists)
    time.sleep(0.3)
    process.terminate()
    assert apart.wait(process) == 4
    assert apart.wait(command(folder, SWEEPS_FAKE_PAUSE_S="0")) == 0
    assert set(ran(folder).values()) == {1}
