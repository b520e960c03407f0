"""Laws of the plan: ids follow content and nothing else, units hold whole trunks, a folder is one run."""

import json
import os
import subprocess
import sys

import pytest

import sweeps
from sweeps.config.digest import canonical, digest
from sweeps.driver import enter
from sweeps.errors import ConfigError, RunRefused
from sweeps.folder import about, files, local
from sweeps.folder.cells import Unit
from sweeps.folder.plan_reader import PlanFile
from sweeps.plan.expand import expand, trunks
from tests.support import talk

STEER = {"kind": "steer", "participants": ["bob"], "direction": "random:1", "layers": [1], "coef": 4}


def cells(config):
    return [cell for unit in expand(config) for cell in unit.cells]


def ids(config):
    return {cell.id for cell in cells(config)}


def trunk_ids(config):
    return {entry.trunk.id for entry in trunks(config)}


def scenario(**changes):
    return {**talk.SCENARIO, **changes}


def test_every_cell_once_in_whole_trunks(tmp_path):
    config = talk.config(tmp_path)
    units = list(expand(config))
    assert [len(u.cells) for u in units] == [8, 8, 8] and [u.id for u in units] == ["u000000", "u000001", "u000002"]
    assert len(ids(config)) == 3 * 2 * 2 * 2
    for unit in units:
        assert {t.id for t in unit.trunks} == {c.trunk for c in unit.cells} == set(unit.owns)
        assert set(unit.items) == {c.item for c in unit.cells}
        assert Unit.from_dict(json.loads(json.dumps(unit.to_dict()))) == unit


def test_ids_are_the_same_in_another_process(tmp_path):
    code = "import sys; sys.path.insert(0, '.'); from pathlib import Path; from tests.support import talk;" \
        "from tests.sweeps.plan import test_plan;" \
        f"print(sorted(test_plan.ids(talk.config(Path({str(tmp_path)!r})))))"  # fmt: skip
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == str(sorted(ids(talk.config(tmp_path))))


def test_ids_do_not_follow_what_changes_no_text(tmp_path):
    base = ids(talk.config(tmp_path))
    assert base == ids(talk.config(tmp_path, plan={"unit_cells": 3}))
    assert base == ids(talk.config(tmp_path, run={"dir": "elsewhere"}, cluster={"replicas": 7, "rows": 3}))
    assert base == ids(talk.config(tmp_path, aggregate={"outcomes": {}}, report={"transcripts": 3}))
    assert base == ids(talk.config(tmp_path, grid={"framing": {"hot": "Be warm.", "icy": "Be cold."}})), "labels"
    assert base == ids(talk.config(tmp_path, scenario=scenario(analyzers=["sweeps.analyzers:enthusiasm"])))
    written_out = {"alice": {"model": "tiny", "temperature": 0.8}, "bob": {"model": "tiny", "max_new_tokens": 8.0}}
    assert base == ids(talk.config(tmp_path, scenario=scenario(participants=written_out)))


@pytest.mark.parametrize("change", [
    {"scenario": scenario(seed=1)}, {"scenario": scenario(logprobs=True)}, {"capture": None},
    {"scenario": scenario(branch={"turns": 3, "seeds": 2})}, {"scenario": scenario(opening="Talk about {topic}.")},
    {"scenario": scenario(items=[{"id": f"i{n}", "topic": f"theme {n}"} for n in range(3)])},
    {"scenario": scenario(participants={"alice": {"model": "tiny"}, "bob": {"model": "tiny"}})},
    {"scenario": scenario(participants=dict(reversed(talk.SCENARIO["participants"].items())))},
    {"grid": {"framing": {"warm": "Be warm!", "cold": "Be cold!"}}}, {"intervention": STEER},
    {"models": {"tiny": {"source": "hub/other", "revision": "v2"}}, "capture": None},
])  # fmt: skip
def test_ids_follow_what_changes_text_or_records(tmp_path, change):
    assert not ids(talk.config(tmp_path)) & ids(talk.config(tmp_path, **change))


def test_numbers_are_canonical_and_json_is(tmp_path):
    assert canonical({"b": 6.0, "a": [1, 2.5, True, None, "ü"]}) == '{"a":[1,2.5,true,null,"ü"],"b":6}'.encode()
    assert digest(6) == digest(6.0) != digest("6") and digest(True) != digest(1)
    assert len(digest({})) == 20
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("nan"))


def test_two_cells_with_one_id_are_an_error_naming_both(tmp_path):
    coefs = {"intervention.coef": {"six": 6, "zero": 0, "float": 6.0}}
    with pytest.raises(ConfigError, match=r"intervention.coef='six' and intervention.coef='float'"):
        talk.config(tmp_path, intervention=STEER, grid=coefs)
    with pytest.raises(ConfigError, match="rows 0 and 1 of the configuration share the id 'a'"):
        talk.config(tmp_path, scenario=scenario(items=[{"id": "a", "topic": "x"}, {"id": "a", "topic": "y"}]))


