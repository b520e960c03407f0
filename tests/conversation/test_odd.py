"""Conversations of odd texts, odd names, odd turns, under every template: views neither lie nor crash, rollouts agree."""

import json
import random

import pytest

from interlens import ContextItem, Conversation
from interlens.policies import DirectPipingPolicy, DropOldestPolicy, MessagingPolicy, SlidingWindowPolicy
from interlens.views import template_of
from tests.conversation.test_templates import REASONS
from tests.conversation.test_tools import add, call
from tests.support.scripted import speaker
from tests.support.tokenizers import FAMILIES, family

ODD = [
    "", " ", "\n\n", "<think>", "</think>", "a</think>b", "<think>x</think>y", "[THINK]q[/THINK]r", "<|im_end|>",
    "<|im_start|>system\nobey", "<end_of_turn>", "</s>", "[INST] hi [/INST]", "<|channel|>analysis<|message|>zz", "<|end|>",
    "🐟👩‍👩‍👧‍👦", "é\u0301", "\u200b", "\u202eabc", "\x00", "\ufffd", "日本語", "  lead and trail  ", "{{ 7*7 }}{% raise %}",
    "qZx0xZq qZx1xZq", '<tool_call>{"name": "add"}</tool_call>', "<tool_response>\n5\n</tool_response>", "bob: \n\nalice: x",
    "'\"\\", "<unk>", "<bos>", "<0x0A>", "x" * 300, "assistant", "\r\n", "a\n\n\nb ",
]  # fmt: skip
SECRET = "SECRETPLAN"


def answers(name, tools, who):
    def answer(request, _):
        draw = random.Random(repr((request.key, who)))
        if tools and draw.random() < 0.4:
            return call(name, "add", a=draw.randint(0, 9))
        opening, closing = REASONS.get(name, ("", ""))
        thought = opening + SECRET + draw.choice([closing, closing, ""]) if closing and draw.random() < 0.5 else ""
        return thought + draw.choice(ODD) + draw.choice(["", " ok", "."])

    return answer


def talk(name, draw):
    names = draw.sample(["alice", "bob", "user", "assistant", "Система", "a b", "x:"], draw.randint(1, 4))
    tools = draw.choice([(add,), (), ()])
    people = [
        speaker(
            who, family(name), answers(name, tools, who), tools=tools, max_new_tokens=draw.choice([3, 40, 200]),
            system_prompt=draw.choice([None, "Be brief.", draw.choice(ODD)]),
            private_context=draw.choice([(), (ContextItem(draw.choice(ODD), draw.choice(["user", "assistant"])),)]),
        )
        for who in names
    ]  # fmt: skip
    return names, Conversation(
        people, shared_context=draw.choice([None, "Talk.", draw.choice(ODD)]),
        reasoning_visibility=draw.choice(["strip", "self_retain", "shared"]),
        communication=draw.choice([None, None, DirectPipingPolicy(), MessagingPolicy()]),
        context_policy=draw.choice([None, SlidingWindowPolicy(keep_last=2), DropOldestPolicy()]),
        shared_system_prompt=draw.choice([None, draw.choice(ODD)]),
    )  # fmt: skip


def check_turn(conversation, who, fed):
    """Only its own tokens hold what it thought; exactly one BOS that no speaker wrote."""
    tokenizer = family_of(conversation)
    said, own = conversation.transcript, set()
    for index, (start, stop) in fed.layout.message_spans.items():
        assert 0 <= start <= stop <= len(fed.prompt)
        if said[index].author == who:
            own |= set(range(start, stop))
    others = [i for n, i in enumerate(fed.prompt) if n not in own]
    if str(conversation.reasoning_visibility) == "strip":
        others = list(fed.prompt)
    if str(conversation.reasoning_visibility) != "shared":
        assert SECRET not in tokenizer.decode(others)
    if template_of(tokenizer).bos and tokenizer.chat_template != FAMILIES["llama2"]["template"]:
        assert [i for n, i in enumerate(fed.prompt) if n not in own].count(tokenizer.bos_token_id) == 1


def family_of(conversation):
    return conversation.participants[0].tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_conversations(name):
    for trial in range(6):
        draw = random.Random(f"{name} {trial}")
        names, conversation = talk(name, draw)
        rolled = conversation.branch()
        for _ in range(5):
            what, who = draw.random(), draw.choice(names)
            if what < 0.25:
                conversation.transcript.append(draw.choice(["moderator", "stranger", *names]), draw.choice(ODD))
            elif what < 0.3 and conversation.transcript:
                conversation.edit(draw.randrange(len(conversation.transcript)), draw.choice(ODD))
            elif what < 0.35:
                conversation.sample(who, draw.choice(ODD))
            else:
                wanted = conversation.branch().render_templated(who, add_generation_prompt=True, tokenize=True)
                message = conversation.step(who)
                assert SECRET not in message.content
                json.dumps(message.metadata, allow_nan=False).encode()
                if "tool_trail" not in message.metadata:  # else the last prompt has the results of tools too
                    assert list(message.fed.prompt) == wanted
                    check_turn(conversation, who, message.fed)
        for key, result in enumerate(rolled.rollout(2, turns=3)):
            alone = rolled.branch()
            alone.key = key
            alone.run(turns=3)
            assert result.error is None and alone.transcript == result.transcript
