"""Opening is reading: no command imports what lies in or beside a folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sweeps
from sweeps.driver import entry
from tests.support.small import build_model, settings

TRAP = "import pathlib; pathlib.Path({0!r}).touch()\nraise RuntimeError('code of a stranger ran')\n"
MODULES = (
    "pynvml",
    "numpy",
    "torch",
    "yaml",
    "argparse",
    "tempfile",
    "hydra",
    "fsspec",
    "interlens",
    "sweeps",
    "ray",
    "mine",
)
COMMANDS = {
    "status": ["status", "."], "verify": ["verify", ".", "--deep"], "report": ["report", "."],
    "show": ["show", ".", "{cell}"],
    "gc": ["gc", ".", "--dry-run"], "export": ["export", ".", "{out}/x.parquet"], "compare": ["compare", ".", "."],
    "aggregate": ["aggregate", "."], "analyze": ["analyze", ".", "name=mine:f"],
    "plan": ["plan", "scenario.analyzers=['mine:f']"],
}  # fmt: skip


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A finished run folder with modules of every likely name in it."""
    root = tmp_path_factory.mktemp("stranger")
    told = settings(build_model(root / "tiny"), num_items=1, seeds=1)
    assert entry.run(told, root / "run") == 0
    for name in MODULES:
        (root / "run" / f"{name}.py").write_text(TRAP.format(str(root / "ran")))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "command"), [*(("sweeps", name) for name in COMMANDS), ("python -P -m sweeps", "status")]
)
def test_nothing_in_a_folder_runs_when_a_command_is_given_there(start, command, stranger, tmp_path):
    cell = sweeps.open(stranger / "run").cells["cell"][0].as_py()
    arguments = [a.format(cell=cell, out=tmp_path) for a in COMMANDS[command]]
    program = {"sweeps": [shutil.which("sweeps", path=Path(sys.executable).parent) or "sweeps"],
               "python -P -m sweeps": [sys.executable, "-P", "-m", "sweeps"]}[start]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run(
        [*program, *arguments], cwd=stranger / "run", capture_output=True, text=True, env=env, timeout=180
    )
    assert not (stranger / "ran").exists(), ran.stderr
    assert (ran.returncode == 0) == (command not in ("analyze", "plan")), ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_working_directory_serves_the_users_own_code_only_where_no_run_is(tmp_path, monkeypatch):
    from sweeps.cli import _near_a_run

    monkeypatch.chdir(tmp_path)
    assert not _near_a_run()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").touch()
    assert not _near_a_run(), "a project keeps its runs in a folder of their own"
    for inside in ("runs", "runs/a"):
        monkeypatch.chdir(tmp_path / inside)
        assert _near_a_run()
    (tmp_path / "runs" / "a" / "messages").mkdir()
    monkeypatch.chdir(tmp_path / "runs" / "a" / "messages")
    assert _near_a_run()
