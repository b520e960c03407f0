"""Laws of a replica, with a tiny float32 model: what a unit writes does not depend on how it came to run."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from sweeps import errors
from sweeps import run as sweeps_run
from sweeps.cli import main
from sweeps.commands.capture import capture
from sweeps.driver import driver, entry
from sweeps.errors import ConfigError
from sweeps.folder import commits as folder_commits
from sweeps.folder.plan_reader import PlanFile
from sweeps.folder.verify import reopen, verify
from tests.support.small import Switch, build_model, contents, same, settings


@pytest.fixture(autouse=True)
def switched_off():
    yield
    Switch.fail_item = None


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert entry.run(settings(model), folder) == 0
    return folder


def test_a_sweep_writes_what_it_planned(undisturbed):
    talk, values = contents(undisturbed)
    assert len(talk) == 12
    for messages in talk.values():
        assert [author for author, *_ in messages] == ["moderator", "alice", "bob", "moderator", "alice", "bob"]
    assert {key[3:] for key in values} == {(0, "residual", "mean"), (2, "residual", "mean"), (1, "residual", None)}
    trunks = {tuple(messages[:3]) for messages in talk.values()}
    assert len(trunks) == 3, "cells of one trunk share its messages"
    outcomes = (undisturbed / "aggregates" / "outcomes.json").read_text()
    assert "words" in outcomes


@pytest.mark.parametrize(
    "change", [{"unit_cells": 12}, {"unit_cells": 1}, {"cluster__in_flight": 1}, {"cluster__rows": 2}]
)
def test_neither_units_nor_rows_nor_units_in_flight_change_a_cell(model, undisturbed, tmp_path, change):
    assert entry.run(settings(model, **change), tmp_path / "run") == 0
    same(contents(tmp_path / "run"), contents(undisturbed))


def test_progress_moves_with_turns_long_before_cells(model, tmp_path, monkeypatch):
    from sweeps.driver.progress import Snapshot
    from sweeps.replica.unit_run import UnitRun

    seen, real = [], UnitRun._finished

    def note(self, done):
        seen.append((self.num_held, self.shared.counters()["turns"].get(self.unit.id)))
        real(self, done)

    monkeypatch.setattr(UnitRun, "_finished", note)
    assert entry.run(settings(model, unit_cells=12), tmp_path / "run") == 0
    worth = [w for _, w in seen]
    assert worth == sorted(worth) and worth[-1] == 12.0, "all turns of all twelve cells"
    assert 0 < seen[0][1] < 3 and seen[0][0] == 0, "a trunk is two of 30 turns"
    under = Snapshot(cells=24, held=6, underway=worth[0], cells_per_s=2.0)
    assert f"6/24 cells | {(6 + worth[0]) / 24:.0%} of all turns" in under.line()
    assert under.eta_s == (18 - worth[0]) / 2


def test_stopped_and_continued_equals_uninterrupted(model, undisturbed, tmp_path, monkeypatch):
    from sweeps.replica.unit_run import UnitRun

    real = UnitRun._cell_done

    def stop_after_three(self, done):
        real(self, done)
        if self.num_held == 3:
            self.shared.stop()
            stopping.append("SIGTERM")

    stopping: list[str] = []
    monkeypatch.setattr(UnitRun, "_cell_done", stop_after_three)
    check = driver.Driver._check_stops

    def check_after_signal(self, crew):
        if stopping:
            self._on_signal(stopping[0])
        check(self, crew)

    monkeypatch.setattr(driver.Driver, "_check_stops", check_after_signal)
    assert entry.run(settings(model, unit_cells=12), tmp_path / "run") == 4
    commits = list(folder_commits.list_commits(tmp_path / "run"))
    assert len(commits) == 1 and len(commits[0].children) == 1 and 0 < len(commits[0].cells) < 12
    monkeypatch.undo()
    before = contents(tmp_path / "run")[0]
    assert entry.run(settings(model, unit_cells=12), tmp_path / "run") == 0
    same(contents(tmp_path / "run"), contents(undisturbed))
    assert all(contents(tmp_path / "run")[0][cell] == talk for cell, talk in before.items())
    trunks = [t for c in folder_commits.list_commits(tmp_path / "run") for t in c.trunks]
    assert len(trunks) == len(set(trunks)) == 3


def test_an_extension_continues_committed_trunks(model, undisturbed, tmp_path):
    folder = tmp_path / "run"
    assert entry.run(settings(model, seeds=1), folder) == 0
    first = {c.unit for c in folder_commits.list_commits(folder)}
    assert entry.run(settings(model), folder) == 0
    same(contents(folder), contents(undisturbed))
    later = [c for c in folder_commits.list_commits(folder) if c.unit not in first]
    assert later and not any(c.trunks for c in later)


def test_damaged_units_run_again_with_all_that_stands_on_them(model, undisturbed, tmp_path):
    """The extension's units continue trunks of the first ones; a retry is a child."""
    folder = tmp_path / "run"
    Switch.fail_item = "i1"
    assert entry.run(settings(model, seeds=1, unit_cells=2), folder) == 3
    Switch.fail_item = None
    again = settings(model, seeds=2, unit_cells=2)
    again = replace(again, run=replace(again.run, retry_failed=True))
    assert entry.run(again, folder) == 0
    of_item = {row["item"]: row["unit"] for row in PlanFile(folder).table(["item", "unit"]).to_pylist()[::-1]}
    for path in (folder / "messages").glob(f"{of_item['i1']}-*"):
        path.unlink()
    found = verify(folder)
    assert found.damaged == [of_item["i1"]]
    opened = reopen(folder, found)
    assert opened[0] == of_item["i1"] and f"{opened[0]}.r" in opened and len(opened) == 3
    assert entry.run(again, folder) == 0
    assert verify(folder, deep=True).ok and reopen(folder, verify(folder)) == []
    same(contents(folder), contents(undisturbed))


