"""Aggregates over a real run folder: streamed sums, stored vectors, the files, the page."""

import numpy as np
import pytest
import torch

import sweeps
from interlens.interp.activation_cache import ActivationRecord
from interlens.message import Message
from sweeps import aggregates, folder
from sweeps.aggregates import CellResult
from sweeps.aggregates.directions import read_directions
from sweeps.aggregates.results import read_results
from sweeps.analyzers import enthusiasm_rate
from sweeps.config import ConfigError
from sweeps.inputs import hashes
from sweeps.plan import expand
from sweeps.report import write_report
from sweeps.writer import UnitWriter
from tests.sweeps import talk

CONTRAST = "framing == 'warm' vs framing == 'cold'"
AXIS = np.array([1.0, -1, 1, -1, 1, -1, 1, -1]) / 8**0.5
TEXTS = {"warm": "I love this! It is wonderful.", "cold": "No. It is <b>bad</b>."}


def cell_records(cell, rng):
    sign = 1.0 if cell.condition["framing"] == "warm" else -1.0
    made = []
    for layer in (1, 3):
        vector = torch.tensor(rng.standard_normal((1, 8)) + sign * layer * AXIS, dtype=torch.float32)
        made.append(ActivationRecord("bob", 3, layer, "residual", vector, (0, 1), {"answer": (0, 1)}, pool="mean",
                                     num_pooled=4, tokens=(1, 2, 3, 4), positions=(7, 8, 9, 10)))  # fmt: skip
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = talk.config(
        tmp_path_factory.mktemp("run"),
        aggregate={
            "directions": {"contrast": CONTRAST, "permutations": 5, "draws": 200},
            "outcomes": {"draws": 200},
        },
    )
    folder.enter(config, config.run.dir)
    rng = np.random.default_rng(0)
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
        sums = aggregates.sums(aggregates.build(config.aggregate))
        states = {made.name: made.zero() for made in sums}
        for n, trunk in enumerate(unit.trunks):
            said = [Message("moderator", "hello"), talk.said("alice", "hi", n)]
            writer.add_trunk(trunk.id, said, [trunk_record()])
        for n, cell in enumerate(unit.cells):
            records, text = cell_records(cell, rng), TEXTS[cell.condition["framing"]]
            messages = [Message("moderator", "framing"), talk.said("bob", text, n)]
            outcomes = {"enthusiasm.bob": enthusiasm_rate(text) + n % 2, "mood": "good"}
            for made in sums:
                made.add(states[made.name], CellResult(cell=cell, item_row=unit.items[cell.item], messages=messages,
                                                       records=records, outcomes=outcomes))  # fmt: skip
            writer.add_cell(cell, messages, records, outcomes, start=2)
        for made in sums:
            writer.add_sums(made.name, states[made.name])
        assert writer.commit() == "won"
    opened = sweeps.open(config.run.dir)
    aggregates.finalize(opened)
    return opened


def trunk_record():
    """Far from everything a cell records."""
    return ActivationRecord("bob", 1, 1, "residual", torch.full((1, 8), 99.0), (0, 1), {"answer": (0, 1)}, pool="mean")


def test_streamed_sums_equal_what_is_recomputed_from_the_stored_vectors(run):
    entry = run.config.aggregate[0]
    made = aggregates.build([entry], run.config)[0]
    states = list(run.sums("directions"))
    assert len(states) == 3
    total = made.zero()
    for state in states:
        total = made.merge(total, dict(state))
    streamed, recomputed = made.finish(total), made.fit(run)
    for a, b in zip(streamed["directions"], recomputed["directions"], strict=True):
        assert a["key"] == b["key"] and (a["num_pos"], a["num_neg"]) == (b["num_pos"], b["num_neg"]) == (12, 12)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-12)
        assert np.abs(streamed["tensors"][a["tensor"]] - recomputed["tensors"][a["tensor"]]).max() < 1e-12


def test_the_planted_direction_is_in_the_file_and_a_next_run_can_name_it(run):
    found, provenance = read_directions(run.root / "aggregates/directions.safetensors")
    assert set(found) == {"residual.1", "residual.3"} and found["residual.3"] @ AXIS > 0.9
    assert provenance["split"] == "item" and provenance["run"] == str(run.root)
    steered = talk.config(
        run.root.parent,
        intervention={"participants": ["bob"], "direction": f"run:{run.root}:residual:3", "layers": [3], "coef": 2},
    )
    assert list(hashes(steered)) == [f"run:{run.root}:residual:3"]


def test_a_trunks_own_records_are_in_no_direction(run):
    entry = read_results(run.root)["directions"]["directions"][0]
    assert entry["norm_pos"] < 10


def test_an_impossible_aggregate_stops_a_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"^aggregate 'directions': no column 'frame' .*framing"):
        talk.config(tmp_path, aggregate={"directions": {"contrast": "frame == 'warm' vs frame == 'cold'"}})
    with pytest.raises(ConfigError, match=r"^no aggregate 'centroids'; there are: difference_of_means"):
        talk.config(tmp_path, aggregate={"centroids": {}})


def test_outcomes_are_paired_over_the_stored_table(run):
    found = read_results(run.root)["outcomes"]
    assert [r["measure"] for r in found["responses"]] == ["enthusiasm.bob"]
    change = found["responses"][0]["levels"][1]["difference"]
    expected = enthusiasm_rate(TEXTS["cold"]) - enthusiasm_rate(TEXTS["warm"])
    assert change["value"] == pytest.approx(expected, abs=1.0) and change["groups"] == 3
    counts = {(row["measure"], row["condition"]["framing"]): row["count"] for row in found["means"]}
    assert counts == {("enthusiasm.bob", "warm"): 12, ("enthusiasm.bob", "cold"): 12}


def test_the_page_and_the_closing_lines(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert "It is &lt;b&gt;bad&lt;/b&gt;." in page and page.count("trunk seed") == 6
    lines = aggregates.findings(run)
    assert lines[0] == "24 of 24 cells finished, over 3 items; none failed."
    assert all(line in page.replace("&#x27;", "'") for line in lines)
