"""Calls as the families' own templates write them, rendered by transformers, are read back with the same arguments."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlens import Conversation
from interlens.calls import (
    Family,
    family_of,
    parse_gemma,
    parse_gemma4,
    parse_harmony,
    parse_hermes,
    parse_llama,
    parse_mistral,
    parse_pythonic,
)
from interlens.reasoning import split_text
from interlens.tools import ToolRegistry
from tests.support.scripted import speaker
from tests.support.tokenizers import family, make


def use(
    text: str, tags: list[str], n: int, x: float, flag: bool, maybe: int | None, nested: dict, rows: list[dict]
) -> str:
    """
    Use everything.

    Args:
        text: A text.
        tags: Some texts.
        n: A whole number.
        x: A number.
        flag: Yes or no.
        maybe: A number, or nothing.
        nested: An object.
        rows: Some objects.
    """
    return json.dumps([text, tags, n, x, flag, maybe, nested, rows])


TOOLS = ToolRegistry([use]).parameters()
BRACES = (
    "{% macro value(v) %}{% if v is string %}{{ Q + v + Q }}{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is none %}null{% elif v is mapping %}{{ '{' }}{% for k, w in v | items %}{{ k + ':' }}{{ value(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for w in v %}{{ value(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
GEMMA = BRACES.replace("Q", "'<escape>'") + (
    "{% for c in calls %}{{ '<start_function_call>call:' + c.name }}{{ value(c.arguments) }}{{ '<end_function_call>' }}"
    "{% endfor %}"
)
GEMMA4 = BRACES.replace("Q", "'<|\"|>'") + (
    "{% for c in calls %}{{ '<|tool_call>call:' + c.name }}{{ value(c.arguments) }}{{ '<tool_call|>' }}{% endfor %}"
)
HERMES = (
    '{% for c in calls %}{{ \'<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' }}{{ c.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
CODER = (
    "{% for c in calls %}{{ '<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}"
)
OLD_CODER = CODER.replace(
    "v if v is string else v | tojson",
    "v | tojson if v is mapping or v is iterable and v is not string else v | string",
)
GLM = (
    "{% for c in calls %}{{ '<tool_call>' + c.name + '\n' }}{% for k, v in c.arguments | items %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}"
    "{% endfor %}{{ '</tool_call>' }}{% endfor %}"
)
GLM47 = GLM.replace("\n", "")
LLAMA = (
    "{% for c in calls %}{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}' }}"
    "{% if not loop.last %}; {% endif %}{% endfor %}"
)
MISTRAL = "[TOOL_CALLS] [{% for c in calls %}{{ c | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]"
MISTRAL11 = "{% for c in calls %}{{ '[TOOL_CALLS]' + c.name + '[ARGS]' }}{{ c.arguments | tojson }}{% endfor %}"
HARMONY = (
    "{% for c in calls %}{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.arguments | tojson }}{{ '<|call|>' }}{% endfor %}"
)
HARMONY_TOLD = (
    "{% for c in calls %}{{ '<|start|>assistant<|channel|>commentary to=functions.' + c.name }}"
    "{{ ' <|constrain|>json<|message|>' }}{{ c.arguments | tojson }}{{ '<|call|>' }}{% endfor %}"
)


def python(calls):
    return ", ".join(f"{c['name']}({', '.join(f'{k}={v!r}' for k, v in c['arguments'].items())})" for c in calls)


def rendered(template, calls):
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    template = "{% set calls = messages[0].tool_calls | map(attribute='function') | list %}" + template
    return family("chatml").apply_chat_template([message], chat_template=template, tokenize=False)


FORMS = {
    "hermes": (parse_hermes, HERMES, True), "coder": (parse_hermes, CODER, True),
    "old coder": (parse_hermes, OLD_CODER, True), "glm": (parse_hermes, GLM, True), "glm 4.7": (parse_hermes, GLM47, True),
    "llama": (parse_llama, LLAMA, True), "llama tagged": (parse_llama, "<|python_tag|>" + LLAMA, False),
    "mistral": (parse_mistral, MISTRAL, False), "mistral 11": (parse_mistral, MISTRAL11, True),
    "functiongemma": (parse_gemma, GEMMA, True), "gemma 4": (parse_gemma4, GEMMA4, True),
    "tool_code": (parse_gemma, lambda c: f"```tool_code\n[{python(c)}]\n```", True),
    "lfm": (parse_pythonic, lambda c: f"<|tool_call_start|>[{python(c)}]<|tool_call_end|>", True),
    "harmony": (parse_harmony, HARMONY, False), "harmony told": (parse_harmony, HARMONY_TOLD, False),
}  # fmt: skip
"""Name -> (parser, how calls are written, whether another group of calls may follow after prose)."""
PIECES = ["<tool_call>", "</tool_call>", "</parameter>", "<parameter=a>", "<arg_key>", "</arg_value>", "</function>", "\n",
          '"', "'", "\\", "{", "}", "[", "]", ",", ":", ";", "```", " ", "é", "日本", "😀", "null", "true", "90210", "1.5",
          "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|tool_call_end|>", "<end_function_call>", "<tool_call|>",
          "a", "None"]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
keys = st.sampled_from(["a", "b_c", "key", "d1"])
numbers = st.integers(-(10**12), 10**12)
floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional=dict(
        text=texts, tags=st.lists(texts, max_size=3), n=numbers, x=floats | numbers, flag=st.booleans(),
        maybe=st.none() | numbers, nested=st.dictionaries(keys, values, max_size=3),
        rows=st.lists(st.dictionaries(keys, values, max_size=2), max_size=2),
    ),
)  # fmt: skip
prose = st.sampled_from(["", "Let me see.\n", "I use {braces}, [brackets] and 3 < 4.\n", 'He said "no".\n'])


def sound(name, given_arguments):
    """Whether the form can write these texts at all: some have no way to escape what ends a text."""
    flat = json.dumps(given_arguments, ensure_ascii=False)
    if "gemma" in name:
        return '<|"|>' not in flat and "<escape>" not in flat
    if name in ("coder", "old coder"):
        ends = ("<parameter=", "</function>", "</tool_call>")
        text = str(given_arguments.get("text", ""))
        after = [part.strip() for part in text.split("</parameter>")[1:]]
        spelled = any(part.startswith(ends) for part in after) or (after and not after[-1])
        return not spelled or not any(part.startswith(ends) for part in after)
    if "glm" in name:
        after = [part.strip() for part in str(given_arguments.get("text", "")).split("</arg_value>")[1:]]
        return not any(part.startswith(("<arg_key>", "</tool_call>")) for part in after)
    return True


def written(name, calls):
    template = FORMS[name][1]
    return template(calls) if callable(template) else rendered(template, calls)


def same(made, wanted):
    return [(c.name, c.error, c.arguments) for c in made] == [("use", None, w) for w in wanted] and json.dumps(
        [dict(c.arguments) for c in made]
    ) == json.dumps(list(wanted))


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(arguments, min_size=1, max_size=2), min_size=1, max_size=2),
    said=st.tuples(prose, prose, prose),
)
def test_what_a_template_writes_is_read_back(name, groups, said):
    """Also after prose, between and before it; and a reply that is cut off gives the calls that were whole."""
    parse, _, several = FORMS[name]
    groups = groups if several else groups[:1]
    assume(all(sound(name, a) for group in groups for a in group))
    parts = [written(name, [{"name": "use", "arguments": a} for a in group]) for group in groups]
    spoken = [said[i % 3] for i in range(len(parts) + 1)]
    text = spoken[0] + "".join(part + "\n" + after for part, after in zip(parts, spoken[1:], strict=True))
    wanted = [a for group in groups for a in group]
    left, calls = parse(text, TOOLS)
    assert same(calls, wanted), (text, calls)
    if "harmony" not in name:
        assert left.split() == " ".join(spoken).split()
    for cut in range(0, len(text), 1 + len(text) // 40):
        whole = [c for c in parse(text[:cut], TOOLS)[1] if c.error is None]
        assert same(whole, wanted[: len(whole)]), (text[:cut], whole)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 3}',
        '{"name": "Alice", "parameters": {"age": 3}}',
        '{"name": "use", "age": 3}',
        '{"people": [{"name": "use", "parameters": {}}]}',
        '[{"name": "Alice", "age": 3}]',
        '{"name": "Alice", "ag',
        "Call it as use(text=3), or [1]. {not json}",
        "```python\nprint(hello(name='x'))\n```",
        "```python\nx = 3\nprint(x)\n```",
    ],
)
def test_an_answer_is_no_call(name, text):
    parse = FORMS[name][0]
    assert parse(text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    "parse, text, left",
    [
        (parse_hermes, "The tag <tool_call> opens a call.", None),
        (parse_mistral, "[TOOL_CALLS] is a mark.", None),
        (parse_llama, 'Sure.\n{"name": "use", "parameters": {"n": 1}}\nDone.', "Sure.\nDone."),
        (parse_mistral, '[TOOL_CALLS] [{"name": "use", "arguments": {"n": 1}}] Done.', " Done."),
        (parse_hermes, '<tool_call>{"name": "use", "arguments": {"n": 1}}</tool_call> Done.', " Done."),
    ],
)
def test_text_around_a_call_is_content(parse, text, left):
    rest, calls = parse(text, TOOLS)
    assert rest.split() == (text if left is None else left).split()
    assert same(calls, [] if left is None else [{"n": 1}])


@pytest.mark.parametrize(
    "parse, text",
    [
        (parse_hermes, '<tool_call>\n{"name": "use", "arguments": {"text": "a</tool_call>\nb"}}\n</tool_call>'),
        (parse_llama, '{"name": "use", "parameters": {"text": "a</tool_call>\nb"}}'),
        (parse_mistral, '[TOOL_CALLS]use[ARGS]{"text": "a</tool_call>\nb"}'),
    ],
)
def test_raw_line_breaks_in_texts_are_read(parse, text):
    assert same(parse(text, TOOLS)[1], [{"text": "a</tool_call>\nb"}])


@pytest.mark.parametrize("written_value", ["90210", "null", "true", "None", "1.5", "[1]"])
def test_a_bare_text_has_the_type_of_the_schema(written_value):
    forms = [
        (parse_hermes, f"<tool_call>\n<function=use>\n<parameter=text>{written_value}</parameter>\n</function></tool_call>"),
        (parse_hermes, f"<tool_call>use\n<arg_key>text</arg_key>\n<arg_value>{written_value}</arg_value>\n</tool_call>"),
    ]  # fmt: skip
    if written_value != "[1]":
        forms += [
            (parse_gemma, f"<start_function_call>call:use{{text:{written_value}}}<end_function_call>"),
            (parse_gemma4, f"<|tool_call>call:use{{text:{written_value}}}<tool_call|>"),
        ]
    for parse, text in forms:
        assert same(parse(text, TOOLS)[1], [{"text": written_value}])


def test_a_template_whose_calls_are_not_known_is_refused_at_the_first_turn():
    shown = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + shown
    alice = speaker("alice", make(template), "Hello.", tools=[use])
    with pytest.raises(ValueError, match=r"how this model writes calls is not known.*hermes \(<tool_call>\).*Family\("):
        Conversation([alice], shared_context="Go.").step("alice")
    assert isinstance(family_of("<tool_call>"), Family) and family_of("", takes_tools=False).name == "hermes"


def test_a_bare_text_that_cannot_be_of_its_type_is_an_error():
    (call,) = parse_hermes("<tool_call>use<arg_key>n</arg_key><arg_value>many</arg_value></tool_call>", TOOLS)[1]
    assert call.error == "argument 'n': 'many' is no integer" and not call.arguments


GEMMA4_TURNS = (  # in the style of the family's documented prompt format
    BRACES.replace("Q", "'<|\"|>'") + "{{ bos_token }}{% if tools %}{{ '<|turn>system\n' }}{% for t in tools %}"
    "{{ '<|tool>declaration:' + t.function.name + '{}<tool|>' }}{% endfor %}{{ '<turn|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content }}"
    "{{ '<turn|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}{# <|tool_call> <|channel> <channel|> #}"
)


def test_gemma_4_thinks_calls_and_answers():
    marks = (
        "<|turn>",
        "<turn|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
    )
    tokenizer = make(GEMMA4_TURNS, bos="<bos>", eos="<eos>", special=marks, adds_bos=True)
    asked = '<|tool_call>call:use{text:<|"|>a, {b}: "c"<|"|>,tags:[<|"|>x<|"|>],n:3,flag:true,maybe:null}<tool_call|>'
    lines = ["<|channel>thought\nI must use it.<channel|>" + asked, "<|channel>thought\nDone.<channel|>It is 3."]
    alice = speaker("alice", tokenizer, lines, tools=[use])
    message = Conversation([alice], shared_context="Go.").step("alice")
    assert (message.content, message.metadata["reasoning"]) == ("It is 3.", "Done.")
    (told,) = message.metadata["tool_trail"][0]["calls"]
    assert told["name"] == "use" and told["arguments"] == {
        "text": 'a, {b}: "c"', "tags": ["x"], "n": 3, "flag": True, "maybe": None,
    }  # fmt: skip
    assert split_text(lines[1]) == ("Done.", "It is 3.")


def test_a_template_whose_thoughts_are_not_known_is_refused_at_the_first_turn():
    body = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if enable_thinking %}{% endif %}"
    )
    tokenizer = make(body)
    with pytest.raises(
        ValueError, match=r"alice: .*speaks of thoughts \(enable_thinking\).*<think> </think>.*thinking=\("
    ):
        Conversation([speaker("alice", tokenizer, "Hm.")], shared_context="Go.").step("alice")
    for thinking, reasoning, said in ((False, None, "(hm) Yes."), (("(", ")"), "hm", "Yes.")):
        alice = speaker("alice", tokenizer, "(hm) Yes.", thinking=thinking)
        message = Conversation([alice], shared_context="Go.").step("alice")
        assert (message.metadata.get("reasoning"), message.content) == (reasoning, said)
