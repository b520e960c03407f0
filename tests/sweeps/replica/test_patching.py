"""Laws of patch conditions, with a tiny float32 model: a donor's activations in place of the recipient's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sweeps import run as sweeps_run
from sweeps.commands import show
from sweeps.compose import from_plain
from sweeps.driver import driver, entry
from sweeps.driver.parts import Needs
from sweeps.driver.units import Units
from sweeps.errors import ConfigError
from sweeps.folder import commits
from sweeps.folder.plan_reader import PlanFile
from sweeps.folder.verify import verify
from tests.support import apart
from tests.support.small import Switch
from tests.support.tiny import tiny

TOLD = {"red": "The {thing} is red.", "blue": "The {thing} is blue."}
LOGITS = {"participants": ["bob"], "sites": ["logits"], "tokens": "positions(-1)", "special": "keep"}
PATCH = {"kind": "patch", "participants": ["bob"], "from": {"trunk.opening": "red"}, "layers": [1], "tokens": "prompt"}


@pytest.fixture(autouse=True)
def switched_off():
    yield
    Switch.fail_item = None


def told(model, *, grid=None, **changes):
    """Bob is told a colour, red or blue, and asked for it: 2 items, one short answer."""
    plain = {
        "experiment": "told",
        "scenario": {
            "items": [{"id": f"i{n}", "thing": thing} for n, thing in enumerate(("ball", "door"))],
            "participants": {"bob": {"model": "tiny", "max_new_tokens": 4, "temperature": 0.0}},
            "framing": "What colour?",
            "analyzers": ["tests.support.small:analyze"],
        },
        "models": {"tiny": {"source": str(model), "dtype": "float32"}},
        "grid": {"trunk.opening": TOLD, **(grid or {})},
        "intervention": PATCH,
        "capture": LOGITS,
        "cluster": {"executor": "inline", "rows": 8},
        "run": {"progress": "none", "interval_s": 0.2},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        plain[section] = {**plain[section], key: value} if key else value
    return from_plain(plain)


def ran(config, folder, code=0):
    assert entry.run(config, folder) == code
    run = sweeps_run.open(folder)
    assert verify(folder, deep=True).ok
    return run


def said(run):
    """(item, colour) -> tokens and last-position logits of bob's answer."""
    found = {}
    for row in run.cells.to_pylist():
        if row["state"] == "done":
            logits = run.at(cell=row["cell"], site="logits")[-1].numpy()
            key = (row["item"], *(row[axis] for axis in run.axes))
            found[key] = run.messages(row["cell"])[-1].fed.generated, logits
    return found


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """Nothing patched."""
    return said(ran(told(model, intervention=[]), tmp_path_factory.mktemp("plain") / "run"))


def close(a, b):
    assert a[0] == b[0]
    np.testing.assert_allclose(a[1], b[1], atol=1e-5)


def test_all_positions_of_the_last_layer_give_the_donors_distribution(model, plain, tmp_path):
    run = ran(told(model, intervention={**PATCH, "layers": -1}), tmp_path / "run")
    found = said(run)
    for item in ("i0", "i1"):
        assert np.abs(plain[item, "red"][1] - plain[item, "blue"][1]).max() > 0.01, "or this shows nothing"
        np.testing.assert_allclose(found[item, "blue"][1], plain[item, "red"][1], atol=1e-5)
        assert found[item, "blue"][0][0] == plain[item, "red"][0][0]
    cell = next(row["cell"] for row in run.cells.to_pylist() if row["trunk.opening"] == "blue")
    done = run.messages(cell)[-1].metadata["patch"]
    assert done["layer"] == 2 and done["tokens_modified"] == len(done["positions"]) > 20


def test_a_patch_from_the_cell_itself_changes_nothing(model, plain, tmp_path):
    steps = {"intervention.layers": {"none": [], "0": 0, "both": [0, 2]}}
    found = said(ran(told(model, grid=steps, intervention={**PATCH, "from": {}}), tmp_path / "run"))
    assert len(found) == 12
    for (item, colour, _), value in found.items():
        close(value, plain[item, colour])


