"""Small made-up conversations and records for tests of the store: real classes, no model."""

from __future__ import annotations

import json

import torch

from interlens.interp.activation_cache import ActivationRecord
from interlens.interp.select import Layout
from interlens.message import Fed, Message
from interlens.reasoning import Markers
from sweeps.compose import from_plain

SCENARIO = {
    "items": [{"id": f"i{n}", "topic": f"topic {n}"} for n in range(3)],
    "participants": {"alice": {"model": "tiny"}, "bob": {"model": "tiny", "max_new_tokens": 8}},
    "opening": "Let's talk about {topic}.",
    "trunk": {"turns": 2, "seeds": 2},
    "branch": {"turns": 2, "seeds": 2},
}


def config(tmp_path, **changes):
    """A checked configuration over a model folder that has only its sizes."""
    folder = tmp_path / "tiny"
    folder.mkdir(exist_ok=True)
    sizes = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 50}
    (folder / "config.json").write_text(json.dumps(sizes))
    plain = {
        "scenario": SCENARIO,
        "models": {"tiny": {"source": str(folder), "dtype": "float32"}},
        "grid": {"framing": {"warm": "Be warm.", "cold": "Be cold."}},
        "capture": [{"participants": ["bob"], "layers": [1, -1], "tokens": "answer", "pool": "mean"},
                    {"participants": ["bob"], "layers": [1], "tokens": "answer"}],
        "plan": {"unit_cells": 8},
        "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    return from_plain({**plain, **changes})


def said(author: str, text: str, number: int = 0) -> Message:
    """A generated message with everything a real one records."""
    generated = tuple(range(10 + number, 15 + number))
    layout = Layout(message_spans={0: (1, 4)}, special_spans=((0, 1), (4, 6)), special_ids=frozenset({2, 7}),
                    markers=Markers(open=((8, 9),), close=((11,),)), branch_start=4)  # fmt: skip
    metadata = {
        "raw_completion": text + "<eos>", "n_tokens": 5, "n_prompt_tokens": 6, "finish_reason": "stop", "seed": 3,
        "sampling": {"temperature": 0.5}, "steering": {"mode": "add", "coef": 4.0},
        "logprobs": [-0.5, -0.25, -1.0, -2.0, 0.0], "surprisal": [0.5, 0.25, 1.0, 2.0, 0.0], "entropy": [1.0] * 5,
    }  # fmt: skip
    phases = ("reasoning", "reasoning", "answer", "answer", "answer")
    fed = Fed(prompt=(1, 2, 3, 4, 5, 6), generated=generated, phases=phases, layout=layout, template_hash="t1")
    return Message(author, text, metadata, fed=fed)


def records(message_idx: int, value: float) -> list[ActivationRecord]:
    """What `config`'s captures keep of one message: means at layers 1 and 3, the answer's rows at layer 1."""
    common = {"tokens": (12, 13, 14), "positions": (8, 9, 10), "selection": "phase(answer)"}
    rows = torch.full((3, 8), value, dtype=torch.bfloat16) + torch.arange(3, dtype=torch.bfloat16)[:, None]
    pooled = [
        ActivationRecord("bob", message_idx, layer, "residual", torch.full((1, 8), value + layer), (0, 1),
                         {"answer": (0, 1)}, pool="mean", num_pooled=3, **common)
        for layer in (1, 3)
    ]  # fmt: skip
    return [*pooled, ActivationRecord("bob", message_idx, 1, "residual", rows, (0, 3), {"answer": (0, 3)}, **common)]
