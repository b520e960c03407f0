"""Laws of inputs: known by content, copied at the start, never trusted by path."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from sweeps.driver import enter
from sweeps.errors import ConfigError, Damaged, RunRefused
from sweeps.folder.verify import verify
from sweeps.plan import directions
from tests.support import talk
from tests.sweeps.plan.test_plan import STEER, ids, scenario


def direction(path, value=1.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"residual.1": torch.full((8,), value), "residual.3": torch.arange(8.0)}, path)


def steered(tmp_path, source, **changes):
    return talk.config(tmp_path, intervention={**STEER, "direction": source}, **changes)


def test_a_direction_is_its_content(tmp_path):
    direction(tmp_path / "a" / "aggregates" / "directions.safetensors")
    direction(tmp_path / "b" / "aggregates" / "directions.safetensors")
    direction(tmp_path / "c.safetensors", 2.0)
    one = ids(steered(tmp_path, f"run:{tmp_path}/a:residual:1"))
    assert one == ids(steered(tmp_path, f"run:{tmp_path}/b:residual:1")), "wherever it lies"
    others = (f"run:{tmp_path}/a:residual:3", f"file:{tmp_path}/c.safetensors:1", "random:1", "random:2")
    found = [one, *(ids(steered(tmp_path, source)) for source in others)]
    assert len(set.union(*found)) == len(found) * len(one)


def test_the_folders_copy_is_used_when_the_source_is_gone(tmp_path):
    source = f"run:{tmp_path}/a:residual:3"
    direction(tmp_path / "a" / "aggregates" / "directions.safetensors")
    config = steered(tmp_path, source)
    enter.enter(config, config.run.dir)
    shutil.rmtree(tmp_path / "a")
    again = steered(tmp_path, source)
    assert enter.enter(again, config.run.dir).state == "same"
    assert torch.equal(directions.load_direction(again, source, 8, config.run.dir), torch.arange(8.0))
    with pytest.raises(ValueError, match="8 values, the model's site has 9"):
        directions.load_direction(again, source, 9, config.run.dir)
    with pytest.raises(ConfigError, match="no run folder"):
        steered(tmp_path, source, run={"dir": str(tmp_path / "elsewhere")})


def test_a_copy_that_changed_is_not_used(tmp_path):
    direction(tmp_path / "c.safetensors")
    source = f"file:{tmp_path}/c.safetensors:3"
    config = steered(tmp_path, source)
    enter.enter(config, config.run.dir)
    copy = tmp_path / "run" / "inputs" / f"{config.inputs[source]}.safetensors"
    data = bytearray(copy.read_bytes())
    data[-2] ^= 4
    copy.write_bytes(data)
    with pytest.raises(Damaged, match="was changed"):
        directions.load_direction(config, source, 8, config.run.dir)
    with pytest.raises(Damaged, match="was changed"):
        enter.enter(config, config.run.dir)
    assert any(copy.name in problem for problem in verify(config.run.dir, deep=True).problems)


def test_a_source_that_changed_is_refused(tmp_path):
    path = tmp_path / "a" / "aggregates" / "directions.safetensors"
    direction(path)
    config = steered(tmp_path, f"run:{tmp_path}/a:residual:1")
    enter.enter(config, config.run.dir)
    direction(path, 3.0)
    with pytest.raises(RunRefused, match=r"inputs\.run:"):
        enter.enter(steered(tmp_path, f"run:{tmp_path}/a:residual:1"), config.run.dir)


def test_directions_on_the_grid_are_inputs_too(tmp_path):
    direction(tmp_path / "c.safetensors")
    source = f"file:{tmp_path}/c.safetensors:3"
    config = talk.config(
        tmp_path, intervention=STEER, grid={"intervention.direction": {"found": source, "random": "random:5"}}
    )
    assert set(config.inputs) == {source}
    draw = directions.load_direction(config, "random:5", 8, tmp_path)
    assert torch.equal(draw, directions.load_direction(config, "random:5", 8, tmp_path)) and abs(draw.norm() - 1) < 1e-6


@pytest.mark.parametrize(("source", "said"), [
    ("file:{}/none.safetensors:1", "there is no"), ("file:{}/c.safetensors:7", "it has: residual.1, residual.3"),
    ("file:{}/text.safetensors:1", "cannot read"), ("run:{}:residual:1", "have a directions aggregate"),
])  # fmt: skip
def test_a_source_that_is_none_is_refused(tmp_path, source, said):
    direction(tmp_path / "c.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ConfigError, match=said):
        steered(tmp_path, source.format(tmp_path))


def test_an_adapter_is_its_content(tmp_path):
    def adapted(name):
        people = {"alice": {"model": "tiny"}, "bob": {"model": "tiny", "adapter": str(tmp_path / name)}}
        return ids(talk.config(tmp_path, scenario=scenario(participants=people)))

    for name, data in (("one", b"x"), ("copy", b"x"), ("two", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(data)
    assert adapted("one") == adapted("copy") and not adapted("one") & adapted("two")


def test_an_adapter_that_changed_is_refused_with_the_difference(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "adapter_model.safetensors").write_bytes(b"x")
    people = {"alice": {"model": "tiny"}, "bob": {"model": "tiny", "adapter": str(tmp_path / "own")}}

    def config():
        return talk.config(tmp_path, scenario=scenario(participants=people))

    enter.enter(config(), config().run.dir)
    assert enter.enter(config(), config().run.dir).state == "same"
    (tmp_path / "own" / "adapter_model.safetensors").write_bytes(b"y")
    with pytest.raises(RunRefused, match=rf"inputs\.{tmp_path}/own: .* -> "):
        enter.enter(config(), config().run.dir)


@pytest.mark.parametrize(("values", "said"), [
    (torch.ones(7), "has 7 values, residual there has 8"),
    (torch.zeros(8), "cannot steer"),
    (torch.full((8,), float("nan")), "cannot steer"),
])  # fmt: skip
def test_a_direction_that_cannot_steer_is_refused_before_a_run(tmp_path, values, said):
    save_file({"1": values}, tmp_path / "d.safetensors")
    with pytest.raises(ConfigError, match=said):
        steered(tmp_path, f"file:{tmp_path}/d.safetensors:1")
    with pytest.raises(ConfigError, match=said):
        steered(tmp_path, "random:1", grid={"intervention.direction": ["random:1", f"file:{tmp_path}/d.safetensors:1"]})


@pytest.mark.parametrize("instead", ["random", "orthogonal"])
def test_a_control_direction_has_the_norm_of_what_it_stands_for(tmp_path, instead):
    direction(tmp_path / "c.safetensors", 2.0)
    source = f"{instead}:7:file:{tmp_path}/c.safetensors:3"
    config = steered(tmp_path, source)
    enter.enter(config, config.run.dir)
    drawn, given = directions.load_direction(config, source, 8, config.run.dir), torch.arange(8.0)
    assert drawn.norm() == pytest.approx(float(given.norm()), rel=1e-6)
    assert (abs(float(drawn @ given)) < 1e-4) == (instead == "orthogonal")
    other = directions.read_direction(source.replace(":7:", ":8:"))
    assert not torch.equal(drawn, other) and torch.equal(drawn, directions.read_direction(source))


def test_controls_are_one_keyword_and_become_axes(tmp_path):
    direction(tmp_path / "c.safetensors")
    source = f"file:{tmp_path}/c.safetensors:3"
    controls = ["random", "orthogonal", "zero"]
    edit = {**STEER, "direction": source, "coef": 4.0, "controls": controls}
    axes = {axis.path: axis for axis in talk.config(tmp_path, intervention=edit, grid={}).grid}
    assert axes["intervention.direction"].labels == ("found", "random", "orthogonal")
    assert axes["intervention.direction"].values == (source, f"random:1:{source}", f"orthogonal:1:{source}")
    assert axes["intervention.coef"].values == (0, 4.0)
    doses = talk.config(tmp_path, intervention=edit, grid={"intervention.coef": [2, 4]}).grid
    assert {axis.path: axis.values for axis in doses}["intervention.coef"] == (0, 2, 4)
    for wrong, complaint in (
        ({"controls": ["mirror"]}, "no control 'mirror'; possible: random, orthogonal, zero"),
        ({"controls": ["random"], "direction": None}, "are for steering along a direction"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            talk.config(tmp_path, intervention={**edit, **wrong}, grid={})
    with pytest.raises(ConfigError, match=r"the grid varies intervention\.direction already"):
        talk.config(tmp_path, intervention=edit, grid={"intervention.direction": {"a": source, "b": "random:1"}})
