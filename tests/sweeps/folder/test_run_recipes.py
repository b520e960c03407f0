"""The recipes of docs/data.md are run, one after the other, on a run folder."""

import re
from pathlib import Path

import pytest

import sweeps
from sweeps.driver import enter
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("recipes")
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
        for trunk in unit.trunks:
            writer.add_trunk(trunk.id, [talk.said("alice", "first")])
        for n, cell in enumerate(unit.cells):
            records = talk.records(1, float(n))
            for record in records:
                record.layer = {1: 16, 3: 20}[record.layer]
            writer.add_cell(cell, [talk.said("bob", "so", 1)], records, {"words": n}, start=1)
        writer.commit()
    return tmp_path / "run"


def test_every_recipe_runs(root, capsys):
    assert len(RECIPES) >= 6
    shared = {"RUN": str(root)}
    for recipe in RECIPES:
        if "to_ray_dataset" not in recipe:
            exec(recipe, shared)
    shown = capsys.readouterr().out
    assert "bob | so" in shown and "residual.16" in shown and "warm" in shown
    assert shared["tensor"].shape == (3, 8) and shared["x"].shape == (24, 8) and sum(shared["warm"]) == 12


@pytest.mark.slow
def test_ray_reads_a_table(root, a_ray):
    run = sweeps.open(root)
    (recipe,) = [recipe for recipe in RECIPES if "to_ray_dataset" in recipe]
    shared = {"run": run}
    exec(recipe, shared)
    assert shared["tokens"].count() == run.table("messages").num_rows
    found = run.to_ray_dataset("records", ["cell", "layer"]).to_pandas()
    assert len(found) == 72 and set(found["layer"]) == {16, 20}
    assert run.to_ray_dataset("messages").count() == run.table("messages").num_rows
