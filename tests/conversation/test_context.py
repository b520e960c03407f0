"""What is sent fits the context: local prompts, API prompts, and prompts that tool results make longer."""

import json

import pytest

from interlens import APIParticipant, Conversation, Message, ScriptedParticipant, TokenBudget
from interlens.errors import ContextOverflow
from interlens.participants import Participant
from interlens.policies import DropOldestPolicy, SlidingWindowPolicy, SummarizePolicy, deny
from tests.conversation.test_api import api, talk
from tests.conversation.test_tools import call
from tests.support.scripted import speaker
from tests.support.server import ChatServer, serve
from tests.support.tokenizers import family


def words(messages, tools):
    """A count of one's own."""
    return sum(len(m["content"].split()) for m in messages) + 10 * len(tools)


@pytest.mark.parametrize(
    "policy, first",
    [(DropOldestPolicy(), "Talk."), (SlidingWindowPolicy(keep_last=2), "Talk."),
     (SummarizePolicy(keep_last=1, summarizer="bob"), "Talk.")],
)  # fmt: skip
def test_policies_hold_for_apis_that_can_count(policy, first):
    pytest.importorskip("openai")
    chat = ChatServer()
    with serve(chat) as url:
        remote = api(url, context_limit=26, count_tokens=words, max_new_tokens=10)
        conversation = talk(remote, context_policy=policy)
        conversation.transcript.append("bob", "one two three four five six seven eight")
        conversation.run(turns=9, first="remote")
    sent = [body["messages"] for body in chat.requests]
    assert len(sent) == 5 and all(words(m, ()) + 10 <= 26 and m[0]["content"] == first for m in sent)
    assert any("eight" in str(m) for m in sent[:1]) and "eight" not in str(sent[-1])


def test_an_api_that_cannot_count_is_refused_where_counting_is_needed():
    plain = APIParticipant("remote", "m", api_key="k")
    others = ScriptedParticipant("bob", ["Hm."])
    for options, says in (
        ({"context_limit": 100}, "context_limit=100 needs the tokens of 'remote'"),
        ({"context_policy": DropOldestPolicy()}, "DropOldestPolicy needs .* context_limit=.* count_tokens="),
        ({"context_policy": SummarizePolicy()}, "SummarizePolicy needs"),
    ):
        with pytest.raises(ValueError, match=says):
            Conversation([plain, others], **options)
    conversation = Conversation([plain, others])
    conversation.context_limit = 100  # set later: refused before anything is sent
    with pytest.raises(ValueError, match="context_limit=100 needs"):
        conversation.step("remote")
    with pytest.raises(ValueError, match="context_limit needs count_tokens"):
        APIParticipant("remote", "m", context_limit=100)
    with pytest.raises(ValueError, match="must be above 0"):
        APIParticipant("remote", "m", count_tokens=0)
    Conversation([others, ScriptedParticipant("carol", ["x"])], context_limit=1).run(turns=2)  # scripts have no prompt


def test_a_window_needs_no_counting_and_an_estimate_is_one_of_characters():
    pytest.importorskip("openai")
    chat = ChatServer()
    with serve(chat) as url:
        talk(api(url), context_policy=SlidingWindowPolicy(keep_last=1)).run(turns=5)
        assert [len(b["messages"]) for b in chat.requests] == [1, 2, 2]
        remote = api(url, context_limit=40, count_tokens=2.0, max_new_tokens=10)
        conversation = talk(remote)
        assert remote.count_tokens(conversation.view("remote")) == 3 + 4  # "Talk.", and its markup
        conversation.transcript.append("bob", "x" * 60)
        with pytest.raises(
            ContextOverflow, match="prompt of 41 tokens and a reply of up to 10 do not fit a context of 40"
        ):
            conversation.step("remote")


class Terse(Participant):
    """A participant of one's own with a prompt."""

    has_prompt, context_limit, max_new_tokens = True, 4, 1

    def count_tokens(self, view):
        return len(view)

    def reply(self, view, request):
        return Message(self.name, f"I see {len(view)}.")


def test_participants_of_ones_own_can_have_a_prompt():
    conversation = Conversation([Terse("t")], shared_context="Go.", context_policy=DropOldestPolicy())
    conversation.run(turns=6)
    assert [m.content for m in conversation.transcript[1:]] == [f"I see {n}." for n in (1, 2, 3, 3, 3, 3)]


def long(words: int) -> str:
    """
    Say much.

    Args:
        words: How many words.
    """
    return "word " * words


def local(*lines, **options):
    tokenizer = family("qwen2")
    alice = speaker("alice", tokenizer, list(lines), tools=[long], max_new_tokens=100)
    conversation = Conversation(
        [alice, speaker("bob", tokenizer, "x " * 60, max_new_tokens=130)], shared_context="Talk.", **options
    )
    conversation.step("bob")
    return conversation, alice


def test_a_long_tool_result_never_overflows_silently():
    ask = call("qwen2", "long", words=30)
    conversation, alice = local(ask, "Done.", context_limit=560)
    room = 560 - 100 - len(conversation.render_templated("alice", add_generation_prompt=True, tokenize=True))
    assert 0 < room < 150
    before = conversation.transcript.copy()
    with pytest.raises(ContextOverflow, match="do not fit a context of 560"):
        conversation.step("alice")
    assert conversation.transcript == before and len(alice.engine.requests) == 1
    conversation, alice = local(ask, "Done.", context_limit=560, context_policy=DropOldestPolicy())
    message = conversation.step("alice")
    first, second = alice.engine.requests
    assert message.content == "Done." and len(second.tokens) + 100 <= 560
    text = family("qwen2").decode(second.tokens)
    assert "word word" in text and "x x" not in text and "x x" in family("qwen2").decode(first.tokens)