def test_a_lost_commit_on_which_others_stand_is_refused_until_they_are_reopened(model, undisturbed, tmp_path, capsys):
    folder, more = tmp_path / "run", ["layers=0,1", "pool=max", "cluster.executor=inline", "run.progress=none"]
    assert entry.run(settings(model, seeds=1, unit_cells=2), folder) == 0
    assert entry.run(settings(model, seeds=2, unit_cells=2), folder) == 0
    assert capture(folder, more) == 0
    captured = [list(folder_commits.list_commits(added.root)) for added in sweeps_run.open(folder).captures]
    (first, other) = folder_commits.committed_units(folder)[:2]
    (folder / f"_commits/{first}.json").unlink()
    (folder / f"_commits/{other}.json").write_bytes(b"{")
    assert verify(folder).damaged == [other], "what cannot be read comes first"
    assert reopen(folder, verify(folder))[0] == other
    found = verify(folder)
    assert len(found.damaged) == 1 and "which no commit holds" in found.problems[0]
    capsys.readouterr()
    assert entry.run(settings(model, seeds=2, unit_cells=2), folder) == 5
    assert "whose commit is gone" in capsys.readouterr().err
    with pytest.raises(errors.Damaged, match="no commit"):
        for cell in sweeps_run.open(folder).held_cells:
            sweeps_run.open(folder).messages(cell)
    assert main(["verify", str(folder), "--reopen"]) == 1 and "reopened" in capsys.readouterr().out
    left = [list(folder_commits.list_commits(added.root)) for added in sweeps_run.open(folder).captures]
    assert 0 < len(left[0]) < len(captured[0]), "what was captured of them is gone too"
    assert entry.run(settings(model, seeds=2, unit_cells=2), folder) == 0 and capture(folder, more) == 0
    assert verify(folder, deep=True).problems == []
    assert [len(list(folder_commits.list_commits(added.root))) for added in sweeps_run.open(folder).captures] == [
        len(captured[0])
    ]
    talk, values = contents(folder)
    same((talk, {at: v for at, v in values.items() if at[-1] != "max"}), contents(undisturbed))
    assert entry.run(settings(model, seeds=3, unit_cells=2), folder) == 0
    with pytest.raises(ConfigError, match=r"captured before 6 of the 18 cells"):
        capture(folder, more)


