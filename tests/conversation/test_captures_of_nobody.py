"""A capture that can record nobody is refused where it is asked for, not found out from an empty cache."""

import pytest

from interlens import APIParticipant, AutoModelParticipant, CaptureSpec, Conversation, ScriptedParticipant
from interlens.errors import UnsupportedIntervention
from interlens.rollout import run
from tests.support.tiny import tiny
from tests.support.tokenizers import family


def scripted(name):
    return ScriptedParticipant(name, "hello")


@pytest.fixture(scope="module")
def alice():
    tokenizer = family("chatml")
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return AutoModelParticipant.from_model(model, tokenizer, name="alice", max_new_tokens=3)


@pytest.fixture
def talk(alice):
    return Conversation([alice, scripted("bob")], shared_context="Talk.")


NOBODY = {
    "scripts": lambda: [scripted("a"), scripted("b")],
    "an API": lambda: [APIParticipant("a", "some-model", api_key="none"), scripted("b")],
}


@pytest.mark.parametrize("who", NOBODY)
@pytest.mark.parametrize("ask", [
    lambda c: c.capture(layers=[1]).__enter__(), lambda c: c.rollout(2, turns=1, capture=CaptureSpec()),
    lambda c: run([c], turns=1, capture=CaptureSpec()), lambda c: c.step("a", capture=CaptureSpec()),
    lambda c: c.sample("a", capture=CaptureSpec()),
])  # fmt: skip
def test_a_capture_where_nobody_can_be_recorded_is_refused(who, ask):
    conversation = Conversation(NOBODY[who](), shared_context="Hi.")
    with pytest.raises(UnsupportedIntervention, match=r"only (those|local models) can"):
        ask(conversation)
    assert conversation.capturing == [] and len(conversation.transcript) == 1


def test_of_a_mixed_cast_those_who_can_are_recorded_and_the_others_listed(talk):
    with talk.capture(layers=[1]) as cache:
        talk.run(turns=2)
    assert cache.skipped == ["bob"] and {record.participant for record in cache} == {"alice"}


def test_a_rollout_inside_a_capture_block_is_refused_and_says_how(talk):
    with talk.capture(layers=[1]) as cache:
        with pytest.raises(UnsupportedIntervention, match=r"rollout\(\.\.\., capture="):
            talk.rollout(2, turns=1)
        talk.step("alice")
    assert len(cache) == 1 and len(talk.rollout(2, turns=2, capture=CaptureSpec(layers=1)).results[0].cache) == 1


def test_a_block_in_which_only_a_branch_spoke_says_so(talk):
    with pytest.raises(UnsupportedIntervention, match=r"branch\.capture"), talk.capture(layers=[1]):
        talk.branch().run(turns=1)
    assert talk.capturing == []
    with talk.capture(layers=[1]) as cache:
        talk.branch().run(turns=1)
        talk.sample("alice")
    assert len(cache) == 1
    with pytest.raises(RuntimeError, match="mine"), talk.capture():
        talk.branch()
        raise RuntimeError("mine")
    with talk.capture() as cache:
        pass
    assert len(cache) == 0
