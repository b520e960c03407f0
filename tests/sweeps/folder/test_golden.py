"""What an earlier version wrote is still read, and its ids still stand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import sweeps
from sweeps import errors
from sweeps.commands.capture import capture
from sweeps.driver import enter, entry
from sweeps.folder import schemas
from sweeps.folder.about import versions
from sweeps.folder.verify import verify
from sweeps.plan.expand import expand
from sweeps.report.page import write_report
from tests.support import talk
from tests.support.small import build_model, settings
from tests.sweeps.folder.golden import make
from tests.sweeps.folder.test_run import answer

VERSIONS = sorted(p.name for p in Path(__file__).with_name("golden").glob("v*"))


def test_there_is_one_of_each_version_that_is_read():
    assert [f"v{version}" for version in sorted(schemas.READABLE)] == VERSIONS
    assert max(schemas.READABLE) == schemas.SCHEMA_VERSION


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_read_and_sound(version):
    run = sweeps.open(Path(__file__).with_name("golden") / version)
    assert verify(run.root, deep=True).lines == [
        "ok: 1 commits, 7 files, 9 messages, 21 records, 7 cells done, 1 cells failed, 0 cells pending"
    ]
    cell = run.cells["cell"][6].as_py()
    messages = run.messages(cell)
    expected = [talk.Message("moderator", "About tea."), talk.said("alice", "Tea."), talk.said("bob", "so 6", 1)]
    assert messages == expected and [m.fed for m in messages] == [m.fed for m in expected]
    assert [r.tokens for r in run.query(cell=cell)] == [r.tokens for r in answer(2, 6.0)]
    x, table = run.vectors(layer=3)
    assert x[:, 0].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 9.0, 10.0] and set(table["intervention.coef"].to_pylist()) == {
        0,
        4.5,
    }
    assert run.outcomes().to_pylist()[0]["mood"] == "ü" and run.table("failures")["attempts"].to_pylist() == [3]
    assert run.routing_stats().expert_load.tolist() == [[1 / 3, 2 / 3]]
    assert [dict(s)["count"].tolist() for s in run.sums("outcomes")] == [[0, 1, 2]]
    assert np.isclose(run.about["schema_version"], int(version[1:]))


@pytest.mark.parametrize("version", VERSIONS)
def test_its_ids_stand(version, tmp_path):
    """The same configuration gives the same cells, or every folder of the world would be refused."""
    run = sweeps.open(Path(__file__).with_name("golden") / version)
    (unit,) = expand(make.config(tmp_path))
    assert [c.id for c in unit.cells] == run.cells["cell"].to_pylist()
    assert unit.trunks[0].id == run.cells["trunk"][0].as_py()
    (again,) = expand(run.config)
    assert again == unit, "and so does the configuration in the folder"


@pytest.mark.parametrize("version", [*VERSIONS[:-1], "v99"])
def test_a_folder_of_another_version_is_never_continued(version, tmp_path):
    """Readers accept the previous version; writing into it would mix two."""
    golden = Path(__file__).with_name("golden") / (version if version in VERSIONS else VERSIONS[-1])
    shutil.copytree(golden, tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["schema_version"] = int(version[1:])
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    before = sorted(tmp_path.rglob("*"))
    said = (
        rf"schema version {version[1:]}, this is {schemas.SCHEMA_VERSION}; continue it with the version that began it"
    )
    with pytest.raises(errors.RunRefused, match=said):
        enter.enter(make.config(tmp_path), tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_version_0_1_began_is_continued_verified_reported_and_captured(tmp_path, monkeypatch):
    """Written by the code of 0.1.0, stopped after two of three units; `whole.json` is what it said when not stopped."""
    begun = Path(__file__).with_name("golden") / "begun"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(begun / "run", "run")
    build_model("tiny")
    about = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(
        json.dumps({**about, "versions": versions()})
    )  # the same libraries, wherever this runs
    options = {"progress": "none", "interval_s": 0.2, "dir": "run"}
    config = settings("tiny", scenario__analyzers=["sweeps.analyzers:enthusiasm"], run=options)
    before = {path: path.read_bytes() for path in Path("run").rglob("*.*") if "_commits" in path.parts}
    assert sweeps.open("run").counts == {"done": 8, "failed": 0, "pending": 4}
    assert entry.run(config, "run") == 0
    run = sweeps.open("run")
    said = {cell: [[m.author, m.content] for m in run.messages(cell)] for cell in run.cells["cell"].to_pylist()}
    assert said == json.loads((begun / "whole.json").read_text())
    assert all(path.read_bytes() == content for path, content in before.items())
    assert verify("run", deep=True).ok and write_report(run).is_file()
    assert capture("run", ["layers=1", "sites=mlp", "participants=bob"]) == 0
    assert len(run.refresh().query(site="mlp")) >= 12 and verify("run", deep=True).ok
    assert entry.run(config, "run") == 0, "and then there is nothing to do"
