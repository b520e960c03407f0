"""What cannot act, or cannot be said, is refused in one line before anything runs."""

import pytest

from sweeps.cli import main
from sweeps.compose import load
from sweeps.errors import ConfigError

ROWS = "scenario.items=[{id: a, topic: x}]"
STEER = ["scenario=topics", ROWS, "intervention=steer", "intervention.direction=random:1"]
BOB = "participants=[bob]"


@pytest.mark.parametrize(("overrides", "said"), [
    ([*STEER, f"intervention.{BOB}", "intervention.turns=[7]"], r"intervention\[0\] can never act"),
    ([*STEER, f"intervention.{BOB}", "scenario.branch.turns=1"], "who speaks when: .*branch 0: alice"),
    (["scenario=topics", "scenario.items=[{id: b, topic: null}]"], "{topic} is null in item 'b'"),
    (["scenario=topics", ROWS, "+aggregate.outcomes.qqqq=1"], "has no option 'qqqq'; options: "),
])  # fmt: skip
def test_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load(overrides)


def test_half_a_character_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "topic": "\\ud83d"}\n')
    with pytest.raises(ConfigError, match="half of a character"):
        load(["scenario=topics", f"scenario.items={rows}"])


def test_an_edit_that_acts_somewhere_is_taken():
    assert load([*STEER, f"intervention.{BOB}", "intervention.turns=[1]"]).intervention[0].turns == (1,)


def test_version_and_help_of_plan(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("sweeps 0.")
    assert main(["plan", "--help"]) == 0 and "--measure" in capsys.readouterr().out
