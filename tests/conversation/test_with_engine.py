"""Laws of conversations on the real engine, with tiny random models in float32."""

import json
import pickle
import subprocess
import sys

import pytest
import torch

import interlens
from interlens import (
    AutoModelParticipant,
    CaptureSpec,
    Conversation,
    Patch,
    ScriptedParticipant,
    Select,
    SteeringSpec,
    UnsupportedIntervention,
)
from interlens.errors import UnknownSite
from tests.conversation.test_tools import add
from tests.support.tiny import tiny
from tests.support.tokenizers import family


@pytest.fixture(scope="module")
def model():
    tokenizer = family("qwen3")
    return tiny("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture
def conversation(model):
    pair = (model, family("qwen3"))
    options = dict(max_new_tokens=12, temperature=1.0, top_p=None)
    return Conversation.from_models((pair, pair), names=("alice", "bob"), shared_context="Talk.", seed=1, **options)


def same_records(a, b):
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        for name in (
            "participant",
            "message_idx",
            "layer",
            "site",
            "token_span",
            "phases",
            "tokens",
            "positions",
            "sample",
        ):
            assert getattr(x, name) == getattr(y, name), name
        torch.testing.assert_close(x.tensor, y.tensor, rtol=1e-4, atol=1e-5)


def test_a_rollout_is_each_conversation_alone(conversation):
    spec = CaptureSpec(layers=(0, -1), tokens=Select.generated())
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    conversation.participant("bob").steering = SteeringSpec(direction, layers=(1,), coef=2.0, tokens=Select.generated())
    report = conversation.rollout(6, seed=5, turns=4, capture=spec)
    assert not report.failed
    for i, result in enumerate(report):
        alone = conversation.branch()
        alone.seed, alone.key = 5, i
        with alone.capture(layers=(0, -1), tokens=Select.generated()) as cache:
            alone.run(turns=4)
        assert alone.transcript == result.transcript
        same_records(list(cache), list(result.cache))
    bob = report.results[0].transcript[2].metadata
    assert bob["steering"]["coef"] == 2.0
    assert bob["steering"]["tokens_modified"] == bob["n_tokens"] - 1  # the last one feeds nothing
    assert "steering" not in report.results[0].transcript[1].metadata


def test_records_have_addresses_and_describe_their_rows(conversation):
    with conversation.capture(layers=[0, 2]) as outer:
        one = conversation.step("bob")
        with conversation.capture(sites=["mlp"], layers=(1,), tokens=Select.phase("answer"), pool="mean") as inner:
            conversation.sample("alice", "Why?")
            two = conversation.step("alice")
        conversation.sample(["alice", "bob"], "And?")
    assert [(r.participant, r.message_idx, r.layer, r.sample) for r in outer] == [
        ("bob", 1, 0, None), ("bob", 1, 2, None), ("alice", 3, 0, 1), ("alice", 3, 2, 1), ("alice", 2, 0, None),
        ("alice", 2, 2, None), ("alice", 4, 0, 1), ("alice", 4, 2, 1), ("bob", 4, 0, 2), ("bob", 4, 2, 2),
    ]  # fmt: skip
    assert {(r.participant, r.site, r.pool, tuple(r.tensor.shape)) for r in inner} == {
        ("alice", "mlp", "mean", (1, 32))
    }
    record = outer.at(participant="bob", layer=2, sample=None), outer.query(participant="bob", layer=2, sample=None)[0]
    assert record[0] is record[1].tensor and len(record[0]) == len(one.fed.prompt) + one.metadata["n_tokens"]
    assert record[1].tokens == (*one.fed.prompt, *one.fed.generated)
    start, stop = record[1].phases["answer"]
    assert stop - start == one.metadata["n_tokens"] and two.records == ()
    taken = conversation.step(
        "bob", capture=[CaptureSpec(layers=(1,)), CaptureSpec(layers=(1,), tokens=Select.message(0))]
    )
    assert [r.selection for r in taken.records] == ["all()", "message(0)"]
    assert family("qwen3").decode(list(taken.records[1].tokens)) == "Talk."


def test_a_turns_steering_replaces_the_participants_own(conversation):
    direction = torch.ones(32)
    plain = conversation.sample("alice")
    conversation.participant("alice").steering = SteeringSpec(direction, layers=1, coef=50.0)
    steered = conversation.branch().sample("alice")
    assert steered.content != plain.content and steered.metadata["steering"]["tokens_modified"] == (
        steered.metadata["n_prompt_tokens"] + steered.metadata["n_tokens"] - 1
    )
    none = conversation.branch().sample("alice", steering=())
    assert none == plain
    both = conversation.sample(
        "alice", steering=[SteeringSpec(direction, layers=0), SteeringSpec(direction, layers=1)],
        patch=Patch(torch.zeros(1, 32), 0, (3,)),
        return_logprobs=True,
    )  # fmt: skip
    assert len(both.metadata["steering"]) == 2 and both.metadata["patch"]["tokens_modified"] == 1
    assert all(len(both.metadata[k]) == both.metadata["n_tokens"] for k in ("logprobs", "surprisal", "entropy"))
    json.dumps(both.metadata, allow_nan=False)


def test_what_is_impossible_leaves_the_conversation_as_it_was(conversation):
    before = conversation.transcript.copy()
    for bad in (CaptureSpec(layers=(7,)), CaptureSpec(sites=("router",)), CaptureSpec(tokens=Select.message(5))):
        with pytest.raises((UnknownSite, ValueError)):
            conversation.step("alice", capture=bad)
    assert conversation.transcript == before
    conversation.participants.append(ScriptedParticipant("carl", ["Hm."]))
    with pytest.raises(UnsupportedIntervention, match="carl"):
        conversation.step("carl", steering=SteeringSpec(torch.ones(32), layers=1))
    assert conversation.step("alice") is not None


def test_one_model_and_one_engine(conversation, model):
    alice, bob = conversation.participants
    assert alice.engine is bob.engine is conversation.branch().participants[0].engine and alice.model is model


def test_a_participant_travels_without_its_weights(conversation):
    data = pickle.dumps(conversation.participants[0])
    assert len(data) < 20_000
    there = pickle.loads(data)
    assert there.name == "alice" and there.max_new_tokens == 12
    with pytest.raises(ValueError, match="give it one again"):
        _ = there.model


def test_save_load_continue_is_continue(conversation, tmp_path, model):
    direction = torch.randn(32, generator=torch.Generator().manual_seed(3))
    conversation.participant("bob").steering = SteeringSpec(
        {1: direction}, layers=1, coef=3.0, tokens=Select.generated()
    )
    conversation.key = ("item", 2)
    conversation.run(turns=3)
    conversation.save(tmp_path / "talk")
    there = Conversation.load(tmp_path / "talk")
    assert "model" in there.needs()["alice"]
    assert there.participants[0].weights is there.participants[1].weights  # one model stays one model
    for p in there.participants:
        p.weights = conversation.participants[0].weights
    assert there.participant("bob").steering == conversation.participant("bob").steering
    assert [m.fed for m in there.transcript] == [m.fed for m in conversation.transcript]
    conversation.run(turns=3), there.run(turns=3)
    assert there.transcript == conversation.transcript


def test_loading_runs_nothing_and_imports_nothing(conversation, tmp_path):
    conversation.run(turns=1)
    conversation.save(tmp_path / "talk")
    script = (
        "import sys; from interlens import Conversation; c = Conversation.load(sys.argv[1]);"
        "print(len(c.transcript), c.needs()); assert 'interlens.loading' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path / "talk")], capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.startswith("2 {'alice'"), found.stderr


def test_steering_by_phase_meets_the_captured_phase(model):
    """An edit of the answer touches exactly the rows that a capture calls answer."""
    tokenizer = family("r1")
    small = tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    close = tokenizer.convert_tokens_to_ids("</think>")
    with torch.no_grad():
        small.lm_head.weight[close] *= 12.0  # closes its thoughts often
    alice = AutoModelParticipant.from_model(
        small, tokenizer, name="alice", max_new_tokens=24, temperature=2.0, top_p=None
    )
    talk = Conversation([alice], shared_context="Think.")
    spec = SteeringSpec(torch.ones(32), layers=0, mode="replace", coef=100.0, tokens=Select.phase("answer"))
    report = talk.rollout(12, turns=1, capture=CaptureSpec(layers=(0,)))
    assert sum("answer" in r.cache.records[0].phases for r in report) > 3
    alice.steering = spec
    for result in talk.rollout(12, turns=1, capture=CaptureSpec(layers=(0,))):
        record, message = result.cache.records[0], result.transcript[-1]
        along = record.tensor @ torch.ones(32) / 32**0.5
        edited = (along - 100).abs() < 1e-2
        first, last = record.phases.get("answer", (0, 0))
        assert edited[first:last].all() and not edited[:first].any()
        assert message.metadata["steering"]["tokens_modified"] == max(last - first - 1, 0)  # the last feeds nothing


def test_base_and_adapter_share_weights_and_do_not_leak(model, tmp_path):
    from peft import LoraConfig, get_peft_model

    tokenizer = family("qwen3")
    other = tiny("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id)
    wrapped = get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.mul_(20)
    wrapped.save_pretrained(tmp_path / "lora")

    def talk(*adapters):
        people = [
            AutoModelParticipant.from_model(model, tokenizer, name=n, adapter=a, max_new_tokens=8, top_p=None)
            for n, a in zip("xy", adapters, strict=False)
        ]
        return Conversation(people, shared_context="Talk.").run(turns=4)

    plain = talk(None, None)
    mixed = talk(str(tmp_path / "lora"), None)
    assert mixed[1].content != plain[1].content and talk(None, None) == plain
    (name,) = model.peft_config
    assert talk(name, None) == mixed


def test_captures_and_steering_over_tool_turns_are_those_of_a_conversation_alone(conversation, monkeypatch):
    """A tiny model calls tools by chance here: every second text is read as a call."""
    from interlens import calls, tools

    def parse(text, schemas=None):
        return ("", [calls.Call(name="add", arguments={"a": len(text)})]) if len(text) % 2 else (text, [])

    monkeypatch.setattr(
        calls, "FAMILIES", [calls.Family(name="odd", signs=("<|im_start|>",), parse=parse), *calls.FAMILIES]
    )
    alice = conversation.participant("alice")
    alice.tools, alice.max_tool_iters = tools.as_tools([add]), 2
    alice.steering = SteeringSpec(torch.ones(32), layers=1, coef=2.0, tokens=Select.generated())
    specs = [CaptureSpec(layers=(1,)), CaptureSpec(layers=(0,), tokens=Select.message(0))]
    report = conversation.rollout(6, seed=2, turns=3, capture=specs)
    assert not report.failed
    rounds = [len(m.metadata.get("tool_trail", ())) for t in report.transcripts() for m in t if m.author == "alice"]
    assert 0 in rounds and max(rounds) == 2
    for i, result in enumerate(report):
        alone = conversation.branch()
        alone.seed, alone.key = 2, i
        single = interlens.run([alone], turns=3, capture=specs).results[0]
        assert alone.transcript == result.transcript
        same_records(list(single.cache), list(result.cache))
        assert [(r.message_idx, r.layer) for r in result.cache] == [(i, n) for i in (1, 2, 3) for n in (1, 0)]
        for record in result.cache.query(layer=1):  # of the last generation, results of tools in its prompt
            fed = alone.transcript[record.message_idx].fed
            assert record.tokens == (*fed.prompt, *fed.generated) and len(record.tensor) == len(record.tokens)
