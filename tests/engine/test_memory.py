"""Nothing is computed twice, and nothing computed under one edit is ever used under another."""

from dataclasses import replace

import pytest
import torch

from interlens.engine.engine import Engine
from interlens.engine.forward import Batch, Forward
from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec, Select
from interlens.interp.select import Layout
from tests.support.reference import check, drain, generate, model_of, patch, prompt, same, steer
from tests.support.tiny import FAMILIES, tiny

SOME = ("llama", "gemma3", "mixtral")
TRUNK = prompt(50, 100)
WARM = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=6)
RESIDUALS = tuple((layer, "residual") for layer in range(3))


def request(tokens, number=0, pairs=(), **options):
    return Request(
        **{"tokens": tuple(tokens), "sampling": WARM, "key": ("m", number), "logprobs": True, "keep": "bob",
           "interventions": tuple(spec for spec, _ in pairs), **options}
    )  # fmt: skip


def reference(model, asked, pairs=()):
    return generate(model, asked, [hand for _, hand in pairs], RESIDUALS)


def spent(engine, requests):
    """Replies, and (prefilled, reused) tokens that they took."""
    before = engine.counters["prefill_tokens"], engine.counters["reused_tokens"]
    replies = drain(engine, [engine.submit(each) for each in requests])
    return replies, (engine.counters["prefill_tokens"] - before[0], engine.counters["reused_tokens"] - before[1])


def branch(lead):
    """Positions from the end of the trunk on, and the selection of them."""
    return dict(tokens=Select.branch(), at=lambda ids, n, layout: range(lead, len(ids)))


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_of_a_trunk_compute_it_once(family):
    model = model_of(family)
    engine = Engine(model)
    if not engine._forward.forkable:
        pytest.skip("this family's state cannot be forked")
    layout = Layout(branch_start=50)
    plans = [[], [steer(1, (0, 1), 1.5, **branch(50))], [steer(2, (2,), 1.0, "ablate", **branch(50))], [], []]
    asked = [request((*TRUNK, *prompt(3 + i, i)), i, pairs, layout=layout) for i, pairs in enumerate(plans)]
    replies, (prefilled, reused) = spent(engine, asked)
    for reply, each, pairs in zip(replies, asked, plans, strict=True):
        check(reply, reference(model, each, pairs), model)
    assert prefilled == 50 + sum(3 + i for i in range(5)) and reused == 4 * 50


@pytest.mark.parametrize("family", SOME)
def test_a_prefix_computed_under_one_edit_is_never_used_under_another(family):
    model, engine = model_of(family), Engine(model_of(family))
    plans = [
        [], [steer(1, (0,), 1.5)], [steer(1, (0,), 1.6)], [steer(1, (1,), 1.5)], [steer(1, (0,), 1.5, "norm_add")],
        [steer(2, (0,), 1.5)], [steer(1, (0,), 1.5), steer(1, (0,), 1.5)], [patch((0,), 0, 1)], [patch((0,), 0, 2)],
        [steer(1, (0,), 1.5, site="resid_pre")],
    ]  # fmt: skip
    for number, pairs in enumerate(plans):
        ordered = sorted(pairs, key=lambda pair: pair[0].rank)
        asked = request(TRUNK[:40], 0, pairs, capture=(CaptureSpec(),), sampling=replace(WARM, max_new_tokens=3))
        run = reference(model, asked, ordered)
        for turn in range(2):
            (reply,), (prefilled, reused) = spent(engine, [asked])
            check(reply, run, model)
            assert (prefilled, reused) == ((1, 39) if turn else (40, 0)), (number, turn)
    assert reply.counters["recomputed_tokens"] == 39


def test_prefixes_are_shared_up_to_the_first_position_that_is_edited_otherwise():
    model, engine = model_of("llama"), Engine(model_of("llama"))
    spent(engine, [request(TRUNK, 0, layout=Layout(branch_start=40))])
    cases = [
        ([steer(1, **branch(40))], 40), ([steer(1, tokens=Select.positions(33), at=lambda *_: [33])], 33),
        ([steer(1, tokens=Select.generated(), at=lambda ids, n, _: range(n, len(ids)))], 49),
        ([patch((20, 45), 1)], 20), ([patch((3,), 1)], 0), ([steer(5, coef=0.0)], 49), ([patch((52,), 2)], 49),
    ]  # fmt: skip
    for number, (pairs, shared) in enumerate(cases, start=1):
        asked = request(TRUNK, number, pairs, layout=Layout(branch_start=40), keep=None)
        (reply,), (prefilled, reused) = spent(engine, [asked])
        check(reply, reference(model, asked, pairs), model)
        assert (prefilled, reused) == (50 - shared, shared), number


@pytest.mark.parametrize("family", SOME)
def test_a_conversation_steered_from_its_start_reuses_its_own_keys_and_values(family):
    model, engine = model_of(family), Engine(model_of(family))
    pairs = [steer(3, (0, 2), 1.2)]
    ids, computed = prompt(20, 7), 0
    for turn in range(5):
        asked = request(ids, turn, pairs)
        (reply,), (prefilled, _) = spent(engine, [asked])
        check(reply, reference(model, asked, pairs), model)
        computed += prefilled + reply.counters["decode_tokens"]
        ids = (*ids, *reply.tokens, *prompt(4, 50 + turn))
    assert computed <= 1.02 * len(ids)
    assert len(engine.memory) == 1


