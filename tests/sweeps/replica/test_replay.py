"""Laws of replay: what was said, fed again, gives what was recorded; given text is captured without sampling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import sweeps
from interlens.interp import CaptureSpec, capture_activations
from sweeps import cli
from sweeps.compose import from_plain
from sweeps.driver import entry
from sweeps.errors import ConfigError
from sweeps.folder import space
from sweeps.folder.verify import verify
from tests.support.small import contents, settings

CLUSTER = {"executor": "inline", "rows": 8}
RUN = {"progress": "none", "interval_s": 0.2}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A steered run over trunks that captures its trunk's turns too."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    capture = [{"participants": ["bob"], "layers": [0, 1, 2], "tokens": "all", "turns": "all", "special": "keep"},
               {"participants": ["alice"], "layers": [1], "tokens": "answer", "pool": "mean"}]  # fmt: skip
    assert entry.run(settings(model, capture=capture), folder) == 0
    return folder


def replayed(model, source, folder, code=0, **changes):
    plain = {
        "experiment": "replay",
        "scenario": {"replay": str(source), "participants": {"bob": {"model": "tiny"}}},
        "models": {"tiny": {"source": str(model), "dtype": "float32"}},
        "capture": {"layers": [0, 2], "tokens": "answer"},
        "cluster": CLUSTER, "run": {**RUN, "dir": str(folder)},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        plain[section] = {**plain[section], key: value} if key else value
    assert entry.run(from_plain(plain), folder) == code
    assert verify(folder, deep=True).ok
    return sweeps.open(folder)


def plain_forward(model, ids, layer):
    """[S, D] from plain transformers, one sequence."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return capture_activations(loaded, torch.tensor([ids]), CaptureSpec(("residual",), (layer,)))[0].tensor


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_capturing_a_run_again_gives_what_it_recorded(whole, capsys, monkeypatch):
    before = contents(whole)[1]
    assert cli.main(["capture", str(whole), "layers=0,1,2", "sites=resid_pre,residual", "cluster.executor=inline",
                     "run.progress=none"]) == 1  # fmt: skip
    assert "has this already: participants=bob, sites=residual, layers=0" in capsys.readouterr().err
    words = ["sites=residual,mlp", "tokens=all|special", "cluster.executor=inline", "run.progress=none"]
    with monkeypatch.context() as patched:
        patched.setattr(space, "free_bytes", lambda root: space.RESERVE_BYTES + 1_000)
        assert cli.main(["capture", str(whole), *words]) == 5
    assert "capture less (pool=mean), or force it" in capsys.readouterr().err and not (whole / "captures").exists()
    assert cli.main(["capture", str(whole), *words]) == 0
    run = sweeps.open(whole)
    (added,) = run.captures
    assert added.root.parent.name == "captures" and verify(added.root, deep=True).ok and verify(whole, deep=True).ok
    assert added.cells["cell"].to_pylist() == run.cells["cell"].to_pylist()
    again = contents(added.root)
    assert again[0] == contents(whole)[0], "the same conversations, token for token"
    found = {key: value for key, value in again[1].items() if key[4] == "residual" and key[1] == "bob"}
    assert len(found) == 12 * 3
    for key, value in found.items():
        np.testing.assert_allclose(value, before[key], atol=1e-5)
    trunks = run.query(cell=None, participant="bob", layer=1, site="residual")
    old = [r for r in trunks if r.selection == "all()"]
    new = [r for r in trunks if r.selection != "all()"]
    assert len(old) == len(new) == 3
    for a, b in zip(old, new, strict=True):
        np.testing.assert_allclose(a.tensor, b.tensor, atol=1e-5)
    cell = run.cells["cell"][0].as_py()
    assert run.at(cell=cell, site="mlp", participant="bob", layer=2).isfinite().all()
    assert {r.site for r in run.cache(cell)} == {"residual", "mlp"}