def test_a_window_without_framing_keeps_the_calls_of_the_turn():
    lines = [call("qwen2", "long", words=2), call("qwen2", "long", words=3), "Done."]
    conversation, alice = local(*lines, context_policy=SlidingWindowPolicy(keep_last=1, keep_system=False))
    conversation.step("alice")
    last = family("qwen2").decode(alice.engine.requests[-1].tokens)
    assert "Talk." not in last and all(part in last for part in ("x x", *lines[:2], "word word", "word word word"))


def test_a_long_tool_result_never_overflows_an_api():
    pytest.importorskip("openai")
    asked = {"id": "c", "type": "function", "function": {"name": "long", "arguments": '{"words": 50}'}}
    chat = ChatServer([{"content": "", "tool_calls": [asked]}, "Done."] * 2)
    with serve(chat) as url:
        remote = api(url, context_limit=90, count_tokens=words, max_new_tokens=10, tools=[long])
        conversation = talk(remote, context_policy=DropOldestPolicy())
        conversation.transcript.append("bob", "x " * 30)
        assert conversation.step("remote").content == "Done."
        assert "x x" in str(chat.requests[0]["messages"]) and "x x" not in str(chat.requests[1]["messages"])
        assert (
            chat.requests[1]["messages"][-1]["role"] == "tool" and "word" in chat.requests[1]["messages"][-1]["content"]
        )
        strict = talk(api(url, context_limit=60, count_tokens=words, max_new_tokens=10, tools=[long]))
        with pytest.raises(ContextOverflow, match="do not fit a context of 60"):
            strict.step("remote")


def test_a_budget_counts_the_generations_of_a_tool_loop():
    lines = [call("qwen2", "long", words=1), "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
    for per_turn in (40, 70):
        conversation, alice = local(*lines)
        alice.max_new_tokens = 200
        conversation.run(turns=1, first="alice", until=TokenBudget(per_turn=per_turn))
        message = conversation.transcript[-1]
        spent = message.metadata["n_tokens"] + sum(t["n_tokens"] for t in message.metadata.get("tool_trail", ()))
        assert spent <= per_turn, message.metadata
    assert len(alice.engine.requests) == 2 and message.metadata["finish_reason"] == "length"


def test_a_summary_is_of_what_was_said_and_kept_with_the_turn():
    def made(hooks=()):
        people = [speaker(n, family("chatml"), max_new_tokens=20) for n in ("alice", "bob")]
        conversation = Conversation(
            people, shared_context="Talk.", context_limit=190, context_policy=SummarizePolicy(keep_last=1),
            message_hooks=hooks,
        )  # fmt: skip
        for n in range(12):
            conversation.transcript.append("bob", f"Word number {n}.")
        return conversation

    def asked(conversation):
        return [family("chatml").decode(r.tokens) for r in conversation.participants[0].engine.requests]

    once, sampled, denied = made(), made(), made(hooks=[lambda m, c: deny()])
    sampled.sample("alice", "Well? " * 9), denied.step("alice")
    sampled.render_templated("alice", add_generation_prompt=True)
    assert sampled.context_policy == denied.context_policy == made().context_policy
    assert once.step("alice", max_new_tokens=1) == sampled.step("alice", max_new_tokens=1)
    assert once.context_policy == sampled.context_policy != denied.context_policy
    assert all(r.sampling.max_new_tokens == 20 for r in once.participants[0].engine.requests[:-1])
    before = len(asked(once))
    once.rewind(1)
    for n in range(16):
        once.transcript.append("bob", f"New word {n}.")
    once.step("alice")
    assert "Earlier:" in asked(once)[before - 2] and "Earlier:" not in asked(once)[before]
    before = len(asked(once))
    once.edit(3, "Another word.")
    once.step("alice")
    assert "Another word." in asked(once)[before]


def test_a_summary_is_written_in_pieces_that_fit():
    tokenizer = family("chatml")
    people = [speaker(n, tokenizer, max_new_tokens=20) for n in ("alice", "bob")]
    conversation = Conversation(
        people, shared_context="Talk.", context_limit=190, context_policy=SummarizePolicy(keep_last=1)
    )
    for n in range(12):
        conversation.transcript.append("bob", f"Word number {n}.")
    conversation.step("alice")
    *summaries, turn = people[0].engine.requests
    assert len(summaries) > 1 and all(len(r.tokens) + 20 <= 190 for r in summaries)
    assert all(any(f"number {n}." in tokenizer.decode(r.tokens) for r in summaries) for n in range(11))
    assert "Summary of the conversation so far" in tokenizer.decode(turn.tokens)
    conversation.transcript.append("bob", "much " * 100)
    conversation.transcript.append("bob", "Well?")
    with pytest.raises(ContextOverflow, match="message 14 cannot be summarised"):
        conversation.step("alice")
    json.dumps(conversation.transcript[13].metadata)
