"""Laws of the page: it fetches nothing, model text stays text, and the numbers shown are the aggregates'."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import sweeps
from sweeps.aggregates.registry import build
from sweeps.aggregates.results import finalize
from sweeps.config.schema import AggregateConfig, AxisConfig
from sweeps.driver import entry as driver_entry
from sweeps.folder.results import read_results
from sweeps.report.charts import Point, Series, chart, ticks
from sweeps.report.findings import said as sentences_of
from sweeps.report.findings import sentences
from sweeps.report.markup import number, tag, text
from sweeps.report.page import write_report
from sweeps.report.surprisal import EDGES, coloured, decoders
from tests.support.small import build_model, settings
from tests.support.stored import results, steer, stored

EVIL = (
    "<script>alert('x')</script><img src=x onerror=alert(1)>",
    "</p></details></body> & \"quotes\" 'single'",
    "\x00\x1b[31mred \u202egnp.exe 日本語 😀",
    "<!-- comment --><style>*{display:none}</style>",
)
VOID = {"meta", "br"}


class Tree(HTMLParser):
    """Tags balance, and every attribute and text is collected."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)


def parsed(page):
    tree = Tree()
    tree.feed(page)
    assert tree.open == []
    return tree


def finished(tmp_path, **changes):
    made, _ = results(items=6)
    aggregate = (
        AggregateConfig(
            name="directions",
            options={"contrast": "framing == 'warm' vs framing == 'cold'", "permutations": 3, "draws": 100},
        ),
        AggregateConfig(name="outcomes", options={"draws": 100}),
    )
    run = stored(made, root=tmp_path, texts=EVIL, aggregate=aggregate, **changes)
    finalize(run)
    return run


def test_the_page_fetches_nothing_and_runs_nothing(tmp_path):
    page = write_report(finished(tmp_path)).read_text(encoding="utf-8")
    tree = parsed(page)
    assert not {"script", "img", "link", "iframe", "object"} & set(tree.tags)
    assert all(value.startswith("#") for key, value in tree.attributes if key in ("href", "src", "xlink:href"))
    assert not [key for key, _ in tree.attributes if key.startswith("on")]
    assert "url(" not in page and "@import" not in page
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in tree.attributes


def test_model_text_is_shown_verbatim_and_never_becomes_markup(tmp_path):
    page = write_report(finished(tmp_path)).read_text(encoding="utf-8")
    shown = "\n".join(parsed(page).texts)
    for said in (EVIL[0], EVIL[1], EVIL[3]):
        assert said in shown
    assert "␀␛[31mred ⟨U+202E⟩gnp.exe 日本語 😀" in shown
    assert "\x00" not in page and "\u202e" not in page


