"""What cannot run is refused in one line, with its exit code, before anything is written."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sweeps.cli import main
from tests.support import tokenizers
from tests.support.tiny import tiny

TALK = ["scenario.items=[{id: a, topic: tea}]", "cluster=inline", "run.progress=none", "run.dir=run"]
SCRIPTED = [*TALK, "scenario.participants={ann: {kind: scripted, lines: [hi]}, ben: {kind: scripted, lines: [oh]}}"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny model folders: dense, moe (layer 1 is dense), and broken copies."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tokenizers.make(tokenizers.CHATML, eos="<|im_end|>", special=("<|im_start|>",))
    for name, family in (("dense", "llama"), ("moe", "qwen3_moe")):
        tiny(family, vocab_size=len(tokenizer)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for broken in ("cut", "weightless", "mute", "garbled", "alien", "shardless"):
        shutil.copytree(root / "dense", root / broken)
    weights = (root / "dense" / "model.safetensors").read_bytes()
    (root / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (root / "weightless" / "model.safetensors").unlink()
    for file in (root / "mute").glob("tok*"):
        file.unlink()
    (root / "garbled" / "config.json").write_text("{oops")
    (root / "alien" / "config.json").write_text('{"model_type": "alien"}')
    (root / "shardless" / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (root / "shardless" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, config in (("dora", {"peft_type": "LORA", "use_dora": True}), ("hollow", {"peft_type": "LORA"})):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(json.dumps(config))
    save_file({"3": torch.ones(31), "4": torch.ones(32)}, root / "directions.safetensors")
    return root


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(arguments, code, said, capsys):
    before = sorted(Path().rglob("*"))
    assert main(["run", *arguments]) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert sorted(Path().rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(("model", "said"), [
    ("owner/nosuch", "no model 'owner/nosuch': no such folder, not whole in the hub's cache"),
    ("{}/cut", "cannot read '{}/cut/model.safetensors'"),
    ("{}/weightless", "has no weights: none of model.safetensors"),
    ("{}/shardless", "cannot read '{}/shardless/model-00001-of-00002.safetensors'"),
    ("{}/mute", "has no tokenizer"),
    ("{}/garbled", "cannot read the configuration of model folder '{}/garbled'"),
    ("{}/alien", "cannot read the configuration of model folder '{}/alien'"),
    ("{}/hollow", "names no base model"),
])  # fmt: skip
def test_a_model_that_is_not_there(model, said, models, capsys):
    people = f"scenario.participants={{ann: {{model: '{model.format(models)}'}}}}"
    refused([*TALK, people], 1, said.format(models), capsys)


@pytest.mark.parametrize(("adapter", "said"), [
    ("owner/nosuch", "'owner/nosuch' is not a PEFT adapter folder"),
    ("{}/dora", "cannot differ per row of a batch: use_dora"),
    ("{}/hollow", "has no adapter_model.safetensors"),
])  # fmt: skip
def test_an_adapter_that_is_not_there_on_any_point_of_the_grid(adapter, said, models, capsys):
    people = f"scenario.participants={{ann: {{model: {models}/dense}}}}"
    grid = f"grid.scenario.participants.ann.adapter={{none: null, it: '{adapter.format(models)}'}}"
    refused([*TALK, people, grid], 1, said, capsys)


def test_a_judge_that_is_not_there(capsys):
    judge = "scenario.judges.warm={model: owner/nosuch, prompt: 'How warm? {transcript}'}"
    refused([*SCRIPTED, judge], 1, "scenario.judges.warm: no model 'owner/nosuch'", capsys)


def test_an_api_is_not_looked_for_here(capsys):
    people = "scenario.participants={ann: {kind: api, model: owner/nosuch}}"
    refused([*TALK, people, "scenario.opening='{mood}'"], 1, "no column {mood}", capsys)
    assert main(["plan", *TALK, people]) == 0


@pytest.mark.parametrize(("more", "said"), [
    ("{participants: [ann], sites: [router]}", "capture[0].sites: no site 'router' for 'llama'; it has: embed,"),
    ("{participants: [moe], sites: [router], layers: [1]}", "layer 1 has no site 'router'; layers that have it: 0, 2"),
    ("{participants: [moe], sites: [q], layers: [3]}", "no layer 3 in"),
    ("{participants: [moe], sites: [blocks.1.hook_resid_pre]}", "names layer 1; give layers: [1]"),
])  # fmt: skip
def test_a_site_that_a_model_lacks(more, said, models, capsys):
    people = f"scenario.participants={{ann: {{model: {models}/dense}}, moe: {{model: {models}/moe}}}}"
    Path("conf/capture").mkdir(parents=True)
    Path("conf/capture/ours.yaml").write_text(f"# @package _global_\ncapture: {more}\n")
    refused(["--config-dir", "conf", "capture=ours", *TALK, people, "scenario.branch.turns=2"], 1, said, capsys)


@pytest.mark.parametrize(("edit", "said"), [
    ({"site": "router"}, "intervention[0].site: no site 'router' for 'llama'"),
    ({"direction": "file:{}/directions.safetensors:3"}, "has 31 values, residual there has 32"),
    ({"direction": "file:{}/directions.safetensors:4", "site": "k"}, "has 32 values, k there has 16"),
])  # fmt: skip
def test_an_edit_that_does_not_fit(edit, said, models, capsys):
    edit = {"participants": ["ann"], "layers": [1], "direction": "random:1", **edit}
    values = [f"intervention.{k}={str(v).format(models).replace(' ', '')}" for k, v in edit.items()]
    people = f"scenario.participants={{ann: {{model: {models}/dense}}}}"
    refused([*TALK, people, "intervention=steer", *values], 1, said, capsys)


def test_cells_that_coincide_are_found_before_the_folder_is_begun(capsys):
    grid = ["grid.framing={a: x, b: y}", "grid.scenario.framing=[z]"]
    refused([*SCRIPTED, *grid], 1, "two points of the grid are the same cells: framing='a'", capsys)


def test_places_that_hold_no_run(capsys):
    Path("notes").write_text("mine")
    refused([*SCRIPTED, "run.dir="], 1, "run.dir is empty; give a folder, or null", capsys)
    refused([*SCRIPTED, "run.dir=notes"], 5, "'notes' is a file; name a folder", capsys)
    refused([*SCRIPTED, "run.dir=notes/a/b"], 5, "'notes/a/b' lies under 'notes', which is a file", capsys)


@pytest.mark.skipif(sys.platform != "linux", reason="/sys lets nobody make a folder, root neither")
def test_a_place_that_cannot_be_written(capsys):
    said = "cannot be used (Operation not permitted at '/sys/ours'); name a folder that can be written"
    refused([*SCRIPTED, "run.dir=/sys/ours/run"], 5, said, capsys)
    if os.geteuid():
        Path("locked").mkdir(mode=0o555)
        refused([*SCRIPTED, "run.dir=locked/run"], 5, "cannot be used (Permission denied", capsys)
