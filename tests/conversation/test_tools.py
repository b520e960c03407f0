"""Tools: schemas, the calls of every family, and the loop."""

import copy
import json

import pytest

from interlens import Conversation, MessagingPolicy, ToolRegistry
from interlens.calls import (
    Call,
    family_of,
    parse_gemma,
    parse_harmony,
    parse_hermes,
    parse_llama,
    parse_mistral,
    parse_pythonic,
)
from interlens.policies import approve, deny
from interlens.tools import Tool
from interlens.views import template_of
from tests.support.scripted import speaker
from tests.support.tokenizers import family


def add(a: int, b: int = 1) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def fail(why: str) -> str:
    """
    Always fails.

    Args:
        why: The reason.
    """
    raise RuntimeError(why)


WANTED = Call(name="add", arguments={"a": 2, "b": 3})


@pytest.mark.parametrize(
    "parse, text",
    [
        (parse_hermes, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'),
        (parse_hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}'),
        (parse_hermes, "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>"
         "\n<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>"),
        (parse_llama, '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}'),
        (parse_llama, '{"type": "function", "name": "add", "parameters": {"a": 2, "b": 3}}'),
        (parse_llama, "[add(a=2, b=3)]"),
        (parse_mistral, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "x"}]'),
        (parse_mistral, '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}'),
        (parse_gemma, "```tool_code\nprint(add(a=2, b=3))\n```"),
        (parse_gemma, "<start_function_call>call:add{a:2,b:3}<end_function_call>"),
        (parse_harmony, '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'),
        (parse_harmony, ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>'),
        (parse_pythonic, "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_every_family_writes_the_same_call(parse, text):
    rest, calls = parse(text)
    assert calls == [WANTED] and rest.strip() == ""
    assert parse("Nothing to call, just {braces} and [brackets].") == (
        "Nothing to call, just {braces} and [brackets].",
        [],
    )


@pytest.mark.parametrize(
    "parse, text, wrong",
    [
        (parse_hermes, '<tool_call>{"name": "add", </tool_call>', "not valid JSON"),
        (parse_hermes, '<tool_call>{"nome": "add"}</tool_call>', "a call is"),
        (parse_hermes, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object"),
        (parse_mistral, "[TOOL_CALLS] [{", "not valid JSON"),
        (parse_llama, '{"name": "add", ', "not valid JSON"),
        (parse_gemma, "```tool_code\nadd(2, 3)\n```", "given by name"),
        (parse_gemma, "```tool_code\nadd(a=__import__('os'))\n```", "literals"),
        (parse_gemma, "```tool_code\nadd(a={[1]: 2})\n```", "literals"),
        (parse_pythonic, "<|tool_call_start|>import os<|tool_call_end|>", "not Python calls"),
        (parse_pythonic, f"<|tool_call_start|>{'-' * 9000}1<|tool_call_end|>", "not Python calls"),
        (parse_hermes, f"<tool_call>{'[' * 2000}</tool_call>", "not valid JSON"),
        (parse_llama, '{"name": ' + "[" * 2000, "not valid JSON"),
        (parse_hermes, f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 60}{"]" * 60}}}}}</tool_call>',
         "nested in more than 50 levels"),
        (parse_llama, f'{{"name": "add", "parameters": {"[" * 300}{"]" * 300}}}', "must be a JSON object"),
    ],
)  # fmt: skip
def test_a_broken_call_becomes_an_error_result(parse, text, wrong):
    (call,) = parse(text)[1]
    assert wrong in call.error
    assert ToolRegistry([add]).run(call) == (f"error: {call.error}", True)


def test_a_reply_that_never_ends_is_read_at_once():
    begun = "<|channel|>commentary to=functions.add"
    assert parse_harmony(begun + "-" * 20_000) == (begun + "-" * 20_000, [])


def test_several_calls():
    two = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
    assert parse_llama(f"{two}; {two}")[1] == [WANTED, WANTED]
    assert (
        parse_mistral('[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}')[1] == [WANTED] * 2
    )