def test_a_patch_of_some_positions_lies_between(model, plain, tmp_path):
    where = {"intervention.tokens": {"fact": "message(0)", "last": "positions(-1)", "before": "window(0, 4)"}}
    found = said(ran(told(model, grid=where), tmp_path / "run"))
    for item in ("i0", "i1"):
        close(found[item, "blue", "before"], plain[item, "blue"])  # the same tokens in both
        for tokens in ("fact", "last"):
            close(found[item, "red", tokens], plain[item, "red"])  # patched from itself
            changed = found[item, "blue", tokens][1]
            assert min(np.abs(changed - plain[item, c][1]).max() for c in ("red", "blue")) > 1e-3


def test_a_patch_of_a_steered_cell_carries_its_steering_once(model, tmp_path):
    steer = {"participants": ["bob"], "direction": "random:1", "layers": [2], "coef": 3.0, "tokens": "all"}
    steered = said(ran(told(model, intervention=steer), tmp_path / "steered"))
    both = said(ran(told(model, intervention=[steer, {**PATCH, "layers": -1}]), tmp_path / "both"))
    for item in ("i0", "i1"):
        close(both[item, "red"], steered[item, "red"])
        np.testing.assert_allclose(both[item, "blue"][1], steered[item, "red"][1], atol=1e-5)
        assert np.abs(steered[item, "blue"][1] - steered[item, "red"][1]).max() > 0.01


def test_another_run_is_a_donor_and_its_copy_is_enough(model, plain, tmp_path):
    donor = told(model, intervention=[], run={"dir": str(tmp_path / "donor"), "progress": "none"})
    ran(donor, tmp_path / "donor")
    from_run = {**PATCH, "layers": -1, "from": {"run": str(tmp_path / "donor"), "trunk.opening": "red"}}
    wanted = told(model, intervention=from_run, run={"dir": str(tmp_path / "run"), "progress": "none"})
    found = said(ran(wanted, tmp_path / "run"))
    for item in ("i0", "i1"):
        np.testing.assert_allclose(found[item, "blue"][1], plain[item, "red"][1], atol=1e-5)
    (tmp_path / "donor").rename(tmp_path / "gone")
    again = told(model, intervention=from_run, run={"dir": str(tmp_path / "run"), "progress": "none"})
    assert entry.run(again, tmp_path / "run") == 0
    with pytest.raises(ConfigError, match="no run folder"):
        told(model, intervention=from_run, run={"dir": str(tmp_path / "new"), "progress": "none"})


def test_unequal_lengths_fail_the_cell_with_both(model, tmp_path):
    longer = {"trunk.opening": {"red": "The {thing} is red.", "blue": "The {thing} here is of a blue colour."}}
    run = ran(told(model, grid=longer), tmp_path / "run", 3)
    errors = run.table("failures")["error"].to_pylist()
    assert len(errors) == 2 and run.counts["done"] == 2
    assert all("prompt tokens here and" in e and "in the donor; they must be as many" in e for e in errors)
    shown = show.text(run, run.table("failures")["cell"][0].as_py())
    assert "failed after 1 attempts: " in shown and errors[0] in shown


def test_a_failed_donor_fails_its_recipients_and_a_retry_runs_both(model, plain, tmp_path, monkeypatch):
    from sweeps.replica import unit_run

    real, broken = unit_run.UnitRun._play_cell, {"red"}

    def failing(self, cell, trunk):
        if cell.condition["trunk.opening"] in broken and cell.item == "i1":
            raise RuntimeError("no donor today")
        return (yield from real(self, cell, trunk))

    monkeypatch.setattr(unit_run.UnitRun, "_play_cell", failing)
    run = ran(told(model, intervention={**PATCH, "layers": -1}), tmp_path / "run", 3)
    rows = {row["cell"]: row["error"] for row in run.table("failures").to_pylist()}
    state = {(c["item"], c["trunk.opening"]): c["cell"] for c in run.cells.to_pylist()}
    assert rows.keys() == {state["i1", "red"], state["i1", "blue"]}
    assert rows[state["i1", "blue"]].startswith(f"its donor {state['i1', 'red']} failed: RuntimeError: no donor today")
    broken.clear()
    again = {"progress": "none", "interval_s": 0.2, "retry_failed": True}
    found = said(ran(told(model, intervention={**PATCH, "layers": -1}, run=again), tmp_path / "run"))
    np.testing.assert_allclose(found["i1", "blue"][1], plain["i1", "red"][1], atol=1e-5)


