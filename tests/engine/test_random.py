"""Whatever is asked, in whatever order and company: an engine answers as a full recomputation of each request would."""

import os
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec
from tests.engine.test_faults import Own, raises
from tests.engine.test_interventions import LAYOUT, MODES, SELECTIONS
from tests.engine.test_out_of_memory import Gasping
from tests.support.reference import check, forward, generate, model_of, patch, prompt, steer, tolerance

KEEP = tuple((layer, "residual") for layer in range(3))
SAMPLINGS = (
    Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.5, top_p=None),
    Sampling(temperature=0.7, top_k=8), Sampling(temperature=1.0, stop_ids=tuple(range(3, 20))),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One request in few numbers, so that equal ones are recomputed once."""

    shared: int
    own: int
    new: int
    sampling: int
    edits: tuple[tuple[int, ...], ...]
    takes: tuple[tuple[int, str | None], ...]
    keep: bool
    clean: bool
    fault: int | None = None
    """Number of the selection at which an edit of this request raises."""

    @property
    def faults(self):
        return () if self.fault is None else (Own(raises, layers=(1,), tokens=SELECTIONS[self.fault][0]),)

    @property
    def request(self):
        return Request(
            tokens=(*prompt(40, 7)[: self.shared], *prompt(self.own, self.own)), key=("x", self.own, self.sampling),
            sampling=replace(SAMPLINGS[self.sampling], max_new_tokens=self.new), layout=LAYOUT, logprobs=True,
            interventions=(*(spec for spec, _ in self.pairs), *self.faults), keep="bob" if self.keep else None,
            capture=tuple(
                CaptureSpec(layers=(0, 2), tokens=SELECTIONS[i][0], pool=pool, source="clean" if self.clean else "run")
                for i, pool in self.takes
            ),
        )  # fmt: skip

    @property
    def pairs(self):
        made = []
        for kind, selection, layer, seed in self.edits:
            if kind == len(MODES):
                positions = {seed, 9 + selection % 5}
                if self.shared + self.own - 2 not in positions:
                    positions.add(-2)
                made.append(patch(sorted(positions), layer, seed))
            else:
                tokens, at = SELECTIONS[selection]
                layers = (layer,) if seed else (layer, (layer + 1) % 3)
                made.append(steer(seed, layers, 1.1, MODES[kind], tokens, at, each=seed % 2 == 1))
        return made


PLANS = st.builds(
    Plan,
    shared=st.sampled_from([0, 0, 17, 20, 36, 40]),
    own=st.integers(10, 24),
    new=st.integers(0, 6),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    edits=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, len(SELECTIONS) - 1), st.integers(0, 2), st.integers(0, 3)),
        max_size=3,
    ).map(tuple),
    takes=st.lists(
        st.tuples(st.integers(0, len(SELECTIONS) - 1), st.sampled_from([None, None, "mean", "last", "max"])), max_size=2
    ).map(tuple),
    keep=st.booleans(),
    clean=st.booleans(),
    fault=st.sampled_from([None] * 9 + list(range(len(SELECTIONS)))),
)


@cache
def answers(family: str, plan: Plan):
    """(the edited run, the same tokens without edits)."""
    model, ordered = model_of(family), sorted(plan.pairs, key=lambda pair: pair[0].rank)
    run = generate(model, plan.request, [hand for _, hand in ordered], KEEP)
    return run, forward(model, run.ids, run.num_prompt, keep=KEEP)


def agrees(family, plan, reply):
    run, plain = answers(family, plan)
    model = model_of(family)
    records, reply.records = reply.records, []
    check(reply, run, model)
    expected = [
        (selection, pool, layer)
        for selection, pool in plan.takes
        for layer in (0, 2)
        if list(SELECTIONS[selection][1](run.ids, run.num_prompt, LAYOUT))
    ]
    assert len(records) == len(expected)
    for record, (selection, pool, layer) in zip(records, expected, strict=True):
        rows = list(SELECTIONS[selection][1](run.ids, run.num_prompt, LAYOUT))
        value = (plain if plan.clean else run).states[layer, "residual"][rows]
        pooled = {"mean": value.mean(0)[None], "last": value[-1:], "max": value.amax(0)[None]}
        tol = tolerance(model) if pool is None else dict(rtol=1e-3, atol=3e-4)
        torch.testing.assert_close(record.tensor.double(), pooled.get(pool, value).double(), **tol)
        assert record.positions == tuple(rows) and (record.layer, record.pool) == (layer, pool)
    end = len(run.ids) - (len(run.ids) > run.num_prompt)  # the last generated position feeds nothing
    modified = [sum(p < end for p in hand.at(run.ids, run.num_prompt, LAYOUT)) for _, hand in plan.pairs]
    assert reply.tokens_modified[: len(modified)] == tuple(modified)


@st.composite
def scenes(draw):
    plans = draw(st.lists(PLANS, min_size=1, max_size=7))
    when = [draw(st.integers(0, 6)) for _ in plans]
    stop = [draw(st.sampled_from([None, None, None, 0, 2, 5])) for _ in plans]
    options = dict(
        rows=draw(st.integers(1, 6)), chunk=draw(st.sampled_from([1, 3, 8, 512])), reuse=draw(st.booleans()),
        budget=draw(st.sampled_from([None, None, 80, 150])),
    )  # fmt: skip
    oom = draw(st.sampled_from([(), (), (), (2,), (5,), (3, 9)]))
    return plans, when, stop, options, draw(st.sampled_from([None, None, 3, 8])), oom


def play(family, scene):
    plans, when, stop, options, rewind, oom = scene
    engine, tickets = Gasping(model_of(family), **options), {}
    engine.when = oom
    for step in range(1500):
        for i, plan in enumerate(plans):
            if when[i] == step:
                tickets[i] = engine.submit(plan.request)
            if i in tickets and stop[i] is not None and step == when[i] + stop[i]:
                engine.cancel(tickets[i])
        if step == rewind:
            engine.rewind()
        worked = engine.step()
        if len(tickets) == len(plans) and not worked:
            break
    judge(family, engine, plans, tickets, stop, options, oom)


def judge(family, engine, plans, tickets, stop, options, oom):
    for i, plan in enumerate(plans):
        reply = tickets[i].reply
        assert reply is not None, i
        if stop[i] is not None and isinstance(reply.error, RuntimeError):
            run = answers(family, replace(plan, fault=None))[0]
            assert reply.tokens == run.tokens[: len(reply.tokens)] and reply.records == []
        elif isinstance(reply.error, ZeroDivisionError):
            run = answers(family, replace(plan, fault=None))[0]
            assert list(SELECTIONS[plan.fault][1](run.ids, run.num_prompt, LAYOUT)) and reply.records == []
            assert reply.tokens == run.tokens[: len(reply.tokens)]
        elif isinstance(reply.error, MemoryError):
            assert "with a single row" in str(reply.error) and engine.counters["out_of_memory"] > 0
        elif any(edit[0] == len(MODES) for edit in plan.edits) and isinstance(reply.error, ValueError):
            wanted = [p for spec, _ in plan.pairs for p in spec.required_positions(len(plan.request.tokens))]
            assert max(wanted) >= len(plan.request.tokens) + len(reply.tokens)
        else:
            agrees(family, replace(plan, fault=None), reply)
    assert engine._collector.bytes_held == 0
    assert engine._table.live == [] and not engine._table.groups and not engine._waiting
    if options["budget"]:
        assert engine._table.allocated + engine.memory.parked_columns <= options["budget"]
    np.testing.assert_equal(engine.counters["requests"], len(plans))


MORE = int(os.environ.get("INTERLENS_SCENES", "1"))
"""This many times the usual number of scenes, and other ones each time if not 1."""
COMMON = dict(deadline=None, derandomize=MORE == 1, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@settings(max_examples=30 * MORE, **COMMON)
@given(scenes())
def test_any_scene_with_full_attention(scene):
    play("llama", scene)


@settings(max_examples=10 * MORE, **COMMON)
@given(scenes())
def test_any_scene_with_sliding_windows(scene):
    play("gemma3", scene)


@settings(max_examples=10 * MORE, **COMMON)
@given(scenes())
def test_any_scene_with_experts(scene):
    play("mixtral", scene)
