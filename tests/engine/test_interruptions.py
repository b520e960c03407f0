"""Many threads, cancelled requests, a step that was interrupted: what is finished is what it would have been."""

import threading
from dataclasses import replace

from interlens.engine.engine import Engine
from interlens.interp import SteeringSpec
from tests.engine.reference import direction, drain, model_of, prompt, same, steer
from tests.engine.test_faults import requests


def test_threads_share_one_engine_without_cross_talk():
    model = model_of("llama")
    engine, results = Engine(model, rows=5), {}
    vectors = [direction(i) for i in range(8)]

    def asked(thread):
        steering = (SteeringSpec(vectors[thread], (1,), 2.0),) if thread % 2 else ()
        return [replace(r, key=("t", thread, i), interventions=steering) for i, r in enumerate(requests(3))]

    def work(thread):
        results[thread] = [engine.run([request])[0] for request in asked(thread)[:2]] + engine.run(asked(thread)[2:])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for i in range(8):
        for one, other in zip(results[i], Engine(model).run(asked(i)), strict=True):
            same(one, other, model)


def test_cancelled_requests_stop_and_the_others_do_not_notice():
    model = model_of("gemma2")
    asked = [replace(r, keep="bob") for r in requests(8)]
    whole = Engine(model).run(asked)
    for when in range(7):
        engine = Engine(model, rows=3, chunk=5)
        tickets = [engine.submit(request) for request in asked]
        for _ in range(when):
            engine.step()
        for i in (1, 2, 6):
            engine.cancel(tickets[i])
        replies = drain(engine, tickets)
        for i, (one, other) in enumerate(zip(replies, whole, strict=True)):
            if i in (1, 2, 6) and one.error is not None:
                assert one.finish_reason == "error" and "cancelled" in str(one.error) and one.records == []
                assert one.tokens == other.tokens[: len(one.tokens)]
            else:
                same(one, other, model)
        assert engine._collector.bytes_held == 0 and replies[6].error is not None


def test_teacher_forcing_that_starts_over_scores_each_token_once():
    model = model_of("llama")
    asked = replace(requests(1)[0], forced=prompt(9, 77))
    whole = Engine(model).run([asked])[0]
    assert len(whole.logprobs["logprobs"]) == 9
    for when in range(1, 9):
        engine = Engine(model, chunk=2)
        ticket = engine.submit(asked)
        for _ in range(when):
            engine.step()
        engine.rewind()
        same(drain(engine, [ticket])[0], whole, model)


def test_an_interrupted_engine_rewinds_and_goes_on():
    model = model_of("llama")
    pairs = steer(1, (0, 2), 1.5)
    asked = [replace(r, interventions=(pairs[0],) if i % 2 else ()) for i, r in enumerate(requests(6))]
    asked[4] = replace(asked[4], forced=tuple(prompt(9, 77)))
    whole = Engine(model).run(asked)
    for when in (1, 2, 3, 5, 8):
        engine = Engine(model, rows=4, chunk=4)
        tickets = [engine.submit(request) for request in asked]
        for _ in range(when):
            engine.step()
        engine.rewind()
        for one, other in zip(drain(engine, tickets), whole, strict=True):
            same(one, other, model)
        assert engine._collector.bytes_held == 0
