"""What an earlier version wrote is still read, and its ids still stand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import sweeps
from sweeps import errors
from sweeps.driver import enter
from sweeps.folder import schemas
from sweeps.folder.verify import verify
from sweeps.plan.expand import expand
from tests.support import talk
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
