"""The examples run, and show what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shows",
    [
        ("debate", ["[4] bob:", "ended after", "bob, message 2:", "told to change sides"]),
        ("panel", ["[5] doctor:", "doctor, is bread healthy?", "between us: you own a bread factory."]),
        (
            "tool_user",
            ["called multiply({'a': 64, 'b': 23}) -> 1472", "clerk: it is 1472.", "after the last call: 1 record"],
        ),
        ("reasoning", ["thought:", "reasoning:  ", "answer:", "tokens steered:"]),
        ("rollout_rows", ["soup:", "0 failed", "2 pooled vectors"]),
        ("api_participant", ["remote:", "cannot look into ['remote']", "requests=1", "cannot be steered"]),
    ],
)
def test_example(name, shows, capsys):
    if name == "api_participant":
        for needed in ("openai", "fastapi", "uvicorn"):
            pytest.importorskip(needed)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for text in shows:
        assert text in printed or text in printed.lower(), printed
