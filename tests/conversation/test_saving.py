"""What is saved comes back, whole; nothing in a folder is executed; a folder is the old or the new conversation."""

import datetime
import json
import os
from collections import OrderedDict

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlens import (
    APIParticipant,
    AutoModelParticipant,
    ContextItem,
    Conversation,
    DirectPipingPolicy,
    DropOldestPolicy,
    HumanParticipant,
    Message,
    MessagingPolicy,
    Patch,
    ScriptedParticipant,
    Select,
    SlidingWindowPolicy,
    SteeringSpec,
    SummarizePolicy,
    Transcript,
    dataset_field,
)
from interlens.encoding import SCHEMA_VERSION
from interlens.errors import CannotLoad
from interlens.interp.select import Layout
from interlens.message import Fed
from interlens.participants import Participant, Prices
from interlens.reasoning import Markers
from tests.support.scripted import speaker
from tests.support.tokenizers import family

text = st.text(max_size=12)
ids = st.lists(st.integers(0, 60000), max_size=6).map(tuple)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
layouts = st.builds(
    Layout,
    message_spans=st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3),
    special_spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
    special_ids=st.frozensets(st.integers(0, 99), max_size=3),
    markers=st.none() | st.builds(Markers, open=st.tuples(ids), close=st.tuples(ids), opened=st.booleans()),
    branch_start=st.none() | st.integers(0, 9),
)
feds = st.builds(
    Fed,
    prompt=ids,
    generated=ids,
    phases=st.lists(st.sampled_from(["reasoning", "answer"]), max_size=6).map(tuple),
    layout=st.none() | layouts,
    template_hash=text,
)
messages = st.builds(
    Message, author=text, content=text, metadata=st.dictionaries(text, plain, max_size=3), fed=st.none() | feds
)
keys = st.recursive(st.none() | text | st.integers(), lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)
texts = st.none() | text | st.builds(dataset_field, text) | st.tuples(text, st.builds(dataset_field, text))
policies = st.sampled_from(
    [None, DropOldestPolicy(), SlidingWindowPolicy(keep_last=3, keep_system=False), SummarizePolicy(summarizer="bob")]
)
talks = st.sampled_from([None, DirectPipingPolicy(("alice", "bob")), MessagingPolicy()])


def same(a, b):
    """Field by field, whatever they are."""
    assert type(a) is type(b)
    if isinstance(a, Transcript):
        assert a == b and [m.fed for m in a] == [m.fed for m in b]
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            same(a[name], b[name])
    elif hasattr(a, "__dict__") and not isinstance(a, (type, str)) and not callable(a):
        left, right = (v.__getstate__() if hasattr(v, "__getstate__") else vars(v) for v in (a, b))
        skipped = ("_line", "fingerprint", "capturing", "conditions", "heard", "first_ids")
        same(*({k: v for k, v in s.items() if k not in skipped} for s in (left or {}, right or {})))
    else:
        assert a == b


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(messages, max_size=4), key=keys, seed=st.integers(0, 2**40), system=texts, shared=texts,
    context=policies, communication=talks,
    row=st.none() | st.dictionaries(text, plain, max_size=3), temperature=st.floats(0, 2),
    own_seed=st.none() | st.integers(), thinking=st.sampled_from(["auto", True, False, ("<a>", "</a>")]),
    coef=st.floats(-5, 5), visibility=st.sampled_from(["strip", "self_retain", "shared"]),
)  # fmt: skip
def test_a_conversation_comes_back_whole(
    said, key, seed, system, shared, context, communication, row, temperature, own_seed, thinking, coef, visibility,
    tmp_path_factory,
):  # fmt: skip
    direction = torch.randn(4, generator=torch.Generator().manual_seed(1))
    alice = speaker(
        "alice", family("chatml"), temperature=temperature, seed=own_seed, thinking=thinking, system_prompt=system,
        private_context=(ContextItem("Psst.", "assistant"), ContextItem(dataset_field("x"))),
        steering=[SteeringSpec(direction, layers=(1, 2), coef=coef, tokens=Select.generated() - Select.positions(3)),
                  Patch(torch.ones(2, 4), 1, (0, -1))],
    )  # fmt: skip
    people = [
        alice, ScriptedParticipant("bob", ["x", "y"], cycle=False), HumanParticipant("carol"),
        APIParticipant("dave", "m", base_url="http://x", prices=Prices(prompt=1.0, completion=2.0), max_cost=3.0,
                       context_limit=500, count_tokens=3.5),
    ]  # fmt: skip
    conversation = Conversation(
        people, Transcript(said), None, shared, context_policy=context, context_limit=999, communication=communication,
        reasoning_visibility=visibility, seed=seed,
    )  # fmt: skip
    conversation.key, conversation.row, conversation.turns_taken, conversation.branch_start = key, row, 3, 1
    conversation.stop_reason = "because"
    folder = tmp_path_factory.mktemp("talk")
    conversation.save(folder)
    same(Conversation.load(folder), conversation)
    json.loads((folder / "conversation.json").read_text())


@settings(max_examples=40, deadline=None)
@given(said=st.lists(messages, max_size=4))
def test_a_transcript_comes_back_whole(said, tmp_path_factory):
    path = tmp_path_factory.mktemp("talk") / "t.json"
    Transcript(said).save(path)
    same(Transcript.load(path), Transcript(said))


