"""API participants on the official SDKs against a local server that misbehaves."""

import pickle
import time

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from interlens import APIParticipant, Conversation, ScriptedParticipant, SteeringSpec, UnsupportedIntervention
from interlens.errors import APIFailed, BudgetExceeded
from interlens.participants import Prices
from tests.support.scripted import speaker
from tests.support.server import ChatServer, serve
from tests.support.tokenizers import family


def api(url, name="remote", **options):
    if options.get("provider") == "anthropic":
        url = url.removesuffix("/v1")
    return APIParticipant(name, "some-model", base_url=url, **{"backoff_s": 0.01, "api_key": "k", **options})


def talk(participant, **options):
    return Conversation([participant, ScriptedParticipant("bob", ["Hm."])], shared_context="Talk.", **options)


@pytest.mark.parametrize("provider", ["openai", "openrouter", "anthropic"])
def test_every_provider_sees_its_view_and_answers(provider):
    chat = ChatServer()
    with serve(chat) as url:
        remote = api(url, provider=provider, system_prompt="Be brief.", temperature=0.5, max_new_tokens=33)
        conversation = talk(remote)
        conversation.run(turns=3)
    assert [m.content for m in conversation.transcript] == ["Talk.", "Answer 1.", "Hm.", "Answer 2."]
    body = chat.requests[1]
    assert body["max_tokens"] == 33 and body["temperature"] == 0.5 and body["model"] == "some-model"
    if provider == "anthropic":
        assert body["system"] == "Be brief."
        sent = [(m["role"], m["content"][0]["text"]) for m in body["messages"]]
    else:
        sent = [(m["role"], m["content"]) for m in body["messages"]]
        assert sent.pop(0) == ("system", "Be brief.")
    assert sent == [("user", "Talk."), ("assistant", "Answer 1."), ("user", "Hm.")]
    message = conversation.transcript[-1].metadata
    assert message["n_tokens"] == 5 and message["n_prompt_tokens"] == 10 and message["finish_reason"] == "stop"
    assert remote.usage.requests == 2 and remote.usage.completion_tokens == 10


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize(
    "fault",
    [("status", 429, {}), ("status", 500, {}), ("status", 529, {}), "cut", "garbage", ("slow", 1.0), "drip"],
    ids=str,
)
def test_faults_are_retried(provider, fault):
    chat = ChatServer([fault, fault, "At last."])
    with serve(chat) as url:
        remote = api(url, provider=provider, timeout_s=0.5 if fault == "drip" or fault[0] == "slow" else 30.0)
        assert talk(remote).step("remote").content == "At last."
    assert remote.usage.retries == 2 and remote.usage.requests == 1 and len(chat.requests) == 3


def test_an_answer_of_another_shape_is_retried():
    nameless = {"id": "c", "type": "function", "function": {"name": None, "arguments": "{}"}}
    shapes = {
        "openai": [{"content": 5}, {"content": ["x"]}, {"content": "", "tool_calls": [nameless]}],
        "anthropic": [{"blocks": [{"type": "tool_use", "id": "c", "name": None, "input": {}}]}],
    }
    for provider, said in shapes.items():
        with serve(ChatServer([*said, "At last."])) as url:
            remote = api(url, provider=provider)
            assert talk(remote).step("remote").content == "At last." and remote.usage.retries == len(said)


def test_retry_after_is_obeyed_and_waits_grow():
    chat = ChatServer([("status", 429, {"Retry-After": "0.4"}), ("status", 500, {}), ("status", 500, {}), "Yes."])
    with serve(chat) as url:
        talk(api(url, backoff_s=0.05)).step("remote")
    waits = [b - a for a, b in zip(chat.times, chat.times[1:], strict=False)]
    assert waits[0] >= 0.4 and waits[1] >= 0.1 and waits[2] >= 0.2


