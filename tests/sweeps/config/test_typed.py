"""What was typed wins over what an experiment writes, for every group and pair of options, or is refused."""

import itertools

import pytest

from sweeps.compose import load
from sweeps.config.shipped import conf_dir
from sweeps.errors import ConfigError
from sweeps.typed import GROUPS

BASE = ["experiment=enthusiasm"]
OPTIONS = {
    group: sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    for group in GROUPS if group not in ("experiment", "debug", "intervention", "grid")
}  # fmt: skip
"""Options that stand by themselves: steer and patch want a direction or a donor, coef wants something to steer."""


def section(config, group):
    return getattr(config, {"model": "models"}.get(group, group))


def test_the_examples():
    notes = []
    config = load([*BASE, "capture=none", "aggregate=none"], notes)
    assert config.capture == () and config.aggregate == ()
    assert any("capture=none" in line for line in notes) and any("aggregate=none" in line for line in notes)
    config = load([*BASE, "cluster=gpu", "cluster.address=null"])
    assert (config.cluster.replicas, config.cluster.num_gpus, config.cluster.rows) == (8, 1, 256)
    assert load([*BASE, "cluster=gpu", "cluster.replicas=3", "cluster.address=null"]).cluster.replicas == 3
    assert load([*BASE, "cluster.replicas=3", "cluster=gpu", "cluster.address=null"]).cluster.replicas == 3, (
        "in any order"
    )


def test_an_inline_section_of_ones_own_experiment_loses_too(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "scenario: {items: topics.jsonl, opening: 'About {topic}.', participants: {bob: {kind: scripted, lines: [oh]}}}\n"
        "cluster: {replicas: 2, in_flight: 3}\n"
        "grid: {framing: {warm: Be warm., cold: Be cold.}, scenario.branch.turns: [1, 2]}\n"
    )
    own = [f"hydra.searchpath=['file://{tmp_path}']", "experiment=mine"]
    config = load([*own, "cluster=inline"])
    assert (config.cluster.executor, config.cluster.replicas, config.cluster.in_flight) == ("inline", 2, 3), (
        "key by key"
    )
    assert load([*own, "cluster=gpu", "cluster.address=null"]).cluster.replicas == 8
    axes = {axis.path: axis.labels for axis in load([*own, "grid=none"]).grid}
    assert axes == {} and load([*own, "~grid"]).grid == ()
    kept = load([*own, "~grid.framing"]).grid
    assert [axis.path for axis in kept] == ["scenario.branch.turns"]
    replaced = {axis.path: axis.labels for axis in load([*own, "grid.framing={hot: Be hot.}"]).grid}
    assert replaced == {"framing": ("hot",), "scenario.branch.turns": (1, 2)}, "an axis is replaced, never added to"
    small = load([*own, "cluster=gpu", "debug=small"])
    assert small.cluster.executor == "inline", "debug is typed too, and comes last"


EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize(
    "experiment", [name for name in EXPERIMENTS if name != "enthusiasm_steered"]
)  # reads another run
def test_every_option_and_pair_of_options_wins(experiment):
    """A typed section equals what the option alone gives, wherever the option says something."""
    chosen = [(group, option) for group, options in OPTIONS.items() for option in options if group != "scenario"]
    for one, other in itertools.combinations(chosen, 2):
        if one[0] == other[0]:
            continue
        typed = [f"{group}={option}" for group, option in (one, other)]
        try:
            config = load([f"experiment={experiment}", *typed, "cluster.address=null", "aggregate=none"])
        except ConfigError as error:  # refused, with what is missing: several could be captured
            assert "capture=answer_mean" in typed and "capture[0].participants is missing" in str(error)
            continue
        for group, option in (one, other):
            if group == "capture":
                assert bool(config.capture) == (option != "none"), typed
            if group == "cluster":
                assert config.cluster.executor == ("inline" if option == "inline" else "ray"), typed