def test_a_run_cut_between_donor_and_recipient_goes_on_the_same(model, tmp_path, monkeypatch):
    from sweeps.replica.unit_run import UnitRun

    steps = {"intervention.layers": {"0": 0, "1": 1}}
    whole = said(ran(told(model, grid=steps), tmp_path / "whole"))
    real, held = UnitRun._cell_done, []

    def stop_after_donors(self, done):
        real(self, done)
        held.append(done.tag)
        if sum(cell.condition["trunk.opening"] == "red" for cell in held) == 4:
            self.shared.stop()

    monkeypatch.setattr(UnitRun, "_cell_done", stop_after_donors)
    check = driver.Driver._check_stops
    monkeypatch.setattr(
        driver.Driver, "_check_stops", lambda self, crew: (held and self._on_signal("SIGTERM"), check(self, crew))
    )
    assert entry.run(told(model, grid=steps), tmp_path / "run") == 4
    (commit,) = commits.list_commits(tmp_path / "run")
    assert commit.cells and commit.children, "donors are committed, recipients are not"
    monkeypatch.undo()
    found = said(ran(told(model, grid=steps), tmp_path / "run"))
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        close(value, found[key])


def test_an_extended_grid_takes_donors_of_earlier_units(model, plain, tmp_path):
    last = {**PATCH, "layers": -1}
    ran(told(model, grid={"trunk.opening": {"red": TOLD["red"]}}, intervention=last), tmp_path / "run")
    found = said(ran(told(model, intervention=last), tmp_path / "run"))
    np.testing.assert_allclose(found["i0", "blue"][1], plain["i0", "red"][1], atol=1e-5)
    plan = PlanFile(tmp_path / "run")
    infos = {info.id: info for info in plan.infos()}
    assert infos["u000000"].donors == {} and infos["u000001"].donors == {"u000000": 0b11}
    units = Units(plan.unit, lambda name: None, locate=plan.locate)
    assert units.needs("u000001", 0b01) == Needs(
        trunks=(plan.unit("u000001").cells[0].trunk,), donors={"u000000": 0b01}
    )


def test_a_patch_mixes_with_axes_of_models_adapters_and_steering(model, tmp_path):
    """Each point of the grid patches from its own model's donor, under its own adapter and steering."""
    other, tuned = another(model, tmp_path / "other"), adapter(model, tmp_path / "tuned")
    bob = "scenario.participants.bob"
    axes = {f"{bob}.model": ["tiny", "other"], f"{bob}.adapter": {"base": None, "tuned": str(tuned)},
            "intervention.0.coef": [0.0, 3.0]}  # fmt: skip
    models = {name: {"source": str(at), "dtype": "float32"} for name, at in (("tiny", model), ("other", other))}
    steer = {"participants": ["bob"], "direction": "random:1", "layers": [1], "coef": 0.0, "tokens": "all"}
    without = said(ran(told(model, models=models, grid=axes, intervention=[steer]), tmp_path / "plain"))
    patches = [steer, {**PATCH, "layers": -1}]
    patched = said(ran(told(model, models=models, grid=axes, intervention=patches), tmp_path / "run"))
    assert len(patched) == len(without) == 32
    reds = []
    for (item, colour, *point), (tokens, logits) in patched.items():
        donor = without[item, "red", *point]
        np.testing.assert_allclose(logits, donor[1], atol=1e-5)
        assert tokens[0] == donor[0][0]
        reds += [logits] if (item, colour) == ("i0", "red") else []
    assert len(reds) == 8
    apart = min(np.abs(a - b).max() for n, a in enumerate(reds) for b in reds[:n])
    assert apart > 1e-3, "or a donor of another point would not be seen"