def test_a_run_is_replayed_as_text(model, whole, tmp_path):
    plain = {
        "scenario": {"replay": f"run:{whole}"},
        "capture": {"participants": ["bob"], "layers": [0, 1, 2], "tokens": "all", "special": "keep"},
        "intervention": [{"participants": ["bob"], "direction": "random:1", "layers": [1], "coef": 2.0,
                          "turns": [3], "tokens": "generated"}],
        "cluster": CLUSTER, "run": {**RUN, "dir": str(tmp_path / "run")},
    }  # fmt: skip
    assert entry.run(from_plain(plain), tmp_path / "run") == 0
    run, before = sweeps.open(tmp_path / "run"), sweeps.open(whole)
    assert run.cells["item"].to_pylist() == before.cells["cell"].to_pylist()
    for row in run.cells.to_pylist():
        said, was = run.messages(row["cell"]), before.messages(row["item"])
        assert [(m.author, m.content) for m in said] == [(m.author, m.content) for m in was]
        assert [m.fed and m.fed.generated for m in said if m.author == "bob"] == [
            m.fed and m.fed.generated for m in was if m.author == "bob"
        ]
        trunk = before.plan_row(row["item"])["trunk"]
        again = run.at(cell=row["cell"], message_idx=2, layer=2)
        np.testing.assert_allclose(again, before.query(trunk=trunk, cell=None, participant="bob", layer=2)[0].tensor,
                                   atol=1e-5)  # fmt: skip


def test_given_conversations_are_captured_as_plain_transformers_computes_them(model, tmp_path):
    rows = [{"id": f"r{n}", "label": n % 2, "messages": [
        {"role": "user", "content": "How are you? " * (n + 1)}, {"role": "assistant", "content": f"Fine {n}, thanks."},
        {"author": "moderator", "content": "And now?"}, {"author": "bob", "content": "Still fine."},
    ]} for n in range(5)]  # fmt: skip
    run = replayed(model, written(tmp_path, rows), tmp_path / "run")
    assert run.counts == {"done": 5, "failed": 0, "pending": 0}
    for row in run.cells.to_pylist():
        said = run.messages(row["cell"])
        assert [m.content for m in said] == [m["content"].strip() if m.get("role") == "assistant" else m["content"]
                                             for m in rows[int(row["item"][1:])]["messages"]]  # fmt: skip
        for index in (1, 3):
            fed = said[index].fed
            record = next(r for r in run.query(cell=row["cell"], layer=2) if r.message_idx == index)
            full = plain_forward(model, [*fed.prompt, *fed.generated], 2)
            np.testing.assert_allclose(record.tensor, full[list(record.positions)], atol=1e-4)
            assert len(record.positions) == len(fed.generated) - 1  # without the end of turn
    tokens = run.messages(run.cells["cell"][0].as_py())[1].fed
    assert said[3].metadata["finish_reason"] == "stop" and tokens.generated


def test_contrast_pairs_are_two_cells_of_an_item(model, tmp_path):
    rows = [{"id": f"r{n}", "positive": f"Good {n}.", "negative": f"A bad one {n}."} for n in range(4)]
    run = replayed(
        model, written(tmp_path, rows), tmp_path / "run", grid={"side": ["positive", "negative"]},
        capture={"layers": [1], "tokens": "message(0)", "pool": "mean"},
        aggregate={"difference_of_means": {"contrast": "side == 'positive' vs side == 'negative'"}},
    )  # fmt: skip
    x, table = run.vectors(layer=1, participant="bob")
    assert x.shape == (8, 32) and sorted(set(table["side"].to_pylist())) == ["negative", "positive"]
    cell = table["cell"][0].as_py()
    (read,) = [m for m in run.messages(cell) if m.author == "bob"]
    record = run.query(cell=cell)[0]
    full = plain_forward(model, list(read.fed.prompt), 1)
    np.testing.assert_allclose(x[0], full[list(record.positions)].mean(0), atol=1e-5)
    assert (run.root / "aggregates" / "difference_of_means.json").exists()


