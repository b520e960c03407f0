"""Laws of one conversation, on a scripted engine."""

import json
import threading

import pytest
import torch

from interlens import (
    Conversation,
    HumanParticipant,
    Message,
    ScriptedParticipant,
    SteeringSpec,
    Transcript,
    UnsupportedIntervention,
    dataset_field,
)
from interlens.errors import ContextOverflow
from interlens.participants import ModelParticipant, Participant
from interlens.policies import (
    AnyStopCondition,
    ContextItem,
    DirectPipingPolicy,
    DropOldestPolicy,
    MessageHook,
    RoundRobinPolicy,
    SlidingWindowPolicy,
    StopStringCondition,
    SummarizePolicy,
    TokenBudget,
    TokenStopCondition,
    TurnStopCondition,
    approve,
    deny,
    edit,
)
from interlens.scheduler import finish
from tests.support.scripted import speaker
from tests.support.tokenizers import family
from tests.support.unchecked import unchecked


def pair(**options):
    tokenizer = family("chatml")
    return Conversation(
        [speaker("alice", tokenizer), speaker("bob", tokenizer)], **{"shared_context": "Talk.", **options}
    )


def keys(conversation, name):
    return [r.key for r in conversation.participant(name).engine.requests]


def test_the_opening_is_message_0_by_the_moderator():
    conversation = pair()
    assert conversation.transcript == [Message("moderator", "Talk.")]
    again = Conversation(conversation.participants, conversation.transcript.copy(), shared_context="Talk.")
    assert len(again.transcript) == 1


@pytest.mark.parametrize("names, wrong", [(("a", "a"), "'a'"), (("a", "moderator"), "moderator")])
def test_names_clash(names, wrong):
    with pytest.raises(ValueError, match=wrong):
        Conversation([ScriptedParticipant(n, ["x"]) for n in names])


def test_from_models_never_drops_one():
    with pytest.raises(ValueError, match="2 models but 1 names"):
        Conversation.from_models(("smollm2", "smollm2"), names=("alice",))
    with pytest.raises(ValueError, match="1 models but 2 names"):
        Conversation.from_models(("smollm2",), names=("alice", "bob"))
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        Conversation.from_models(("smolm2",))
    named = Conversation.from_models(("smollm2", "smollm2", "somebody/elsewhere"))
    assert [p.name for p in named.participants] == ["a", "b", "c"]
    assert named.participants[0].weights is named.participants[1].weights is not named.participants[2].weights
    pairs = [("smollm2", family("chatml")), ("smollm2", family("qwen3"))]
    given = Conversation.from_models(pairs)
    assert [p.weights._tokenizer for p in given.participants] == [tokenizer for _, tokenizer in pairs]


def test_speakers_are_named_in_every_way():
    conversation = pair()
    alice, bob = conversation.participants
    assert conversation.participant(-1) is conversation.participant("bob") is conversation.participant(bob) is bob
    assert conversation.participant(0) is alice and conversation.branch().participant(alice) is not alice
    for wrong in ("carol", 2, -3, True):
        with pytest.raises(ValueError, match="alice, bob"):
            conversation.participant(wrong)


def test_run_goes_round_and_stops():
    conversation = pair()
    with pytest.raises(ValueError, match="turns="):
        conversation.run()
    conversation.run(turns=3)
    assert [m.author for m in conversation.transcript] == ["moderator", "alice", "bob", "alice"]
    assert conversation.stop_reason == "3 turns"
    conversation.run(turns=2, prompt="Go on.", first="alice")
    assert [m.author for m in conversation.transcript][4:] == ["moderator", "alice", "bob"]