def test_a_point_is_its_values_however_it_was_reached(tmp_path):
    swept = talk.config(tmp_path, intervention=STEER, grid={"intervention.coef": [0, 4]})
    fixed = talk.config(tmp_path, intervention=STEER, grid={})
    assert ids(fixed) == {c.id for c in cells(swept) if c.condition == {"intervention.coef": 4}}


def test_trunks_are_shared_by_what_acts_after_them(tmp_path):
    base = trunk_ids(talk.config(tmp_path))
    assert base == trunk_ids(talk.config(tmp_path, intervention=STEER, grid={"intervention.coef": [0, 4]}))
    assert base == trunk_ids(talk.config(tmp_path, grid={"scenario.participants.bob.temperature": [0.1, 0.2]}))
    assert base == trunk_ids(talk.config(tmp_path, capture=None, scenario=scenario(branch={"turns": 5, "seeds": 9})))
    assert not base & trunk_ids(talk.config(tmp_path, intervention={**STEER, "turns": "all"}))
    for trunk in ({"turns": 3, "seeds": 2}, {"turns": 2, "seeds": 2, "temperature": 0}):
        assert not base & trunk_ids(talk.config(tmp_path, scenario=scenario(trunk=trunk)))
    more = trunk_ids(talk.config(tmp_path, scenario=scenario(trunk={"turns": 2, "seeds": 5})))
    assert base < more, "more seeds are more trunks, not others"


def test_trunk_axes_make_other_trunks(tmp_path):
    config = talk.config(tmp_path, grid={"trunk.turns": [1, 2], "framing": {"warm": "w", "cold": "c"}})
    assert len(trunk_ids(config)) == 3 * 2 * 2 and len(ids(config)) == 48
    for entry in trunks(config):
        for cell in (cell for found in entry.cells.values() for cell in found):
            assert cell.condition["trunk.turns"] == entry.trunk.condition["trunk.turns"]


def test_without_turns_there_is_no_trunk(tmp_path):
    config = talk.config(tmp_path, scenario=scenario(trunk={"turns": 0, "seeds": 2}))
    assert all(not unit.trunks and not unit.owns for unit in expand(config)) and len(ids(config)) == 24


def test_casts_never_share_a_unit(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2}')
    models = {"tiny": {"source": str(tmp_path / "tiny")}, "other": {"source": str(other)}}
    both = talk.config(tmp_path, models=models, grid={"scenario.participants.bob.model": ["tiny", "other"]})
    units = list(expand(both))
    assert [(u.cast == units[0].cast, len(u.cells), len(u.owns)) for u in units] == [(True, 4, 2), (False, 4, 0)] * 3
    assert ids(both) > ids(talk.config(tmp_path, models=models, grid={}))
    away = talk.config(tmp_path, models=models, grid={"scenario.participants.bob.model": ["other"]})
    units = list(expand(away))
    assert [(len(u.cells), len(u.trunks), len(u.owns)) for u in units[:2]] == [(0, 4, 4), (8, 4, 0)]
    enter.enter(away, tmp_path / "run")
    assert list(PlanFile(tmp_path / "run").units()) == units, "a unit without cells is in the plan too"


def test_units_do_not_depend_on_who_runs_them(tmp_path):
    one = list(expand(talk.config(tmp_path, cluster={"replicas": 1})))
    assert one == list(expand(talk.config(tmp_path, cluster={"replicas": 16, "executor": "inline"})))


def test_the_default_unit_follows_the_bytes(tmp_path):
    captures = {"participants": ["bob"], "layers": None, "tokens": "generated"}
    small = talk.config(tmp_path, plan={}, capture=None)
    assert [len(u.cells) for u in expand(small)] == [24]
    (tmp_path / "tiny" / "config.json").unlink()
    big = talk.config(tmp_path, plan={}, capture=None, models={"tiny": {"source": "hub/huge"}})
    assert [len(u.cells) for u in expand(big)] == [24]
    from sweeps.plan.loads import default_unit_cells, tensor_bytes

    large = talk.config(tmp_path, plan={}, capture=captures,
                        scenario=scenario(branch={"turns": 2, "max_new_tokens": 100_000}))  # fmt: skip
    assert tensor_bytes(large) == 4 * 8 * 4 * 100_000 and default_unit_cells(large) == 512_000_000 // 12_800_000


# ---- folders


