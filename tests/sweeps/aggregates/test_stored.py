"""Aggregates over a real run folder: streamed sums, stored vectors, the files, the page."""

import functools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

import sweeps
from interlens.interp.activation_cache import ActivationRecord
from interlens.message import Message
from sweeps import cli
from sweeps.aggregates import CellResult, registry, results
from sweeps.aggregates.recompute import added, recompute
from sweeps.aggregates.shards import Shard
from sweeps.aggregates.vectors import leaks
from sweeps.analyzers import enthusiasm_rate
from sweeps.config.schema import AggregateConfig
from sweeps.driver import enter
from sweeps.errors import ConfigError
from sweeps.folder.results import read_directions, read_results
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from sweeps.plan.inputs import hashes
from sweeps.report.findings import sentences
from sweeps.report.page import write_report
from tests.support import talk

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
    rows = torch.tensor(rng.standard_normal((4, 8)) + sign * AXIS, dtype=torch.bfloat16)
    rows[3] *= 20.0 if rng.random() < 0.3 else 1.0
    made.append(ActivationRecord("bob", 3, 1, "residual", rows, (0, 4), {"answer": (0, 4)}, tokens=(1, 2, 3, 4),
                                 positions=(7, 8, 9, 10)))  # fmt: skip
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = talk.config(
        tmp_path_factory.mktemp("run"),
        aggregate={
            "directions": {"contrast": CONTRAST, "permutations": 5, "draws": 200},
            "outcomes": {"draws": 200},
            "moments": {"by": "framing", "covariance": True},
            "tokens": {"kind": "moments", "pool": None, "max_norm": 30.0},
            "tokenwise": {"kind": "difference_of_means", "contrast": CONTRAST, "pool": None},
            "some": {
                "kind": "difference_of_means",
                "contrast": CONTRAST,
                "where": "trunk_seed == 1 and message_idx > 2",
            },
            "logprob_summary": {},
            "lda": {"contrast": CONTRAST, "permutations": 2, "draws": 50},
            "logistic": {"contrast": CONTRAST, "permutations": 2, "draws": 50},
            "probe_eval": {"contrast": CONTRAST, "permutations": 2, "draws": 50, "transfer": "trunk_seed"},
            "similarity": {"of": ["directions", "lda"]},
        },
        scenario={**talk.SCENARIO, "logprobs": True},
    )
    enter.enter(config, config.run.dir)
    rng = np.random.default_rng(0)
    memory = []
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
        sums = registry.sums(registry.build(config.aggregate))
        states = {made.name: made.zero() for made in sums}
        for n, trunk in enumerate(unit.trunks):
            said = [Message("moderator", "hello"), talk.said("alice", "hi", n)]
            writer.add_trunk(trunk.id, said, [trunk_record()])
        for n, cell in enumerate(unit.cells):
            records, text = cell_records(cell, rng), TEXTS[cell.condition["framing"]]
            messages = [Message("moderator", "framing"), talk.said("bob", text, n)]
            outcomes = {"enthusiasm.bob": enthusiasm_rate(text) + n % 2, "mood": "good"}
            result = CellResult(cell=cell, item_row=unit.items[cell.item], messages=[*said, *messages], records=records,
                                outcomes=outcomes, num_trunk_messages=2)  # fmt: skip
            memory.append(result)
            for made in sums:
                made.add(states[made.name], result)
            writer.add_cell(cell, messages, records, outcomes, start=2)
        for made in sums:
            writer.add_sums(made.name, states[made.name])
        assert writer.commit() == "won"
    opened = sweeps.open(config.run.dir)
    results.finalize(opened)
    opened.memory = memory
    return opened


def trunk_record():
    """Far from everything a cell records."""
    return ActivationRecord("bob", 1, 1, "residual", torch.full((1, 8), 99.0), (0, 1), {"answer": (0, 1)}, pool="mean")


SUMS = ["directions", "outcomes", "moments", "tokens", "tokenwise", "some", "logprob_summary"]


def assert_equal(a, b):
    assert a.keys() == b.keys() and a
    for key, value in a.items():
        assert np.abs(value - b[key]).max() <= 1e-12 * max(np.abs(value).max(), 1.0), key


def named(run, name):
    entry = next(entry for entry in run.config.aggregate if entry.name == name)
    return registry.build([entry], run.config)[0]


def in_memory(run, made):
    state = made.zero()
    for result in run.memory:
        made.add(state, result)
    return state


@pytest.mark.parametrize("name", SUMS)
def test_streamed_recomputed_and_in_memory_agree(run, name):
    made = named(run, name)
    states = [dict(state) for state in run.sums(name)]
    assert len(states) == 3
    streamed = functools.reduce(made.merge, states, made.zero())
    assert_equal(streamed, in_memory(run, made))
    assert_equal(streamed, recompute(run, made))
    for commit, state in zip(run.commits(), states, strict=True):
        assert_equal(state, added(made.zero(), Shard(run, commit), made))


