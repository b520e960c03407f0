"""What goes wrong says what and where, in the request concerned; its neighbours finish as if nothing had happened."""

import functools
import threading
from dataclasses import replace

import pytest
import torch

from interlens.engine.collect import Collector
from interlens.engine.engine import Engine, engine_for
from interlens.engine.request import Request, Sampling
from interlens.engine.slabs import Slabs
from interlens.errors import HookDidNotFire, NonFinite, UnsupportedIntervention
from interlens.interp import CaptureSpec, Select, SteeringSpec
from tests.engine.reference import direction, drain, model_of, prompt, same, steer
from tests.tiny import tiny


def requests(count=5, **options):
    sampling = Sampling(temperature=1.0, top_p=0.9, max_new_tokens=6)
    return [
        Request(
            **{"tokens": prompt(7 + 3 * i, i), "sampling": sampling, "key": ("f", i), "logprobs": True,
               "capture": (CaptureSpec(layers=(0, 2)),), **options}
        )
        for i in range(count)
    ]  # fmt: skip


class Custom:
    """An intervention whose edit is `change`; it may raise, or return anything."""

    rank, per_position, edit_key = 1, False, "custom"

    def __init__(self, change, layers=(1,), tokens=None, site="residual"):
        self.change, self.layers, self.site = change, layers, site
        self.tokens = Select.all() if tokens is None else tokens
        self.fingerprint = f"{id(self):x}"

    def is_noop(self):
        return False

    def check(self, num_layers, width): ...

    def required_positions(self, num_prompt):
        return ()

    def parameters(self, layer, positions, num_prompt=None):
        return {"change": torch.zeros(1, 1)}

    def edit(self, hidden, parameters):
        return self.change(hidden)

    def summary(self):
        return {}


class Own(Custom):
    """One that shares its call with no other."""

    @property
    def edit_key(self):
        return id(self)


def raises(hidden):
    raise ZeroDivisionError("the gate is stuck")


