"""Laws of `sweeps analyze`: what is computed afterwards equals what would have been computed at once."""

import pytest

import sweeps
from sweeps.aggregates.results import finalize
from sweeps.cli import main
from sweeps.commands.analyze import analyze
from sweeps.config.schema import AggregateConfig
from sweeps.driver import entry
from sweeps.errors import ConfigError
from sweeps.folder.garbage import collect
from sweeps.folder.verify import verify
from tests.support.small import build_model, contents, same, settings

SHIPPED = "sweeps.analyzers:enthusiasm"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run without analyzers, and a module `later` beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "later", raising=False)
    told = settings(build_model(tmp_path / "tiny"), scenario__analyzers=[], aggregate={})
    assert entry.run(told, tmp_path / "run") == 0
    return tmp_path / "run"


def rows(folder):
    return {row["cell"]: row for row in sweeps.open(folder).outcomes().to_pylist()}


def test_an_analyzer_that_comes_later_says_what_it_would_have_said(folder, tmp_path):
    born = settings(tmp_path / "tiny", scenario__analyzers=[SHIPPED], aggregate={})
    assert entry.run(born, tmp_path / "born") == 0
    before = contents(folder)
    assert main(["analyze", str(folder), f"name={SHIPPED}"]) == 0
    assert rows(folder) == rows(tmp_path / "born")
    same(contents(folder), before)
    assert verify(folder, deep=True).ok and collect(folder) == [], "nothing of it is foreign"
    entry_ = AggregateConfig(name="outcomes", options={})
    found, expected = (finalize(sweeps.open(f), [entry_])["outcomes"] for f in (folder, tmp_path / "born"))
    by_name = [{r["measure"]: r for r in result.pop("responses") if r["of"] == "text"} for result in (found, expected)]
    assert found == expected and by_name[0] == by_name[1]


def test_a_failure_stands_until_the_analyzer_has_a_value(folder, tmp_path, monkeypatch):
    module = tmp_path / "later.py"
    module.write_text(
        "def mood(c):\n    if c.row['id'] == 'i1':\n        raise ValueError('no mood')\n    return {'mood': 1.0}\n"
    )
    assert main(["analyze", str(folder), "name=later:mood"]) == 3
    run = sweeps.open(folder)
    failed = [row for row in rows(folder).values() if row["failed.later:mood"]]
    assert (
        {row["item"] for row in failed} == {"i1"}
        and run.analyses_failed == 4
        and all(r["mood"] is None for r in failed)
    )
    module.write_text("def mood(c):\n    return {'mood': 2.0}\n")
    monkeypatch.delitem(__import__("sys").modules, "later")
    assert analyze(sweeps.open(folder), ["name=later:mood"]) == (12, 0)
    assert {row["mood"] for row in rows(folder).values()} == {2.0}, (
        "an edited analyzer is another version, for every cell"
    )
    assert sweeps.open(folder).analyses_failed == 0 and "failed.later:mood" not in next(iter(rows(folder).values()))


def test_cut_off_it_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    (tmp_path / "later.py").write_text(
        "seen = []\ndef count(c):\n    seen.append(c.key)\n    return {'n': len(c.transcript)}\n"
    )
    import later  # ty: ignore[import-not-found]

    from sweeps.folder import analyses

    real, written = analyses.write, []

    def dies(store, version, unit, found):
        if written:
            raise KeyboardInterrupt
        written.append(unit)
        real(store, version, unit, found)

    monkeypatch.setattr(analyses, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        analyze(sweeps.open(folder), ["name=later:count"])
    monkeypatch.setattr(analyses, "write", real)
    later.seen.clear()
    assert analyze(sweeps.open(folder), ["name=later:count"]) == (12, 0) and len(later.seen) == 8
    later.seen.clear()
    assert analyze(sweeps.open(folder), ["name=later:count"]) == (12, 0) and later.seen == [], "all is there"


@pytest.mark.parametrize(("given", "why"), [
    ([], "give name=MODULE:FUNCTION"), (["name=nowhere:f"], "cannot import 'nowhere:f'"),
    (["name=warmth"], "no judge 'warmth' in this run"), ([f"name={SHIPPED}", "x=1"], "takes no options"),
    (["name=w", "prompt={transcript}", "nonsense=1"], "nonsense"), (["word"], "options are key=value"),
])  # fmt: skip
def test_what_cannot_be_analysed_is_refused_and_leaves_nothing(folder, given, why):
    with pytest.raises(ConfigError, match=why):
        analyze(sweeps.open(folder), given)
    assert not (folder / "analyses").exists()
