"""A small real sweep: a tiny model, two participants, trunks, framings, steering, captures; how to compare two runs."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from sweeps import run as sweeps_run
from sweeps.compose import from_plain
from sweeps.replica.setting import Setting
from tests.support.tiny import tiny
from tests.support.tokenizers import CHATML, make


def build_model(folder, seed=0):
    """A tiny float32 chat model with its tokenizer, saved in `folder`."""
    tokenizer = make(CHATML, eos="<|im_end|>", special=("<|im_start|>",))
    tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model, *, num_items=3, unit_cells=4, seeds=2, executor="inline", **changes):
    """A sweep of 12 cells over 3 trunks; `section__key=value` changes a key, `section=value` a section."""
    plain = {
        "experiment": "tiny",
        "scenario": {
            "items": [{"id": f"i{n}", "topic": f"topic {n}"} for n in range(num_items)],
            "participants": {
                "alice": {"model": "tiny", "max_new_tokens": 5}, "bob": {"model": "tiny", "max_new_tokens": 6},
            },
            "opening": "Let's talk about {topic}.",
            "trunk": {"turns": 2, "seeds": 1},
            "branch": {"turns": 2, "seeds": seeds},
            "analyzers": ["tests.support.small:analyze"],
        },
        "models": {"tiny": {"source": str(model), "dtype": "float32"}},
        "grid": {"framing": {"warm": "Be warm.", "cold": "Be cold."}},
        "intervention": [{"participants": ["bob"], "direction": "random:1", "layers": [1], "coef": 2.0}],
        "capture": [{"participants": ["bob"], "layers": [0, 2], "tokens": "answer", "pool": "mean"},
                    {"participants": ["bob"], "layers": [1], "tokens": "answer"}],
        "aggregate": {"outcomes": {}},
        "plan": {"unit_cells": unit_cells},
        "cluster": {"executor": executor, "replicas": 1, "rows": 8},
        "run": {"progress": "none", "interval_s": 0.2},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        plain[section] = {**plain[section], key: value} if key else value
    return from_plain(plain)


class Switch:
    """What `analyze` does next in this process: raise for an item."""

    fail_item: str | None = None


def trouble(what, path):
    """Columns of an item whose cells kill, hang or raise as long as there is a file at `path`."""
    return {"do": what, "while": str(path)}


def troubled(setting, row):
    """`Setting.framing`, which fails the cells of an item that is told to."""
    if row.get("do") == "raise" and os.path.exists(row["while"]):
        raise RuntimeError("it was told to")
    if row["id"] == Switch.fail_item:
        raise ValueError("this item cannot be framed")
    return _framing(setting, row)


_framing, Setting.framing = Setting.framing, troubled
"""In every process that imports `analyze`, replicas of other processes too."""


def analyze(conversation):
    row = conversation.row
    if row.get("do") and os.path.exists(row["while"]):
        if row["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while row["do"] == "hang":
            time.sleep(1)
    return {"words": float(sum(len(m.content.split()) for m in conversation.transcript))}


def contents(folder):
    """Cell -> its whole conversation with tokens, and every record's address and values."""
    run = sweeps_run.open(folder)
    cells = [row["cell"] for row in run.cells.to_pylist() if row["state"] == "done"]
    talk = {
        cell: [(m.author, m.content, m.fed.generated if m.fed else None) for m in run.messages(cell)] for cell in cells
    }
    values = {}
    for cell in cells:
        for r in run.query(cell=cell):
            values[cell, r.participant, r.message_idx, r.layer, r.site, r.pool] = r.tensor.float().numpy()
    return talk, values


def same(a, b):
    """Equal texts and tokens; equal addresses; values to float32 rounding."""
    (talk_a, values_a), (talk_b, values_b) = a, b
    assert talk_a == talk_b and values_a.keys() == values_b.keys()
    for key, value in values_a.items():
        np.testing.assert_allclose(value, values_b[key], atol=1e-4)