@pytest.mark.parametrize(("row", "message"), [
    ({"messages": [{"author": "carol", "content": "x"}]}, "nobody is called 'carol'"),
    ({"messages": []}, "must be a text, or a list"),
    ({"message": "x"}, "no column 'messages' .scenario.side.; did you mean 'message'"),
    ({"messages": [{"author": "bob"}]}, "a message must be"),
])  # fmt: skip
def test_rows_that_hold_no_conversation_are_refused(model, tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        replayed(model, written(tmp_path, [{"id": "a", **row}]), tmp_path / "run")


def test_a_replay_adds_nothing(model, tmp_path):
    source = written(tmp_path, [{"id": "a", "messages": "x"}])
    with pytest.raises(ConfigError, match=r"scenario\.framing adds to conversations"):
        replayed(model, source, tmp_path / "run", grid={"framing": {"warm": "Be warm."}})


def test_smollm2_in_bfloat16_agrees_within_its_rounding(smollm2, tmp_path):
    """Batched otherwise than it was sampled: last bits differ. At most 4 % of a row's norm, 1 % on average."""
    plain = {
        "scenario": {"items": [{"id": "a", "topic": "rain"}, {"id": "b", "topic": "a long walk in the hills"}],
                     "participants": {"bob": {"model": "smollm2", "max_new_tokens": 12}},
                     "opening": "Say something about {topic}.", "branch": {"seeds": 2}},
        "capture": {"layers": [4, 16, 29], "tokens": "all"},
        "cluster": CLUSTER, "run": {**RUN, "dir": str(tmp_path / "run")},
    }  # fmt: skip
    assert entry.run(from_plain(plain), tmp_path / "run") == 0
    words = ["tokens=all|answer", "cluster.executor=inline", "run.progress=none"]
    assert cli.main(["capture", str(tmp_path / "run"), *words]) == 0
    run = sweeps.open(tmp_path / "run")
    errors = []
    for row in run.cells.to_pylist():
        for layer in (4, 16, 29):
            a, b = (r.tensor.float() for r in run.query(cell=row["cell"], layer=layer))
            errors.append((a - b).norm(dim=1) / a.norm(dim=1))
    found = torch.cat(errors)
    assert found.max() < 0.04 and found.mean() < 0.01, (found.max(), found.mean())


def test_a_patched_run_is_captured_again_under_its_patches(model, tmp_path):
    from tests.sweeps.replica.test_patching import PATCH, TOLD, told

    folder = tmp_path / "run"
    keep = {"participants": ["bob"], "layers": [0, 2], "tokens": "all", "special": "keep"}
    wanted = told(model, intervention={**PATCH, "tokens": "message(0)"}, capture=keep)
    assert len(TOLD) == 2 and entry.run(wanted, folder) == 0
    words = ["tokens=all|special", "cluster.executor=inline", "run.progress=none"]
    assert cli.main(["capture", str(folder), *words]) == 0
    run = sweeps.open(folder)
    for row in run.cells.to_pylist():
        for layer in (0, 2):
            a, b = (r.tensor for r in run.query(cell=row["cell"], layer=layer))
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_aggregates_read_what_capture_added(model, tmp_path):
    """A direction at a layer that was captured later is the one that capturing it at once would have given."""
    contrast = {"kind": "difference_of_means", "contrast": "framing == 'warm' vs framing == 'cold'", "permutations": 0,
                "draws": 50}  # fmt: skip
    capture = {"participants": ["bob"], "layers": [0], "tokens": "answer", "pool": "mean"}
    at_once = settings(model, capture={**capture, "layers": [0, 2]}, aggregate={"directions": contrast})
    assert entry.run(at_once, tmp_path / "at_once") == 0
    assert entry.run(settings(model, capture=capture, aggregate={"directions": contrast}), tmp_path / "later") == 0
    words = ["layers=2", "cluster.executor=inline", "run.progress=none"]
    assert cli.main(["capture", str(tmp_path / "later"), *words]) == 0
    assert cli.main(["aggregate", str(tmp_path / "later")]) == 0
    assert cli.main(["aggregate", str(tmp_path / "later"), "name=lda", f"contrast={contrast['contrast']}"]) == 0
    at_once, later = sweeps.open(tmp_path / "at_once"), sweeps.open(tmp_path / "later")
    for name in ("residual.0", "residual.2"):
        torch.testing.assert_close(later.directions()[name], at_once.directions()[name], atol=1e-4, rtol=0)
    assert set(later.directions("lda")) == {"residual.0", "residual.2"}
    assert verify(later.root, deep=True).ok
    file = min((later.root / "captures").rglob("activations/**/*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = verify(later.root, deep=True)
    assert found.problems[0].startswith("captures/") and "sha256" in found.problems[0]
