"""Writes a golden run folder, once per schema version: `python -m tests.sweeps.folder.golden.make FOLDER`."""

import sys
from dataclasses import replace
from pathlib import Path

from sweeps.compose import from_plain
from sweeps.driver import enter
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk
from tests.sweeps.folder.test_run import answer

PLAIN = {
    "experiment": "golden",
    "models": {"tiny": {"source": "hub/tiny", "dtype": "bfloat16"}},
    "scenario": {
        "items": [{"id": "tea", "topic": "tea", "hot": True, "grams": 2.5}],
        "participants": {"alice": {"model": "tiny", "max_new_tokens": 5}, "bob": {"model": "tiny", "temperature": 1}},
        "opening": "About {topic}.", "trunk": {"turns": 1, "seeds": [7]}, "branch": {"turns": 1, "seeds": 2},
    },
    "grid": {"framing": {"warm": "Be warm.", "none": None}, "intervention.coef": [0, 4.5]},
    "intervention": {"kind": "steer", "participants": ["bob"], "direction": "random:3", "layers": [1], "coef": 0},
    "capture": [{"participants": ["bob"], "layers": [1, 3], "tokens": "answer", "pool": "mean"},
                {"participants": ["bob"], "layers": [1], "tokens": "answer"}],
    "plan": {"unit_cells": 8},
}  # fmt: skip


def config(root):
    made = from_plain(PLAIN)
    return replace(made, run=replace(made.run, dir=str(root)))


def write(root):
    settings = config(root)
    enter.enter(settings, root)
    (unit,) = expand(settings)
    writer = UnitWriter(root, unit, {"alice": "tiny", "bob": "tiny"}, attempt="0123abcd")
    writer.add_trunk(unit.trunks[0].id, [talk.Message("moderator", "About tea."), talk.said("alice", "Tea.")])
    for n, cell in enumerate(unit.cells):
        if n == 5:
            writer.fail_cell(cell, "ValueError: on purpose", "Traceback ...", 3)
            continue
        writer.add_cell(cell, [talk.said("bob", f"so {n}", 1)], answer(2, float(n)), {"words": n, "mood": "ü"}, start=2)
        found = {"participant": "bob", "message_idx": None, "phase": "answer", "layer": 0, "tokens": 3, "top_k": 1}
        writer.add_routing(cell, [{**found, "counts": [1, 2], "mass": [0.25, 0.75]}])
    writer.add_sums("outcomes", {"count": talk.torch.arange(3.0).numpy()})
    assert writer.commit(counters={"tokens": 45}) == "won"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