def test_schemas_come_from_hints_and_docstrings():
    schema = Tool.from_function(add).schema["function"]
    assert schema["name"] == "add" and schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["parameters"]["required"] == ["a"]
    with pytest.raises(ValueError, match="needs a type hint"):
        Tool.from_function(lambda x: x)

    async def later(a: int) -> int:
        return a

    with pytest.raises(ValueError, match=r"later.* cannot be a tool: it is async"):
        Tool.from_function(later)
    registry = ToolRegistry([add])
    with pytest.raises(ValueError, match="already a tool 'add'"):
        registry.add(add)
    assert registry.run(Call(name="sub")) == ("error: no tool 'sub'; there are: add", True)
    assert registry.run(Call(name="add", arguments={"x": 1}))[0].startswith("error: TypeError")


CALLS = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>',
    "llama": '{"name": "NAME", "parameters": ARGS}',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGS}]',
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS<|call|>",
}


def call(name, tool, **arguments):
    template = template_of(family(name))
    text = CALLS[family_of(template.source, template.takes_tools).name]
    return text.replace("NAME", tool).replace("ARGS", json.dumps(arguments))


@pytest.mark.parametrize(
    "name", ["chatml", "qwen2", "qwen3", "llama3", "gemma2", "mistral", "mistral3", "harmony", "phi3"]
)
def test_the_loop(name):
    tokenizer = family(name)
    final = "<|channel|>final<|message|>It is 5." if name == "harmony" else "It is 5."
    lines = [call(name, "add", a=2, b=3), call(name, "fail", why="no luck"), final]
    alice = speaker("alice", tokenizer, lines, tools=[add, fail])
    conversation = Conversation([alice, speaker("bob", tokenizer)], shared_context="What is 2 + 3?")
    message = conversation.step("alice")
    assert message.content == "It is 5." and message.metadata["finish_reason"] == "stop"
    calls = [c for part in message.metadata["tool_trail"] for c in part["calls"]]
    assert calls == [
        {"name": "add", "arguments": {"a": 2, "b": 3}, "result": "5", "is_error": False},
        {"name": "fail", "arguments": {"why": "no luck"}, "result": "error: RuntimeError: no luck", "is_error": True},
    ]
    first, second, third = alice.engine.requests
    assert [r.key[3] for r in alice.engine.requests] == [0, [0, 1], [0, 2]]
    own = tokenizer(lines[0], add_special_tokens=False)["input_ids"]
    if name != "mistral":  # which shows tools with the last user message only
        assert second.tokens[: len(first.tokens)] == first.tokens  # the call is fed as it was generated
        assert list(second.tokens[len(first.tokens) :][: len(own)]) == own
    text = tokenizer.decode(third.tokens)
    assert "no luck" in text and "5" in text[text.index("2 + 3") + 5 :]
    assert "It is 5." in conversation.render_templated("bob")
    json.dumps(message.metadata, allow_nan=False)


def test_a_tool_may_ask_others_but_not_take_their_turn():
    tokenizer, talks = family("qwen2"), []

    def ask(who: str, aloud: bool) -> str:
        """
        Ask somebody.

        Args:
            who: Whom.
            aloud: Whether all hear the answer.
        """
        return (talks[0].step if aloud else talks[0].sample)(who).content

    def talk(aloud):
        lines = [call("qwen2", "ask", who="bob", aloud=aloud), "Done."]
        talks[:] = [
            Conversation([speaker("alice", tokenizer, lines, tools=[ask]), speaker("bob", tokenizer, "Because.")])
        ]
        return talks[0].step("alice")

    message = talk(aloud=False)
    assert message.metadata["tool_trail"][0]["calls"][0]["result"] == "Because." and len(talks[0].transcript) == 1
    with pytest.raises(RuntimeError, match="had 0 messages when alice's turn began and has 1 now"):
        talk(aloud=True)


def test_the_loop_is_bounded_and_says_so():
    tokenizer = family("qwen2")
    alice = speaker("alice", tokenizer, call("qwen2", "add", a=1), tools=[add], max_tool_iters=2)
    message = Conversation([alice], shared_context="Go.").step("alice")
    assert message.metadata["finish_reason"] == "tool" and len(message.metadata["tool_trail"]) == 2
    assert len(alice.engine.requests) == 3 and message.content == ""


