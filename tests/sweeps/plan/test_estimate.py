"""Laws of the estimates: what is planned is what is counted, and near what a finished run wrote."""

from dataclasses import replace

import pytest

from sweeps import errors
from sweeps import run as sweeps_run
from sweeps.commands import plan
from sweeps.compose import from_plain
from sweeps.driver import enter, entry, size
from sweeps.folder import space
from sweeps.plan.expand import expand
from tests.support import talk
from tests.sweeps.plan.test_plan import STEER, scenario


@pytest.mark.parametrize("change", [
    {}, {"plan": {"unit_cells": 7}}, {"plan": {"unit_cells": 1}}, {"grid": {}},
    {"grid": {"trunk.turns": [1, 2, 3], "framing": {"a": "x", "b": "y"}}},
    {"intervention": STEER, "grid": {"intervention.coef": [0, 1, 2]}, "plan": {"unit_cells": 10}},
    {"scenario": scenario(trunk={"turns": 0, "seeds": 3}, branch={"turns": 1, "seeds": [4, 9]}), "capture": None},
    {"models": {"tiny": {"source": "hub/a"}, "other": {"source": "hub/b"}}, "capture": None,
     "grid": {"scenario.participants.bob.model": ["tiny", "other"]}},
    {"models": {"tiny": {"source": "hub/a"}, "other": {"source": "hub/b"}}, "capture": None,
     "grid": {"scenario.participants.bob.model": ["other"]}},
])  # fmt: skip
def test_counts_are_those_of_the_plan(tmp_path, change):
    config = talk.config(tmp_path, **change)
    units = list(expand(config))
    found = size.size(config)
    assert (found.cells, found.units) == (sum(len(u.cells) for u in units), len(units))
    assert found.items == 3 and found.trunks == len({c.trunk for u in units for c in u.cells})


def test_tokens_and_tensors_are_counted_by_turn(tmp_path):
    config = talk.config(tmp_path, grid={})
    found = size.size(config)
    per_trunk, per_cell = 512 + 8, 512 + 8
    assert found.tokens == 6 * per_trunk + 12 * per_cell
    means, rows = 2 * 8 * 4, 8 * 8 * 4
    assert found.tensor_bytes == 12 * (means + rows), "bob's answer: two means, and 8 rows of float32"
    assert found.recomputed == 0
    branch = talk.config(tmp_path, grid={"scenario.branch.max_new_tokens": [4, 16]})
    assert size.size(branch).tokens == 6 * per_trunk + 12 * (8 + 32)
    whole = talk.config(tmp_path, grid={}, capture={"participants": ["bob"], "layers": [0], "tokens": "all"})
    assert size.size(whole).recomputed > 12 * 512
    assert "run through the model again" in plan.describe(whole)


def test_edits_of_the_trunk_are_said(tmp_path):
    assert "share no KV" not in plan.describe(talk.config(tmp_path, intervention=STEER))
    assert "share no KV" in plan.describe(talk.config(tmp_path, intervention={**STEER, "tokens": "all - special"}))


def test_sizes_read_well():
    assert [space.human(n) for n in (0, 999, 1500, 2_500_000, 7e9, 3.2e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "7.0 GB", "3.2 TB",
    ]  # fmt: skip


def test_what_does_not_fit_the_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "free_bytes", lambda root: space.RESERVE_BYTES + 1_000)
    config = talk.config(tmp_path)
    with pytest.raises(errors.RunRefused, match=r"501\.0|500\.0 MB"):
        enter.enter(config, config.run.dir)
    assert not (tmp_path / "run").exists()
    forced = talk.config(tmp_path, run={"dir": config.run.dir, "force": True})
    assert enter.enter(forced, config.run.dir).state == "new"
    assert enter.enter(config, config.run.dir).state == "same", "what runs already is not asked again"