class Slotted:
    __slots__ = ("words",)


class Parrot(Participant):
    def __init__(self, name, volume):
        super().__init__(name)
        self.volume, self.memory = volume, Slotted()
        self.memory.words = ["who"]

    def reply(self, view, request):
        return Message(self.name, view[-1].content * self.volume)


def hook(message, conversation):
    raise AssertionError("never called")


def tool(word: str) -> str:
    """
    A tool.

    Args:
        word: A word.
    """
    return word


def test_the_readers_own_code_only_when_allowed(tmp_path):
    here = __name__
    people = [Parrot("polly", 2), speaker("bob", family("chatml"), tools=[tool])]
    Conversation(people, message_hooks=[hook], shared_context=hook).save(tmp_path)
    allow = [f"{here}:Parrot", f"{here}:Slotted", f"{here}:hook", f"{here}:tool"]
    for missing in allow:
        with pytest.raises(ValueError, match=f"if you trust it, load with allow=.*{missing.split(':')[1]}"):
            Conversation.load(tmp_path, allow=[a for a in allow if a != missing])
    there = Conversation.load(tmp_path, allow=allow)
    assert there.participants[0].volume == 2 and there.message_hooks == [hook]
    assert there.participants[0].memory.words == ["who"]
    assert there.participants[1].tools[0].function is tool


def test_a_forged_folder_imports_nothing(tmp_path):
    Conversation([ScriptedParticipant("a", ["x"])]).save(tmp_path)
    body = json.loads((tmp_path / "conversation.json").read_text())
    for forged in (
        {"$": "import", "path": "os:system"}, {"$": "custom", "path": "subprocess:Popen", "id": 0, "fields": {}},
        {"$": "Popen", "id": 0, "fields": {}},
    ):  # fmt: skip
        body["conversation"]["row"] = forged
        (tmp_path / "conversation.json").write_text(json.dumps(body))
        with pytest.raises(ValueError, match=r"if you trust it|unknown kind 'Popen'"):
            Conversation.load(tmp_path)


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
def test_files_have_the_mode_that_the_umask_leaves(tmp_path, mask):
    before = os.umask(mask)
    try:
        Transcript([Message("a", "hi")]).save(tmp_path / "t.json")
    finally:
        os.umask(before)
    assert (tmp_path / "t.json").stat().st_mode & 0o777 == 0o666 & ~mask and len(list(tmp_path.iterdir())) == 1


def test_another_schema_is_refused(tmp_path):
    Conversation([ScriptedParticipant("a", ["x"])]).save(tmp_path)
    path = tmp_path / "conversation.json"
    body = json.loads(path.read_text())
    for version in (SCHEMA_VERSION + 1, None, "1"):
        path.write_text(json.dumps(body | {"schema_version": version}))
        with pytest.raises(ValueError, match=f"schema_version {version!r}; this version reads {SCHEMA_VERSION}"):
            Conversation.load(tmp_path)


def test_an_interrupted_save_leaves_the_old_conversation(tmp_path, monkeypatch):
    conversation = Conversation([speaker("a", family("chatml"), steering=SteeringSpec(torch.ones(4), layers=0))])
    conversation.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    conversation.participants[0].steering = SteeringSpec(torch.zeros(4) + 2, layers=0)
    conversation.transcript.append("a", "new")
    replace = os.replace

    def dies(source, target):
        if str(target).endswith(".json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        conversation.save(tmp_path)
    monkeypatch.undo()
    assert len(Conversation.load(tmp_path).transcript) == 0
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    conversation.save(tmp_path)
    assert len(Conversation.load(tmp_path).transcript) == 1 and len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_found_again_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"message_hooks\[0\] is .*<lambda>, which cannot be imported again"):
        Conversation([ScriptedParticipant("a", ["x"])], message_hooks=[lambda m, c: None]).save(tmp_path)
    conversation = Conversation([ScriptedParticipant("a", ["x"])])
    for value in (b"x", datetime.date(2026, 1, 1), numpy.int64(3), OrderedDict(a=1), len, tmp_path, torch.float32):
        conversation.row = {"x": value}
        with pytest.raises(ValueError, match=r"row\['x'\] is a .*does not come back from its attributes alone"):
            conversation.save(tmp_path)
    assert not (tmp_path / "conversation.json").exists()


def test_a_conversation_from_another_machine_says_what_it_needs(tmp_path):
    away = AutoModelParticipant.from_pretrained("/nowhere/llama", name="alice", adapter="/nowhere/lora")
    api = APIParticipant("carol", "gpt", base_url="http://x", api_key="secret")
    Conversation([away, ScriptedParticipant("bob", ["Hm."]), api], shared_context="Go.").save(tmp_path)
    there = Conversation.load(tmp_path)
    assert there.needs() == {
        "alice": "model '/nowhere/llama' with adapter '/nowhere/lora'",
        "carol": "API openai, model 'gpt' at http://x, and its key",
    }
    there.step("bob")
    with pytest.raises(CannotLoad, match="no model at '/nowhere/llama'"):
        there.step("alice")
    assert [m.author for m in there.transcript] == ["moderator", "bob"]