@pytest.mark.parametrize("fault, tries", [(("status", 500, {}), 3), (("status", 400, {}), 1), (("status", 401, {}), 1)])
def test_what_does_not_help_is_not_retried_and_fails_that_conversation_only(fault, tries):
    chat = ChatServer([fault] * tries)
    with serve(chat) as url:
        conversation = talk(api(url, max_retries=2))
        with pytest.raises(APIFailed, match=rf"'remote' got no answer .* in {tries} tries?; .*told to fail"):
            conversation.step("remote")
        assert len(conversation.transcript) == 1
        chat.script = [fault] * (2 * tries - 1)
        report = conversation.rollout(2, turns=1)
    assert len(report.failed) == 1 and "told to fail" in report.failed[0].traceback


def test_nobody_is_at_home():
    with pytest.raises(APIFailed, match="Connection"):
        talk(api("http://127.0.0.1:9/v1", max_retries=1)).step("remote")


def test_the_limit_in_flight_holds_over_all_conversations():
    chat = ChatServer(pause_s=0.02)
    with serve(chat) as url:
        report = talk(api(url, max_in_flight=3)).rollout(12, turns=1)
    assert not report.failed and chat.most_in_flight == 3


def test_local_rows_go_on_while_an_api_thinks():
    chat = ChatServer(pause_s=0.3)
    tokenizer = family("chatml")
    with serve(chat) as url:
        local = Conversation([speaker("alice", tokenizer, "word " * 20)], shared_context="Go.")
        ends = {}

        def analyzer(conversation):
            ends[conversation.participants[0].name] = time.monotonic()
            return {}

        import interlens

        start = time.monotonic()
        interlens.run([talk(api(url)), local], turns=1, analyzer=analyzer)
    assert ends["alice"] - start < 0.25 < ends["remote"] - start


@pytest.mark.parametrize("options", [{"steering": 1}, {"patch": 1}, {"capture": 1}, {"return_logprobs": True}], ids=str)
def test_interventions_raise_before_anything_is_sent(options):
    import torch

    from interlens import CaptureSpec, Patch

    real = {"steering": SteeringSpec(torch.ones(4), layers=0), "patch": Patch(torch.ones(1, 4), 0, (0,)),
            "capture": CaptureSpec(), "return_logprobs": True}  # fmt: skip
    chat = ChatServer()
    with serve(chat) as url:
        with pytest.raises(UnsupportedIntervention, match="'remote', a APIParticipant"):
            talk(api(url)).step("remote", **{k: real[k] for k in options})
        with pytest.raises(UnsupportedIntervention, match="remote"), talk(api(url)).capture(participants=["remote"]):
            pass
    assert chat.requests == []


def test_costs_are_counted_and_stop_the_spending():
    chat = ChatServer()
    with serve(chat) as url:
        remote = api(url, prices=Prices(prompt=1000.0, completion=2000.0), max_cost=0.05)
        conversation = talk(remote)
        message = conversation.step("remote")
        assert message.metadata["api"]["cost"] == pytest.approx(0.02) and remote.usage.cost == pytest.approx(0.02)
        report = conversation.rollout(6, turns=2)
        assert all(isinstance(r.error, BudgetExceeded) for r in conversation.rollout(2, turns=2))
        with pytest.raises(BudgetExceeded, match="15 of max_tokens_total=15"):
            both = talk(api(url, max_tokens_total=15))
            both.run(turns=3)
    assert remote.usage.cost >= 0.05 and len(report) == 6


