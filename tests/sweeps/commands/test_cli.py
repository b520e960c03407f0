"""The command line as people meet it: Hydra's flags, one-line errors, exit codes, and nothing left behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sweeps
from sweeps.cli import main
from sweeps.config.shipped import conf_dir

SCRIPTED = [
    "scenario.items=[{id: a, topic: tea},{id: b, topic: rain}]",
    "scenario.participants={ann: {kind: scripted, lines: [hi, so]}, ben: {kind: scripted, lines: [oh]}}",
    "scenario.opening='About {topic}.'", "scenario.trunk.turns=1", "scenario.branch.turns=2", "scenario.branch.seeds=2",
    "cluster=inline", "run.progress=plain",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def files(root="."):
    return sorted(str(p) for p in Path(root).rglob("*") if p.is_file())


def test_plan_finds_experiments_of_ones_own(tmp_path, capsys):
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "talk.yaml").write_text("# @package _global_\nscenario: {branch: {turns: 3}}\n")
    assert main(["plan", "--config-dir", str(tmp_path / "mine"), "experiment=talk", *SCRIPTED[:3]]) == 0
    assert "talk -> runs/talk" in capsys.readouterr().out
    assert main(["plan", "experiment=talk", *SCRIPTED[:3]]) == 1


def test_a_run_from_plan_to_report(capsys):
    arguments = [*SCRIPTED, "grid.framing={warm: w, cold: c}"]
    assert main(["plan", *arguments]) == 0
    assert "8 cells in 1 units: 2 items, 2 trunks of 1 turns" in capsys.readouterr().out and files() == []
    assert main(["run", *arguments]) == 0
    run = sweeps.open("runs/sweep")
    assert run.counts == {"done": 8, "failed": 0, "pending": 0}
    cell = run.cells["cell"][0].as_py()
    assert [m.content for m in run.messages(cell)] == ["About tea.", "hi", "w", "oh", "so"]
    before = {name: os.stat(name).st_mtime_ns for name in files() if not re.search("_lease|events|progress", name)}
    assert main(["run", *arguments]) == 0, "finished: nothing to do"
    assert before.items() <= {name: os.stat(name).st_mtime_ns for name in files()}.items()
    assert {name.split("/")[0] for name in files()} == {"runs"}, "Hydra left nothing behind"
    capsys.readouterr()
    assert main(["status", "runs/sweep"]) == 0 and "8 of 8 cells committed" in capsys.readouterr().out
    assert main(["show", "runs/sweep", cell]) == 0 and "[2] moderator: w" in capsys.readouterr().out
    assert main(["verify", "runs/sweep", "--deep"]) == 0
    assert main(["gc", "runs/sweep"]) == 0
    assert main(["report", "runs/sweep"]) == 0 and Path("runs/sweep/report/index.html").is_file()


def test_another_configuration_is_refused_and_an_extension_runs(capsys):
    assert main(["run", *SCRIPTED]) == 0
    before = [name for name in files() if "_lease" not in name and "events" not in name]
    assert main(["run", *SCRIPTED, "scenario.seed=3"]) == 5
    assert "holds another run" in capsys.readouterr().err
    assert before == [name for name in files() if "_lease" not in name and "events" not in name]
    assert main(["run", *SCRIPTED, "scenario.branch.seeds=3"]) == 0
    assert sweeps.open("runs/sweep").counts["done"] == 6


def test_multirun_folders_are_named_by_content(capsys):
    assert main(["run", "-m", *SCRIPTED, "scenario.seed=1,2"]) == 0
    first = sorted(p.name for p in Path("runs").iterdir())
    assert len(first) == 2 and all(name.startswith("sweep-") for name in first)
    stamps = {name: os.stat(name).st_mtime_ns for name in files() if name.endswith((".parquet", "run.json"))}
    assert main(["run", *reversed(SCRIPTED), "--multirun", "scenario.seed=3,2,1"]) == 0, "a flag may stand anywhere"
    assert len(list(Path("runs").iterdir())) == 3 and set(first) < {p.name for p in Path("runs").iterdir()}
    assert stamps.items() <= {name: os.stat(name).st_mtime_ns for name in files()}.items()
    assert {name.split("/")[0] for name in files()} == {"runs"}


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["run", "experiment=nope"], 1, "no experiment 'nope'"),
    (["run", *SCRIPTED, "scenario.sed=1"], 1, "did you mean 'seed'"),
    (["run", "scenario.items=[]", *SCRIPTED[1:]], 1, "no items"),
    (["run"], 1, "no participants"),
    (["run", "x y"], 1, "write key=value"),
    (["plan", "experiment=enthusiasm", "capture.0.layers=[99]"], 1, "no layer 99"),
    (["plan", "experiment=enthusiasm_steered"], 1, "no run folder 'runs/enthusiasm'"),
    (["status", "nowhere"], 1, "nowhere"),
    (["report", "nowhere"], 1, "is no run folder"),
    (["show", "nowhere"], 1, "usage: sweeps show"),
    (["verify", "nowhere", "--depp"], 1, "usage: sweeps verify"),
    (["gc", "nowhere"], 1, "is no run folder"),
    (["run", *SCRIPTED, "run.dir=3"], 1, "run.dir must be a text, got 3"),
    (["run", *SCRIPTED, "--resolve"], 1, "The --resolve flag can only be used"),
    (["run", *SCRIPTED, "scenario.seed=1,2"], 1, "Ambiguous value for argument 'scenario.seed=1,2'"),
    (["plan", *SCRIPTED, "--config-dir", "nowhere"], 1, "no folder 'nowhere' for --config-dir"),
    (["plan", *SCRIPTED, "--config-dir"], 1, "expected one argument; usage: sweeps plan"),
    (["fly"], 1, "no command 'fly'; there are: plan, run"),
    ([], 1, ""),
])  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(arguments, code, said, capsys):
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") <= 1 and files() == []


@pytest.mark.parametrize(("damage", "said"), [
    (lambda run: (run / "run.json").write_text("{oops"), "run.json of 'runs/sweep' cannot be read"),
    (lambda run: (run / "config-0.yaml").write_text("a: ["), "config-0.yaml of 'runs/sweep' cannot be read"),
    (lambda run: shutil.rmtree(run / "plan"), "plan"),
    (lambda run: next((run / "_commits").iterdir()).write_text("{"), "let its unit and what stands on it run again"),
    (lambda run: next((run / "messages").iterdir()).unlink(), "no such file: runs/sweep/messages/"),
    (lambda run: next((run / "messages").iterdir()).write_bytes(b"PAR1"), "messages/u000000-"),
])  # fmt: skip
def test_damage_to_a_run_is_told_in_one_line(damage, said, capsys):
    assert main(["run", *SCRIPTED]) == 0
    damage(Path("runs/sweep"))
    capsys.readouterr()
    for command in (["report", "runs/sweep"], ["run", *SCRIPTED]):
        code, err = main(command), capsys.readouterr().err
        assert (code == 1 and said in err and err.count("\n") == 1) or (command[0] == "run" and "messages" in said), err


def test_an_own_folder_that_is_something_else_is_refused(capsys):
    Path("thesis").mkdir()
    Path("thesis/chapter.txt").write_text("mine")
    assert main(["run", *SCRIPTED, "run.dir=thesis"]) == 5
    assert "not empty" in capsys.readouterr().err and Path("thesis/chapter.txt").read_text() == "mine"
    assert [p.name for p in Path("thesis").iterdir()] == ["chapter.txt"], "nothing of ours is left there"
    assert main(["run", *SCRIPTED, "run.dir=thesis/chapter.txt"]) == 5
    assert "is a file; name a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_hydras_flags_work_in_a_process_of_its_own():
    def sweeps(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(conf_dir().parent)}
        return subprocess.run(
            [sys.executable, "-m", "sweeps", *arguments], capture_output=True, text=True, env=environment
        )

    shown = sweeps("run", "--help")
    assert shown.returncode == 0 and "experiment: enthusiasm" in shown.stdout and "Exit codes" in shown.stdout
    job = sweeps("run", "experiment=enthusiasm", "--cfg", "job")
    assert job.returncode == 0 and "items: topics.jsonl" in job.stdout
    assert sweeps("run", "--no-such-flag").returncode == 1
    assert sweeps("--help").stdout.startswith("sweeps <command>") and files() == []


def test_the_exit_code_of_several_jobs(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text("def fine(c):\n    return {}\ndef bad(c):\n    raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "-m", *SCRIPTED, "scenario.analyzers=['odd:fine'],['odd:bad']"]) == 3
    assert main(["run", "-m", *SCRIPTED, "scenario.branch.turns=0,1", "scenario.analyzers=['odd:bad']"]) == 1
    assert len(list(Path("runs").iterdir())) == 3, "the impossible job left nothing, the others have their folders"
    seen = []
    monkeypatch.setattr("sweeps.cli.run_composed", lambda composed: seen.append(composed) or 4)
    assert main(["run", "-m", *SCRIPTED, "scenario.seed=1,2,3"]) == 4 and len(seen) == 1, "a stop starts no further job"
