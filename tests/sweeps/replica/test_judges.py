"""Judges: asked after the last turn, on the same engine or over HTTP; prompt, raw answer and failures are kept."""

import pytest

import sweeps
from sweeps.commands.analyze import analyze
from sweeps.config.schema import JudgeConfig
from sweeps.driver import entry
from sweeps.errors import ConfigError
from sweeps.folder.results import read_results
from sweeps.replica.judges import parsed
from tests.support import small
from tests.support.server import ChatServer, serve

PROMPT = "About {topic}:\n{transcript}\nHow warm is it, from 1 to 5?"


def judged(model, judges, **changes):
    scenario = {
        "judges": judges,
        "analyzers": [],
        "trunk": {"turns": 1, "seeds": 1},
        "branch": {"turns": 2, "seeds": 1},
    }
    changed = {f"scenario__{key}": value for key, value in scenario.items()}
    return small.settings(model, num_items=2, intervention=[], capture=[], **{**changed, **changes})


def test_an_api_judge_is_asked_over_http_and_what_it_said_is_kept(model, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    chat = ChatServer(["4, I think", "no idea", "7", ("status", 500, {}), "2.5"])
    with serve(chat) as url:
        judge = {
            "kind": "api",
            "model": "m",
            "base_url": url,
            "prompt": PROMPT,
            "range": [1, 5],
            "participants": ["bob"],
        }
        assert entry.run(judged(model, {"warmth": judge}), tmp_path / "run") == 0
    assert len(chat.requests) == 5, "one was asked again"
    run = sweeps.open(tmp_path / "run")
    rows = run.outcomes().to_pylist()
    values = {row["warmth_raw"]: (row["warmth"], row["warmth_parsed"]) for row in rows}
    assert values == {"4, I think": (4.0, 1.0), "no idea": (None, 0.0), "7": (None, 0.0), "2.5": (2.5, 1.0)}
    asked = {request["messages"][-1]["content"] for request in chat.requests}
    assert asked == {row["warmth_prompt"] for row in rows} and all("OPENAI" not in prompt for prompt in asked)
    for row in rows:
        (answer,) = [
            m.content for m in run.messages(row["cell"])[run.num_trunk_messages(row["cell"]) :] if m.author == "bob"
        ]
        topic = row["item"].replace("i", "topic ")
        assert row["warmth_prompt"] == f"About {topic}:\n{answer}\nHow warm is it, from 1 to 5?", "no framing, no trunk"
    means = {(m["measure"], m["condition"]["framing"]): m["count"] for m in read_results(run.root)["outcomes"]["means"]}
    assert means["warmth_parsed", "warm"] == 2 and sum(n for (name, _), n in means.items() if name == "warmth") == 2


def test_an_api_judge_that_cannot_be_reached_loses_no_conversation_and_can_be_asked_again(model, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    chat = ChatServer([("status", 401, {})] * 4)
    with serve(chat) as url:
        judge = {"kind": "api", "model": "m", "base_url": url, "prompt": PROMPT}
        assert entry.run(judged(model, {"warmth": judge}), tmp_path / "run") == 3
        run = sweeps.open(tmp_path / "run")
        assert run.counts["failed"] == 0 and run.analyses_failed == 4
        assert "APIFailed: 'warmth' got no answer" in run.outcomes()["failed.warmth"][0].as_py()
        with pytest.raises(ConfigError, match="an address that a folder names is used only when you name it too"):
            analyze(run, ["name=warmth"])
        assert analyze(run, ["name=warmth", f"base_url={url}"]) == (4, 0)
    run = run.refresh()
    assert run.outcomes()["warmth"].null_count == 0 and run.analyses_failed == 0
    assert "failed.warmth" not in run.outcomes().column_names


@pytest.mark.slow
def test_the_embedded_model_judges_on_the_engine_of_the_participants(tmp_path, smollm2):
    judge = {"model": "smollm2", "answer": "choice", "choices": ["yes", "no"], "max_new_tokens": 8,
             "prompt": "Someone says: {transcript}\nIs this a greeting? Answer yes or no."}  # fmt: skip
    people = {"alice": {"kind": "scripted", "lines": ["Good morning to you all!"]},
              "bob": {"model": "smollm2", "max_new_tokens": 6, "temperature": 0.0}}  # fmt: skip
    config = judged(
        tmp_path, {"greets": {**judge, "participants": ["alice"]}, "again": judge}, scenario__participants=people,
        scenario__trunk={"turns": 0}, models={}, cluster={"executor": "inline", "rows": 8}, scenario__opening="Hello.",
    )  # fmt: skip
    assert entry.run(config, tmp_path / "run") == 0
    run = sweeps.open(tmp_path / "run")
    for row in run.outcomes().to_pylist():
        assert "says: Good morning to you all!\nIs" in row["greets_prompt"]
        assert "says: alice: Good morning to you all!\n\nbob: " in row["again_prompt"]
        assert row["greets_raw"] and row["greets_parsed"] == float(row["greets"] is not None)
    assert set(run.about["models"]) == {"smollm2"}, "one model, loaded once"


@pytest.mark.parametrize(
    "answer, options, value",
    [
        ("It is 4 of 5.", {}, 4.0),
        ("-2.5", {}, -2.5),
        ("4", {"range": (5.0, 9.0)}, None),
        ("none", {}, None),
        ("Yes!", {"answer": "choice", "choices": ("yes", "no")}, "yes"),
        ("yes and no", {"answer": "choice", "choices": ("yes", "no")}, None),
        ("nothing", {"answer": "choice", "choices": ("yes", "no")}, None),
        ("  a word ", {"answer": "text"}, "a word"),
        (" ", {"answer": "text"}, None),
    ],
)
def test_answers_are_read_or_counted_as_unreadable(answer, options, value):
    assert parsed(answer, JudgeConfig(prompt="{transcript}", model="m", **options)) == value


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"prompt": "How warm?"}, r"prompt does not hold \{transcript\}"),
        ({"prompt": "{transcript} {nothing}"}, r"no column \{nothing\} in item 'i0'"),
        ({"participants": ["bert"]}, "no participant 'bert'"),
        ({"answer": "choice", "choices": ["yes"]}, "answer: choice needs at least two"),
        ({"answer": "letter"}, "answer is 'letter'; possible: number, choice, text"),
        ({"range": [5, 1]}, "give \\[lowest, highest\\]"),
        ({"model": "smolm"}, "no model 'smolm'"),
    ],
)
def test_judges_that_cannot_be_asked_are_refused_at_once(model, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        judged(model, {"warmth": {"model": "tiny", "prompt": PROMPT, **changes}})


def test_a_judge_is_in_no_id(model):
    from sweeps.plan.expand import expand

    with_one = judged(model, {"warmth": {"model": "tiny", "prompt": PROMPT}})
    ids = [[cell.id for unit in expand(config) for cell in unit.cells] for config in (with_one, judged(model, {}))]
    assert ids[0] == ids[1]