def lookup(word: str) -> str:
    """
    Look a word up.

    Args:
        word: The word.
    """
    return f"{word} is a soup"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_tools(provider):
    if provider == "openai":
        calls = [{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"word": "ramen"}'}}]
        bad = [{"id": "c2", "type": "function", "function": {"name": "lookup", "arguments": "{"}}]
        script = [{"content": None, "tool_calls": calls}, {"content": "", "tool_calls": bad}, "It is a soup."]
    else:
        call = {"type": "tool_use", "id": "c1", "name": "lookup", "input": {"word": "ramen"}}
        script = [
            {"blocks": [{"type": "text", "text": "Let me see."}, call]},
            {"blocks": [call | {"id": "c2", "input": {}}]},
        ]
        script.append("It is a soup.")
    chat = ChatServer(script)
    with serve(chat) as url:
        message = talk(api(url, provider=provider, tools=[lookup])).step("remote")
    trail = message.metadata["tool_trail"]
    assert message.content == "It is a soup." and trail[0]["calls"][0]["result"] == "ramen is a soup"
    assert trail[1]["calls"][0]["is_error"] and "lookup" in str(chat.requests[0]["tools"])
    assert "ramen is a soup" in str(chat.requests[1]["messages"][-1])
    assert message.metadata["api"]["requests"] == 3


def test_reasoning_of_an_api_is_kept_apart():
    said = [
        "<think>a plan</think>Soup.", "a plan</think>\n\nSoup.", "[THINK]a plan[/THINK]Soup.",
        "<think>a </think><think>plan</think>Soup.", "So<think>a plan</think>up.", "<think>a plan, cut off",
        {"content": "Soup.", "reasoning_content": "a plan"}, {"content": "plan</think>Soup.", "reasoning": "a"},
    ]  # fmt: skip
    chat = ChatServer([*said, "In <think> tags one thinks."])
    with serve(chat) as url:
        conversation = talk(api(url))
        conversation.run(turns=2 * len(said) + 1)
    *messages, last = [m for m in conversation.transcript if m.author == "remote"]
    assert [m.content for m in messages] == ["Soup."] * 5 + [""] + ["Soup."] * 2
    assert all(m.metadata["reasoning"].split()[:2] in (["a", "plan"], ["a", "plan,"]) for m in messages)
    assert "plan" not in str([body["messages"] for body in chat.requests])
    assert last.content == "In <think> tags one thinks." and "reasoning" not in last.metadata


def test_keys_never_travel(tmp_path):
    remote = api("http://127.0.0.1:9/v1", api_key="very-secret")
    assert b"very-secret" not in pickle.dumps(remote) and pickle.loads(pickle.dumps(remote)).model_id == "some-model"
    conversation = talk(remote)
    conversation.save(tmp_path)
    assert "very-secret" not in (tmp_path / "conversation.json").read_text()
    assert "some-model" in Conversation.load(tmp_path).needs()["remote"]


def test_wrong_settings():
    with pytest.raises(ValueError, match="anthropic, openai, openrouter"):
        APIParticipant("x", "m", provider="closedai")
    with pytest.raises(ValueError, match="needs prices"):
        APIParticipant("x", "m", max_cost=1.0)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_an_api_may_speak_first_twice_in_a_row_and_after_nothing(provider):
    chat = ChatServer()
    with serve(chat) as url:
        conversation = Conversation([api(url, provider=provider), ScriptedParticipant("bob", ["", "Hm."])])
        for who in ("remote", "remote", "bob", "bob", "remote", "remote"):
            conversation.step(who)
    sent = [
        [
            (m["role"], m["content"] if isinstance(m["content"], str) else m["content"][0]["text"])
            for m in body["messages"]
        ]
        for body in chat.requests
    ]
    assert sent[0] == [("user", "(You speak first.)")]
    if provider == "anthropic":  # a user first and last, in turn, and no empty block
        assert sent[1] == [("user", "(You speak first.)"), ("assistant", "Answer 1."), ("user", "(Go on.)")]
        for messages in sent:
            assert [role for role, _ in messages] == [("user", "assistant")[n % 2] for n in range(len(messages))]
            assert messages[-1][0] == "user" and all(text.strip() for _, text in messages)
    else:
        assert sent[1] == [("assistant", "Answer 1."), ("user", "(Go on.)")]
        assert [role for role, _ in sent[2]] == ["assistant", "assistant", "user", "user"]