@pytest.mark.parametrize("family", SOME)
def test_a_live_row_is_forked_while_it_decodes(family):
    model = model_of(family)
    engine = Engine(model, rows=8)
    first = request(TRUNK, 0, sampling=replace(WARM, max_new_tokens=30), keep=None)
    ticket = engine.submit(first)
    for _ in range(6):
        engine.step()
    pairs = [steer(1, (1,), 2.0, tokens=Select.generated(), at=lambda ids, n, _: range(n, len(ids)))]
    others = [request((*TRUNK, 5, 6), 1), request(TRUNK[:30], 2), request(TRUNK, 3, pairs)]
    replies, (_, reused) = spent(engine, others)
    assert reused == 50 + 29 + 49 and ticket.reply is None
    for reply, asked, hands in zip(replies, others, ([], [], pairs), strict=True):
        check(reply, reference(model, asked, hands), model)
    check(drain(engine, [ticket])[0], reference(model, first), model)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_small_budget_evicts_and_requeues_but_changes_nothing(family):
    model = model_of(family)
    plans = [[steer(i, (1,), 1.0)] if i % 3 == 1 else [] for i in range(7)]
    asked = [
        request((*TRUNK[:20], *prompt(2 * i, i)), i, pairs, keep=f"p{i % 4}", capture=(CaptureSpec(),))
        for i, pairs in enumerate(plans)
    ]
    whole = Engine(model, reuse=False).run(asked)
    for budget in (45, 130, 1000):
        engine = Engine(model, rows=6, budget=budget)
        for _ in range(2):
            replies = drain(engine, [engine.submit(each) for each in asked])
            for one, other in zip(replies, whole, strict=True):
                same(one, other, model)
            assert engine._table.allocated + engine.memory.parked_columns <= budget
        assert engine._collector.bytes_held == 0
        assert budget > 130 or engine.memory.evictions > 0


def test_a_row_that_no_budget_holds_is_its_own_error():
    model = model_of("llama")
    asked = [request(prompt(10, 1), 1), request(prompt(60, 2), 2), request(prompt(12, 3), 3)]
    asked.append(request(prompt(10, 4), 4, sampling=replace(WARM, max_new_tokens=90)))
    engine = Engine(model, budget=40)
    replies = drain(engine, [engine.submit(each) for each in asked])
    for i in (1, 3):
        assert isinstance(replies[i].error, MemoryError) and "budget of 40" in str(replies[i].error)
    assert len(replies[3].tokens) == 31
    for i in (0, 2):
        same(replies[i], Engine(model).run([asked[i]])[0], model)
    assert engine._table.allocated + engine.memory.parked_columns <= 40


def test_participants_are_forgotten_by_name():
    engine = Engine(model_of("llama"))
    asked = [request(prompt(30, i), i, keep=name) for i, name in enumerate("abca")]
    spent(engine, asked)
    assert len(engine.memory) == 4
    engine.forget(["a"])
    assert len(engine.memory) == 2
    _, (_, reused) = spent(engine, [asked[1], asked[0]])
    assert reused == 29
    engine.forget()
    assert len(engine.memory) == engine.memory.parked_columns == 0


def test_nothing_is_parked_or_shared_without_reuse():
    engine = Engine(model_of("llama"), reuse=False)
    for _ in range(2):
        _, (prefilled, reused) = spent(engine, [request(TRUNK, i) for i in range(3)])
        assert (prefilled, reused, len(engine.memory)) == (150, 0, 0)


@pytest.mark.parametrize("family", SOME)
def test_records_inside_a_reused_prefix_are_complete_and_leave_it_as_it_is(family):
    """Captures of steered and plain rows that start from parked columns; decoding after them is unchanged."""
    model, engine = model_of(family), Engine(model_of(family), chunk=7)
    spent(engine, [request(TRUNK, 0)])
    parts = [Select.all(), Select.prompt(), Select.window(10, 30), Select.positions(44), Select.generated(1)]
    asked = [request(TRUNK, 1 + i, capture=(CaptureSpec(tokens=part),)) for i, part in enumerate(parts)]
    replies, (prefilled, reused) = spent(engine, asked)
    assert (prefilled, reused) == (len(parts), 49 * len(parts))
    for reply, each, count in zip(replies, asked, (56, 50, 20, 1, 7), strict=True):
        check(reply, reference(model, each), model)
        assert [len(record.tensor) for record in reply.records] == [count] * 3
    assert [reply.counters["recomputed_tokens"] for reply in replies] == [49, 49, 39, 5, 0]


def test_recomputation_for_records_leaves_keys_and_values_bit_for_bit():
    """In bfloat16 another chunking gives other last bits, so what is only looked at again must not be written again."""
    engine = Engine(tiny("llama", torch.bfloat16), chunk=64)
    spent(engine, [request(TRUNK, 0, sampling=replace(WARM, max_new_tokens=1))])
    (parked,) = engine.memory._parked.values()
    engine.chunk = 3
    ticket = engine.submit(request(TRUNK, 1, capture=(CaptureSpec(),), keep=None))
    while not engine.live:
        engine.step()
    assert engine.live[0].counters["recomputed_tokens"] == 49
    for layer, (keys, values) in enumerate(parked.source.layers):
        for slabs, standing in ((engine.slabs.keys, keys), (engine.slabs.values, values)):
            assert torch.equal(slabs[layer][engine.live[0].index, :, :49], standing[:, :49])
    drain(engine, [ticket])


def test_only_real_tokens_above_the_floor_are_written():
    batch = Batch(first=2, ids=[prompt(9), prompt(5), prompt(9)], starts=[3, 0, 4], stops=[9, 5, 9], floors=[5, 0, 4])
    _, window = Forward(model_of("llama"))._inputs(batch)
    wanted = [(0, p) for p in range(5, 9)] + [(1, p) for p in range(5)] + [(2, p) for p in range(4, 9)]
    assert list(zip(window.row.tolist(), window.column.tolist(), strict=True)) == wanted
    assert (window.first, window.num_rows, window.width) == (2, 3, 9)
    assert window.query.tolist() == [2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
