"""What goes wrong says what and where, in the request concerned; its neighbours finish as if nothing had happened."""

import copy
import math
import threading
from dataclasses import replace

import pytest
import torch
import transformers

from interlens.engine import Engine, engine_for
from interlens.engine.request import Request, Sampling
from interlens.errors import HookDidNotFire, NonFinite, UnsupportedIntervention
from interlens.interp import CaptureSpec, Select, SteeringSpec
from tests.support.reference import direction, drain, model_of, prompt, same
from tests.support.tiny import tiny


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


def nan_at(layer, tokens, site="residual"):
    return Custom(lambda h: h * float("nan"), layers=(layer,), tokens=tokens, site=site)


def test_what_failed_rows_leave_in_memory_reaches_nobody():
    """Two rows fail in one step and one of them had been moved; whoever stands there later sees none of it."""
    model, step = model_of("llama"), Select.window(1, 2, "generated")
    asked = requests(sampling=Sampling(temperature=0.0, max_new_tokens=40))
    for i in (0, 4):
        asked[i] = replace(asked[i], interventions=(nan_at(0, step),))
    asked[2] = replace(asked[2], interventions=(nan_at(0, Select.window(12, 13, "generated")),))
    engine = Engine(model, rows=16, reuse=False)
    tickets = [engine.submit(request) for request in asked]
    while not all(tickets[i].reply for i in (0, 4)):
        engine.step()
    assert all(isinstance(tickets[i].reply.error, NonFinite) for i in (0, 4))
    short = requests(6, tokens=prompt(7), sampling=Sampling(temperature=0.0, max_new_tokens=20))
    others = [tickets[1], tickets[3], *(engine.submit(request) for request in short)]
    replies = drain(engine, [tickets[2], *others])  # number 2 fails, and the last of the short ones moves to its place
    assert isinstance(replies[0].error, NonFinite) and len(replies[0].tokens) == 13
    for reply, alone in zip(replies[1:], Engine(model).run([asked[1], asked[3], *short]), strict=True):
        same(reply, alone, model)


def test_not_a_number_in_logits_or_in_the_middle_of_forced_tokens_is_named():
    model = model_of("llama")
    asked = requests(4)
    asked[1] = replace(asked[1], interventions=(nan_at(2, Select.window(1, 2, "generated"), "logits"),))
    asked[3] = replace(asked[3], interventions=(nan_at(2, Select.window(1, 3, "generated")),), forced=prompt(6, 9))
    for chunk in (3, 512):
        replies = Engine(model, chunk=chunk).run(asked)
        for i, where in ((1, "every layer is finite but the head is not"), (3, "layer 2 is the first")):
            assert isinstance(replies[i].error, NonFinite) and where in str(replies[i].error)
            assert not any(math.isnan(value) for value in (replies[i].logprobs or {}).get("logprobs", ()))
        for i in (0, 2):
            same(replies[i], Engine(model).run([asked[i]])[0], model)


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


def test_an_intervention_that_cannot_be_batched_is_refused_before_it_meets_others():
    bad = Custom(lambda h: h + 1)
    bad.edit_key = ["a", "list"]
    engine = Engine(model_of("llama"))
    reply = engine.submit(replace(requests(1)[0], interventions=(bad,))).reply
    assert isinstance(reply.error, TypeError) and "unhashable" in str(reply.error) and not engine.step()


def test_training_mode_is_refused_also_in_mid_run():
    model = tiny("gpt2", torch.float64)
    engine = Engine(model)
    whole = engine.run(requests())
    tickets = [engine.submit(request) for request in requests()]
    engine.step()
    model.train()
    assert "model.eval()" in str(engine.submit(requests()[0]).reply.error)
    for reply, other in zip(drain(engine, tickets), whole, strict=True):
        assert isinstance(reply.error, UnsupportedIntervention)
        assert reply.tokens == other.tokens[: len(reply.tokens)]
    model.eval()
    for one, other in zip(engine.run(requests()), whole, strict=True):
        same(one, other, model)


def modes():
    yield torch.inference_mode()
    yield torch.enable_grad()
    yield torch.autocast("cpu", dtype=torch.bfloat16)


def test_the_mode_a_caller_is_in_changes_nothing():
    """Whoever holds the lock steps for all: their inference mode, autocast or gradients must not reach the others."""
    model = tiny("llama").requires_grad_(True)
    asked = [replace(r, interventions=(SteeringSpec(direction(i), (1,), 2.0),)) for i, r in enumerate(requests())]
    asked[2] = replace(asked[2], forced=prompt(6, 9))
    whole = Engine(model).run(asked)
    for mode in modes():
        with mode:
            replies = Engine(model).run(asked)
        for reply, other in zip(replies, whole, strict=True):
            same(reply, other, model, exact=True)
            for record in reply.records:
                assert not record.tensor.is_inference() and not record.tensor.requires_grad


def test_a_copied_model_has_an_engine_of_its_own():
    model = tiny("llama", torch.float64)
    engine = engine_for(model)
    whole = engine.run(requests(2))
    twin = copy.deepcopy(model)
    assert engine_for(twin) is not engine and engine_for(twin).model is twin and engine_for(model) is engine
    for one, other in zip(engine_for(twin).run(requests(2)), whole, strict=True):
        same(one, other, model, exact=True)


@pytest.mark.parametrize("name", ["rows", "chunk", "budget"])
def test_an_engine_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Engine(model_of("llama"), **{name: 0})


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_of_no_table_is_tried_before_it_is_trusted(is_decoder):
    """BertGeneration attends to what comes after, unless it is told to be a decoder."""
    config = transformers.BertGenerationConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, is_decoder=is_decoder,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertGenerationDecoder(config).eval().double()
    prompt = (5, 6, 7, 8)
    request = Request(tokens=prompt, sampling=Sampling(max_new_tokens=4, temperature=0, stop_ids=()))
    for reply in Engine(model, rows=2).run([request, request]):
        if not is_decoder:
            assert isinstance(reply.error, UnsupportedIntervention) and "attends to what comes after" in str(
                reply.error
            )
            continue
        ids = list(prompt)
        for token in reply.tokens:
            assert token == model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(token)
        assert len(reply.tokens) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["GPTNeo", "Moshi"])
def test_masks_of_a_models_own_are_found_before_they_change_rows(kind, dtype):
    """GPT-Neo cuts its window by column, Moshi names a window and applies none: rows of unequal length would differ."""
    common = dict(vocab_size=100, hidden_size=32, max_position_embeddings=512)
    config = {
        "GPTNeo": dict(common, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=128),
        "Moshi": dict(common, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, sliding_window=64, head_dim=8),
    }[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else None
    (reply,) = Engine(model.eval().to(dtype)).run([Request(tokens=(5, 6, 7), sampling=Sampling(max_new_tokens=2))])
    assert isinstance(reply.error, UnsupportedIntervention) and "windows from its own cache" in str(reply.error)


def test_a_scaling_that_looks_at_the_longest_row_ends_where_it_begins():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0],
            "original_max_position_embeddings": 32}  # fmt: skip
    model = tiny("phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=32)
    asked = [
        Request(tokens=tuple(range(3, 3 + n)), sampling=Sampling(max_new_tokens=8, temperature=0)) for n in (10, 60)
    ]
    alone = Engine(model).run(asked[:1])[0]
    beside, long = Engine(model).run(asked)
    assert beside.tokens == alone.tokens and "longrope scaling would look at the batch's longest row" in str(long.error)
    assert (
        len(Engine(model).run([Request(tokens=tuple(range(3, 33)), sampling=Sampling(max_new_tokens=9))])[0].tokens)
        == 2
    )
