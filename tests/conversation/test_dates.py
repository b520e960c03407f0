"""A template with a date shows one day all through a conversation, whatever day it is by now."""

import datetime

import pytest

from interlens import Conversation
from interlens.interp import message_token_ids
from interlens.views import template_of
from tests.support.scripted import speaker
from tests.support.tokenizers import family, make

DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
    "{{ '<|im_start|>system\nToday is ' + date_string + '.<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NOW = datetime.date.today().strftime("%d %b %Y")


@pytest.fixture
def tokenizer():
    return make(DATED, eos="<|im_end|>", special=("<|im_start|>",))


def theirs(tokenizer, messages, generate=True):
    """The prompt as transformers renders it today."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def test_a_conversation_of_today_shows_today(tokenizer):
    conversation = Conversation([speaker("alice", tokenizer)], shared_context="Go.")
    message = conversation.step("alice")
    expected = theirs(tokenizer, [{"role": "user", "content": "Go."}])
    assert NOW in expected and tokenizer.decode(message.fed.prompt) == expected
    assert message.metadata["date"] == conversation.date == datetime.date.today().isoformat()


def test_past_midnight_every_speaker_still_sees_the_first_day(tokenizer, tmp_path):
    """Branches, samples, rollouts, and the conversation saved and loaded again."""
    people = [speaker("alice", tokenizer), speaker("bob", tokenizer)]
    conversation = Conversation(people, shared_context="Go.")
    before = template_of(tokenizer).hash
    conversation.date = "2024-02-29"  # it began then
    conversation.run(turns=3)
    first = theirs(tokenizer, [{"role": "user", "content": "Go."}]).replace(NOW, "29 Feb 2024")
    assert tokenizer.decode(conversation.transcript[1].fed.prompt) == first
    said = [*conversation.transcript[1:], conversation.sample("bob"), conversation.branch().step("alice")]
    said += [conversation.rollout(1, turns=1).results[0].transcript[-1]]
    for message in said:
        assert (
            "Today is 29 Feb 2024." in tokenizer.decode(message.fed.prompt) and message.metadata["date"] == "2024-02-29"
        )
    assert template_of(tokenizer).hash == before
    conversation.save(tmp_path / "talk")
    loaded = Conversation.load(tmp_path / "talk")
    assert loaded.date == "2024-02-29" and loaded.view("bob").date == "2024-02-29"
    conversation.reset()
    assert conversation.date == "2024-02-29"


def test_templates_without_a_date_record_none():
    conversation = Conversation([speaker("alice", family("qwen2"))], shared_context="Go.")
    assert "date" not in conversation.step("alice").metadata


def test_what_is_no_day_is_refused(tokenizer):
    conversation = Conversation([speaker("alice", tokenizer)], shared_context="Go.")
    conversation.date = "yesterday"
    with pytest.raises(ValueError, match="such as '2026-12-01', not 'yesterday'"):
        conversation.step("alice")


def test_spans_belong_to_the_ids_that_are_given(tokenizer):
    """A special token that is spelled out is text here; `apply_chat_template` makes it markup, so its ids are others."""
    chat = [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "Well."}]
    ids, spans = message_token_ids(tokenizer, chat)
    text = theirs(tokenizer, chat, generate=False)
    others = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(others) == text and len(ids) > len(others)
    assert [a for a, _ in spans] == [0, spans[0][1]] and spans[-1][1] == len(ids)
    assert [c["content"] in tokenizer.decode(ids[a:b]) for c, (a, b) in zip(chat, spans, strict=True)] == [True, True]


def test_system_prompts_of_their_own():
    made = [
        Conversation.from_models(["smollm2"] * 2, system_prompts=["Be kind.", None]),
        Conversation.from_models(["smollm2"] * 2, system_prompts={"a": "Be kind."}),
    ]
    assert [[p.system_prompt for p in c.participants] for c in made] == [["Be kind.", None]] * 2
    for given, wrong in (
        (["one"], "2 models but 1 system prompts"),
        ({"carol": "x"}, "names 'carol', who is no participant; there are: a, b"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Conversation.from_models(["smollm2"] * 2, system_prompts=given)
    with pytest.raises(TypeError, match=r"not 'Be kind.'; system_prompt is for all"):
        Conversation.from_models(["smollm2"] * 2, system_prompts="Be kind.")
    with pytest.raises(TypeError, match="give one of them"):
        Conversation.from_models(["smollm2"], system_prompts=["x"], system_prompt="y")
