"""Laws of aggregates: any split and order agree, recomputed equals streamed, planted effects are found."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlens import SteeringSpec
from interlens.message import Message
from sweeps.aggregates import Fit, Sum
from sweeps.aggregates.direction_files import direction_of, save_directions
from sweeps.aggregates.registry import SHORT_NAMES, build, kinds
from sweeps.aggregates.results import finalize
from sweeps.config.schema import AggregateConfig
from sweeps.folder.results import read_directions, read_results
from sweeps.folder.store import open_store
from tests.support.stored import record, results, steer, stored

CONTRAST = "framing == 'warm' vs framing == 'cold'"
RESULTS, AXES = results()
ENTRIES = {
    "directions": AggregateConfig(name="directions", options={"contrast": CONTRAST, "permutations": 3, "draws": 100}),
    "outcomes": AggregateConfig(name="outcomes", options={"draws": 100}),
    "moments": AggregateConfig(name="moments", options={"by": ["framing"]}),
    "covariances": AggregateConfig(
        name="covariances", options={"kind": "moments", "covariance": True, "max_norm": 12.0}
    ),
    "logprob_summary": AggregateConfig(name="logprob_summary", options={}),
}
HAVE = {entry.options.get("kind", SHORT_NAMES.get(entry.name, entry.name)) for entry in ENTRIES.values()}
for kind in set(kinds()) - HAVE - {"routing_stats"}:  # what else there is, as it comes; these cells have no routing
    try:
        build([AggregateConfig(name=kind)])
        ENTRIES[kind] = AggregateConfig(name=kind)
    except ValueError:
        ENTRIES[kind] = AggregateConfig(name=kind, options={"contrast": CONTRAST})
SUMS = [made for entry in ENTRIES.values() if isinstance(made := build([entry])[0], Sum)]


def fold(aggregate, cells):
    state = aggregate.zero()
    for result in cells:
        aggregate.add(state, result)
    return state


def fitted(name, cells):
    """The whole of one aggregate: summed, then fitted over the stored vectors."""
    aggregate = build([ENTRIES[name]])[0]
    return aggregate.fit(stored(cells), aggregate.finish(fold(aggregate, cells)))


@pytest.mark.parametrize("aggregate", SUMS, ids=lambda a: a.name)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, len(RESULTS)), max_size=5), seed=st.integers(0, 2**31))
def test_any_order_and_any_split_agree(aggregate, cuts, seed):
    rng = np.random.default_rng(seed)
    shuffled = [RESULTS[i] for i in rng.permutation(len(RESULTS))]
    bounds = [0, *sorted(cuts), len(shuffled)]
    states = [fold(aggregate, shuffled[a:b]) for a, b in itertools.pairwise(bounds)]
    merged = aggregate.zero()
    for i in rng.permutation(len(states)):
        merged = aggregate.merge(merged, states[i])
    whole = fold(aggregate, RESULTS)
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        scale = max(np.abs(value).max(), 1e-300)
        assert np.abs(merged[key] - value).max() / scale < 1e-12, key


@pytest.mark.parametrize("aggregate", SUMS, ids=lambda a: a.name)
def test_states_are_flat_float64_arrays_and_merge_leaves_its_inputs_alone(aggregate):
    a, b = fold(aggregate, RESULTS[:10]), fold(aggregate, RESULTS[10:20])
    before = {key: value.copy() for key, value in a.items()}
    aggregate.merge(a, b)
    assert all(np.array_equal(a[key], before[key]) for key in before) and a.keys() == before.keys()
    for value in a.values():
        assert value.dtype == np.float64 and value.ndim >= 1


def test_a_cell_that_cannot_be_added_leaves_the_state_as_it_was():
    aggregate = build([AggregateConfig(name="directions", options={"contrast": "framing == 'warm' vs item == 'i0'"})])[
        0
    ]
    state = fold(aggregate, [r for r in RESULTS if r.cell.condition["framing"] == "cold"][:3])
    before = {key: value.copy() for key, value in state.items()}
    with pytest.raises(ValueError, match="both sides"):
        aggregate.add(state, RESULTS[0])
    assert state.keys() == before.keys() and all(np.array_equal(state[k], before[k]) for k in before)


def test_directions_equal_plain_numpy():
    aggregate = build([ENTRIES["directions"]])[0]
    streamed = aggregate.finish(fold(aggregate, RESULTS))
    for index, layer in enumerate((8, 16)):
        rows = {label: np.stack([r.records[index].tensor[0].double().numpy() for r in RESULTS
                                 if r.cell.condition["framing"] == label]) for label in ("warm", "cold")}  # fmt: skip
        plain = rows["warm"].mean(0) - rows["cold"].mean(0)
        assert np.allclose(streamed["tensors"][f"residual.{layer}"], plain, rtol=0, atol=1e-12)
        entry = next(e for e in streamed["directions"] if e["layer"] == layer)
        assert (entry["num_pos"], entry["num_neg"], entry["num_neither"]) == (40, 40, 0)
        assert entry["norm"] == pytest.approx(np.linalg.norm(plain), rel=1e-12)
        assert entry["norm_pos"] == pytest.approx(np.sqrt((rows["warm"] ** 2).sum(1).mean()), rel=1e-12)


def test_a_planted_direction_is_found_and_its_controls_are_not():
    found = fitted("directions", RESULTS)
    for entry, axis in zip(found["directions"], AXES, strict=True):
        direction = found["tensors"][entry["tensor"]]
        assert direction @ axis / np.linalg.norm(direction) > 0.8
        evaluation = entry["evaluation"]
        assert evaluation["auroc"]["low"] > 0.65 > evaluation["shuffled"]["mean"]
        assert abs(evaluation["random"]["mean"] - 0.5) < 0.15
        assert evaluation["num_groups"] == 10
    assert found["cosines"]["names"] == ["residual.8", "residual.16"]


def test_two_participants_keep_their_directions_apart():
    two, _ = results(items=3)
    for result in two:
        result.records.append(record(np.ones(24), participant="alice"))
    aggregate = build([ENTRIES["directions"]])[0]
    state = fold(aggregate, two)
    found = aggregate.finish(state)
    assert set(found["tensors"]) == {"residual.8@bob.mean", "residual.16@bob.mean"}
    alice = next(e for e in found["directions"] if e["participant"] == "alice")
    assert alice["norm"] == 0.0 and "tensor" not in alice


def test_cells_on_neither_side_and_non_finite_rows_are_counted_not_used():
    cells, _ = results(labels=("warm", "plain", "cold"), items=4, layers=(16,))
    cells[0].records[0].tensor[0, 3] = float("nan")
    aggregate = build([ENTRIES["directions"]])[0]
    entry = aggregate.finish(fold(aggregate, cells))["directions"][0]
    assert (entry["num_pos"], entry["num_neg"], entry["num_neither"], entry["non_finite"]) == (15, 16, 16, 1)


def test_one_item_gives_a_direction_and_says_why_there_is_no_evaluation():
    cells, _ = results(items=1)
    entry = fitted("directions", cells)["directions"][0]
    assert entry["norm"] > 0 and entry["evaluation"] is None and "at least 2 groups" in entry["why"]


def dose_run(direction="random:1", without=()):
    cells, _ = results(axis="intervention.coef", labels=(0, 4, 8), dose=True, signal=0.0, layers=(16, 20))
    vector = direction_of(stored([]), "random:1", 24)
    for result in cells:
        for rec in result.records:
            rec.tensor += float(result.cell.condition["intervention.coef"]) * rec.tensor.new_tensor(vector)
    kept = [r for r in cells if r.cell.id not in without]
    return stored(kept, axis="intervention.coef", labels=(0, 4, 8), interventions=(steer(direction),))


def test_dose_response_is_paired_and_finds_the_planted_slopes():
    run = dose_run()
    found = build([ENTRIES["outcomes"]])[0].fit(run)
    responses = {response["measure"]: response for response in found["responses"]}
    assert (found["axis"], found["baseline"]) == ("intervention.coef", 0)
    score = responses["score"]
    assert score["slope"]["value"] == pytest.approx(2.0, abs=0.05)
    at_8 = score["levels"][2]
    assert (at_8["count"], at_8["pairs"]) == (40, 40)
    assert at_8["difference"]["value"] == pytest.approx(16, abs=0.1)
    paired = at_8["difference"]["high"] - at_8["difference"]["low"]
    unpaired = at_8["mean"]["high"] - at_8["mean"]["low"]
    assert paired < unpaired / 2
    assert responses["projection.bob.16"]["slope"]["value"] == pytest.approx(1.0, abs=0.1)
    assert responses["projection.bob.16"]["steered_here"] and not responses["projection.bob.20"]["steered_here"]


def test_a_missing_cell_leaves_its_pair_out_and_no_more():
    run = dose_run(without=("c0",))
    levels = build([ENTRIES["outcomes"]])[0].fit(run)["responses"][0]["levels"]
    assert [level["count"] for level in levels] == [39, 40, 40]
    assert levels[1]["pairs"] == 39


def test_an_axis_of_mixed_labels_is_stored_as_text_and_compared_by_its_labels():
    cells, _ = results(axis="layer_of", labels=("none", 3), items=4)
    for result in cells:
        result.cell.condition["layer_of"] = str(result.cell.condition["layer_of"])
    found = build([ENTRIES["outcomes"]])[0].fit(stored(cells, axis="layer_of", labels=("none", 3)))
    assert [level["count"] for level in found["responses"][0]["levels"]] == [16, 16]
    assert found["responses"][0]["levels"][1]["pairs"] == 16


def test_named_axes_are_compared_with_their_first_level():
    found = build([ENTRIES["outcomes"]])[0].fit(stored(RESULTS))
    assert found["baseline"] == "warm"
    score = found["responses"][0]
    assert score["slope"] is None and score["levels"][1]["difference"]["value"] == pytest.approx(-2.0, abs=0.1)


def test_finalize_writes_results_and_directions_that_a_next_run_can_name(tmp_path):
    run = stored(RESULTS, root=tmp_path, aggregate=(ENTRIES["directions"], ENTRIES["outcomes"]))
    written = finalize(run)
    assert read_results(tmp_path) == json.loads(json.dumps(written))
    direction = direction_of(run, f"run:{tmp_path}:residual:16", 24)
    assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-6)
    assert direction @ AXES[1] > 0.8
    _, provenance = read_directions(tmp_path)
    assert provenance["contrast"] == CONTRAST and provenance["directions"][0]["num_pos"] == 40
    assert finalize(run) == written
    spec = SteeringSpec.load(tmp_path / "aggregates/directions.safetensors")
    assert spec.layers == (8, 16) and np.allclose(spec.vector(16).numpy(), direction)


def test_a_direction_that_is_not_there_is_named(tmp_path):
    run = stored(RESULTS)
    with pytest.raises(ValueError, match=r"there is no .*directions\.safetensors"):
        direction_of(run, f"run:{tmp_path}:residual:16", 4)
    save_directions(open_store(tmp_path), "directions", {"residual.8": np.ones(4)}, {})
    with pytest.raises(ValueError, match=r"no 'residual.16' in .*it has: residual.8"):
        direction_of(run, f"run:{tmp_path}:residual:16", 4)
    with pytest.raises(ValueError, match="site has 5"):
        direction_of(run, f"run:{tmp_path}:residual:8", 5)


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("centroids", {}, "there are: difference_of_means"),
        ("directions", {}, "contrast"),
        ("directions", {"contrast": "framing == 'warm'"}, "expected 'vs'"),
        ("directions", {"contrast": "frame == 'warm' vs frame == 'cold'"}, "no column 'frame'.*framing"),
        ("directions", {"contrast": CONTRAST, "controls": ["mirror"]}, "there are: shuffled, random"),
        ("directions", {"contrast": CONTRAST, "split": "branch_seed"}, "finer than a trunk"),
        ("directions", {"contrast": CONTRAST, "folz": 3}, "folz"),
        ("outcomes", {"axis": "coef"}, "the grid has: framing"),
        ("outcomes", {"baseline": "hot"}, "it has: warm, cold"),
        ("outcomes", {"project": "somewhere"}, "possible: run:"),
        ("../../out", {"kind": "outcomes"}, "cannot name an aggregate"),
        ("a" * 10_000, {"kind": "outcomes"}, "cannot name an aggregate"),
    ],
)
def test_impossible_aggregates_are_refused_before_a_run(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        build([AggregateConfig(name=name, options=options)], stored(RESULTS).config)


def test_every_registered_aggregate_is_a_sum_or_a_fit():
    for entry in ENTRIES.values():
        made = build([entry])[0]
        assert made.name == entry.name and isinstance(made, Sum | Fit)


def test_moments_equal_numpy_and_count_what_they_leave_out():
    rows = np.stack([r.records[1].tensor[0].double().numpy() for r in RESULTS if r.cell.condition["framing"] == "warm"])
    made = build([ENTRIES["moments"]])[0]
    found = made.finish(fold(made, RESULTS))
    entry = next(e for e in found["moments"] if e["layer"] == 16 and e["by"] == {"framing": "warm"})
    assert entry["count"] == 40 and entry["removed"] == 0
    assert np.allclose(found["arrays"][f"{entry['key']}.mean"], rows.mean(0), atol=1e-12)
    assert np.allclose(found["arrays"][f"{entry['key']}.variance"], rows.var(0, ddof=1), atol=1e-12)
    assert entry["rms_norm"] == pytest.approx(np.sqrt((rows**2).sum(1).mean()))
    rows = np.stack([r.records[0].tensor[0].double().numpy() for r in RESULTS])
    kept = rows[np.linalg.norm(rows, axis=1) <= 12.0]
    made = build([ENTRIES["covariances"]])[0]
    entry = (found := made.finish(fold(made, RESULTS)))["moments"][0]
    assert entry["layer"] == 8 and entry["removed"] == 80 - len(kept) > 0 and entry["removed_mean_norm"] > 12
    assert np.allclose(found["arrays"][f"{entry['key']}.covariance"], np.cov(kept.T), atol=1e-12)


def test_logprobs_are_summed_by_token_and_messages_without_are_counted():
    cells, _ = results(items=2)
    for n, result in enumerate(cells):
        result.messages = [
            Message("bob", "hi", {"n_tokens": n + 1, "surprisal": [1.0 + n] * (n + 1), "entropy": [2.0] * (n + 1)})
        ]
    cells[0].messages = [Message("bob", "hi", {"n_tokens": 3})]
    made = build([ENTRIES["logprob_summary"]])[0]
    warm, cold = sorted(made.finish(fold(made, cells))["summary"], key=lambda e: e["by"]["framing"], reverse=True)
    tokens = np.concatenate(
        [[1.0 + n] * (n + 1) for n in range(len(cells)) if n and cells[n].cell.condition["framing"] == "warm"]
    )
    assert (warm["tokens"], warm["messages_without"], cold["messages_without"]) == (len(tokens), 1, 0)
    assert warm["surprisal"] == pytest.approx(tokens.mean()) and warm["surprisal_std"] == pytest.approx(
        tokens.std(ddof=1)
    )
    assert warm["perplexity"] == pytest.approx(np.exp(tokens.mean())) and warm["entropy"] == 2.0
