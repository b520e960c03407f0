"""A run whose template shows a date shows the day on which it began, on resume and when it is captured another day."""

import datetime
import json

import sweeps
from sweeps import cli
from sweeps.compose import from_plain
from sweeps.driver import enter, entry
from tests.support.small import settings
from tests.support.tiny import tiny
from tests.support.tokenizers import make

DATED = (
    "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_run_shows_the_day_on_which_it_began(tmp_path):
    folder, model = tmp_path / "run", tmp_path / "model"
    tokenizer = make(DATED, eos="<|im_end|>", special=("<|im_start|>",))
    tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert entry.run(settings(model, num_items=1), folder) == 0
    about = json.loads((folder / "run.json").read_text())
    assert {d for d, _ in shown(sweeps.open(folder), tokenizer)} == {day(about["date"])}

    begun = tmp_path / "begun"  # the same run, begun long ago and continued now
    changed = settings(model, num_items=1)
    enter.enter(changed, begun)
    text = (begun / "run.json").read_text()
    (begun / "run.json").write_text(text.replace(about["date"], "2024-02-29"))
    assert entry.run(changed, begun) == 0
    run = sweeps.open(begun)
    assert set(shown(run, tokenizer)) == {("29 Feb 2024", "2024-02-29")}

    words = ["sites=mlp", "layers=1", "participants=bob", "cluster.executor=inline", "run.progress=none"]
    assert cli.main(["capture", str(begun), *words]) == 0  # which refuses other prompts than the recorded ones
    (added,) = sweeps.open(begun).captures
    assert added.about["date"] == "2024-02-29" and len(added.cells) == len(run.cells)

    plain = {
        "experiment": "replay", "models": {"tiny": {"source": str(model), "dtype": "float32"}},
        "scenario": {"replay": f"run:{begun}", "participants": {p: {"model": "tiny"} for p in ("alice", "bob")}},
        "capture": {"participants": ["bob"], "layers": [1]},
        "cluster": {"executor": "inline", "rows": 8}, "run": {"progress": "none"},
    }  # fmt: skip
    assert entry.run(from_plain(plain), tmp_path / "replayed") == 0
    assert sweeps.open(tmp_path / "replayed").about["date"] == "2024-02-29"


def day(iso):
    return datetime.date.fromisoformat(iso).strftime("%d %b %Y")


def shown(run, tokenizer):
    """(the day in the prompt, the day in the metadata) of every generated message."""
    for cell in run.cells["cell"].to_pylist():
        for message in run.conversation(cell).transcript:
            if message.fed is not None and message.fed.prompt:
                text = tokenizer.decode(message.fed.prompt)
                yield text.split("system\n")[1].split("<|im_end|>")[0], message.metadata["date"]
