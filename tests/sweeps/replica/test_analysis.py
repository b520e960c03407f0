"""Laws of outcomes: a conversation is kept whatever an analyzer or a judge does, and each failure is named."""

from types import SimpleNamespace

import pytest

import sweeps
from sweeps.cli import main
from sweeps.driver import entry
from sweeps.errors import ConfigError
from sweeps.folder.verify import verify
from sweeps.replica.analysis import analysed, imported, num_failed
from tests.support.small import build_model, contents, same, settings

ODD = {
    "raises": "raise RuntimeError('no luck')", "returns a list": "return [1, 2]", "returns nothing": "return None",
    "an odd value": "return {'x': object()}", "an odd name": "return {3: 1.0}", "exits": "raise SystemExit(3)",
}  # fmt: skip


def outcomes(steps):
    """What a generator of steps that asks for nothing returns."""
    try:
        next(steps)
    except StopIteration as done:
        return done.value
    raise AssertionError("it asked for something")


class Judged:
    """A judge that cannot answer."""

    name = "warmth"

    def steps(self, conversation):
        raise TimeoutError("no answer")
        yield


def test_each_analysis_stands_by_itself():
    analyzers = {"a:fine": lambda c: {"words": 3}, "a:bad": lambda c: 1 / 0, "b:fine": lambda c: {"mood": "ü"}}
    found = outcomes(analysed(SimpleNamespace(transcript=[]), analyzers, [Judged()]))
    assert {k: v for k, v in found.items() if "failed" not in k} == {"words": 3, "mood": "ü"}
    assert "ZeroDivisionError: division by zero (test_analysis.py:" in found["failed.a:bad"]
    assert "TimeoutError: no answer" in found["failed.warmth"] and num_failed(found) == 2


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_no_conversation_is_lost_to_an_analyzer(body, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(f"def analyze(conversation):\n    conversation.transcript.clear()\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    model = build_model(tmp_path / "tiny")
    path = ["mine:analyze", "sweeps.analyzers:enthusiasm"]
    told = settings(model, seeds=1, num_items=2, scenario__analyzers=path, run={"progress": "plain"})
    assert entry.run(told, tmp_path / "run") == 3, "failed analyses are said"
    said = capsys.readouterr()
    assert "4 analyses failed" in said.out + said.err
    run = sweeps.open(tmp_path / "run")
    assert run.counts == {"done": 4, "failed": 0, "pending": 0} and run.analyses_failed == 4
    rows = run.outcomes().to_pylist()
    assert len(rows) == 4 and all(
        row["failed.mine:analyze"] and isinstance(row["enthusiasm.bob"], float) for row in rows
    )
    assert entry.run(settings(model, seeds=1, num_items=2, scenario__analyzers=[]), tmp_path / "without") == 0
    same(contents(tmp_path / "run"), contents(tmp_path / "without"))
    assert verify(tmp_path / "run", deep=True).ok
    assert entry.run(told, tmp_path / "run") == 3, "and said again by the command that finds nothing to do"


def test_an_analyzer_that_replicas_cannot_import_is_refused_before_a_token(tmp_path, monkeypatch, capsys):
    """The driver has it on its path; where the replica runs it is not."""
    with pytest.raises(ConfigError, match=r"cannot import 'not_there:f' where replicas run: ModuleNotFoundError"):
        imported(["not_there:f"])
    with pytest.raises(ConfigError, match="where replicas run: AttributeError"):
        imported(["sweeps.analyzers:no_such"])
    (tmp_path / "bad.py").write_text("raise RuntimeError('half imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="half imported"):
        imported(["bad:f"])


def test_the_command_says_it_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "loud.py").write_text("def bad(conversation):\n    raise KeyError('mood')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    scripted = ["scenario.items=[{id: a, topic: tea}]", "scenario.participants={ann: {kind: scripted, lines: [oh]}}",
                "scenario.opening='{topic}'", "cluster=inline"]  # fmt: skip
    assert main(["run", *scripted, "scenario.analyzers=['loud:bad']", "run.dir=run"]) == 3
    assert "KeyError: 'mood' (loud.py:2)" in sweeps.open("run").outcomes()["failed.loud:bad"][0].as_py()
