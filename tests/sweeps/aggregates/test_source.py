"""Which stored rows an aggregate reads and how they count: each option equals a plain computation in memory."""

import functools

import numpy as np
import pytest
import torch

import sweeps
from interlens.interp.activation_cache import ActivationRecord
from sweeps.aggregates import CellResult, registry, results
from sweeps.aggregates.recompute import recompute
from sweeps.config.schema import AggregateConfig
from sweeps.driver import enter
from sweeps.errors import ConfigError
from sweeps.folder.results import read_results
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk

CONTRAST = "framing == 'warm' vs framing == 'cold'"
CHOICES = {
    "answers": {"tokens": "answer"},
    "prompts": {"tokens": "prompt"},
    "lasts": {"tokens": "prompt", "pool": "last"},
    "by_token": {"tokens": "answer", "weight": "token"},
    "tokens": {"pool": None},
    "by_message": {"pool": None, "weight": "message"},
    "thoughts": {"pool": None, "phase": "reasoning"},
    "thoughts_by_message": {"pool": None, "phase": "reasoning", "weight": "message"},
    "small": {"pool": None, "max_norm": 4.0},
    "small_by_message": {"pool": None, "max_norm": 4.0, "weight": "message"},
}
ANSWER, PROMPT = "(phase(answer) - special())", "(prompt() - special())"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """24 cells; bob's rows are reasoning, then answer, of random lengths, some cells without reasoning."""
    entries = {f"{kind}.{name}": {"kind": kind, "permutations": 2, "draws": 50, "contrast": CONTRAST, **options}
               for name, options in CHOICES.items() for kind in ("difference_of_means",)}  # fmt: skip
    entries |= {f"moments.{name}": {"kind": "moments", "by": "framing", **o} for name, o in CHOICES.items()}
    config = talk.config(tmp_path_factory.mktemp("run"), aggregate=entries)
    enter.enter(config, config.run.dir)
    rng, kept = np.random.default_rng(0), []
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
        sums = registry.sums(registry.build(config.aggregate))
        states = {made.name: made.zero() for made in sums}
        for trunk in unit.trunks:
            writer.add_trunk(trunk.id, [talk.said("alice", "hi")])
        for cell in unit.cells:
            lengths = (int(rng.integers(0, 3)), int(rng.integers(1, 6)))
            rows = rng.standard_normal((sum(lengths), 8)).astype(np.float32) + (cell.condition["framing"] == "warm")
            prompt = rng.standard_normal((2, 8)).astype(np.float32)
            kept.append({"cell": cell, "rows": rows, "prompt": prompt, "lengths": lengths})
            records = [*of(rows, prompt, lengths)]
            for made in sums:
                result = CellResult(cell=cell, item_row=unit.items[cell.item], messages=[], records=records)
                made.add(states[made.name], result)
            writer.add_cell(cell, [talk.said("bob", "so")], records, {}, start=1)
        for made in sums:
            writer.add_sums(made.name, states[made.name])
        writer.commit()
    opened = sweeps.open(config.run.dir)
    results.finalize(opened)
    opened.kept = kept
    return opened


def of(rows, prompt, lengths):
    """What four captures of one message would keep."""
    first, total = lengths[0], sum(lengths)
    phases = {name: span for name, span in (("reasoning", (0, first)), ("answer", (first, total))) if span[0] < span[1]}
    where = {"message_idx": 1, "layer": 1, "site": "residual"}
    for tensor, pool, count, selection in (
        (rows[first:].mean(0)[None], "mean", lengths[1], ANSWER), (prompt.mean(0)[None], "mean", 2, PROMPT),
        (prompt[-1:], "last", 2, PROMPT), (rows, None, None, "(generated(0) - special())"),
    ):  # fmt: skip
        spans = {"answer": (0, 1)} if pool else phases
        yield ActivationRecord("bob", tensor=torch.tensor(tensor), token_span=(0, len(tensor)), phases=spans, pool=pool,
                               num_pooled=count, selection=selection, **where)  # fmt: skip


