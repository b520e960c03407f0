"""Laws of steering and patching in a batch: each row as if it were alone, and as hooks written by hand."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.errors import UnknownSite
from interlens.interp import CaptureSpec, Intervention, Patch, Select, SteeringSpec
from interlens.interp.select import Layout
from tests.engine.test_core import MARKERS
from tests.support.reference import (
    MAIN,
    blocks,
    check,
    direction,
    generate,
    model_of,
    patch,
    phases,
    prompt,
    same,
    steer,
    tolerance,
)
from tests.support.tiny import FAMILIES, MOE_FAMILIES
from tests.support.unchecked import unchecked

SOME = ("llama", "gemma2", "mixtral")
LAYOUT = Layout(
    message_spans={0: (2, 5), 3: (6, 9)}, special_spans=((0, 2), (5, 6)), special_ids=frozenset(range(3, 60)),
    markers=MARKERS, branch_start=7,
)  # fmt: skip
WARM = dict(temperature=1.0, top_p=0.95, max_new_tokens=7)


def request(number, tokens=None, pairs=(), **options):
    sampling = Sampling(**{**WARM, **options.pop("sampling", {})})
    return Request(
        tokens=prompt(9 + number % 4, number) if tokens is None else tokens, sampling=sampling, key=("i", number),
        interventions=tuple(spec for spec, _ in pairs), logprobs=True, **options,
    )  # fmt: skip


def named(*names):
    return lambda ids, n, layout: [p for p, name in enumerate(phases(ids, n, layout)) if name in names]


def special(ids, n, layout):
    return [p for p, t in enumerate(ids) if (p in (0, 1, 5) if p < n else 3 <= t < 60)]


SELECTIONS = [
    (Select.all(), lambda ids, n, _: range(len(ids))),
    (Select.prompt(), lambda ids, n, _: range(n)),
    (Select.generated(), lambda ids, n, _: range(n, len(ids))),
    (Select.generated(1), lambda ids, n, _: range(n - 1, len(ids))),
    (Select.phase("reasoning"), named("reasoning")),
    (Select.phase("answer"), named("answer")),
    (Select.phase("prompt"), named("prompt")),
    (Select.positions(3, -1, 12), lambda ids, n, _: sorted({3, n - 1, 12} & set(range(len(ids))))),
    (Select.window(-4, -1), lambda ids, n, _: range(n - 4, n - 1)),
    (Select.window(1, 4, "generated"), lambda ids, n, _: range(n + 1, min(n + 4, len(ids)))),
    (Select.message(3), lambda ids, n, _: range(6, 9)),
    (Select.special(), special),
    (Select.branch(), lambda ids, n, _: range(7, len(ids))),
    (Select.message(0) | Select.generated(), lambda ids, n, _: [2, 3, 4, *range(n, len(ids))]),
    (Select.branch() - Select.special(), lambda i, n, o: [p for p in range(7, len(i)) if p not in special(i, n, o)]),
]
MODES = ("add", "ablate", "norm_add", "replace")


@pytest.mark.parametrize("family", SOME)
def test_every_selection_and_mode_in_one_batch_is_a_hand_written_hook(family):
    model, plans = model_of(family), []
    for number, (tokens, at) in enumerate(SELECTIONS):
        pairs = [steer(number, ((number % 3,), (0, 2))[number % 2], 1.3, MODES[number % 4], tokens, at, each=True)]
        if number % 3 == 0:
            pairs.append(steer(50 + number, (1, 2), 0.7, MODES[(number + 1) % 4], tokens, at))
        plans.append((request(number, pairs=pairs, layout=LAYOUT, capture=(CaptureSpec(),)), pairs, at))
    replies = Engine(model, chunk=5).run([plan[0] for plan in plans])
    touched = set()
    for reply, (asked, pairs, at) in zip(replies, plans, strict=True):
        run = generate(model, asked, [hand for _, hand in pairs], [(layer, "residual") for layer in range(3)])
        check(reply, run, model)
        modified = sum(p < len(run.ids) - 1 for p in at(run.ids, run.num_prompt, LAYOUT))  # the last one feeds nothing
        assert reply.tokens_modified == (modified,) * len(pairs)
        assert reply.phases == tuple(phases(run.ids, run.num_prompt, LAYOUT)[run.num_prompt :])
        touched |= set(reply.phases)
        same(Engine(model).run([asked])[0], reply, model)
    assert touched == {"reasoning", "answer"}


@pytest.mark.parametrize("family", MAIN)
def test_patches_act_in_any_chunk_and_at_the_decode_steps_that_reach_them(family):
    model = model_of(family)
    plans = [
        [patch((0, 4, 9), 0, 1)], [patch((-1, 2), -1, 2), patch((12,), 0, 3)], [patch((10, 11, 12, 13), 1, 4)],
        [steer(5, (1,), 2.0), patch((3, 11), 1, 5)], [patch((6,), 1, 6, site="resid_pre"), steer(7, (1,), -1.0)],
    ]  # fmt: skip
    for chunk in (1, 3, 512):
        asked = [request(i, prompt(10, i), pairs) for i, pairs in enumerate(plans)]
        for reply, each, pairs in zip(Engine(model, chunk=chunk).run(asked), asked, plans, strict=True):
            ordered = sorted(pairs, key=lambda pair: isinstance(pair[0], SteeringSpec))
            check(reply, generate(model, each, [hand for _, hand in ordered]), model)
            counted = [len(s.positions) if isinstance(s, Patch) else 9 + len(reply.tokens) for s, _ in pairs]
            assert reply.tokens_modified == tuple(counted)


def test_sites_are_edited_as_by_hooks_on_their_modules():
    model = model_of("llama")
    places = {"residual": 1, "resid_pre": 1, "mlp": 0, "attn": 2, "embed": 0, "final_norm": 2}
    plans = [[steer(i, (at,), 2.0, MODES[i % 4], site=site)] for i, (site, at) in enumerate(places.items())]
    logits = direction(9, 100)
    plans.append([(SteeringSpec(logits, (2,), 3.0, site="logits"), steer(layers=(2,), site="logits")[1])])
    plans[6][0][1].__dict__["change"] = lambda h, layer, positions: h + 3.0 * logits.to(h.dtype)
    asked = [request(i, pairs=pairs) for i, pairs in enumerate(plans)]
    for reply, each, pairs in zip(Engine(model).run(asked), asked, plans, strict=True):
        check(reply, generate(model, each, [hand for _, hand in pairs]), model)


@pytest.mark.parametrize("family", MAIN)
def test_an_edit_of_one_row_leaves_the_others_as_they_are(family):
    model = model_of(family)
    plain = [request(i, capture=(CaptureSpec(),)) for i in range(5)]
    edits = (steer(1, (0, 2), 3.0)[0], steer(2, (1,), 1.0, "norm_add", site="mlp")[0], patch((4, 11), 1)[0])
    touched = list(plain)
    touched[2] = replace(plain[2], interventions=edits)
    without, with_edits = Engine(model).run(plain), Engine(model).run(touched)
    for i in (0, 1, 3, 4):
        same(with_edits[i], without[i], model, exact=family not in MOE_FAMILIES)
    assert with_edits[2].error is None
    assert not torch.allclose(with_edits[2].records[0].tensor, without[2].records[0].tensor)


@pytest.mark.parametrize("family", MAIN)
def test_no_strength_and_patching_a_run_with_itself_are_no_edit(family):
    model = model_of(family)
    plain = [request(i, capture=(CaptureSpec(("residual", "mlp")),)) for i in range(4)]
    before = Engine(model).run(plain)
    zero = tuple(SteeringSpec(direction(i), (0, 1, 2), 0.0, mode) for i, mode in enumerate(MODES[:3]))
    selfish = [
        tuple(
            Patch(record.tensor[:-1], record.layer, record.positions[:-1], record.site)  # the last one feeds nothing
            for record in (reply.records[2 * i % 6], reply.records[(2 * i + 3) % 6])
        )
        for i, reply in enumerate(before)
    ]
    for edits in ([zero] * 4, selfish):
        after = Engine(model, chunk=4).run([replace(r, interventions=e) for r, e in zip(plain, edits, strict=True)])
        for one, other in zip(after, before, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs["logprobs"], other.logprobs["logprobs"], **tolerance(model))
            for a, b in zip(one.records, other.records, strict=True):
                torch.testing.assert_close(a.tensor, b.tensor, **tolerance(model))
    assert Engine(model).run([replace(plain[0], interventions=zero)])[0].tokens_modified == (0, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_steered_batch_is_plain_generate_under_a_hook(family):
    """transformers' own `generate` with its own cache, and a torch hook that adds a vector."""
    model = model_of(family)
    shift = 2.0 * direction(3)
    everywhere = SteeringSpec(direction(3), 1, 2.0)
    later = SteeringSpec(direction(3), 1, 2.0, tokens=Select.generated())
    asked = [
        request(i, prompt(6 + 3 * i, i), [(spec, None)], sampling=dict(temperature=0.0))
        for i, spec in enumerate((everywhere, later, everywhere, later))
    ]
    for i, reply in enumerate(Engine(model, rows=3).run(asked)):

        def add(module, args, output, decoding_only=i % 2):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.shape[1] > 1 and decoding_only:
                return None
            hidden = hidden + shift.to(hidden.dtype)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        handle = blocks(model)[1].register_forward_hook(add)
        try:
            out = model.generate(
                torch.tensor([asked[i].tokens]), max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        finally:
            handle.remove()
        assert tuple(out[0, len(asked[i].tokens) :].tolist()) == reply.tokens and len(reply.tokens) == 7


@pytest.mark.parametrize("family", SOME)
def test_teacher_forcing_under_edits_is_the_generation_itself(family):
    model = model_of(family)
    pairs = [[steer(1, (0, 1), 1.5)], [patch((3, 12), 1)], [steer(2, (2,), 1.0, "ablate", *SELECTIONS[5])], []]
    asked = [
        request(i, pairs=each, layout=LAYOUT, capture=(CaptureSpec(("residual", "logits"), (0, 2)),))
        for i, each in enumerate(pairs)
    ]
    said = Engine(model).run(asked)
    forced = [replace(r, forced=reply.tokens) for r, reply in zip(asked, said, strict=True)]
    for settings in (dict(), dict(chunk=4), dict(rows=1, reuse=False)):
        for one, other in zip(Engine(model, **settings).run(forced), said, strict=True):
            one.logprobs["sampling_logprobs"] = other.logprobs["sampling_logprobs"]
            same(one, other, model)


def test_a_patch_beyond_the_end_is_the_replys_error():
    model = model_of("llama")
    asked = [
        request(0, prompt(8), [patch((5, 13), 1)]), request(1, prompt(8), [patch((5, 14), 1)]),
        request(2, prompt(8), [patch((40,), 0)]), request(3, prompt(8)),
        request(4, prompt(8), [patch((5, 14), 1)], capture=(CaptureSpec(),)),
    ]  # fmt: skip
    replies = Engine(model).run(asked)
    assert [reply.error is None for reply in replies] == [True, False, False, True, False]
    for reply, position in ((replies[1], 14), (replies[2], 40), (replies[4], 14)):
        assert reply.finish_reason == "error" and isinstance(reply.error, ValueError)
        assert f"[{position}]" in str(reply.error) and "15 tokens (8 of them prompt)" in str(reply.error)
    same(replies[3], Engine(model).run(asked[3:])[0], model)


def test_the_last_generated_position_is_no_edit_whether_captured_fed_or_not():
    """A request of one new token, steered where it is generated, is the request without steering, and says so."""
    model = model_of("llama")
    later = SteeringSpec(direction(3), (0, 1), 5.0, tokens="generated")
    one = replace(request(0, prompt(8)).sampling, max_new_tokens=1)
    for capture in ((), (CaptureSpec(),)):
        asked = replace(request(0, prompt(8), capture=capture), sampling=one)
        forced = replace(asked, forced=(7,))
        for each, new in ((asked, 1), (forced, 1), (replace(asked, sampling=replace(one, max_new_tokens=0)), 0)):
            plain, steered = Engine(model).run([each, replace(each, interventions=(later,))])
            assert steered.tokens_modified == (0,) and len(steered.tokens) == new
            assert plain.tokens == steered.tokens and plain.logprobs == steered.logprobs
    everywhere = SteeringSpec(direction(3), 1, 5.0)
    for new, modified in ((0, 8), (1, 8), (2, 9), (5, 12)):
        asked = replace(request(0, prompt(8), [(everywhere, None)]), sampling=replace(one, max_new_tokens=new))
        assert Engine(model).run([asked])[0].tokens_modified == (modified,)


def test_impossible_requests_are_answered_before_any_forward():
    engine = Engine(model_of("llama"))
    steering, wrong = SteeringSpec(direction(), 9), SteeringSpec(direction(width=31), 1)
    bad = [
        (dict(pairs=[(steering, None)]), UnknownSite, "0 to 2"),
        (dict(pairs=[(wrong, None)]), ValueError, "31 values"),
        (dict(pairs=[(SteeringSpec(direction(), 1, tokens=Select.message(7)), None)]), ValueError, "no message 7"),
        (dict(pairs=[(Patch(torch.ones(2, 32), 1, (8, -1)), None)]), ValueError, "twice"),
        (dict(pairs=[(Patch(torch.ones(1, 32), 1, (-30,)), None)]), ValueError, "before a prompt"),
        (dict(pairs=[(object(), None)]), ValueError, "not an intervention"),
        (dict(capture=(CaptureSpec(layers=(3,)),)), UnknownSite, "0 to 2"),
        (dict(capture=(CaptureSpec(("router",)),)), UnknownSite, "it has"),
        (dict(tokens=()), ValueError, "no tokens"),
        (dict(tokens=(5, 100)), ValueError, "100"),
        (dict(tokens=prompt(513)), ValueError, "512"),
        (dict(sampling=dict(temperature=-1.0)), ValueError, "temperature"),
        (dict(sampling=dict(temperature=1e-40)), ValueError, "at least 1e-30"),
        (dict(sampling=dict(temperature=float("inf"))), ValueError, "finite"),
        (dict(sampling=dict(top_p=0.0)), ValueError, "top_p"),
        (dict(sampling=dict(top_k=0)), ValueError, "top_k"),
        (dict(adapter="lora"), ValueError, "lora"),
    ]
    for options, kind, text in bad:
        with unchecked():
            reply = engine.submit(request(0, **{"tokens": prompt(9), **options})).reply
        assert reply is not None and isinstance(reply.error, kind) and text in str(reply.error), (options, reply)
        assert reply.finish_reason == "error" and reply.tokens == ()
    assert engine.counters["steps"] == 0 and not engine.step()


def example():
    """The class of `examples/gated_steer.py`, an intervention from outside the package."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gated_steer.py"))["GatedSteer"]


def test_an_intervention_of_ones_own_is_batched_like_any_other():
    model, gated, pairs = model_of("llama"), example(), []
    for seed in (1, 2, 3):
        probe, by, lowest = direction(seed), direction(seed + 1), (0.0, 0.4, -1e9)[seed - 1]
        hand = steer(seed, (1,))[1]
        hand.__dict__["change"] = lambda h, layer, positions, probe=probe, by=by, lowest=lowest: torch.stack(
            [v + 2.0 * by if float(v @ probe) / float(probe @ probe) ** 0.5 > lowest else v for v in h]
        )
        pairs.append([(gated(by, probe, lowest, (1,), coef=2.0, tokens=Select.all()), hand)])
    assert isinstance(pairs[0][0][0], Intervention)
    asked = [request(i, pairs=each) for i, each in enumerate([*pairs, [steer(4)], []])]
    for reply, each, hands in zip(Engine(model, chunk=4).run(asked), asked, [*pairs, [steer(4)], []], strict=True):
        check(reply, generate(model, each, [hand for _, hand in hands]), model)