def one_faulty(model, fault, **settings):
    """Replies of five requests of which number 2 carries `fault`, the engine, and replies without it."""
    plain = requests()
    steered = [replace(r, interventions=(SteeringSpec(direction(i), (1,), 2.0),)) for i, r in enumerate(plain)]
    faulty = list(steered)
    faulty[2] = replace(plain[2], interventions=(steered[2].interventions[0], fault))
    engine = Engine(model, **settings)
    tickets = [engine.submit(request) for request in faulty]
    replies = drain(engine, tickets)
    without = Engine(model, **settings).run(steered)
    for i in (0, 1, 3, 4):
        same(replies[i], without[i], model)
    assert engine._collector.bytes_held == 0
    assert not engine.step()
    again = engine.run(steered)
    for one, other in zip(again, without, strict=True):
        same(one, other, model)
    return replies[2], engine


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("where", ["prompt", "decoding"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_an_edit_that_raises_fails_its_request_alone(family, where, chunk):
    tokens = Select.prompt() if where == "prompt" else Select.window(2, 4, "generated")
    reply, engine = one_faulty(model_of(family), Own(raises, tokens=tokens), chunk=chunk)
    assert isinstance(reply.error, ZeroDivisionError) and reply.finish_reason == "error" and reply.records == []
    assert len(reply.tokens) == (0 if where == "prompt" else 3)
    assert engine.counters["errors"] == 1


def test_an_edit_that_raises_among_edits_of_its_own_kind_is_found():
    model = model_of("llama")
    asked = requests()
    calls = [lambda h: h + 1, lambda h: h[:, :5], raises]
    asked = [replace(r, interventions=(Custom(calls[0]),)) for r in asked]
    bad = Custom(calls[0])
    bad.parameters = lambda *_: raises(None)
    asked[1] = replace(asked[1], interventions=(bad,))
    wrong = Own(calls[1])
    asked[3] = replace(asked[3], interventions=(wrong,))
    replies = Engine(model).run(asked)
    assert isinstance(replies[1].error, ZeroDivisionError)
    assert isinstance(replies[3].error, ValueError) and "shape" in str(replies[3].error)
    expected = Engine(model).run([asked[0], asked[2], asked[4]])
    for i, other in zip((0, 2, 4), expected, strict=True):
        same(replies[i], other, model)


@pytest.mark.parametrize("chunk", [3, 512])
def test_not_a_number_in_a_row_is_named_by_layer(chunk):
    bad = Custom(lambda h: h * float("nan"), layers=(1,), tokens=Select.positions(4))
    reply, _ = one_faulty(model_of("llama"), bad, chunk=chunk)
    assert isinstance(reply.error, NonFinite) and "layer 1 is the first" in str(reply.error)
    late = Custom(lambda h: h * float("inf"), layers=(2,), tokens=Select.window(1, 3, "generated"))
    reply, _ = one_faulty(model_of("llama"), late)
    assert isinstance(reply.error, NonFinite) and "layer 2 is the first" in str(reply.error) and len(reply.tokens) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_not_a_number_from_pads_reaches_nobody(family):
    """Pads are token 0; where its embedding is NaN, whatever a pad computes is NaN."""
    poisoned, clean = (tiny(family, torch.float32, tie_word_embeddings=False) for _ in range(2))
    poisoned.get_input_embeddings().weight[0] = float("nan")
    for chunk in (4, 512):
        asked = requests(forced=prompt(6, 9))
        engine = Engine(poisoned, chunk=chunk)
        for one, other in zip(engine.run(asked), Engine(clean, chunk=chunk).run(asked), strict=True):
            same(one, other, clean)
        assert engine.counters["pad_tokens"] > 0


def unhooked(model, layer):
    """The layer is called in a way that hooks do not see, as compiled modules are."""

    class Unhooked(type(layer)):
        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs)

    layer.__class__ = Unhooked
    return model


def test_a_hook_that_never_fires_fails_those_who_need_it():
    model = tiny("llama", torch.float64)
    plain = Engine(model).run(requests(capture=(CaptureSpec(layers=(0, 2)),)))
    unhooked(model, model.model.layers[1])
    asked = requests(capture=(CaptureSpec(layers=(0, 2)),))
    asked[1] = replace(asked[1], capture=(CaptureSpec(),))
    asked[3] = replace(
        asked[3], interventions=(SteeringSpec(direction(), (1,), tokens=Select.window(1, 3, "generated")),)
    )
    replies = Engine(model).run(asked)
    for i in (1, 3):
        assert isinstance(replies[i].error, HookDidNotFire) and "residual at layer 1" in str(replies[i].error)
        assert replies[i].records == []
    for i in (0, 2, 4):
        same(replies[i], plain[i], model)


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_forward_that_fails_is_answered_and_the_engine_goes_on(chunk):
    model = tiny("llama", torch.float64)
    engine, stuck = Engine(model, chunk=chunk, rows=3), threading.Event()

    def hook(module, args):
        if stuck.is_set():
            raise RuntimeError("a pipe burst")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(hook)
    stuck.set()
    replies = drain(engine, [engine.submit(request) for request in requests()])
    assert all("a pipe burst" in str(reply.error) for reply in replies)
    stuck.clear()
    after = drain(engine, [engine.submit(request) for request in requests()])
    handle.remove()
    for one, other in zip(after, Engine(model).run(requests()), strict=True):
        same(one, other, model)
    assert engine._collector.bytes_held == 0


def test_registered_edits_are_refused_also_in_mid_run():
    model = tiny("llama", torch.float64)
    engine = engine_for(model)
    assert engine is engine_for(model)
    with pytest.raises(ValueError, match="rows"):
        engine_for(model, rows=3)
    before = engine.run(requests())
    tickets = [engine.submit(request) for request in requests()]
    engine.step()
    with SteeringSpec(direction(), 1, 4.0).register(model):
        refused = engine.submit(requests()[0]).reply
        assert isinstance(refused.error, UnsupportedIntervention) and "registered by hand" in str(refused.error)
        replies = drain(engine, tickets)
    for reply, whole in zip(replies, before, strict=True):
        assert isinstance(reply.error, UnsupportedIntervention)
        assert reply.tokens == whole.tokens[: len(reply.tokens)]
    for one, other in zip(engine.run(requests()), before, strict=True):
        same(one, other, model)


# Out of memory


def hungry(limit):
    """A model that runs out of memory above `limit` rows."""
    model = tiny("llama", torch.float64)

    class Hungry(type(model)):
        @functools.wraps(type(model).forward)
        def forward(self, *args, **kwargs):
            self.seen.append(kwargs["input_ids"].shape[0])
            if self.seen[-1] > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
            return super().forward(*args, **kwargs)

    model.seen = []
    model.__class__ = Hungry
    return model


@pytest.mark.parametrize("chunk", [4, 512])
def test_out_of_memory_halves_the_rows_once_and_changes_no_token(chunk):
    model = hungry(4)
    asked = [replace(r, keep="bob", forced=(5, 6, 7) if i == 3 else None) for i, r in enumerate(requests(7))]
    asked[4] = replace(asked[4], interventions=(SteeringSpec(direction(), (0,), 2.0),))
    engine = Engine(model, rows=8, chunk=chunk)
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model_of("llama")).run(asked), strict=True):
        same(one, other, model)
    assert engine.rows <= 4 and engine._collector.bytes_held == 0
    assert len(engine.reports) == engine.counters["out_of_memory"] == 1
    assert "rows" in engine.reports[0] and str(engine.rows) in engine.reports[0]
    seen = len(model.seen)
    drain(engine, [engine.submit(request) for request in asked])
    assert max(model.seen[seen:]) <= 4 and engine.counters["out_of_memory"] == 1