@pytest.mark.slow
@pytest.mark.parametrize("nth", [2, 4, 9])
def test_a_process_killed_between_donor_and_recipient_is_continued_to_the_same(model, tmp_path, nth):
    """SIGKILL while donors or recipients are being fed, then the same command: as if nothing had happened."""
    whole = said(ran(two_layers(model), tmp_path / "whole"))
    killed = apart.start(run_two_layers, model, tmp_path / "run", SWEEPS_FAILPOINTS=f"replica.in_forward=kill@{nth}")
    assert apart.wait(killed) == -9
    before = {commit.unit for commit in commits.list_commits(tmp_path / "run")}
    found = said(ran(two_layers(model), tmp_path / "run"))
    assert before <= {commit.unit for commit in commits.list_commits(tmp_path / "run")}
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        close(value, found[key])


def two_layers(model):
    return told(model, grid={"intervention.layers": {"0": 0, "1": 1}}, plan={"unit_cells": 1})


def run_two_layers(model, folder):
    return entry.run(two_layers(model), folder)


def another(model, folder):
    """A model of the same shape with other weights."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, seed=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapter(model, folder):
    """A LoRA adapter that changes what the model says."""
    torch.manual_seed(0)
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    tuned.save_pretrained(folder)
    return folder


def test_units_keep_donors_and_recipients_of_an_item_together(model, tmp_path):
    config = told(model, plan={"unit_cells": 1}, run={"dir": str(tmp_path / "run"), "progress": "none"})
    from sweeps.plan.expand import expand

    units = list(expand(config))
    assert [len(unit.cells) for unit in units] == [2, 2]
    for unit in units:
        red, blue = unit.cells
        assert red.donors == blue.donors == (red.id,)


@pytest.mark.parametrize("order", [("red", "blue"), ("blue", "red")])
def test_a_unit_that_is_split_has_donors_before_their_recipients(model, tmp_path, order):
    from sweeps.driver.parts import split
    from sweeps.plan.expand import expand

    run = {"dir": str(tmp_path / "run"), "progress": "none"}
    unit = next(expand(told(model, grid={"trunk.opening": {colour: TOLD[colour] for colour in order}}, run=run)))
    units, both = Units(lambda name: unit, lambda name: None), (1 << len(unit.cells)) - 1
    pairs = {p: cell for p, cell in enumerate(unit.cells) if cell.item == "i0"}
    donor = next(p for p, cell in pairs.items() if cell.condition["trunk.opening"] == "red")
    recipient = next(p for p in pairs if p != donor)
    assert units.donor_positions(unit.id, both)[recipient] == (donor,)
    bits = 1 << donor | 1 << recipient
    first, rest = split({p: c.trunk for p, c in pairs.items()}, (), units.donor_positions(unit.id, bits))
    assert (first.cells, rest.cells) == (1 << donor, 1 << recipient)
    assert units.needs(unit.id, rest.cells).donors == {unit.id: 1 << donor}, "so that the ledger waits"


@pytest.mark.parametrize(("edit", "grid", "message"), [
    ({"from": {"trunk.opening": "green"}}, None, "no value 'green' on axis 'trunk.opening'"),
    ({"from": {"colour": "red"}}, None, "no axis 'colour' in this grid"),
    ({"from": None}, None, r"intervention\[0\].from is missing; possible: axis values"),
    ({"tokens": "answer"}, None, "'answer' selects only what is generated"),
    ({"turns": "all"}, None, "patches act after the trunk"),
    ({"coef": 2.0}, None, "a patch puts values in as they are"),
    ({"kind": "swap"}, None, "possible: steer, patch"),
    ({}, {"intervention.from": {"a": {"intervention.from": "b"}, "b": {"intervention.from": "a"}}},
     "patches wait for each other in a circle"),
])  # fmt: skip
def test_impossible_patches_are_refused(model, edit, grid, message):
    with pytest.raises(ConfigError, match=message):
        told(model, grid=grid, intervention={**PATCH, **edit})