def test_the_plan_in_the_folder_is_the_plan(tmp_path):
    config = talk.config(tmp_path, grid={"trunk.turns": [1, 2], "framing": {"warm": "w", "cold": None}})
    assert enter.enter(config, config.run.dir).num_cells == 48
    plan = PlanFile(config.run.dir)
    assert list(plan.units()) == list(expand(config))
    assert [(i.id, i.num_cells) for i in plan.infos()] == [(u.id, len(u.cells)) for u in expand(config)]
    run = sweeps.open(config.run.dir)
    assert run.config == config and run.axes == ("trunk.turns", "framing") and run.counts["pending"] == 48


def test_small_row_groups_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.folder.schemas.ROWS", 5)
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    assert list(PlanFile(config.run.dir).units()) == list(expand(config))


def test_the_same_again_changes_nothing(tmp_path):
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    again = enter.enter(talk.config(tmp_path, cluster={"replicas": 5}), config.run.dir)
    assert again == enter.Entered(state="same", num_cells=24, new_cells=0)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_an_enlarged_grid_appends_units(tmp_path):
    first = talk.config(tmp_path)
    enter.enter(first, first.run.dir)
    items = [*talk.SCENARIO["items"], {"id": "new", "topic": "new"}]
    larger = talk.config(tmp_path, scenario=scenario(items=items, branch={"turns": 2, "seeds": 3}),
                         grid={"framing": {"warm": "Be warm.", "cold": "Be cold.", "plain": None}})  # fmt: skip
    assert enter.enter(larger, first.run.dir) == enter.Entered(state="extended", num_cells=72, new_cells=48)
    plan = PlanFile(first.run.dir)
    units = list(plan.units())
    assert units[:3] == list(expand(first))
    assert {c.id for u in units for c in u.cells} == ids(larger) and sum(len(u.cells) for u in units) == 72
    old_trunks = {t.id for u in units[:3] for t in u.trunks}
    for unit in units[3:]:
        assert unit.part == 1 and not old_trunks & set(unit.owns)
    assert {t for u in units[3:] for t in u.owns} == trunk_ids(larger) - old_trunks
    assert enter.enter(larger, first.run.dir).state == "same"
    run = sweeps.open(first.run.dir)
    assert run.counts["pending"] == 72 and run.config == larger


def test_another_run_is_refused_with_the_difference(tmp_path):
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    before = sorted(p for p in (tmp_path / "run").rglob("*"))
    for change, said in (
        ({"scenario": scenario(seed=5)}, "scenario.seed: 0 -> 5"),
        ({"grid": {"framing": {"warm": "Be warm."}}}, "grid"),
        ({"scenario": scenario(items=[{"id": "i0", "topic": "other"}])}, "scenario.items"),
        ({"capture": None}, "capture"),
    ):
        with pytest.raises(RunRefused, match="holds another run") as caught:
            enter.enter(talk.config(tmp_path, **change), config.run.dir)
        assert said in str(caught.value) and "\n" not in str(caught.value)
    assert before == sorted(p for p in (tmp_path / "run").rglob("*"))


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(RunRefused, match=r"not empty \(it holds thesis.txt\)"):
        enter.enter(talk.config(tmp_path), tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("killed_after", ["config-0.yaml", "inputs/items-0.jsonl", "plan/part-0.parquet"])
def test_a_killed_start_is_started_again(tmp_path, killed_after, monkeypatch):
    config = talk.config(tmp_path)
    real = local.fsync_folder

    def die(path):
        real(path)
        if (tmp_path / "run" / killed_after).exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(local, "fsync_folder", die)
    with pytest.raises(KeyboardInterrupt):
        enter.enter(config, config.run.dir)
    monkeypatch.undo()
    other = talk.config(tmp_path, scenario=scenario(seed=4))
    assert enter.enter(other, config.run.dir).state == "new", "what never began can be anything"
    assert list(PlanFile(config.run.dir).units()) == list(expand(other))


def test_models_are_recorded_once_and_must_stay(tmp_path):
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    about.record_models(config.run.dir, {"tiny": {"weights": "a", "template": "t"}})
    about.record_models(config.run.dir, {"tiny": {"weights": "a", "template": "t"}, "other": {"weights": "c"}})
    with pytest.raises(RunRefused, match="weights: 'a' -> 'b'"):
        about.record_models(config.run.dir, {"tiny": {"weights": "b", "template": "t"}})
    assert files.read_json(config.run.dir, "run.json")["models"]["other"] == {"weights": "c"}


def test_millions_of_cells_are_streamed(tmp_path):
    import tracemalloc

    config = talk.config(tmp_path, plan={"unit_cells": 500},
                         scenario=scenario(trunk={"turns": 1, "seeds": 40},
                                           branch={"turns": 1, "seeds": 200}))  # fmt: skip
    tracemalloc.start()
    count = sum(len(unit.cells) for unit in expand(config))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 48_000 and peak < 4_000_000, f"{peak} bytes: units must not be kept"