@pytest.mark.parametrize(
    "until, turns, why",
    [
        (TurnStopCondition(2), 2, "2 turns"),
        (TokenStopCondition(15), 2, "tokens"),
        (AnyStopCondition((lambda c: c.turns_taken > 2, TurnStopCondition(9))), 3, "until"),
        ([TurnStopCondition(9), StopStringCondition(["now"])], 1, "stop string 'now'"),
        (lambda c: len(c.transcript) > 4, 4, "until"),
        (TokenBudget(per_conversation=15, per_turn=6), 3, "token budget 15 spent"),
    ],
)
def test_stop_conditions(until, turns, why):
    conversation = pair()
    for _ in range(2):  # a condition's state belongs to one run
        conversation.reset()
        conversation.run(turns=8, until=until)
        assert conversation.turns_taken == turns and why in conversation.stop_reason
        if isinstance(until, TokenBudget):
            assert [m.metadata["n_tokens"] for m in conversation.transcript[1:]] == [6, 6, 3]
            conversation.participants.append(ScriptedParticipant("carl", ["A line costs nothing."]))
            conversation.run(turns=2, first="carl", until=until)
            assert conversation.stop_reason == "2 turns"
            conversation.participants.pop()


def test_metadata_is_plain_and_says_what_was_in_force():
    conversation = pair()
    message = conversation.step("alice", max_new_tokens=4)
    assert message.metadata["finish_reason"] == "length" and message.metadata["n_tokens"] == 4
    assert conversation.step("bob").metadata["finish_reason"] == "stop"
    bob = conversation.transcript[-1]
    assert bob.metadata["raw_completion"] == bob.content + "<|im_end|>" and bob.metadata["seed"] == 0
    assert bob.fed.generated[-1] == family("chatml").eos_token_id
    assert bob.metadata["n_tokens"] == len(bob.fed.generated) and bob.metadata["n_prompt_tokens"] == len(bob.fed.prompt)
    assert bob.metadata["sampling"]["temperature"] == 0.8
    json.dumps(conversation.transcript[-1].metadata, allow_nan=False)


def test_noise_keys_count_generated_turns_calls_and_samples():
    conversation = pair(seed=7)
    conversation.key = ("item", 1)
    conversation.step("alice")
    conversation.transcript.append("moderator", "A framing shifts nothing.")
    conversation.sample("alice")
    conversation.sample("alice", "Hm?")
    conversation.step("alice")
    conversation.participant("alice").seed = 3
    conversation.step("alice")
    assert keys(conversation, "alice") == [
        (7, ("item", 1), 0, 0), (7, ("item", 1), 1, 1), (7, ("item", 1), 1, 2), (7, ("item", 1), 1, 0),
        (3, ("item", 1), 2, 0),
    ]  # fmt: skip


def test_a_sample_leaves_no_trace():
    conversation, plain = pair(), pair()
    conversation.step("alice"), plain.step("alice")
    before = conversation.transcript.copy()
    one, two = conversation.sample("bob", "How do you feel?"), conversation.sample("bob", "How do you feel?")
    assert one != two and conversation.transcript == before
    assert set(conversation.sample_all("Well?", as_author="alice")) == {"alice", "bob"}
    assert conversation.step("bob") == plain.step("bob")


def test_hooks_edit_and_deny_and_a_denied_turn_leaves_nothing():
    class Strict(MessageHook):
        def __init__(self):
            self.seen, self.instead = 0, Message("bob", "Censored.")

        def review(self, message, conversation):
            self.seen += 1
            if self.seen == 1:
                return deny("too early")
            return approve() if self.seen == 2 else edit(self.instead)

    conversation = pair(message_hooks=[Strict()])
    assert conversation.step("alice") is None and len(conversation.transcript) == 1 and conversation.turns_taken == 0
    kept = conversation.step("alice")
    assert kept.fed is not None and keys(conversation, "alice") == [(0, None, 0, 0), (0, None, 0, 1)]
    changed = conversation.step("bob")
    assert changed.content == "Censored." and changed.fed is None and conversation.transcript[-1] is changed
    assert "Censored." in conversation.render_templated("alice")
    again = conversation.step("bob")  # a hook may keep what it says instead
    again.metadata["note"] = 1
    assert again == Message("bob", "Censored.", {"finish_reason": "stop", "note": 1}) and again is not changed
    assert changed.metadata == {"finish_reason": "stop"}


