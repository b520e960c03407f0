"""Routing sums equal the library's statistics of the same tokens, in any split; the picks are the router's own."""

import functools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

import sweeps
from interlens.interp.activation_cache import ActivationRecord
from interlens.interp.expert_load import js_divergence, routing_stats
from interlens.interp.routing import capture_router_logits, moe_num_experts, routing_of
from interlens.loading import load
from sweeps.aggregates import CellResult, Sum
from sweeps.aggregates.recompute import recompute
from sweeps.aggregates.registry import build
from sweeps.config.schema import AggregateConfig, CaptureConfig, ParticipantConfig, ScenarioConfig, SweepConfig
from sweeps.driver import entry as driver_entry
from sweeps.folder.cells import Cell
from sweeps.folder.results import read_results
from sweeps.folder.verify import verify
from sweeps.replica.routing import routing_rows
from sweeps.report.sections import SECTIONS
from tests.support import small
from tests.support.tiny import tiny
from tests.support.tokenizers import CHATML, make


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v3"])
def model(request):
    return tiny(request.param)


def cells(model, n=6, tokens=7):
    made, captures = [], []
    generator = torch.Generator().manual_seed(0)
    for i in range(n):
        ids = torch.randint(5, 40, (1, tokens), generator=generator)
        kept = capture_router_logits(model, ids)
        framing = ("warm", "cold")[i % 2]
        records = [
            ActivationRecord(
                "bob", 2, c.layer, "router", c.router_logits, (3, tokens), {"prompt": (0, 3), "answer": (3, tokens)}
            )
            for c in kept
        ]
        cell = Cell(
            id=f"c{i}", item="i", trunk="t", condition={"framing": framing}, trunk_seed=0, branch_seed=i, unit="u"
        )
        made.append(
            CellResult(
                cell=cell,
                item_row={},
                messages=[],
                records=records,
                routing=routing_rows(records, lambda r: routing_of(model, [r])[0]),
            )
        )
        captures.append((framing, kept))
    return made, captures


def aggregate(**options):
    return build([AggregateConfig(name="routing_stats", options=options)])[0]


def fold(made, results):
    state = made.zero()
    for result in results:
        made.add(state, result)
    return state


def test_sums_equal_the_statistics_of_all_tokens(model):
    results, captures = cells(model)
    made = aggregate(phases=["answer", "prompt"])
    assert isinstance(made, Sum)
    found = made.finish(fold(made, results))
    experts = moe_num_experts(model)
    for framing in ("warm", "cold"):
        whole = None
        for _, kept in (c for c in captures if c[0] == framing):
            one = routing_stats(kept, experts, spans=[(3, 7)])
            whole = one if whole is None else whole.merge(one)
        entries = [e for e in found["routing"] if e["by"] == {"framing": framing} and e["phase"] == "answer"]
        assert [e["layer"] for e in entries] == list(whole.layers)
        assert np.allclose([e["load"] for e in entries], whole.expert_load, atol=1e-12)
        assert np.allclose([e["mass"] for e in entries], whole.expert_mass, atol=2**-11), "rounded to float16"
        assert all(e["tokens"] == whole.n_tokens == 12 and e["top_k"] == whole.top_k for e in entries)
    compared = next(c for c in found["comparisons"] if c["phase"] == "answer")
    loads = [e["load"] for e in found["routing"] if (e["phase"], e["layer"]) == ("answer", compared["layer"])]
    assert compared["js_divergence"] == pytest.approx(
        float(js_divergence(np.array([loads[0]]), np.array([loads[1]]))[0])
    )
    assert "JS divergence" in SECTIONS["routing_stats"](json.loads(json.dumps(found)))


def test_any_split_agrees_and_failed_cells_change_nothing(model):
    results, _ = cells(model)
    made = aggregate()
    whole = fold(made, results)
    split = made.merge(fold(made, results[4:]), made.merge(fold(made, results[:1]), fold(made, results[1:4])))
    assert whole.keys() == split.keys()
    assert all(np.allclose(whole[key], split[key], rtol=1e-12, atol=0) for key in whole)
    results[0].routing = None
    before = dict(whole)
    with pytest.raises(ValueError, match="no routing was recorded"):
        made.add(whole, results[0])
    assert whole == before


