"""Routing sums equal the library's statistics of the same tokens, in any split; the picks are the router's own."""

import json

import numpy as np
import pytest
import torch

from interlens.interp.activation_cache import ActivationRecord
from interlens.interp.expert_load import js_divergence, routing_stats
from interlens.interp.routing import capture_router_logits, moe_num_experts, routing_of
from sweeps.aggregates import CellResult, Sum, build
from sweeps.config import AggregateConfig, CaptureConfig, ParticipantConfig, ScenarioConfig, SweepConfig
from sweeps.plan import Cell
from sweeps.report.results import SECTIONS
from tests.tiny import tiny


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
                cell=cell, item_row={}, messages=[], records=records, routing=lambda r: routing_of(model, [r])[0]
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
        assert np.allclose([e["mass"] for e in entries], whole.expert_mass, atol=1e-6)
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
    with pytest.raises(ValueError, match="needs the model"):
        made.add(whole, results[0])
    assert whole == before


def test_a_configuration_without_router_captures_is_refused():
    scenario = ScenarioConfig(participants={"bob": ParticipantConfig(model="tiny")})
    with pytest.raises(ValueError, match="capture site router without a pool"):
        build([AggregateConfig(name="routing_stats")], SweepConfig(scenario=scenario))
    ready = SweepConfig(scenario=scenario, capture=(CaptureConfig(participants=("bob",), sites=("router",)),))
    assert build([AggregateConfig(name="routing_stats")], ready)[0].name == "routing_stats"