def test_a_lost_part_of_the_plan_is_said(model, tmp_path, capsys):
    assert entry.run(settings(model, seeds=1), tmp_path / "run") == 0
    assert entry.run(settings(model, seeds=2), tmp_path / "run") == 0
    (tmp_path / "run/plan/part-1.parquet").rename(tmp_path / "kept")
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert entry.run(settings(model, seeds=3), tmp_path / "run") == 1
    assert "plan/part-1.parquet is missing" in capsys.readouterr().err
    assert main(["status", str(tmp_path / "run")]) == 1
    assert [path for path in before if path not in set(tmp_path.rglob("*"))] == [], "nothing was taken away"
    (tmp_path / "kept").rename(tmp_path / "run/plan/part-1.parquet")
    (tmp_path / "run/plan/part-0.parquet").rename(tmp_path / "kept")
    assert main(["aggregate", str(tmp_path / "run"), "name=o", "kind=outcomes"]) == 1
    assert "plan/part-0.parquet" in capsys.readouterr().err


def test_a_cell_that_raises_is_a_row_in_failures_and_can_be_tried_again(model, undisturbed, tmp_path):
    folder = tmp_path / "run"
    Switch.fail_item = "i1"
    assert entry.run(settings(model), folder) == 3
    run = sweeps_run.open(folder)
    rows = run.table("failures").to_pylist()
    assert len(rows) == 4 and run.counts == {"done": 8, "failed": 4, "pending": 0}
    assert all("this item cannot be framed" in r["error"] and "troubled" in r["traceback"] for r in rows)
    Switch.fail_item = None
    again = settings(model)
    assert entry.run(replace(again, run=replace(again.run, retry_failed=True)), folder) == 0
    same(contents(folder), contents(undisturbed))


def test_a_trunk_that_fails_fails_its_cells_and_no_others(model, tmp_path, monkeypatch):
    from sweeps.replica.setting import Setting

    real = Setting.conversation

    @functools.wraps(real)
    def failing(self, part, row, before=()):
        if part == "trunk" and row["id"] == "i2":
            raise RuntimeError("no trunk today")
        return real(self, part, row, before)

    monkeypatch.setattr(Setting, "conversation", failing)
    folder = tmp_path / "run"
    assert entry.run(settings(model), folder) == 3
    run = sweeps_run.open(folder)
    assert run.counts == {"done": 8, "failed": 4, "pending": 0}
    rows = run.table("failures").to_pylist()
    assert sum(r["cell"] is None for r in rows) == 1 and all("no trunk today" in r["error"] for r in rows)


def test_casts_share_trunks_and_each_has_its_replica(model, undisturbed, tmp_path):
    other = build_model(tmp_path / "other", seed=5)
    both = {"tiny": {"source": str(model), "dtype": "float32"}, "other": {"source": str(other), "dtype": "float32"}}
    wanted = settings(model, unit_cells=12, cluster__replicas=2, models=both,
                      grid={"scenario.participants.bob.model": ["tiny", "other"]})  # fmt: skip
    folder = tmp_path / "run"
    assert entry.run(wanted, folder) == 0
    commits = list(folder_commits.list_commits(folder))
    assert sorted(len(c.trunks) for c in commits) == [0, 3], "one unit owns the trunks, the other cast reads them"
    talk, _ = contents(folder)
    assert len(talk) == 12 and len({tuple(m[:3]) for m in talk.values()}) == 3
    assert {r["model"] for r in sweeps_run.open(folder).table("records", columns=["model"]).to_pylist()} == {
        "tiny",
        "other",
    }


def test_a_unit_whose_conditions_swap_its_models_files_each_record_under_its_own(model, tmp_path):
    models = {name: {"source": str(model), "dtype": "float32"} for name in ("tiny", "other")}
    axes = {f"scenario.participants.{who}.model": ["tiny", "other"] for who in ("alice", "bob")}
    config = settings(model, models=models, grid=axes, num_items=1, seeds=1, intervention=[], aggregate={})
    assert entry.run(config, tmp_path / "run") == 0
    run = sweeps_run.open(tmp_path / "run")
    mixed = [c for c in run.commits() if len(c.cells) == 2]
    assert len(mixed) == 1, "alice and bob with their models swapped are one cast, and here one unit"
    for row in run.cells.to_pylist():
        found = {r["model"] for r in run.records._index(None, {"cell": row["cell"]}).to_pylist()}
        assert found == {row["scenario.participants.bob.model"]}