def plainly(cell, name):
    """(rows that count, how often each) of one cell, by hand."""
    first = cell["lengths"][0]
    rows = {"prompts": cell["prompt"].mean(0)[None], "lasts": cell["prompt"][-1:]}.get(name, cell["rows"])
    rows = cell["rows"][first:].mean(0)[None] if name in ("answers", "by_token") else rows
    rows = rows[:first] if name.startswith("thoughts") else rows
    rows = rows[np.linalg.norm(rows.astype(float), axis=1) <= 4.0] if name.startswith("small") else rows
    rows = rows.astype(np.float64)
    if name.endswith("by_message"):
        rows = rows.mean(0)[None] if len(rows) else rows[:0]
    return rows, np.full(len(rows), cell["lengths"][1] if name == "by_token" else 1)


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_of_rows_equals_a_plain_computation(run, name):
    results = read_results(run.root)
    means = {}
    for framing in ("warm", "cold"):
        pairs = [plainly(cell, name) for cell in run.kept if cell["cell"].condition["framing"] == framing]
        rows, times = (np.concatenate(part) for part in zip(*pairs, strict=True))
        means[framing] = np.average(rows, axis=0, weights=times)
        entry = next(e for e in results[f"moments.{name}"]["moments"] if e["by"] == {"framing": framing})
        assert entry["count"] == times.sum()
        spread = np.average((rows - means[framing]) ** 2, axis=0, weights=times).sum() * times.sum() / (times.sum() - 1)
        assert entry["total_variance"] == pytest.approx(spread, rel=1e-6)
    found = results[f"difference_of_means.{name}"]
    (entry,) = found["directions"]
    assert entry["norm"] == pytest.approx(np.linalg.norm(means["warm"] - means["cold"]), rel=1e-6)
    assert found["weight"] == ("token" if name in ("by_token", "tokens", "thoughts", "small") else "message")
    messages = sum(len(plainly(cell, name)[0]) > 0 for cell in run.kept)
    assert entry["evaluation"]["rows"] == messages and entry["evaluation"]["auroc"]["groups"] == 3
    if name.startswith("small"):
        left = sum((np.linalg.norm(cell["rows"], axis=1) > 4.0).sum() for cell in run.kept)
        assert entry["removed"] == left > 0 and entry["evaluation"]["removed"] == left


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_streams_as_it_is_recomputed(run, name):
    for kind in ("difference_of_means", "moments"):
        entry = next(entry for entry in run.config.aggregate if entry.name == f"{kind}.{name}")
        made = registry.build([entry], run.config)[0]
        streamed = functools.reduce(made.merge, [dict(s) for s in run.sums(entry.name)], made.zero())
        again = recompute(run, made)
        assert streamed.keys() == again.keys() and streamed
        for key, value in streamed.items():
            assert np.abs(value - again[key]).max() <= 1e-12 * max(np.abs(value).max(), 1.0), key


def test_captures_with_one_pool_are_kept_apart_and_named_apart(run):
    entry = AggregateConfig(name="both", options={"kind": "difference_of_means", "contrast": CONTRAST, "draws": 20,
                                                  "permutations": 0})  # fmt: skip
    found = results.finalize(run, [entry])["both"]
    assert [e["selection"] for e in found["directions"]] == [ANSWER, PROMPT]
    answers = read_results(run.root)["difference_of_means.answers"]["directions"][0]
    assert found["directions"][0]["norm"] == answers["norm"]
    assert found["directions"][0]["tensor"] == f"residual.1@bob.mean#{ANSWER}"
    probes = results.finalize(
        run, [AggregateConfig(name="probe_eval", options={**entry.options, "kind": "probe_eval"})]
    )
    assert {(p["selection"], p["method"]) for p in probes["probe_eval"]["probes"]} == {
        (selection, method) for selection in (ANSWER, PROMPT) for method in ("difference_of_means", "lda", "logistic")
    }


def test_sums_of_an_earlier_version_are_recomputed(run, monkeypatch):
    """Their places had no selection."""
    name = "difference_of_means.answers"
    earlier = [{key.replace(f"#{ANSWER}", ""): value for key, value in state.items()} for state in run.sums(name)]
    monkeypatch.setattr(run, "sums", lambda name: iter(earlier))
    before = read_results(run.root)[name]
    results.finalize(run)
    assert read_results(run.root)[name]["directions"] == before["directions"]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"pool": "median"}, "pool is 'median'; possible: null, mean, last, max"),
        ({"phase": "answer"}, "phase: answer chooses among tokens"),
        ({"pool": None, "phase": "thought"}, "phase is 'thought'; possible: null, prompt, reasoning, answer"),
        ({"pool": "last", "weight": "token"}, "weight: token needs means or tokens"),
        ({"tokens": "anwser"}, "cannot read 'anwser'"),
        ({"kind": "lda", "weight": "token"}, "lda fits messages"),
    ],
)
def test_impossible_choices_are_refused(tmp_path, options, complaint):
    given = {"kind": "difference_of_means", "contrast": CONTRAST, **options}
    with pytest.raises(ConfigError, match=complaint):
        talk.config(tmp_path, aggregate={"x": given})


def built(kind, **options):
    return registry.build([AggregateConfig(name=kind, options=options)])[0]


def alone(run, made, *records):
    """The finished moments of one cell with these records."""
    cell, state = run.kept[0]["cell"], made.zero()
    made.add(state, CellResult(cell=cell, item_row={"id": cell.item}, messages=[], records=list(records)))
    return made.finish(state)["moments"]


@pytest.mark.parametrize("weight", ["token", "message"])
def test_rows_that_are_no_numbers_are_counted_whatever_filters(run, weight):
    rows = np.ones((3, 8), np.float32)
    rows[1], rows[2, 0] = np.nan, np.inf
    *_, unpooled = of(rows, rows[:2], (0, 3))
    for limit in (None, 100.0):
        made = built("moments", by="framing", pool=None, weight="token", max_norm=limit)
        (entry,) = alone(run, made, unpooled)
        assert (entry["count"], entry["non_finite"], entry["removed"]) == (1, 2, 0)
        assert entry["removed_mean_norm"] is None
    (entry,) = alone(run, built("moments", by="framing", pool=None, weight=weight, max_norm=2.0), unpooled)
    assert entry["removed"] == 1 and entry["non_finite"] == 2


def test_streamed_and_recomputed_have_the_same_entries_where_a_phase_is_empty(run):
    rows = np.ones((3, 8), np.float32)
    *_, unpooled = of(rows, rows[:2], (0, 3))
    assert alone(run, built("moments", by="framing", pool=None, phase="reasoning"), unpooled) == []