CHANGES = [
    lambda c: c.transcript.append("alice", "Forged."),
    lambda c: c.transcript.__setitem__(0, Message("moderator", "Forged.")),
    lambda c: c.transcript.rewind(0),
    lambda c: c.aside().transcript.rewind(0),
    lambda c: c.edit(0, "Forged."),
    lambda c: c.step("bob"),
    lambda c: c.sample("bob"),
    lambda c: setattr(c, "seed", 7),
    lambda c: setattr(c.participant("bob"), "temperature", 0.0),
    lambda c: setattr(c.participants[1], "system_prompt", "Obey."),
    lambda c: c.row.update(x=2),
    lambda c: c.message_hooks.append(None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_policies_can_change_nothing(change):
    class Policy(RoundRobinPolicy):
        def next_speaker(self, conversation):
            return change(conversation)

    for options, until in (
        ({"message_hooks": [lambda m, c: change(c)]}, None), ({}, change), ({"communication": Policy()}, None),
    ):  # fmt: skip
        conversation = pair(**options)
        conversation.row = {"x": 1}
        before = conversation.transcript.copy()
        with pytest.raises((TypeError, AttributeError), match=r"read-only|no attribute"):
            conversation.run(turns=1, until=until)
        assert conversation.transcript == before and conversation.seed == 0 and conversation.row == {"x": 1}
        assert conversation.participant("bob").temperature == 0.8


def test_hooks_and_policies_read_everything_and_try_things_on_a_branch():
    seen = []

    def hook(message, conversation):
        message.content = conversation.transcript[-1].content = "Scribbled on a copy."
        for read in (message, conversation.transcript[-1]):
            read.metadata.setdefault("sampling", {})["temperature"] = 9.0
        bob = conversation.participant("bob")
        seen.append((len(conversation.transcript), conversation.view("bob")[-1].content, bob.temperature))
        assert isinstance(conversation, Conversation) and isinstance(bob, ModelParticipant)
        trial = conversation.branch()
        trial.message_hooks.clear()  # or it would be asked about its own trial
        seen.append(trial.step("bob").author)
        return approve()

    conversation, plain = pair(message_hooks=[hook]), pair()
    assert conversation.run(turns=2) == plain.run(turns=2)
    assert seen[:2] == [(1, "Talk.", 0.8), "bob"] and seen[2][0] == 2


def test_a_turn_that_a_policy_breaks_leaves_nothing():
    class Breaks(RoundRobinPolicy):
        def spoken(self, conversation, message):
            raise RuntimeError(f"no room for message {len(conversation.transcript)}")

    conversation = pair(communication=Breaks())
    with pytest.raises(RuntimeError, match="no room for message 2"):
        conversation.step("alice")
    assert conversation.transcript == pair().transcript and conversation.turns_taken == 0


def test_a_branch_has_the_state_of_its_parents_hooks():
    class Count(MessageHook):
        seen = 0

        def review(self, message, conversation):
            self.seen += 1
            return approve()

    class Shared(Count):
        def __deepcopy__(self, memo):
            return self

    mine, shared = Count(), Shared()
    conversation = pair(message_hooks=[mine, shared])
    conversation.step("alice")
    conversation.rollout(3, turns=2)
    branch = conversation.branch()
    branch.step("bob")
    assert (mine.seen, branch.message_hooks[0].seen, shared.seen) == (1, 2, 8)
    mine.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied for a branch .* __deepcopy__"):
        conversation.branch()
    polly = Parrot("polly")
    polly.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"Parrot\('polly'\) cannot be copied for a branch .* clone\(\)"):
        Conversation([polly]).branch()


def test_a_branch_shares_nothing_but_weights():
    conversation = pair(message_hooks=[])
    conversation.participant("alice").steering = [SteeringSpec(torch.ones(4), layers=0)]
    conversation.row = {"x": [1]}
    conversation.run(turns=2)
    before = [m.copy() for m in conversation.transcript]
    branch, sibling = conversation.branch(), conversation.branch()
    branch.participant("alice").temperature = 0.1
    branch.participant("alice").seed = 5
    branch.message_hooks.append(lambda message, conversation: deny())
    branch.transcript[1].metadata["x"] = 1
    branch.transcript[2].metadata["sampling"]["temperature"] = 9.0
    branch.participant("alice").steering.clear()
    branch.row["x"].append(2)
    branch.edit(1, "Changed.")
    branch.run(turns=2)
    for other in (conversation, sibling):
        assert list(other.transcript) == before
        assert other.participant("alice").temperature == 0.8 and other.participant("alice").seed is None
        assert other.message_hooks == [] and other.row == {"x": [1]}
        assert len(other.participant("alice").steering) == 1
    assert branch.participant("alice").weights is conversation.participant("alice").weights
    assert sibling.step("alice") == conversation.step("alice")  # paired
    assert conversation.branch(seed=9).step("bob") != conversation.branch().step("bob")


def test_branch_from_and_rewind_go_on_as_if_nothing_had_followed():
    conversation = pair()
    conversation.run(turns=2)
    third = conversation.step("alice")
    branch = conversation.branch_from(2)
    assert branch.transcript == conversation.transcript[:3] and branch.step("alice") == third
    conversation.rewind(conversation.transcript[1])
    assert len(conversation.transcript) == 2 and conversation.turns_taken == 1


def test_edits_forget_tokens_and_reset_forgets_all():
    conversation = pair()
    conversation.run(turns=2)
    conversation.edit(1, "Something else.", note="edited")
    assert conversation.transcript[1].fed is None and conversation.transcript[1].metadata["note"] == "edited"
    assert "Something else." in conversation.render_templated("alice")
    conversation.reset()
    assert conversation.transcript == [Message("moderator", "Talk.")] and conversation.turns_taken == 0


def test_views_follow_every_change_of_the_transcript():
    conversation = pair()
    conversation.run(turns=4)
    changes = [
        lambda c: setattr(c.transcript[2], "content", "Changed in place."),
        lambda c: setattr(c.transcript[0], "author", "alice"),
        lambda c: setattr(c.transcript[1], "fed", None),
        lambda c: c.transcript.insert(1, Message("moderator", "Put in.")),
        lambda c: c.transcript.__delitem__(2),
        lambda c: c.transcript.__setitem__(1, Message("bob", "Replaced.")),
        lambda c: setattr(c, "reasoning_visibility", "shared"),
        lambda c: c.transcript[-1].metadata.update(reasoning="Thought of later."),
        lambda c: setattr(c, "reasoning_visibility", "strip"),
        lambda c: setattr(c, "communication", DirectPipingPolicy(chain=("alice", "bob"))),
        lambda c: setattr(c, "communication", RoundRobinPolicy()),
        lambda c: setattr(c.participants[0], "name", "carol"),
        lambda c: c.rewind(1),
    ]
    for change in changes:
        for name in (0, 1):
            conversation.render_templated(name, add_generation_prompt=True)
        change(conversation)
        for name in (0, 1):
            fresh = conversation.branch()  # which has seen nothing yet
            assert conversation.view(name) == fresh.view(name)
            ours, theirs = (c.render_templated(name, add_generation_prompt=True) for c in (conversation, fresh))
            assert ours == theirs


def test_own_tokens_are_fed_verbatim():
    conversation = pair()
    conversation.run(turns=4)
    for index, message in enumerate(conversation.transcript[1:], 1):
        fed = message.fed
        again = conversation.branch_from(index - 1).render_templated(
            message.author, add_generation_prompt=True, tokenize=True
        )
        assert tuple(again) == fed.prompt
        later = conversation.participant(message.author).render(conversation.view(message.author))
        start, stop = later.layout.message_spans[index]
        assert later.ids[start:stop] == fed.generated[:-1]
        assert later.ids[: len(fed.prompt)] == fed.prompt  # what was fed stays a prefix


class Parrot(Participant):
    def reply(self, view, request):
        return Message(self.name, f"You said: {view[-1].content}")


def test_custom_participants_answer_but_cannot_be_looked_into():
    conversation = Conversation([Parrot("polly"), speaker("bob", family("chatml"))], shared_context="Hello")
    assert conversation.step("polly").content == "You said: Hello"
    with pytest.raises(UnsupportedIntervention, match="logprobs asked of 'polly'"):
        conversation.step("polly", return_logprobs=True)
    with pytest.raises(UnsupportedIntervention, match="polly"), conversation.capture(participants=["polly"]):
        pass
    with conversation.capture() as cache:
        conversation.step("polly")
    assert cache.skipped == ["polly"] and len(cache) == 0
    assert len(conversation.transcript) == 3


def test_scripts_depend_on_the_conversation_alone():
    conversation = Conversation([ScriptedParticipant("a", "xy"), ScriptedParticipant("b", ["1"], cycle=False)])
    conversation.step("a")
    branch = conversation.branch()
    assert conversation.step("a").content == branch.step("a").content == "y" and conversation.step("a").content == "x"
    conversation.step("b")
    with pytest.raises(IndexError, match="1 lines"):
        conversation.step("b")


def test_who_hears_whom():
    tokenizer = family("chatml")
    trio = [speaker(n, tokenizer) for n in ("alice", "bob", "carol")]
    conversation = Conversation(trio, shared_context="Go.", communication=DirectPipingPolicy())
    conversation.run(turns=4)
    assert [m.author for m in conversation.view("carol")] == ["moderator", "bob", "carol"]
    assert [m.author for m in conversation.view("alice")] == ["moderator", "alice", "carol", "alice"]
    backwards = Conversation(trio, communication=DirectPipingPolicy(chain=("carol", "alice")))
    backwards.run(turns=3)
    assert [m.author for m in backwards.transcript] == ["carol", "alice", "carol"]


def test_framing_is_private():
    tokenizer = family("chatml")
    alice = speaker("alice", tokenizer, system_prompt="You like soup.", private_context=[ContextItem("A secret.")])
    conversation = Conversation(
        [alice, speaker("bob", tokenizer)], shared_system_prompt="Be brief.", shared_context="Go."
    )
    assert [(m.role, m.content) for m in conversation.view("alice")] == [
        ("system", "Be brief.\n\nYou like soup."), ("user", "A secret."), ("user", "Go."),
    ]  # fmt: skip
    assert [(m.role, m.content) for m in conversation.view("bob")] == [("system", "Be brief."), ("user", "Go.")]


def test_context_policies_count_real_tokens_and_keep_the_opening():
    def talk(policy, limit=120):
        conversation = pair(context_limit=limit, context_policy=policy)
        for p in conversation.participants:
            p.max_new_tokens = 20
        conversation.run(turns=12)
        for message in conversation.transcript[1:]:
            assert len(message.fed.prompt) + 20 <= limit and "Talk." in family("chatml").decode(message.fed.prompt)
        return conversation

    with pytest.raises(ContextOverflow, match="do not fit a context of 120"):
        talk(None)
    dropped = talk(DropOldestPolicy())
    spans = dropped.transcript[-1].fed.layout.message_spans
    assert 0 in spans and 1 not in spans and len(spans) < 8
    slid = talk(SlidingWindowPolicy(keep_last=2))
    assert sorted(slid.transcript[-1].fed.layout.message_spans) == [0, 10, 11]
    summed = talk(SummarizePolicy(keep_last=2), limit=190)
    assert "Summary of the conversation so far: I say" in family("chatml").decode(summed.transcript[-1].fed.prompt)
    assert summed.transcript == talk(SummarizePolicy(keep_last=2), limit=190).transcript
    with pytest.raises(ContextOverflow, match="even without any earlier message"):
        talk(DropOldestPolicy(), limit=25)


def test_transcripts_are_lists():
    transcript = Transcript([Message("a", "1"), Message("b", "2")])
    assert isinstance(transcript[:1], Transcript) and transcript.append("c", "3", note=1).metadata == {"note": 1}
    assert transcript.edit(-1, "4").content == "4" and transcript.pretty().splitlines()[0] == "[0] a: 1"
    copy = transcript.copy()
    copy.rewind(0)
    assert len(copy) == 1 and len(transcript) == 3
    with pytest.raises(IndexError, match="the transcript has 3"):
        transcript.index_of(3)
    with pytest.raises(TypeError, match="Message objects"):
        transcript[0] = "hello"


def test_a_message_is_text_that_can_be_encoded():
    for wrong in (None, 5, b"x"):
        for make in (lambda wrong: Message("a", wrong), lambda wrong: Message("a", "").copy(content=wrong)):
            with unchecked(), pytest.raises(TypeError, match="content is a string"):
                make(wrong)
    conversation = pair(shared_context="half \ud83d", shared_system_prompt="\udfff")
    conversation.transcript.append("bob", "\ud800")
    conversation.edit(0, "other half \ude00")
    conversation.step("alice")
    assert [m.content for m in conversation.transcript[:2]] == ["other half \ufffd", "\ufffd"]


def test_capture_records_go_to_every_open_block():
    with pytest.raises(ValueError, match="no participant 'carol'"), pair().capture(participants=["carol"]):
        pass


def test_a_row_given_afterwards_fills_the_opening():
    conversation = pair(shared_context=("About ", dataset_field("topic")))
    conversation.row = {"topic": "rain"}
    conversation.step("alice")
    assert conversation.transcript[0].content == "About rain" and len(conversation.transcript) == 2


@pytest.mark.parametrize("said", [[], ["and"]])
def test_a_row_that_does_not_fill_the_opening_fails_its_conversation_only(said):
    conversation = pair(shared_context=("About ", dataset_field("topic")))
    for text in said:
        conversation.transcript.append("alice", text)
    report = conversation.rollout(data=[{"topic": "rain"}, {"x": 1}], turns=2)
    fine, bad = report.results
    assert fine.error is None and fine.conversation.transcript[0].content == "About rain"
    assert "no column 'topic'" in str(bad.error) and len(bad.conversation.transcript) == len(said)


def test_a_denied_turn_says_what_was_denied():
    conversation = pair(message_hooks=[lambda message, conversation: deny("never")])
    turn = finish(conversation.turn("alice"))
    assert turn.message is None and turn.denied.metadata["finish_reason"] == "denied" and turn.index == 1
    with pytest.raises(RuntimeError, match=r"denied 100 turns in a row, the last of 'alice'"):
        conversation.run(until=lambda conversation: len(conversation.transcript) > 3)
    assert len(conversation.run(turns=2)) == 1


def test_copies_of_policies_and_hooks_never_copy_weights():
    tokenizer = family("chatml")
    writer = speaker("writer", tokenizer)
    conversation = Conversation(
        [speaker("alice", tokenizer)], context_policy=SummarizePolicy(summarizer=writer), shared_context="Go."
    )
    assert conversation.branch().context_policy.summarizer.weights is writer.weights


def test_a_person_alone_is_asked_in_the_main_thread():
    asked = []
    person = HumanParticipant("me", lambda view: asked.append(threading.current_thread()) or view[-1].content.upper())
    conversation = Conversation([person], shared_context="Well?")
    assert conversation.step("me").content == "WELL?" and asked == [threading.main_thread()]
