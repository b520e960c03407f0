"""The engine's first laws, on every family: how requests share forwards changes nothing that they are answered.

Each family's requests are answered once by full recomputation with hand-written hooks; every way to run them through an
engine has to give that.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec, Select
from interlens.interp.select import Layout
from interlens.reasoning import Markers
from tests.support.reference import (
    MAIN,
    check,
    forward,
    generate,
    model_of,
    patch,
    phases,
    prompt,
    same,
    steer,
    tolerance,
)
from tests.support.tiny import FAMILIES

RESIDUALS = tuple((layer, "residual") for layer in range(3))
MARKERS = Markers(open=tuple((t,) for t in range(3, 100, 3)), close=tuple((t,) for t in range(4, 100, 3)))
LAYOUT = Layout(markers=MARKERS)


def answer(ids, num_prompt, layout):
    return [p for p, name in enumerate(phases(ids, num_prompt, layout)) if name == "answer"]


def windows(ids, num_prompt, layout):
    return [p for p in range(len(ids)) if p < num_prompt or num_prompt + 2 <= p < num_prompt + 9]


@cache
def workload(family: str):
    """Requests that differ in everything, the same edits by hand, and their answers by full recomputation."""
    hot = dict(temperature=1.3, top_p=0.9)
    first = prompt(45, 1)
    plans = [
        (prompt(3, 0), dict(temperature=0.0), []),
        (first, dict(**hot), []),
        ((*first[:40], *prompt(9, 2)), dict(temperature=1.0, top_p=None, top_k=7), [steer(1, (0, 2), 1.5, each=True)]),
        ((*first[:40], *prompt(4, 3)), dict(**hot), [steer(2, (1,), 1.0, "ablate"), steer(3, (1,), 0.4, "norm_add")]),
        (prompt(11, 4), dict(temperature=0.7, top_p=None),
         [patch((2, 5, -1, 13), 1), steer(4, (1,), 2.0, tokens=Select.phase("answer"), at=answer)]),
        (prompt(1, 5), dict(**hot),
         [steer(5, (2,), 1.0, "replace", Select.window(-1, 1) | Select.window(2, 9, "generated"), windows)]),
        ((*first[:40], *prompt(4, 3)), dict(temperature=1.0, top_p=0.8, max_new_tokens=4), []),
    ]  # fmt: skip
    requests, runs = [], []
    for number, (tokens, sampling, pairs) in enumerate(plans):
        sampling = Sampling(**{"max_new_tokens": 5, **sampling})
        requests.append(
            Request(
                tokens=tokens, sampling=sampling, key=(family, number), layout=LAYOUT, logprobs=True, keep="bob",
                interventions=tuple(spec for spec, _ in pairs), capture=(CaptureSpec(),),
            )
        )  # fmt: skip
        runs.append(generate(model_of(family), requests[-1], [hand for _, hand in pairs], RESIDUALS))
    return model_of(family), requests, runs


def checked(engine, family, order=None):
    model, requests, runs = workload(family)
    order = list(range(len(requests))) if order is None else order
    for number, reply in zip(order, engine.run([requests[i] for i in order]), strict=True):
        check(reply, runs[number], model)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_answered_as_by_full_recomputation(family):
    engine = checked(Engine(model_of(family), reuse=False), family)
    assert engine.counters["reused_tokens"] == 0
    assert engine._collector.bytes_held == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_shuffled_forked_and_reused_it_is_the_same(family):
    order = list(range(7))
    random.Random(1).shuffle(order)
    engine = checked(Engine(model_of(family), rows=3, chunk=16), family, order)
    before = engine.counters["prefill_tokens"]
    checked(engine, family)
    if engine._forward.forkable:
        assert engine.counters["reused_tokens"] > 0 and engine.counters["recomputed_tokens"] > 0
        assert engine.counters["prefill_tokens"] - before < before / 3
    assert engine._collector.bytes_held == 0


@pytest.mark.parametrize("family", MAIN)
def test_one_by_one_few_rows_and_short_chunks_change_nothing(family):
    engine = Engine(model_of(family), rows=1, reuse=False)
    for number in range(7):
        checked(engine, family, [number])
    for settings in (dict(rows=2), dict(chunk=1, reuse=False), dict(rows=5, chunk=3)):
        checked(Engine(model_of(family), **settings), family)


@pytest.mark.parametrize("family", MAIN)
def test_capture_changes_nothing(family):
    model, requests, _ = workload(family)
    bare = [replace(request, capture=()) for request in requests]
    for reuse in (False, True):
        with_capture, without = Engine(model, reuse=reuse).run(requests), Engine(model, reuse=reuse).run(bare)
        for one, other in zip(with_capture, without, strict=True):
            same(replace(one, records=[]), other, model)


@pytest.mark.parametrize("family", MAIN)
def test_a_clean_capture_is_a_plain_forward_of_what_was_said(family):
    model, requests, _ = workload(family)
    clean = [replace(r, capture=(CaptureSpec(layers=(0, 2), source="clean"),)) for r in requests]
    for reply, request in zip(Engine(model).run(clean), requests, strict=True):
        plain = forward(model, (*request.tokens, *reply.tokens), len(request.tokens), keep=RESIDUALS)
        assert [r.layer for r in reply.records] == [0, 2]
        for record in reply.records:
            assert record.fingerprint == "" and len(record.tensor) == len(plain.ids)
            torch.testing.assert_close(record.tensor, plain.states[record.layer, "residual"], **tolerance(model))


@pytest.mark.parametrize("start", [0, 8, 12, 14, 40])
def test_a_branch_may_begin_anywhere_also_in_what_is_still_to_be_said(start):
    model, layout = model_of("llama"), Layout(branch_start=start, special_ids=frozenset(range(50)))
    branch = Select.branch()

    def at(ids, n, _):
        return range(min(start, len(ids)), len(ids))

    def outside(ids, n, _):
        return [p for p in range(n, len(ids)) if ids[p] >= 50]

    pairs = [
        [steer(1, (-1, 0), 1.5, tokens=branch, at=at)],
        [steer(2, (-2,), 1.0, "ablate", Select.generated() - Select.special(), outside), steer(3, (1,), 1.0)],
    ]
    asked = [
        Request(
            tokens=prompt(12, i), key=("b", i), layout=layout, logprobs=True, interventions=tuple(s for s, _ in each),
            sampling=Sampling(temperature=1.0, max_new_tokens=6), capture=(CaptureSpec(tokens=branch),),
        )
        for i, each in enumerate(pairs)
    ]  # fmt: skip
    for reply, each, hands in zip(Engine(model, chunk=5).run(asked), asked, pairs, strict=True):
        run = generate(model, each, [hand for _, hand in hands], RESIDUALS)
        check(reply, run, model)
        assert [len(record.tensor) for record in reply.records] == ([18 - start] * 3 if start < 18 else [])