def test_tools_in_a_rollout_are_tools_alone():
    tokenizer = family("qwen2")

    def answer(request, tokenizer):
        called = "tool_response" in tokenizer.decode(request.tokens)
        return f"Sum for {request.key[1]}." if called else call("qwen2", "add", a=request.key[1] or 0)

    conversation = Conversation([speaker("alice", tokenizer, answer, tools=[add])], shared_context="Go.")
    report = conversation.rollout(4, turns=2)
    for i, result in enumerate(report):
        alone = conversation.branch()
        alone.key = i
        alone.run(turns=2)
        assert alone.transcript == result.transcript
        assert result.transcript[1].metadata["tool_trail"][0]["calls"][0]["result"] == str(i + 1)


def test_mailboxes():
    tokenizer = family("qwen2")
    script = {
        "alice": [call("qwen2", "send_message", to="bob", content="Meet at noon."), "Sent."],
        "bob": [call("qwen2", "read_messages"), "Read it.", call("qwen2", "read_messages"), "Nothing new."],
    }
    people = [speaker(name, tokenizer, lines) for name, lines in script.items()]
    conversation = Conversation(people, shared_context="Work.", communication=MessagingPolicy())
    before = copy.deepcopy(vars(conversation.communication))
    sampled = conversation.sample("alice")
    assert sampled.metadata["tool_trail"] and vars(conversation.communication) == before
    conversation.message_hooks = [lambda message, seen: (seen.view("alice"), seen.view("bob")) and approve()]
    conversation.run(turns=2)
    assert "Meet at noon." not in conversation.render_templated("bob").split("Read it.")[0].split("tool_response")[0]
    read = conversation.transcript[2].metadata["tool_trail"][0]["calls"][0]["result"]
    assert json.loads(read) == [{"from": "alice", "content": "Meet at noon."}]
    assert [m.author for m in conversation.view("bob")] == ["moderator", "bob"]
    branch = conversation.branch()
    conversation.step("bob")
    assert conversation.transcript[-1].metadata["tool_trail"][0]["calls"][0]["result"] == "[]"
    assert branch.communication.boxes is not conversation.communication.boxes
    for ref, boxes in ((2, {"bob": []}), (1, {"bob": json.loads(read)}), (0, {})):
        assert conversation.branch_from(ref).communication.boxes == boxes
    conversation.rewind(1)
    assert json.loads(conversation.step("bob").metadata["tool_trail"][0]["calls"][0]["result"]) == json.loads(read)


