"""A whole sweep on a tiny real chat model: what was generated is what is stored, and what is stored lives on."""

import dataclasses
import json

import pyarrow.compute as pc
import pytest
import torch

import sweeps
from sweeps.cli import main
from sweeps.driver import size
from sweeps.folder import commits as folder_commits
from sweeps.folder.reader import TABLES
from sweeps.folder.verify import verify
from tests.support import tokenizers
from tests.support.tiny import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tinychat"
    tokenizer = tokenizers.make(tokenizers.CHATML, eos="<|im_end|>", special=("<|im_start|>",))
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def arguments(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "run"
    people = f"{{ann: {{model: {model}, max_new_tokens: 6}}, ben: {{model: {model}, max_new_tokens: 7}}}}"
    experiment = model.parent / "conf"
    (experiment / "capture").mkdir(parents=True)
    (experiment / "capture" / "ours.yaml").write_text(
        "# @package _global_\ncapture:\n"
        "  - {participants: [ben], layers: null, tokens: answer, pool: mean, turns: all}\n"
        "  - {participants: [ann, ben], layers: [-1], tokens: all, special: keep, turns: all}\n"
    )
    return [
        "--config-dir", str(experiment), "capture=ours", "cluster=inline", "run.progress=none", f"run.dir={root}",
        "scenario.items=[{id: a, topic: tea},{id: b, topic: rain}]", f"scenario.participants={people}",
        "scenario.opening='About {topic}.'", "scenario.trunk={turns: 2, seeds: 2}",
        "scenario.branch={turns: 2, seeds: 2}", "grid.framing={warm: 'Be kind.', plain: null}", "plan.unit_cells=8",
        "scenario.logprobs=true",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(arguments):
    assert main(["run", *arguments]) == 0
    return sweeps.open(arguments[5].partition("=")[2])


def test_a_finished_sweep_is_sound(run):
    assert run.counts == {"done": 16, "failed": 0, "pending": 0}
    found = verify(run.root, deep=True)
    assert found.ok and not found.notes, found.lines
    assert len(run.query(pool="mean")) == 3 * (4 + 16), "3 layers; ben speaks once in each trunk and each branch"
    assert len(run.query(pool=None)) == 2 * (4 + 16)


def test_conditions_meet_the_same_trunk_and_noise(run):
    cells = run.cells.to_pandas()
    for _, group in cells.groupby(["item", "trunk_seed"]):
        firsts = {tuple(m.content for m in run.messages(cell)[:3]) for cell in group["cell"]}
        assert len(firsts) == 1, "one trunk"
    plain = cells[cells["framing"] == "plain"]
    assert all(len(run.messages(cell)) == 5 for cell in plain["cell"]), "no framing, no message"


def test_a_stored_conversation_lives_on(run):
    """Every message of every cell is rendered again to the tokens that were recorded, and the next turn goes on."""
    rendered = 0
    for cell in run.cells["cell"].to_pylist():
        said, live = run.messages(cell), run.conversation(cell)
        assert [m.content for m in live.transcript] == [m.content for m in said]
        for at, message in enumerate(said):
            if message.fed is not None:
                again = live.branch()
                again.rewind(at - 1)
                view = again.render_templated(message.author, add_generation_prompt=True, tokenize=True)
                assert view == list(message.fed.prompt), (cell, at)
                rendered += 1
        following = live.step("ann")
        assert following.fed.prompt[: len(said[-2].fed.prompt)] == said[-2].fed.prompt
        assert following.metadata["n_tokens"] > 0
    assert rendered == 16 * 4, "two messages of the trunk, two of the branch"


def test_stored_rows_are_the_models_own(run, model):
    """A plain forward over the stored tokens gives the stored activations."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cell = run.cells["cell"][3].as_py()
    for record in run.query(cell=cell, pool=None):
        fed = run.messages(cell)[record.message_idx].fed
        with torch.no_grad():
            states = plain.model(torch.tensor([[*fed.prompt, *fed.generated]]), output_hidden_states=True).hidden_states
        assert record.tokens == (*fed.prompt, *fed.generated) and record.layer == 2
        normed = plain.model.norm(record.tensor)
        assert torch.allclose(normed, states[-1][0], atol=1e-4)


def test_resuming_with_commits_lost_runs_only_what_is_missing(run, arguments):
    lost = run.root / "_commits" / "u000001.json"
    kept = {p: p.stat().st_mtime_ns for p in (run.root / "_commits").iterdir() if p != lost}
    before = {m.content for cell in run.cells["cell"].to_pylist() for m in run.messages(cell)}
    lost.unlink()
    assert run.refresh().counts["pending"] == 8
    assert main(["run", *arguments]) == 0
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    again = run.refresh()
    assert again.counts["done"] == 16 and verify(run.root, deep=True).ok
    assert before == {m.content for cell in again.cells["cell"].to_pylist() for m in again.messages(cell)}, "float32"


def test_the_plan_was_right_about_tokens_and_bytes(run):
    run = run.refresh()
    planned = size.size(run.config)
    generated = pc.sum(pc.list_value_length(run.table("messages")["tokens"])).as_py()
    assert abs(planned.tokens - generated) <= 0.2 * generated
    means = size.size(dataclasses.replace(run.config, capture=run.config.capture[:1])).tensor_bytes
    assert means == sum(record.tensor.numel() * 4 for record in run.query(pool="mean"))


@pytest.mark.slow
def test_the_plan_of_the_demo_is_within_a_fifth(tmp_path):
    """A piece of the shipped experiment on the embedded model: what it generates varies, so not too small a piece."""
    rows = "scenario.items=[" + ",".join(f"{{id: {t}, topic: {t}}}" for t in ("rain", "bread", "dogs")) + "]"
    assert (
        main(["run", "experiment=enthusiasm", rows, "cluster=inline", "run.progress=none", f"run.dir={tmp_path}/run"])
        == 0
    )
    run = sweeps.open(tmp_path / "run")
    planned, commits = size.size(run.config), list(folder_commits.list_commits(run.root))
    generated = pc.sum(pc.list_value_length(run.table("messages")["tokens"])).as_py()
    written = {table: sum(f["bytes"] for c in commits for f in c.files if f["table"] == table) for table in TABLES}
    tensors = sum(f["bytes"] for c in commits for f in c.files if f["table"] == "activations")
    assert abs(planned.tokens - generated) <= 0.2 * generated
    assert abs(planned.bytes - tensors - sum(written.values())) <= 0.2 * tensors


def test_facts_of_the_run_are_written_down(run):
    about = json.loads((run.root / "run.json").read_text())
    assert set(about["models"]) == {"tinychat"} and {"weights", "template"} <= set(about["models"]["tinychat"])
    assert about["versions"]["torch"].startswith("2.") and "residual" in about["site_semantics"]
