"""Where reasoning ends and the answer begins, in token ids; and who may see it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlens import Conversation, Message
from interlens.interp.select import Layout, Select, TokenSequence
from interlens.message import Fed
from interlens.reasoning import Markers, PhaseTracker, find_markers, phases_of, split_reply
from interlens.views import template_of
from tests.support.scripted import speaker
from tests.support.tokenizers import family

LONG = Markers(open=((1, 2, 3),), close=((4, 5),), blank=frozenset({9}))
SHORT = Markers(open=((1,),), close=((4,),))


def marks(tokens, markers):
    return "".join(phase[0] for phase in phases_of(tokens, markers))


@pytest.mark.parametrize(
    "markers, tokens, phases",
    [
        (LONG, (1, 2, 3, 7, 4, 5, 8), "rrrrrra"),
        (LONG, (9, 9, 1, 2, 3, 7), "aarrrr"),  # white space first; never closed
        (LONG, (8, 1, 7, 1, 2, 3, 8), "aaaaaaa"),  # an ordinary token that begins a marker, in the middle of an answer
        (LONG, (1, 7, 1, 2, 3), "raaaa"),  # at the start it could have been one; a causal label cannot be taken back
        (LONG, (1, 2, 3, 4, 4, 5, 1, 2, 3), "rrrrrraaa"),  # a closing marker overlaps its own beginning
        (SHORT, (8, 1, 7, 4, 8, 1, 7), "arrrarr"),  # one token opens anywhere
        (Markers(open=((1,),), close=((4,),), opened=True), (7, 4, 8), "rra"),
        (None, (1, 2, 3), "aaa"),
    ],
)
def test_phases(markers, tokens, phases):
    assert marks(tokens, markers) == phases


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from([LONG, SHORT]), st.booleans())
def test_online_is_offline(tokens, markers, opened):
    """The phase of a token never depends on what comes after it, so steering by phase and capture agree."""
    markers = Markers(open=markers.open, close=markers.close, opened=opened)
    whole = phases_of(tokens, markers)
    tracker = PhaseTracker(markers)
    assert tuple(tracker.feed(t) for t in tokens) == whole
    assert all(phases_of(tokens[:n], markers) == whole[:n] for n in range(len(tokens)))
    sequence = TokenSequence([0, 0], Layout(markers=markers))
    for n, token in enumerate(tokens):
        sequence.append(token)
        assert bool(Select.phase("answer").mask(sequence, n + 2, n + 3)[0]) is (whole[n] == "answer")


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from([LONG, SHORT]))
def test_a_reply_is_split_without_loss(tokens, markers):
    reasoning, answer = split_reply(tuple(tokens), markers)
    markup = {t for m in (*markers.open, *markers.close) for t in m}
    assert len(reasoning) + len(answer) <= len(tokens)
    assert [t for t in tokens if t not in markup] == [t for t in (*reasoning, *answer) if t not in markup] or reasoning


def test_a_stray_close_hides_what_stood_before_it():
    assert split_reply((7, 8, 4, 6), SHORT) == ((7, 8), (6,))
    assert split_reply((1, 7, 1, 2, 3), LONG) == ((), (1, 7, 1, 2, 3))


@pytest.mark.parametrize("before", ["", "\n", " "])
@pytest.mark.parametrize("after", ["\n\nYes.", "Yes.", " Yes."])
def test_markers_of_several_tokens_are_found_as_they_are_tokenised(smol, before, after):
    markers = find_markers(smol, "", ("<think>", "</think>"))
    ids = smol(f"{before}<think>\nIs a < b?\n</think>{after}", add_special_tokens=False)["input_ids"]
    phases = phases_of(ids, markers)
    answer = smol.decode([i for i, p in zip(ids, phases, strict=True) if p == "answer"])
    assert answer.strip() == "Yes."
    assert smol.decode(list(split_reply(tuple(ids), markers)[1])).strip() == "Yes."


def talk(name, answer, visibility="strip", **options):
    tokenizer = family(name)
    people = [speaker(n, tokenizer, answer, **options) for n in ("alice", "bob")]
    conversation = Conversation(people, shared_context="Begin.", reasoning_visibility=visibility)
    conversation.run(turns=3)
    return conversation, tokenizer


CASES = {
    "closed": ("qwen3", "<think>\nplan it\n</think>\n\nSoup.", "Soup.", "plan it"),
    "unclosed": ("qwen3", "<think>\nplan it and never", "", "plan it and never"),
    "none": ("qwen3", "Soup.", "Soup.", None),
    "opened by the prompt": ("r1", "plan it\n</think>\n\nSoup.", "Soup.", "plan it"),
    "only closed": ("qwen3", "plan it\n</think>\n\nSoup.", "Soup.", "plan it"),
    "[THINK]": ("magistral", "[THINK]plan it[/THINK]Soup.", "Soup.", "plan it"),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>plan it<|end|><|start|>assistant<|channel|>final<|message|>Soup.",
        "Soup.",
        "plan it",
    ),
    "harmony, answer only": ("harmony", "<|channel|>final<|message|>Soup.", "Soup.", None),
    "harmony, unfinished": ("harmony", "<|channel|>analysis<|message|>plan it", "", "plan it"),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_kept_apart_and_never_leaks(case):
    name, answer, content, reasoning = CASES[case]
    conversation, tokenizer = talk(name, answer)
    for message in conversation.transcript[1:]:
        assert message.content == content and message.metadata.get("reasoning") == reasoning
        assert "plan it" not in tokenizer.decode(message.fed.prompt)
        spoken = [i for i, p in zip(message.fed.generated, message.fed.phases, strict=True) if p == "answer"]
        if case not in ("only closed",):  # what nobody opened is answer as long as one only looks back
            assert tokenizer.decode(spoken, skip_special_tokens=True).strip() == content
        if content:  # the stop token ends the answer
            assert message.fed.phases[-1] == "answer"


@pytest.mark.parametrize("case", ["closed", "opened by the prompt", "[THINK]", "harmony"])
def test_visibility(case):
    name, answer, _, _ = CASES[case]
    own, tokenizer = talk(name, answer, "self_retain")
    fed = own.transcript[3].fed
    start, stop = fed.layout.message_spans[1]
    assert fed.prompt[start:stop] == own.transcript[1].fed.generated[:-1]  # verbatim, markers included
    assert tokenizer.decode(fed.prompt).count("plan it") == 1
    assert fed.prompt[: len(own.transcript[1].fed.prompt)] == own.transcript[1].fed.prompt
    shared, tokenizer = talk(name, answer, "shared")
    assert tokenizer.decode(shared.transcript[3].fed.prompt).count("plan it") == 2
    assert [m.content for m in shared.transcript] == [m.content for m in own.transcript]


def test_thinking_flags_reach_the_template():
    conversation, tokenizer = talk("qwen3", "Soup.", thinking=False)
    assert tokenizer.decode(conversation.transcript[1].fed.prompt).endswith("<think>\n\n</think>\n\n")
    assert conversation.transcript[1].fed.layout.markers.opened is False
    assert template_of(family("r1")).reply_markers(None).opened is True
    with pytest.raises(ValueError, match="thinking is 'auto'"):
        speaker("x", tokenizer, thinking="yes")


@pytest.mark.parametrize("visibility", ["strip", "self_retain"])
@pytest.mark.parametrize("case", CASES)
def test_turns_read_back_from_stored_tokens_are_fed_as_before(case, visibility):
    """A reader that knows content, tokens, phases and the template's hash builds the prompts that would have been."""
    name, answer, _, _ = CASES[case]
    conversation, _ = talk(name, answer, visibility)
    there = conversation.branch()
    there.transcript[:] = [
        Message(m.author, m.content, m.metadata, fed=m.fed and Fed(generated=m.fed.generated, phases=m.fed.phases,
                                                                   template_hash=m.fed.template_hash))
        for m in conversation.transcript
    ]  # fmt: skip
    for who in ("alice", "bob"):
        ours, theirs = (
            c.render_templated(who, add_generation_prompt=True, tokenize=True) for c in (conversation, there)
        )
        assert ours == theirs


def test_another_template_renders_the_text():
    conversation, _ = talk("qwen3", "<think>\nplan it\n</think>\n\nSoup.")
    there = Conversation(
        [speaker("alice", family("llama3")), speaker("bob", family("llama3"))], conversation.transcript.copy()
    )
    text = there.render_templated("alice")
    assert text.count("assistant<|end_header_id|>\n\nSoup.<|eot_id|>") == 2 and "plan it" not in text