def test_an_index_for_one_pool_reads_its_row_groups_only(run):
    for shard in run.shards():
        whole = shard.index(["pool"])
        for pool in ("mean", None):
            part = shard.index(["pool"], [pool])
            kept = [row for row in whole.to_pylist() if row["pool"] == pool]
            assert part.to_pylist() == kept and 0 < len(kept) < whole.num_rows


@pytest.mark.parametrize("name", SUMS)
def test_cells_read_back_add_up_to_the_same(run, name):
    """What an aggregate without a fast path would be given."""
    made, state = named(run, name), {}
    for commit in run.commits():
        for result in Shard(run, commit).results():
            made.add(state, result)
    assert_equal(state, in_memory(run, made))


def test_tokens_count_once_each_and_sinks_are_left_out_and_counted(run):
    results = read_results(run.root)
    entry = results["tokens"]["moments"][0]
    assert entry["count"] + entry["removed"] == 24 * 4 and entry["removed"] > 0 and entry["removed_mean_norm"] > 30
    token = results["tokenwise"]["directions"][0]
    assert (token["num_pos"], token["num_neg"], token["pool"]) == (48, 48, None)
    assert (results["tokenwise"]["weight"], results["directions"]["weight"]) == ("token", "message")
    assert (token["evaluation"]["num_pos"], token["evaluation"]["rows"]) == (12, 24), "evaluated on messages"


def test_where_keeps_some_rows(run):
    found = read_results(run.root)["some"]["directions"][0]
    assert (found["num_pos"], found["num_neg"], found["num_neither"]) == (6, 6, 0)
    assert found["evaluation"]["excluded"] == 12


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_labels_join_by_cell_and_message(run, tmp_path, suffix):
    path = str(tmp_path / f"labels.{suffix}")
    kept = run.memory[:-4]
    table = pa.table({"cell": [r.cell.id for r in kept], "message_idx": [3] * len(kept),
                      "good": [int(r.cell.condition["framing"] == "warm") for r in kept]})  # fmt: skip
    csv.write_csv(table, path) if suffix == "csv" else pq.write_table(table, path)
    options = {"contrast": "label.good == 1 vs label.good == 0", "labels": path, "draws": 50, "permutations": 0,
               "kind": "difference_of_means"}  # fmt: skip
    found = results.finalize(run, [AggregateConfig(name="labelled", options=options)])["labelled"]["directions"][0]
    assert found["num_pos"] + found["num_neg"] == 20 and found["num_neither"] == 4
    assert found["evaluation"]["num_pos"] == found["num_pos"]
    (run.root / "aggregates/labelled.json").unlink()
    (run.root / "aggregates/labelled.safetensors").unlink()


def test_probes_find_the_planted_direction_and_agree_with_each_other(run):
    results = read_results(run.root)
    for name in ("lda", "logistic"):
        found, _ = read_directions(run.root, name)
        assert found["residual.3"] @ AXIS > 0.8
        layer_3 = results[name]["directions"][1]
        assert layer_3["evaluation"]["auroc"]["value"] > 0.9 and layer_3["num_pos"] == 12
    evaluated = results["probe_eval"]
    assert [p["method"] for p in evaluated["probes"]] == ["difference_of_means", "lda", "logistic"]
    assert all(p["evaluation"]["auroc"]["value"] > 0.8 for p in evaluated["probes"])
    assert all(set(p["evaluation"]["layers"]) <= {1, 3} for p in evaluated["probes"])
    crossed = {(t["fitted_on"], t["tested_on"]) for t in evaluated["transfer"]}
    assert crossed == {(0, 0), (0, 1), (1, 0), (1, 1)} and evaluated["warnings"] == []
    similar = results["similarity"]["maps"][0]
    assert similar["names"][0] == "directions: residual.1" and len(similar["names"]) == 4
    assert similar["values"][1][3] > 0.8 and similar["random_mean_abs"] == pytest.approx(0.28, abs=0.01)


def test_a_row_budget_takes_a_sample_keyed_by_cell_and_says_so(run):
    made = named(run, "lda")
    made.max_rows = 10
    few, whole = next(made.places(run)), next(named(run, "lda").places(run))
    assert (len(few.y), few.num_stored, len(whole.y), whole.num_stored) == (10, 24, 24, 24)
    order = whole.table.column("cell").to_pylist()
    at = [order.index(cell) for cell in few.table.column("cell").to_pylist()]
    assert at == sorted(at) and np.array_equal(few.x, whole.x[at]) and np.array_equal(few.y, whole.y[at])
    evaluation = made.fit(run)["directions"][0]["evaluation"]
    assert (evaluation["rows"], evaluation["rows_stored"]) == (10, 24)