def test_sums_are_planned_too(tmp_path):
    """Of 8 values: bob's two pooled layers, under each of two framings; squares where the covariance is kept."""
    by = {"kind": "moments", "by": ["framing"]}
    config = talk.config(tmp_path, aggregate={"spread": by})
    assert size.sums_bytes(config) == 4 * (8 * (8 + 8) + size.KEY_BYTES)
    square = talk.config(tmp_path, aggregate={"spread": {**by, "covariance": True}})
    assert size.sums_bytes(square) == 4 * (8 * (8 + 64) + size.KEY_BYTES)
    of_items = talk.config(tmp_path, aggregate={"spread": {"kind": "moments", "by": ["item.topic"], "pool": None}})
    assert size.sums_bytes(of_items) == 3 * (8 * (8 + 8) + size.KEY_BYTES)
    assert size.size(square).other_bytes > size.size(talk.config(tmp_path, aggregate={})).other_bytes


def test_what_does_not_fit_is_refused_by_the_driver_before_it_makes_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(space, "free_bytes", lambda root: space.RESERVE_BYTES + 1_000)
    people = {"ann": {"kind": "scripted", "lines": ["hi"]}}
    config = talk.config(tmp_path, scenario=scenario(participants=people), capture=None)
    assert entry.run(config, config.run.dir) == 5
    assert "stay free" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_one_unit_is_measured_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    people = {"ann": {"kind": "scripted", "lines": ["hi"]}, "ben": {"kind": "scripted", "lines": ["oh"]}}
    config = talk.config(tmp_path, scenario=scenario(participants=people), capture=None)
    measured = plan.measure(config)
    assert measured.cells == 8 and measured.bytes > 0 and not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "run").exists()
    assert "measured: 8 cells" in plan.extrapolate(config, measured)


def test_a_measured_unit_stands_for_its_share_of_all_tokens(tmp_path):
    models = {name: {"source": str(tmp_path / "tiny"), "dtype": dtype}
              for name, dtype in (("tiny", "float32"), ("other", "bfloat16"))}  # fmt: skip
    config = talk.config(tmp_path, grid={"scenario.participants.bob.model": ["tiny", "other"]}, plan={"unit_cells": 4},
                         models=models)  # fmt: skip
    units, total = list(expand(config)), size.size(config).tokens
    assert config.scenario.trunk.turns and len({unit.cast for unit in units}) == 2
    assert sum(plan.unit_budget(config, unit) for unit in units) == total > 0
    budget = plan.unit_budget(config, units[0])
    measured = plan.Measured(cells=len(units[0].cells), seconds=2.0, load_s=0.0, tokens=budget, bytes=1, budget=budget)
    assert f"by that: {total} tokens" in plan.extrapolate(config, measured)


@pytest.mark.slow
def test_prompts_are_counted_within_a_fifth(tmp_path):
    """Captures of whole sequences on the embedded model, with and without markup, and from the branch point on."""
    people = {
        "alice": {"model": "smollm2", "max_new_tokens": 16},
        "bob": {"model": "smollm2", "max_new_tokens": 12, "system_prompt": "You are bob, a patient man of few words."},
    }
    tokens = {1: ("all", "drop"), 2: ("all", "keep"), 3: ("branch", "keep"), 4: ("prompt", "drop")}
    config = from_plain({
        "scenario": {
            "items": [{"id": "a", "topic": "the rain in autumn"}], "participants": people,
            "opening": "Let's talk about {topic}. What do you think of it, and why?",
            "trunk": {"turns": 2, "seeds": 1}, "branch": {"turns": 2, "seeds": 1},
        },
        "grid": {"framing": {"warm": "Answer with delight, as if you had waited for it.", "cold": "Answer with distaste."}},
        "capture": [{"participants": ["alice", "bob"], "layers": [layer], "tokens": which, "special": special}
                    for layer, (which, special) in tokens.items()],
        "cluster": {"executor": "inline"}, "run": {"progress": "none", "dir": str(tmp_path / "run")},
    })  # fmt: skip
    assert entry.run(config, config.run.dir) == 0
    run = sweeps_run.open(config.run.dir)
    for number, layer in enumerate(tokens):
        written = sum(r.tensor.numel() * r.tensor.element_size() for r in run.query(layer=layer))
        planned = size.size(replace(config, capture=(config.capture[number],))).tensor_bytes
        assert abs(planned - written) <= 0.2 * written, (tokens[layer], planned, written)
