"""Many threads, cancelled requests, a step that was interrupted: what is finished is what it would have been."""

import os
import sys
import threading
from dataclasses import replace

import torch

from interlens.engine.engine import Engine
from interlens.interp import CaptureSpec, SteeringSpec, capture_activations
from tests.engine.test_faults import requests
from tests.engine.test_interventions import LAYOUT
from tests.support.reference import direction, drain, model_of, prompt, same, steer


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


def test_two_engines_and_captures_by_hand_on_one_model_never_meet():
    """A hook fires in whatever forward comes by, so blocks of hooks take turns, whoever opens them."""
    model, ids = model_of("llama"), torch.tensor([prompt(30)])
    asked = [replace(r, interventions=(SteeringSpec(direction(i), (1,), 2.0),)) for i, r in enumerate(requests(4))]
    plain = requests(4, capture=())
    alone, bare, captured = (
        Engine(model).run(asked),
        Engine(model).run(plain),
        capture_activations(model, ids, CaptureSpec()),
    )
    failures = []

    def decode():
        for _ in range(3):
            for one, other in zip(Engine(model, rows=2).run(asked), alone, strict=True):
                same(one, other, model)

    def decode_plain():
        for _ in range(6):
            for one, other in zip(Engine(model, rows=2).run(plain), bare, strict=True):
                same(one, other, model)

    def read():
        for _ in range(60):
            for one, other in zip(capture_activations(model, ids, CaptureSpec()), captured, strict=True):
                assert torch.equal(one.tensor, other.tensor)

    def work(part):
        try:
            part()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in (decode, read, decode_plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]


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


class Interrupt:
    """Raises KeyboardInterrupt at the n-th call of a function of the engine."""

    def __init__(self, when):
        self.left = when

    def __call__(self, frame, event, argument):
        if event == "call" and f"interlens{os.sep}engine" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_an_interrupt_anywhere_in_a_step_loses_nobody_and_nothing():
    """Whoever else has requests in the engine is answered as if nothing had happened, at whatever call it comes."""
    model = model_of("llama")
    asked = [replace(r, keep="bob") for r in requests(5)]
    asked[0] = replace(asked[0], capture=(CaptureSpec(pool="mean"), CaptureSpec(layers=(1,), source="clean")))
    asked[1] = replace(asked[1], tokens=prompt(40, 1), interventions=(steer(1, (0, 2), 1.5)[0],))
    asked[2] = replace(asked[2], tokens=prompt(40, 1), interventions=(steer(2, (1,), 1.0)[0],))
    asked[0] = replace(asked[0], interventions=(steer(2, (1,), 1.0)[0],))
    asked[3] = replace(asked[3], sampling=replace(asked[3].sampling, stop_ids=tuple(range(3, 40))), layout=LAYOUT)
    asked[4] = replace(asked[4], forced=tuple(prompt(9, 77)))
    whole, when, interrupted = Engine(model).run(asked), 1, True
    while interrupted:
        engine = Engine(model, rows=3, chunk=8)
        tickets, interrupted = [engine.submit(request) for request in asked], False
        sys.setprofile(Interrupt(when))
        try:
            while any(ticket.reply is None for ticket in tickets):
                engine.step()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
        for one, other in zip(drain(engine, tickets), whole, strict=True):
            same(one, other, model)
        assert engine.bytes_held() == 0 and not engine._unfinished
        when = when + 1 + when // 2
    assert when > 1000


def test_who_interrupts_a_run_leaves_no_work_behind():
    engine = Engine(model_of("llama"))
    sys.setprofile(Interrupt(300))
    try:
        engine.run(requests(5))
    except KeyboardInterrupt:
        sys.setprofile(None)
        steps = engine.counters["steps"]
        while engine.step():
            assert engine.counters["steps"] < steps + 2
        assert not engine._unfinished and engine.counters["errors"] == 5
    finally:
        sys.setprofile(None)