def test_leaks_are_warned_of(run):
    data = next(named(run, "directions").places(run))
    assert leaks(data, "item") == []
    by_cell = replace(data, groups=data.table.column("cell").to_pylist())
    assert leaks(by_cell, "cell")[0].startswith("siblings leak")
    assert "one label only" in leaks(by_cell, "cell")[-1]
    copied = replace(data, x=np.ones_like(data.x))
    assert leaks(copied, "item") == ["copies leak: 1 vectors are exactly equal across groups of item"]
    by_item = {"kind": "lda", "contrast": "item == 'i0' vs item == 'i1'", "permutations": 0, "draws": 20}
    found = results.finalize(run, [AggregateConfig(name="leaky", options=by_item)])["leaky"]["directions"][0]
    assert "one label only" in found["evaluation"]["warnings"][0]
    page = write_report(run).read_text(encoding="utf-8")
    (run.root / "aggregates/leaky.json").unlink()
    (run.root / "aggregates/leaky.safetensors").unlink()
    assert "one label only" in page


def test_the_planted_direction_is_in_the_file_and_a_next_run_can_name_it(run):
    found, provenance = read_directions(run.root)
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
    lines = sentences(run)
    assert lines[0] == "24 of 24 cells finished, over 3 items; none failed."
    assert all(line in page.replace("&#x27;", "'") for line in lines)


def test_the_page_shows_every_kind_of_result(run):
    page = write_report(run).read_text(encoding="utf-8")
    for heading in (
        "Moments</h2>",
        "Logprob summary</h2>",
        "Probe eval</h2>",
        "Similarity</h2>",
        "LDA</h2>",
        "Logistic</h2>",
    ):
        assert heading in page
    told = " ".join(sentences(run))
    assert "LDA, framing == 'warm' vs framing == 'cold': held-out AUROC" in told and len(sentences(run)) <= 10


def test_the_command_recomputes_from_what_is_stored(run, capsys):
    before = read_results(run.root)
    assert cli.main(["aggregate", str(run.root)]) == 0
    told = capsys.readouterr().out
    paths = [line for line in told.splitlines() if not line.startswith(" ")]
    assert len(paths) == len(before) and read_results(run.root) == before
    assert "  Reading bob's residual at all(), a difference of means tells" in told, "under its path, what each says"
    assert cli.main(["aggregate", str(run.root), "name=directions", "where=trunk_seed == 0", "draws=50"]) == 0
    found = read_results(run.root)["directions"]
    assert found["options"]["where"] == "trunk_seed == 0" and found["options"]["contrast"] == CONTRAST
    assert found["directions"][0]["num_pos"] == 6
    assert cli.main(["aggregate", str(run.root), "name=directions", f"contrast={CONTRAST}"]) == 0
    assert read_results(run.root)["directions"]["directions"] == before["directions"]["directions"]


@pytest.mark.parametrize(
    "given, complaint",
    [
        (["pool=mean"], "give name=NAME"),
        (["name=x"], "no aggregate 'x'"),
        (["name=directions", "contrst=a"], "contrst"),
        (["name=directions", "where"], "options are key=value"),
    ],
)
def test_the_command_refuses_what_cannot_be_in_one_line(run, capsys, given, complaint):
    assert cli.main(["aggregate", str(run.root), *given]) == 1
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_on_ray_a_recomputed_sum_is_the_same(run, capsys, request):
    """The first starts a Ray of its own and ends it, the others use one that is there."""
    before = read_results(run.root)["moments"]
    assert cli.main(["aggregate", str(run.root), "name=moments", "replicas=2"]) == 0
    after = read_results(run.root)["moments"]
    for a, b in zip(before["moments"], after["moments"], strict=True):
        assert a["key"] == b["key"] and a["count"] == b["count"]
        assert a["total_variance"] == pytest.approx(b["total_variance"], rel=1e-12)
    request.getfixturevalue("a_ray")
    for name in ("lda", "directions"):
        before = read_results(run.root)[name]
        assert cli.main(["aggregate", str(run.root), f"name={name}", "replicas=2"]) == 0
        assert read_results(run.root)[name]["directions"] == before["directions"]


def test_a_new_question_without_an_answer_leaves_no_old_direction(run):
    arguments = ["aggregate", str(run.root), "name=asked", "kind=difference_of_means"]
    assert cli.main([*arguments, "contrast=framing == 'warm' vs framing == 'cold'"]) == 0
    file = run.root / "aggregates" / "asked.safetensors"
    assert file.is_file()
    assert cli.main([*arguments, "contrast=item == 'nobody' vs framing == 'cold'"]) == 0
    assert not file.exists() and read_results(run.root)["asked"]["directions"][0]["num_pos"] == 0


def test_a_column_that_no_item_has_is_refused(run, capsys):
    arguments = ["aggregate", str(run.root), "name=asked", "kind=moments", "where=item.nosuch == 1"]
    assert cli.main(arguments) == 1
    assert "no column 'item.nosuch' in 'item.nosuch == 1'; items have: " in capsys.readouterr().err