def test_a_configuration_without_router_captures_is_refused():
    scenario = ScenarioConfig(participants={"bob": ParticipantConfig(model="tiny")})
    with pytest.raises(ValueError, match="capture site router without a pool"):
        build([AggregateConfig(name="routing_stats")], SweepConfig(scenario=scenario))
    ready = SweepConfig(scenario=scenario, capture=(CaptureConfig(participants=("bob",), sites=("router",)),))
    assert build([AggregateConfig(name="routing_stats")], ready)[0].name == "routing_stats"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A sweep of a tiny mixture of experts: routers of two layers captured twice, trunk included, a row per message."""
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = make(CHATML, eos="<|im_end|>", special=("<|im_start|>",))
    tiny("mixtral", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    both = {"participants": ["bob"], "sites": ["router"], "layers": [0, 2], "turns": "all", "routing": "message"}
    config = small.settings(
        folder / "tiny", scenario__branch={"turns": 4, "seeds": 2}, intervention=[], unit_cells=6,
        capture=[{**both, "tokens": "answer"}, {**both, "tokens": "generated"}],
        aggregate={"routing_stats": {"by": ["framing"]}, "seeds": {"kind": "routing_stats", "by": "branch_seed"}},
    )  # fmt: skip
    assert driver_entry.run(config, folder / "run") == 0
    return sweeps.open(folder / "run")


def test_a_run_keeps_the_routing_of_every_message(run):
    rows = run.table("routing").to_pylist()
    assert {(r["participant"], r["phase"], r["layer"], r["top_k"]) for r in rows} == {
        ("bob", "answer", layer, 2) for layer in (0, 2)
    }
    assert run.table("routing").schema.field("mass").type.value_type == pa.float16()
    cell = run.cells["cell"][0].as_py()
    for index in (2, 5, 7):  # bob speaks in the trunk, and twice in the branch
        own = {"trunk": run.plan_row(cell)["trunk"], "cell": None} if index == 2 else {"cell": cell}
        kept = run.query(**own, message_idx=index, layer=2, selection="(generated(0) - special())")[0]
        row = next(r for r in rows if r["message_idx"] == index and r["layer"] == 2 and own.items() <= r.items())
        assert row["tokens"] == len(kept.tensor) and sum(row["counts"]) == 2 * row["tokens"]
        model = load(str(run.root.parent / "tiny"), dtype="float32").model
        capture = routing_of(model, [kept])[0]
        picks = np.bincount(capture.topk_experts.long().reshape(-1), minlength=6)
        assert row["counts"] == picks.tolist(), "a token that two captures kept counts once"
        assert np.allclose(row["mass"], capture.router_logits.softmax(-1).mean(0), atol=1e-3)
    assert verify(run.root, deep=True).ok


def test_routing_is_found_by_condition_and_agrees_with_the_sum(run):
    entries = [e for e in read_results(run.root)["routing_stats"]["routing"] if e["by"] == {"framing": "warm"}]
    stats = run.routing_stats(framing="warm", participant="bob")
    assert stats.layers == (0, 2) and stats.n_tokens == entries[0]["tokens"]
    assert np.allclose(stats.expert_load, [e["load"] for e in entries], atol=1e-12)
    assert np.allclose(stats.expert_mass, [e["mass"] for e in entries], atol=1e-12)
    assert run.routing_stats(cell=None).n_tokens + run.routing_stats(item=["i0", "i1", "i2"]).n_tokens == (
        run.routing_stats().n_tokens
    ), "a trunk's own rows belong to no cell"


@pytest.mark.parametrize("name", ["routing_stats", "seeds"])
def test_recomputed_without_a_model_equals_streamed(run, name):
    entry = next(entry for entry in run.config.aggregate if entry.name == name)
    made = build([entry], run.config)[0]
    streamed = functools.reduce(made.merge, [dict(s) for s in run.sums(name)], made.zero())
    again = recompute(run, made)
    assert streamed.keys() == again.keys() and streamed
    assert all(np.allclose(streamed[key], again[key], rtol=1e-12, atol=0) for key in streamed)
