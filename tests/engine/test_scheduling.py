"""When rows are admitted and fed: nobody waits for a long prompt, rows are refilled in batches, in order."""

from dataclasses import replace

import pytest
import torch
import transformers

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.errors import UnsupportedIntervention
from tests.support.reference import drain, model_of, prompt
from tests.support.tiny import FAMILIES


def request(number, length=6, new=8):
    sampling = Sampling(temperature=1.0, max_new_tokens=new)
    return Request(tokens=prompt(length, number), key=("s", number), sampling=sampling)


def test_a_long_prompt_stalls_nobody():
    engine = Engine(model_of("llama"), rows=4, chunk=10)
    short = [engine.submit(request(i, new=60)) for i in range(2)]
    for _ in range(3):
        engine.step()
    long = engine.submit(request(9, 200, 3))
    said = []
    while long.reply is None:
        engine.step()
        said.append([len(row.sequence) for row in engine._table.live if row.ticket in short])
    assert len(said) >= 20
    assert said == [[n + step for n in said[0]] for step in range(len(said))]
    drain(engine, short)


@pytest.mark.parametrize("rows, waiting", [(16, 40), (8, 30), (4, 9)])
def test_rows_are_refilled_when_an_eighth_is_free_or_all_fit(rows, waiting):
    engine = Engine(model_of("llama"), rows=rows, reuse=False)
    tickets = [engine.submit(request(i, new=2 + i * 7 % 11)) for i in range(waiting)]
    admissions = 0
    while any(ticket.reply is None for ticket in tickets):
        free, queued, admitted = rows - engine._table.end, len(engine._waiting), engine.counters["admissions"]
        engine.step()
        admits = engine.counters["admissions"] > admitted
        assert admits == (queued > 0 and free >= min(max(1, rows // 8), queued))
        assert engine._table.end <= rows
        admissions += admits
    assert admissions == engine.counters["admissions"] < waiting


def test_requests_are_admitted_in_the_order_in_which_they_came():
    engine = Engine(model_of("llama"), rows=2)
    tickets = [engine.submit(request(i, new=3)) for i in range(7)]
    finished = []
    while engine.step():
        finished += [i for i, t in enumerate(tickets) if t.reply is not None and i not in finished]
    assert finished == sorted(finished) and len(finished) == 7


def test_counters_add_up():
    engine = Engine(model_of("llama"), rows=3, chunk=4)
    asked = [request(i, 5 + 3 * i, 4) for i in range(6)]
    replies = drain(engine, [engine.submit(each) for each in asked])
    totals = engine.counters
    for name in ("prefill_tokens", "decode_tokens", "reused_tokens", "recomputed_tokens"):
        assert totals[name] == sum(reply.counters[name] for reply in replies)
    assert totals["prefill_tokens"] == sum(len(each.tokens) for each in asked)
    assert totals["decode_tokens"] == sum(len(reply.tokens) - 1 for reply in replies)
    assert (totals["requests"], totals["errors"], totals["requeued"]) == (6, 0, 0)
    steps = totals["steps"]
    assert not engine.step() and totals["steps"] == steps


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in ("qwen3_next",)])
def test_a_family_whose_state_cannot_be_forked_says_so_once(family):
    engine = Engine(model_of(family))
    assert len(engine.reports) == 1 and "cannot be cut or copied" in engine.reports[0]
    asked = [replace(request(i, 10, 4), keep="bob") for i in range(3)]
    for _ in range(2):
        drain(engine, [engine.submit(each) for each in asked])
    assert len(engine.reports) == 1 and engine.counters["reused_tokens"] == 0
    assert engine.counters["prefill_tokens"] == 2 * 30 and len(engine.memory) == 0


def test_a_family_without_attention_is_decoded_and_one_without_a_cache_is_refused():
    """An SSM has no attention heads to count columns by; RWKV takes a state of its own and would ignore our cache."""
    shape = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**shape, state_size=4)).eval()
    asked = [replace(request(i, 5 + i, 6), sampling=Sampling(temperature=0, max_new_tokens=6)) for i in range(3)]
    for reply, each in zip(Engine(mamba).run(asked), asked, strict=True):
        ids = torch.tensor([each.tokens])
        out = mamba.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert reply.error is None and reply.tokens == tuple(out[0, len(each.tokens) :].tolist())
    rwkv = transformers.RwkvForCausalLM(transformers.RwkvConfig(**shape)).eval()
    reply = Engine(rwkv).submit(request(0)).reply
    assert isinstance(reply.error, UnsupportedIntervention) and "takes no cache" in str(reply.error)