def test_every_conversation_is_there_once_under_its_trunk(tmp_path):
    run = finished(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    for cell in run.cells["cell"].to_pylist():
        assert page.count(f"<code>{cell}</code>") == 1
    assert page.count("trunk seed 0") == page.count("trunk seed 1") == 6
    assert page.count("(cut at the length limit)") == 12


def test_the_shown_numbers_are_the_aggregates(tmp_path):
    run = finished(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    stored = json.loads((tmp_path / "aggregates/directions.json").read_text())
    for entry in stored["directions"]:
        found = entry["evaluation"]["auroc"]
        assert f"{number(found['value'])} ({number(found['low'])} to {number(found['high'])})" in page
    for line in sentences(run):
        assert text(line) in page


def test_findings_are_a_few_plain_sentences_with_controls(tmp_path):
    lines = sentences(finished(tmp_path))
    assert 4 <= len(lines) <= 10
    assert lines[0] == "48 of 48 cells finished, over 6 items; none failed."
    told = " ".join(lines)
    assert "shuffled labels" in told and "random directions" in told and "Score" in told
    assert all(line.endswith(".") and re.search(r"\d", line) for line in lines)


def test_findings_call_nothing_an_answer_that_was_only_read(tmp_path):
    result = read_results(finished(tmp_path).root)["directions"]
    told = {}
    for selection in ("(phase(answer) - special())", "(prompt() - special())"):
        for entry in result["directions"]:
            entry["selection"] = selection
        told[selection[:3]] = " ".join(sentences_of(result))
    assert "bob's answers" in told["(ph"] and "answers)." in told["(ph"] and "an answer's mean" in told["(ph"]
    assert "answer" not in told["(pr"] and "bob's residual at (prompt() - special())" in told["(pr"]


def test_findings_say_where_a_projection_moves_by_construction(tmp_path):
    made, _ = results(axis="intervention.coef", labels=(0, 8), dose=True, layers=(16, 20))
    run = stored(made, axis="intervention.coef", labels=(0, 8), root=tmp_path, interventions=(steer("random:1"),),
                 aggregate=(AggregateConfig(name="outcomes", options={"draws": 50}),))  # fmt: skip
    finalize(run)
    told = [line for line in sentences(run) if "projection" in line]
    assert ["by construction" in line for line in told] == [True, False]
    assert "by construction" in write_report(run).read_text(encoding="utf-8")


def test_controls_of_a_direction_stand_beside_it(tmp_path):
    """`controls: [random]` makes the direction an axis: its values are not averaged, the control is told with it."""
    made = []
    for direction in ("found", "random"):
        more, _ = results(axis="intervention.coef", labels=(0, 8), dose=True, layers=(16,), seed=direction == "random")
        for result in more:
            result.cell = replace(result.cell, id=f"{direction}{result.cell.id}",
                                  condition={**result.cell.condition, "intervention.direction": direction})  # fmt: skip
            result.outcomes["score"] *= direction == "found"
        made += more
    axis = AxisConfig(path="intervention.direction", labels=("found", "random"), values=("random:1", "random:2"))
    run = stored(made, axis="intervention.coef", labels=(0, 8), root=tmp_path, interventions=(steer("random:1"),),
                    more_axes=(axis,), aggregate=(AggregateConfig(name="outcomes", options={"draws": 50}),))  # fmt: skip
    found = finalize(run)["outcomes"]["responses"]
    assert [(r["measure"], *r["by"].values()) for r in found[:2]] == [("score", "found"), ("score", "random")]
    assert found[0]["levels"][1]["difference"]["value"] > 10 and found[1]["levels"][1]["difference"]["value"] == 0
    assert found[0]["levels"][0]["count"] == found[1]["levels"][0]["count"] == 40
    (told,) = [line for line in sentences(run) if line.startswith("Score")]
    assert "[direction found]" in told and "; direction random, 0 to 8: 0" in told and "not distinguishable" in told
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and "score [direction random]" in page
    together = AggregateConfig(name="outcomes", options={"draws": 50, "by": []})
    assert [r["by"] for r in build([together])[0].fit(run)["responses"]] == [{}, {}]


def test_failures_are_grouped_with_a_traceback(tmp_path):
    bad = {"error": "ValueError: <b>no</b>", "traceback": "File <x>", "attempts": 1, "trunk": "t"}
    run = finished(tmp_path, failures=({"cell": "c0", **bad}, {"cell": "c1", **bad}))
    page = write_report(run).read_text(encoding="utf-8")
    parsed(page)
    assert "<b>2</b> × ValueError: &lt;b&gt;no&lt;/b&gt;" in page and "File &lt;x&gt;" in page
    assert sentences(run)[0] == "46 of 48 cells finished, over 6 items; 2 failed."
    assert "<code>c0</code>" not in page.partition("Conversations</h2>")[2]


def test_a_run_without_anything_still_has_a_page(tmp_path):
    page = write_report(stored([], root=tmp_path), tmp_path / "elsewhere" / "page.html")
    assert page == tmp_path / "elsewhere" / "page.html"
    assert "No conversation is finished yet." in page.read_text(encoding="utf-8")


def test_unevaluated_directions_say_why(tmp_path):
    made, _ = results(items=1)
    aggregate = AggregateConfig(name="directions", options={"contrast": "framing == 'warm' vs framing == 'cold'"})
    run = stored(made, root=tmp_path, aggregate=(aggregate,))
    finalize(run)
    assert any("at least 2 groups" in line for line in sentences(run))
    assert "at least 2 groups" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("low, high", [(0, 1), (-6, 6), (0.501, 0.502), (-1e-9, 3e7), (12, 19)])
def test_ticks_are_round_few_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-9 * (high - low) <= tick <= high + 1e-9 * (high - low) for tick in found)
    steps = np.diff(found)
    assert np.allclose(steps, steps[0])


def test_charts_place_larger_values_higher_and_keep_intervals_around_them():
    points = [Point(x=0, y=1.0, low=0.5, high=1.5), Point(x=1, y=2.0, low=1.8, high=2.5), Point(x=2, y=0.0)]
    drawn = chart([Series(name="a & b", points=points)], x_label="<x>", y_label="y", title="t")
    heights = [float(y) for y in re.findall(r'<circle [^>]*cy="([\d.]+)"', drawn)]
    assert heights[1] < heights[0] < heights[2]
    bars = re.findall(r'y1="([\d.]+)" y2="([\d.]+)" class="bar', drawn)
    assert all(float(low) > y > float(high) for (low, high), y in zip(bars, heights, strict=False))
    assert "&lt;x&gt;" in drawn and "<x>" not in drawn
    assert "Nothing to draw" in chart([], x_label="", y_label="", title="")


def test_numbers_read_well():
    assert [number(v) for v in (None, 3, 3.0, 0.12345, -2.5, 1234567, 123456.7, 12345, "warm", True)] == [
        "–", "3", "3", "0.123", "−2.5", "1\u202f234\u202f567", "123457", "12\u202f345", "warm", "True"]  # fmt: skip


def test_broken_surrogates_do_not_stop_a_page():
    assert text("a\ud800b") == "a?b"


def test_tags_escape_attributes_and_leave_nothing_out():
    assert tag("p", "<", tag("b", "&"), title='"') == '<p title="&quot;">&lt;<b>&amp;</b></p>'
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8"/>'


def test_the_page_of_many_levels_uses_every_aggregate(tmp_path):
    made, _ = results(labels=("warm", "plain", "cold"), items=4)
    aggregate = (AggregateConfig(name="outcomes", options={"draws": 50, "baseline": "plain"}),)
    assert build(aggregate)[0].name == "outcomes"
    run = stored(made, labels=("warm", "plain", "cold"), root=tmp_path, aggregate=aggregate)
    finalize(run)
    page = write_report(run).read_text(encoding="utf-8")
    assert "change from plain, paired" in page and page.count("<svg") == 1


def test_tokens_are_coloured_by_their_surprisal(tmp_path_factory):
    """A real run that kept log-probabilities: every character of every reply is there, each token with its colour."""
    folder = tmp_path_factory.mktemp("surprisal")
    model = build_model(folder / "tiny")
    wanted = settings(model, scenario__logprobs=True, num_items=1, seeds=1, intervention=[], capture=[])
    assert driver_entry.run(wanted, folder / "run") == 0
    run = sweeps.open(folder / "run")
    page = write_report(run).read_text(encoding="utf-8")
    assert "coloured by their surprisal in nats" in page
    spans = re.findall(r'<span class="u(\d)" title="([\d.]+) nats">', page)
    assert spans and all(sum(float(nats) >= edge for edge in EDGES) == int(level) for level, nats in spans)
    decode = decoders(run)["bob"]
    for row in run.table("messages").to_pylist():
        if row["logprobs"]:
            shown = "".join(parsed(f"<p>{coloured(row, decode)}</p>").texts)
            assert text(row["content"]) == text(shown)
    changed = {**row, "content": "edited afterwards"}
    assert coloured(changed, decode) is None and coloured({**row, "logprobs": None}, decode) is None