@pytest.mark.parametrize("name", ["mistral3", "qwen2", "qwen3", "llama3"])
def test_a_loop_is_fed_as_the_template_itself_writes_it(name):
    """Where a model writes its calls as the template does, the prompts of a tool loop are the template's own."""
    tokenizer = family(name)

    def made(*numbers):
        if name != "mistral3":
            return {"content": "".join(call(name, "add", a=n) for n in numbers[:1])}
        calls = [
            {"id": f"call{slot:05d}", "type": "function", "function": {"name": "add", "arguments": {"a": n}}}
            for slot, n in numbers
        ]
        return {"content": "", "tool_calls": calls}

    rounds = [made((2, 7), (3, 8)), made((5, 9))] if name == "mistral3" else [made(7), made(9)]
    lines = [r["content"] for r in rounds]
    if name == "mistral3":
        lines = [
            "[TOOL_CALLS][" + ", ".join(json.dumps({**c["function"], "id": c["id"]}) for c in r["tool_calls"]) + "]"
            for r in rounds
        ]
    alice = speaker("alice", tokenizer, [*lines, "Done."], tools=[add])
    Conversation([alice], shared_context="Add, <please>.").step("alice")
    messages = [{"role": "user", "content": "Add, <please>."}]
    number = 0
    for round_, request in zip(rounds, alice.engine.requests[1:], strict=True):
        messages.append({"role": "assistant", **round_})
        for _ in round_.get("tool_calls", (0,)):
            number += 1
            result = {1: "8", 2: "9", 3: "10"}[number] if name == "mistral3" else {1: "8", 2: "10"}[number]
            messages.append(
                {"role": "tool", "name": "add", "tool_call_id": f"call{len(messages):05d}", "content": result}
            )
        text = tokenizer.apply_chat_template(
            messages, tools=[dict(t.schema) for t in alice.tools], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(request.tokens) == text
        assert list(request.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_calls_that_are_cut_off_get_the_end_of_turn_they_lack():
    tokenizer = family("qwen2")
    alice = speaker("alice", tokenizer, [call("qwen2", "add", a=7), "Done."], tools=[add], max_new_tokens=30)
    message = Conversation([alice], shared_context="Go.").step("alice")
    assert message.metadata["tool_trail"][0]["n_tokens"] == 30
    text = tokenizer.decode(alice.engine.requests[1].tokens)
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1


def test_mailboxes_in_a_rollout_are_mailboxes_alone():
    """Mail goes to its own conversation; a denied turn and a failing one deliver none."""
    tokenizer = family("qwen2")

    def answer(who, other):
        def says(request, _):
            key, turn, call_number = request.key[1:]
            if isinstance(call_number, list):  # the second generation of a turn
                if key == 2 and who == "alice":
                    return RuntimeError("lost")
                return f"{who} is done with turn {turn}."
            if turn % 2 or who == "bob":
                return call("qwen2", "read_messages")
            return call("qwen2", "send_message", to=other, content=f"Letter {key}.{turn}")

        return says

    people = [speaker("alice", tokenizer, answer("alice", "bob")), speaker("bob", tokenizer, answer("bob", "alice"))]
    conversation = Conversation(people, shared_context="Work.", communication=MessagingPolicy())
    conversation.message_hooks = [
        lambda message, seen: deny() if seen.key == 1 and message.author == "alice" else approve()
    ]
    report = conversation.rollout(4, turns=4)
    assert [r.error is not None for r in report] == [False, False, True, False]
    for key, result in enumerate(report):
        alone = conversation.branch()
        alone.key = key
        if result.error is None:
            alone.run(turns=4)
        assert result.error is not None or alone.transcript == result.transcript
        reads = [
            mail["content"] for m in result.transcript for t in m.metadata.get("tool_trail", ())
            for c in t["calls"] if c["name"] == "read_messages" for mail in json.loads(c["result"])
        ]  # fmt: skip
        assert reads == ({0: [0, 2], 3: [0, 2]}.get(key, []) and [f"Letter {key}.{n}" for n in (0, 2)])
    failed = report.results[2].conversation
    failed.participants[0].engine.answer = lambda request, tokenizer: "I send nothing."
    failed.step("alice")
    assert failed.communication.boxes.get("bob", []) == []  # the letter of the turn that failed was not sent


def swallow(text: str, numbers: list, number: float) -> object:
    """
    Do everything that a tool should not do.

    Args:
        text: A text.
        numbers: Some numbers.
        number: A number.
    """
    numbers.clear()
    if text == "quit":
        raise SystemExit(3)
    return text + "\ud83d" if text == "half" else {1: {2}, "nan": float("nan")}


@pytest.mark.parametrize(
    "text, result",
    [("quit", "error: SystemExit: 3"), ("half", "half\ufffd"), ("odd", '{"1": "{2}", "nan": NaN}')],
)
def test_no_tool_can_break_a_conversation(text, result):
    tokenizer = family("qwen2")
    asked = call("qwen2", "swallow", text=text, numbers=[1, 2], number=float("nan"))
    alice = speaker("alice", tokenizer, [asked, "Done."], tools=[swallow])
    report = Conversation([alice], shared_context="Go.").rollout(2, turns=1)
    assert not report.failed
    message = report.results[0].transcript[-1]
    (told,) = message.metadata["tool_trail"][0]["calls"]
    assert told["arguments"] == {"text": text, "numbers": [1, 2], "number": None} and told["result"] == result
    json.dumps(message.metadata, allow_nan=False).encode()