class SmallSlabs(Slabs):
    """Slabs that cannot be allocated above a number of columns."""

    limit = 1 << 30

    def resize(self, num_rows, num_columns):
        if num_rows * num_columns > self.limit:
            raise torch.OutOfMemoryError(f"no room for {num_rows} x {num_columns}")
        super().resize(num_rows, num_columns)


@pytest.mark.parametrize("limit", [3 * 64, 64])
def test_out_of_memory_while_rows_are_placed_loses_nobody(limit):
    model = model_of("llama")
    engine = Engine(model, rows=8)
    engine.slabs = engine._table.slabs = SmallSlabs()
    engine.slabs.limit = limit
    asked = [replace(r, keep="bob") for r in requests(7)]
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
    assert engine.counters["out_of_memory"] >= 1 and not engine._waiting


def test_out_of_memory_with_one_row_is_its_own_error():
    model = hungry(0)
    engine = Engine(model)
    replies = drain(engine, [engine.submit(request) for request in requests(4)])
    assert all(isinstance(reply.error, MemoryError) and "single row" in str(reply.error) for reply in replies)
    assert not engine.step() and engine._collector.bytes_held == 0


def test_one_row_in_wide_slabs_gives_up_the_spare_ones_before_it_fails():
    model = model_of("llama")
    engine = Engine(model, rows=8)
    engine.slabs = engine._table.slabs = SmallSlabs()
    first = [replace(r, keep="bob") for r in requests(4)]
    drain(engine, [engine.submit(request) for request in first])
    engine.slabs.limit = engine.slabs.num_rows * engine.slabs.num_columns
    long = replace(first[0], tokens=prompt(90, 5))
    same(drain(engine, [engine.submit(long)])[0], Engine(model).run([long])[0], model)


class Torn(Collector):
    """Runs out of memory in the middle of taking over what a forward has gathered."""

    calls, when = 0, ()

    def _pool(self, lane, gathered):
        self.calls += 1
        if self.calls in self.when:
            raise torch.OutOfMemoryError("no room for a pool")
        super()._pool(lane, gathered)


@pytest.mark.parametrize("when", [(1,), (5,), (2, 30)])
def test_out_of_memory_in_the_middle_of_a_capture_doubles_no_row(when):
    model = model_of("llama")
    asked = requests(6, capture=(CaptureSpec(), CaptureSpec(pool="mean")))
    engine = Engine(model, rows=6, chunk=8)
    engine._collector.__class__ = Torn
    engine._collector.when = when
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
    assert engine.counters["out_of_memory"] == len(when) and engine._collector.bytes_held == 0


class Gasping(Engine):
    """Runs out of memory while drawing."""

    when, calls = (), 0

    def _sample(self, rows, logits):
        self.calls += logits is not None
        if logits is not None and self.calls in self.when:
            raise torch.OutOfMemoryError("no room for a softmax")
        super()._sample(rows, logits)


@pytest.mark.parametrize("when", [(1,), (4,), (2, 11)])
def test_out_of_memory_while_drawing_changes_no_token(when):
    model = model_of("llama")
    engine = Gasping(model, rows=6, chunk=8)
    engine.when = when
    asked = [replace(r, keep="bob", forced=(5, 6, 7) if i == 3 else None) for i, r in enumerate(requests(6))]
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)


# Threads, cancellation, interruption


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
