"""What records hold: the rows they say, of the states in force, in storage of their own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec, Select
from interlens.interp.locate import layers_with, sites_of
from tests.engine.test_interventions import LAYOUT, SELECTIONS
from tests.support.reference import (
    MAIN,
    check,
    drain,
    forward,
    generate,
    kept,
    model_of,
    phases,
    prompt,
    same,
    steer,
    tolerance,
)

POOLS = (None, "mean", "last", "max")
WARM = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=8)


def request(number, **options):
    return Request(**{"tokens": prompt(9 + number % 5, number), "sampling": WARM, "key": ("r", number), **options})


def spans(names):
    """Half-open spans of equal neighbours, by the first of each name to the last: by hand, for phases."""
    found = {}
    for name in ("prompt", "reasoning", "answer"):
        rows = [i for i, each in enumerate(names) if each == name]
        if name == "answer" and "reasoning" in names:
            rows = [i for i in rows if i > max(j for j, each in enumerate(names) if each == "reasoning")]
        if rows:
            found[name] = (rows[0], rows[-1] + 1)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("chunk", [4, 512])
def test_selected_rows_pools_spans_and_phases_are_those_of_the_whole_sequence(family, chunk):
    model = model_of(family)
    asked = [
        request(
            i, layout=LAYOUT,
            capture=tuple(CaptureSpec(layers=(0, 2), tokens=tokens, pool=pool) for pool in POOLS),
        )
        for i, (tokens, _) in enumerate(SELECTIONS)
    ]  # fmt: skip
    replies = Engine(model, chunk=chunk, rows=6).run(asked)
    for reply, each, (tokens, at) in zip(replies, asked, SELECTIONS, strict=True):
        ids, num_prompt = (*each.tokens, *reply.tokens), len(each.tokens)
        run = forward(model, ids, num_prompt, keep=[(0, "residual"), (2, "residual")])
        rows = list(at(ids, num_prompt, LAYOUT))
        names = [phases(ids, num_prompt, LAYOUT)[p] for p in rows]
        if not rows:
            assert reply.error is None and reply.records == []
            continue
        assert [(r.pool, r.layer) for r in reply.records] == [(pool, layer) for pool in POOLS for layer in (0, 2)]
        for record in reply.records:
            whole = run.states[record.layer, "residual"][rows].double().numpy()
            expected = {None: whole, "mean": whole.mean(0)[None], "last": whole[-1:], "max": whole.max(0)[None]}
            np.testing.assert_allclose(record.tensor.double().numpy(), expected[record.pool], rtol=1e-3, atol=3e-4)
            assert record.positions == tuple(rows) and record.tokens == tuple(ids[p] for p in rows)
            assert record.selection == str(tokens) and Select.parse(record.selection) == tokens
            assert (record.participant, record.message_idx, record.sample, record.fingerprint) == ("", -1, None, "")
            if record.pool is None:
                assert record.tensor.dtype == next(model.parameters()).dtype
                assert record.token_span == (sum(p < num_prompt for p in rows), len(rows))
                assert record.phases == spans(names) and record.num_pooled is None
            else:
                assert record.tensor.dtype == torch.float32 and record.num_pooled == len(rows)
                assert record.tensor.shape == (1, 32) and record.token_span[1] == 1
                assert record.phases == ({names[0]: (0, 1)} if len(set(names)) == 1 else {})


@pytest.mark.parametrize("family", MAIN)
def test_every_site_is_captured_as_in_a_plain_forward(family):
    """Sites with modules of their own against hooks on these; the others against the residual stream they make up."""
    model = model_of(family)
    asked = [request(i, capture=(CaptureSpec(tuple(sites_of(model))),)) for i in range(4)]
    for reply, each in zip(Engine(model, chunk=5).run(asked), asked, strict=True):
        ids, n = (*each.tokens, *reply.tokens), len(each.tokens)
        found = {(r.layer, r.site): r.tensor for r in reply.records}
        assert set(found) == {(layer, site) for site in sites_of(model) for layer in layers_with(model, site)}
        assert {len(tensor) for tensor in found.values()} == {len(ids)}
        keep = [(layer, site) for layer in range(3) for site in ("residual", "resid_pre")]
        if family == "llama":
            keep += [(layer, site) for layer in range(3) for site in ("mlp", "attn", "q")]
            keep += [(0, "embed"), (2, "final_norm")]
        run = forward(model, ids, n, keep=keep)
        for key, expected in run.states.items():
            torch.testing.assert_close(found[key], expected, **tolerance(model))
        for layer in range(3):
            total = found[layer, "resid_pre"] + found[layer, "attn"] + found[layer, "mlp"]
            torch.testing.assert_close(total, found[layer, "residual"], rtol=1e-3, atol=1e-4)


def test_the_last_token_and_the_stop_token_are_covered():
    model = model_of("llama")
    free = Engine(model).run([request(i) for i in range(4)])
    asked = []
    for i, reply in enumerate(free):
        stop = reply.tokens[3]
        asked.append(
            request(
                i, sampling=replace(WARM, stop_ids=(stop, 1)), logprobs=True,
                capture=(CaptureSpec(), CaptureSpec(layers=(1,), tokens=Select.generated(), pool="last")),
            )
        )  # fmt: skip
    for reply, whole, each in zip(Engine(model).run(asked), free, asked, strict=True):
        first = whole.tokens.index(each.sampling.stop_ids[0])
        assert reply.finish_reason == "stop" and reply.tokens == whole.tokens[: first + 1]
        run = generate(model, each, keep=[(layer, "residual") for layer in range(3)])
        check(reply, run, model)
        assert all(record.positions[-1] == len(run.ids) - 1 for record in reply.records)
        torch.testing.assert_close(
            reply.records[-1].tensor[0], run.states[1, "residual"][-1].float(), rtol=1e-3, atol=1e-4
        )
        assert reply.counters["decode_tokens"] == len(reply.tokens)
        bare = Engine(model).run([replace(each, capture=())])[0]
        assert bare.counters["decode_tokens"] == len(reply.tokens) - 1


def test_finish_reasons_and_lengths():
    model = model_of("llama")
    for count in (0, 1, 3):
        asked = request(1, sampling=replace(WARM, max_new_tokens=count), capture=(CaptureSpec(),), logprobs=True)
        reply = Engine(model).run([asked])[0]
        assert (reply.finish_reason, len(reply.tokens), reply.error) == ("length", count, None)
        assert [len(record.tensor) for record in reply.records] == [10 + count] * 3
        assert len((reply.logprobs or {"logprobs": []})["logprobs"]) == count
    near = request(2, tokens=prompt(509), capture=(CaptureSpec(layers=(1,)),))
    reply = Engine(model).run([near])[0]
    assert (reply.finish_reason, len(reply.tokens), len(reply.records[0].tensor)) == ("length", 3, 512)
    for forced, reason in (((5, 6, 7), "length"), ((5, 6, 2), "stop"), ((), "length"), ((5, 2, 6), "length")):
        asked = request(3, forced=forced, sampling=replace(WARM, stop_ids=(2,)), capture=(CaptureSpec(),))
        reply = Engine(model).run([asked])[0]
        assert (reply.finish_reason, reply.tokens) == (reason, forced)
        assert [len(record.tensor) for record in reply.records] == [12 + len(forced)] * 3


@pytest.mark.parametrize("family", MAIN)
def test_probabilities_are_those_of_a_plain_forward(family):
    model = model_of(family)
    settings = [
        WARM, replace(WARM, temperature=0.0), replace(WARM, temperature=0.6, top_p=None, top_k=5),
        replace(WARM, temperature=1.5, top_p=None), replace(WARM, top_k=9, top_p=0.5),
    ]  # fmt: skip
    asked = [request(i, sampling=sampling, logprobs=True) for i, sampling in enumerate(settings)]
    for reply, each in zip(Engine(model).run(asked), asked, strict=True):
        ids, n = (*each.tokens, *reply.tokens), len(each.tokens)
        logits = forward(model, ids, n).logits[n - 1 : -1].double().numpy()
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        chosen = p[np.arange(8), list(reply.tokens)]
        tol = dict(rtol=1e-3, atol=2e-3) if family == "mixtral" else dict(rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(reply.logprobs["logprobs"], np.log(chosen), **tol)
        np.testing.assert_allclose(reply.logprobs["entropy"], -(p * np.log(p)).sum(-1), **tol)
        for step, value in enumerate(reply.logprobs["sampling_logprobs"]):
            if each.sampling.temperature == 0:
                assert value == 0
                continue
            q = np.where(kept(logits[step], each.sampling), p[step] ** (1 / each.sampling.temperature), 0)
            assert value == pytest.approx(np.log(q[reply.tokens[step]] / q.sum()), abs=2e-3)
        forced = Engine(model, chunk=3).run([replace(each, forced=reply.tokens)])[0]
        for name in ("logprobs", "surprisal", "entropy"):
            np.testing.assert_allclose(forced.logprobs[name], reply.logprobs[name], **tol)


def test_records_own_what_they_hold_and_can_be_trained_on():
    model = model_of("llama")
    specs = (
        CaptureSpec(("residual", "mlp"), tokens=Select.window(2, 5)), CaptureSpec(pool="mean"),
        CaptureSpec(layers=(1,), tokens=Select.positions(3), offload=None),
    )  # fmt: skip
    engine = Engine(model, rows=3)
    with torch.inference_mode():
        replies = engine.run([request(i, capture=specs) for i in range(7)])
    seen = set()
    for record in (record for reply in replies for record in reply.records):
        tensor = record.tensor
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.untyped_storage().data_ptr() not in seen and tensor.is_contiguous()
        seen.add(tensor.untyped_storage().data_ptr())
        assert not tensor.is_inference() and not tensor.requires_grad
        probe = torch.ones(tensor.shape[-1], dtype=tensor.dtype, requires_grad=True)
        (tensor @ probe).sum().backward()
        assert torch.isfinite(probe.grad).all()
    assert engine._collector.bytes_held == 0


def test_only_what_is_selected_is_held():
    model = model_of("llama")
    engine = Engine(model, rows=4)
    spec = CaptureSpec(("residual", "mlp"), (0, 2), tokens=Select.window(1, 6))
    tickets = [engine.submit(request(i, capture=(spec, CaptureSpec(pool="mean")))) for i in range(4)]
    engine.step()
    assert engine._collector.bytes_held == 4 * 2 * 2 * 5 * 32 * 8
    while engine.step():
        assert engine._collector.bytes_held <= 4 * 2 * 2 * 5 * 32 * 8
    assert all(len(ticket.reply.records) == 4 + 3 for ticket in tickets) and engine._collector.bytes_held == 0


def test_a_long_row_keeps_nothing_of_its_neighbours_alive():
    """Rows come and go while one stays: what is held for it is its own payload, in storage and not only in count."""
    engine = Engine(model_of("llama"), rows=4)
    engine._collector._flush_bytes = 4096
    spec = (CaptureSpec(layers=(1,)),)
    long = engine.submit(request(0, sampling=replace(WARM, max_new_tokens=60), capture=spec))
    others = [engine.submit(request(i, capture=spec)) for i in range(1, 20)]
    most = 0
    while long.reply is None and engine.step():
        rows = [row for row in engine._table.live if row.kept is not None]
        claims = [claim for row in rows for pieces in row.kept.pieces.values() for _, claim in pieces]
        stored = {c.rows().untyped_storage().data_ptr(): c.rows().untyped_storage().nbytes() for c in claims}
        staged = sum(part.values.nbytes for parts in engine._collector._staged.values() for part in parts)
        assert sum(stored.values()) + staged <= engine.bytes_held()
        most = max(most, sum(stored.values()))
    assert most > 4096
    drain(engine, [long, *others])
    assert engine.bytes_held() == 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_clean_and_run_captures_of_one_steered_request(family):
    model = model_of(family)
    specs = (CaptureSpec(layers=(1, 2)), CaptureSpec(layers=(2, 0), source="clean", tokens=Select.generated()))
    pairs = [[steer(1, (1,), 2.0)], [], [steer(2, (0,), 0.0)], [steer(3, (2,), 1.0, "ablate")]]
    asked = [
        request(i, interventions=tuple(s for s, _ in each), capture=specs, keep="bob") for i, each in enumerate(pairs)
    ]
    engine = Engine(model)
    for _ in range(2):
        for reply, each, hands in zip(engine.run(asked), asked, pairs, strict=True):
            ids, n = (*each.tokens, *reply.tokens), len(each.tokens)
            keep = [(layer, "residual") for layer in range(3)]
            edited = forward(model, ids, n, [hand for _, hand in hands], keep).states
            plain = forward(model, ids, n, keep=keep).states
            assert [r.layer for r in reply.records] == [1, 2, 0, 2]
            steered = bool(hands) and hands[0][0].coef != 0
            assert [bool(r.fingerprint) for r in reply.records] == [steered, steered, False, False]
            for record in reply.records[:2]:
                torch.testing.assert_close(record.tensor, edited[record.layer, "residual"], **tolerance(model))
            for record in reply.records[2:]:
                torch.testing.assert_close(record.tensor, plain[record.layer, "residual"][n:], **tolerance(model))


def test_specs_answer_in_the_order_in_which_they_are_asked():
    model = model_of("llama")
    specs = (CaptureSpec(layers=(2,), source="clean"), CaptureSpec(layers=(0,)))
    asked = request(0, capture=specs, interventions=(steer(1, (0,), 2.0)[0],))
    reply = Engine(model).run([asked])[0]
    assert [(r.layer, bool(r.fingerprint)) for r in reply.records] == [(2, False), (0, True)]
    same(Engine(model, rows=1).run([asked])[0], reply, model)


@pytest.mark.parametrize("chunk", [4, 512])
def test_rows_above_max_norm_are_left_out_before_pooling_and_counted(chunk):
    model = model_of("llama")
    plain = CaptureSpec(layers=(0, 2), tokens=Select.all())
    (whole,) = Engine(model, chunk=chunk, rows=4).run([request(1, capture=(plain,))])
    limit = float(whole.records[1].tensor.norm(dim=-1).quantile(0.47))  # of layer 2; layer 0 has smaller rows
    specs = [replace(plain, max_norm=limit, pool=pool) for pool in POOLS] + [replace(plain, max_norm=1e-9)]
    asked = [request(number, capture=(*specs, plain)) for number in (1, 2, 3)]
    replies = Engine(model, chunk=chunk, rows=4).run(asked)
    (first, *_) = replies
    assert first.tokens == whole.tokens
    assert len(first.records) == len(POOLS) * 2 + 2, "a record of which nothing is left does not exist"
    for number, pool in enumerate(POOLS):
        for at, layer in enumerate((0, 2)):
            record, full = first.records[2 * number + at], whole.records[at]
            inside = full.tensor.norm(dim=-1) <= limit
            kept_rows = full.tensor[inside]
            reduced = {None: kept_rows, "mean": kept_rows.mean(0)[None], "last": kept_rows[-1:],
                       "max": kept_rows.amax(0)[None]}[pool]  # fmt: skip
            assert (record.layer, record.pool, record.removed) == (layer, pool, int((~inside).sum()))
            assert torch.allclose(record.tensor.double(), reduced.double(), atol=1e-5)
            positions = inside.nonzero()[:, 0].tolist()
            assert list(record.positions) == positions and list(record.tokens) == [full.tokens[p] for p in positions]
            assert record.token_span[1] == len(record.tensor) and record.num_pooled == (
                len(positions) if pool else None
            )
    assert first.records[1].removed > 0 and first.records[-1].removed == 0
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        CaptureSpec(max_norm=-1.0)
