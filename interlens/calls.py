"""How families write tool calls.

A parser takes the raw text of a reply, special tokens included and reasoning left out (harmony: kept), and the tools
that there are, and gives the text without the calls, and the calls. A call that cannot be read, one that is cut off
for instance, is a Call with an `error`, which becomes its result and is never run.

Ends are found by reading the values, not by looking for the closing mark, which a text may spell out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .call import Call, Parsed, Reader, Tools, call_of, json_calls, python_calls, unread
from .written import NO_JSON, Written, read_braces, read_json

_HERMES = re.compile(r"<tool_call>")
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_XML_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_XML_VALUE = re.compile(r"(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))", re.DOTALL)
_XML_OPEN_VALUE = re.compile(  # a model forgot the closing tag
    r"(.*?)\n?(?=<parameter=[^>\n]+>|</function>\s*</tool_call>)", re.DOTALL
)
_XML_END = re.compile(r"\s*</function>")
_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|\Z)")
_GLM_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_GLM_VALUE = re.compile(r"(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))", re.DOTALL)


def parse_hermes(text: str, tools: Tools | None = None) -> Parsed:
    """Within <tool_call>: JSON (Hermes, Qwen), <function=...><parameter=...> (Qwen-Coder), or a name with <arg_key> and
    <arg_value> (GLM)."""
    reader = Reader(text)
    for found in reader.found(_HERMES):
        start = reader.at
        if _XML_FUNCTION.match(text, start):
            while function := _XML_FUNCTION.match(text, reader.at):
                reader.at = function.end()
                _arguments(reader, function[1].strip(), _XML_PARAMETER, (_XML_VALUE, _XML_OPEN_VALUE), _XML_END)
            reader.skip("</tool_call>")
        elif name := _GLM_NAME.match(text, start):
            reader.at = name.end()
            _arguments(reader, name[1], _GLM_KEY, (_GLM_VALUE,), re.compile(r"\s*</tool_call>"))
        elif text[start:].lstrip()[:1] in ("{", "[", "") or "</tool_call>" in text[start:]:
            reader.json("</tool_call>", "<tool_call>")
        else:
            reader.at = found.start()  # the tag is only spoken of
    return reader.parsed(tools)


def _arguments(
    reader: Reader, name: str, key: re.Pattern[str], values: tuple[re.Pattern[str], ...], end: re.Pattern[str]
) -> None:
    """A call whose arguments stand in tags, one after another."""
    arguments: dict[str, Any] = {}
    while found := key.match(reader.text, reader.at):
        start = found.end()
        with suppress(*NO_JSON):  # a list or an object may spell out the tag that ends it
            if reader.text[start : start + 1] in ("[", "{"):
                start = read_json(reader.text, start)[1]
        value = next((v for pattern in values if (v := pattern.match(reader.text, start))), None)
        if value is None:
            break
        arguments[found[1].strip()] = Written(reader.text[found.end() : value.end(1)])
        reader.at = value.end()
    if closed := end.match(reader.text, reader.at):
        reader.at = closed.end()
        reader.calls.append(Call(name=name, arguments=arguments))
    else:
        rest = reader.rest_to("</tool_call>")
        reader.calls.append(unread(rest, "the call is cut off", name, "XML"))
        reader.skip("</tool_call>")


_CALL_KEYS = {"type", "id", "name", "function", "parameters", "arguments"}


def _is_call(data: Any, tools: Tools | None) -> bool:
    """Whether JSON data are a call and no answer: a known tool by name, its arguments, and nothing else."""
    if not isinstance(data, Mapping) or not set(data) <= _CALL_KEYS:
        return False
    inner = data.get("function") if isinstance(data.get("function"), Mapping) else data
    name = inner.get("name")
    given = "parameters" in inner or "arguments" in inner
    return isinstance(name, str) and given and (tools is None or name in tools)


_CUT_CALL = re.compile(r"\{(?=[^{}\[\]]*\"name\").*?\"name\"\s*:\s*(?:\"([^\"]*)(\"?)|(?=[\[{]))", re.DOTALL)


def _is_cut_call(text: str, at: int, tools: Tools | None) -> bool:
    """Whether what stands here begins a call of a known tool, and cannot be read."""
    found = _CUT_CALL.match(text, at)
    if found is None or tools is None or found[1] is None:
        return found is not None and tools is None
    return found[1] in tools if found[2] else any(name.startswith(found[1]) for name in tools)


def parse_llama(text: str, tools: Tools | None = None) -> Parsed:
    """Llama 3: {"name": ..., "parameters": ...}, after <|python_tag|> or not; several with ";". Or [name(key=value)].

    Nothing marks such a call, so JSON is one only if it names a known tool and has a call's keys and no others.
    """
    before, tagged, body = text.partition("<|python_tag|>")
    if not tagged:
        before, body = "", text
    if body.strip().startswith("["):
        found = python_calls(re.sub(r"<\|\w+\|>\s*\Z", "", body))
        if found and (tools is None or tagged or all(c.name in tools for c in found)):
            return before, found
    reader = Reader(body)
    for found in reader.found(re.compile(r"[;\s]*[{\[]")):
        start = found.end() - 1
        try:
            data, end = read_json(body, start)
        except NO_JSON as error:
            if _is_cut_call(body, start, tools):
                reader.calls.append(unread(body[start:], error))
                reader.at = len(body)
            else:
                reader.at = found.start()
            continue
        asked = data if isinstance(data, list) else [data]
        if asked and all(_is_call(d, tools) or (tagged and _is_call(d, None)) for d in asked):
            reader.calls += map(call_of, asked)
            reader.at = end
        else:  # an answer, with all that is in it
            reader.left.append(body[found.start() : end])
            reader.at = end
    left, calls = reader.parsed(tools)
    if tagged and not calls:
        return before, [unread(body, 'a call is {"name": ..., "parameters": {...}}')]
    return (before + left, calls) if calls else (text, [])


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:(?=[\[{]|\Z)|([\w.-]+)(?:\[CALL_ID\]\s*[\w-]*)?\s*(?:\[ARGS\]|(?=\{)|\Z))")


def parse_mistral(text: str, tools: Tools | None = None) -> Parsed:
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}], or [TOOL_CALLS]name[ARGS]{...}."""
    reader = Reader(text)
    for found in reader.found(_MISTRAL):
        try:
            data, reader.at = read_json(text, reader.at)
            reader.calls += json_calls(data, found[1])
        except NO_JSON as error:
            reader.calls.append(unread(reader.rest_to("[TOOL_CALLS]"), error, found[1] or ""))
    return reader.parsed(tools)


TRIED = 20
"""Closing marks that are tried as the end of Python calls: a text may spell some of them out."""
_GEMMA_BLOCK = re.compile(r"```(tool_code|python)[^\S\n]*\n")
_GEMMA_CALL = re.compile(r"<start_function_call>\s*call:\s*([\w.-]+)\s*(?=\{|\Z)")
_GEMMA4_CALL = re.compile(r"<\|tool_call>\s*call:\s*([\w.-]+)\s*(?=\{|\Z)")


def _braced(text: str, mark: re.Pattern[str], quote: str, end: str, tools: Tools | None) -> Parsed:
    """Calls in Gemma's own notation."""
    reader = Reader(text)
    for found in reader.found(mark):
        try:
            arguments, reader.at = read_braces(text, reader.at, quote)
            reader.calls.append(Call(name=found[1], arguments=arguments))
        except NO_JSON as error:
            reader.calls.append(unread(reader.rest_to(end), error, found[1], "arguments"))
        reader.skip(end)
    return reader.parsed(tools)


def parse_gemma(text: str, tools: Tools | None = None) -> Parsed:
    """Gemma: a ```tool_code block of Python calls, or FunctionGemma's <start_function_call>call:name{key:value}."""
    left, calls = _braced(text, _GEMMA_CALL, "<escape>", "<end_function_call>", tools)
    if calls:
        return left, calls
    reader = Reader(text)
    for found in reader.found(_GEMMA_BLOCK):
        ends = [m.start() for m in re.compile("```").finditer(text, reader.at)][:TRIED]
        bodies = [(text[reader.at : e], e + 3) for e in ends] or [(text[reader.at :], len(text))]
        read = next(((c, e) for b, e in bodies if (c := python_calls(_without_marks(b)))), None)
        if read and (found[1] == "tool_code" or all(tools is None or c.name in tools for c in read[0])):
            reader.calls += read[0]
            reader.at = read[1]
        elif found[1] == "tool_code":
            reader.calls.append(Call(name="", error=f"not Python calls: {bodies[0][0].strip()[:200]}"))
            reader.at = bodies[0][1]
        else:
            reader.at = found.start()
    left, calls = reader.parsed(tools)
    return (left, calls) if calls else (text, [])


def _without_marks(text: str) -> str:
    return re.sub(r"(?:<[^<>\s]+>\s*)+\Z", "", text)


def parse_gemma4(text: str, tools: Tools | None = None) -> Parsed:
    """Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>."""
    return _braced(text, _GEMMA4_CALL, '<|"|>', "<tool_call|>", tools)


_HARMONY = re.compile(
    r"(?:<\|channel\|>\w++\s++to=functions\.([\w.-]++)|to=functions\.([\w.-]++)<\|channel\|>\w++)[^<]*+"
    r"(?:<\|constrain\|>\s*+\w++\s*+)?<\|message\|>"
)


def parse_harmony(text: str, tools: Tools | None = None) -> Parsed:
    """gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>."""
    reader = Reader(text)
    for found in reader.found(_HARMONY):
        name = found[1] or found[2]
        if re.compile(r"\s*<\|(?:call|end)\|>").match(text, reader.at):
            reader.calls.append(Call(name=name))
        else:
            end = "<|call|>" if "<|call|>" in text[reader.at :] else "<|end|>"
            reader.json(end, "<|start|>", name)
        reader.skip("<|call|>")
        reader.skip("<|end|>")
    return reader.parsed(tools)


_LFM = re.compile(r"<\|tool_call_start\|>")


def parse_pythonic(text: str, tools: Tools | None = None) -> Parsed:
    """LFM2 and others: <|tool_call_start|>[name(key=value)]<|tool_call_end|>; JSON too."""
    reader, end = Reader(text), "<|tool_call_end|>"
    for _ in reader.found(_LFM):
        ends = [m.start() for m in re.compile(re.escape(end)).finditer(text, reader.at)][:TRIED]
        ends = ends or [len(text)]
        read = next(((c, e) for e in ends if (c := python_calls(text[reader.at : e])) is not None), None)
        if read is None:
            with suppress(*NO_JSON):
                data, stop = read_json(text, reader.at)
                read = json_calls(data), stop
        body = text[reader.at : ends[0]]
        calls, reader.at = read or ([Call(name="", error=f"not Python calls: {body.strip()[:200]}")], ends[0])
        reader.calls += calls
        reader.skip(end)
    return reader.parsed(tools)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family writes calls. It applies to templates that contain one of `signs`."""

    name: str
    signs: tuple[str, ...]
    parse: Callable[[str, Tools], Parsed]
    in_reasoning: bool = False
    """Whether calls stand where this package sees reasoning (harmony's commentary channel)."""


FAMILIES: list[Family] = [
    Family(name="harmony", signs=("<|channel|>",), parse=parse_harmony, in_reasoning=True),
    Family(name="gemma4", signs=("<|tool_call>",), parse=parse_gemma4),
    Family(name="pythonic", signs=("<|tool_call_start|>",), parse=parse_pythonic),
    Family(name="hermes", signs=("<tool_call>",), parse=parse_hermes),
    Family(name="mistral", signs=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), parse=parse_mistral),
    Family(name="llama", signs=("<|python_tag|>", "ipython"), parse=parse_llama),
    Family(name="gemma", signs=("<start_function_call>", "tool_code", "<start_of_turn>"), parse=parse_gemma),
]
"""Looked through in order; put your own in front."""


def family_of(template: str, takes_tools: bool = True) -> Family:
    """The family of a chat template; Hermes, which `describe` asks for, where the template shows no tools.

    ValueError where it shows tools and nothing tells how its model writes calls.
    """
    if not takes_tools:
        return next(f for f in FAMILIES if f.name == "hermes")
    found = next((f for f in FAMILIES if any(sign in template for sign in f.signs)), None)
    if found is None:
        known = "; ".join(f"{f.name} ({', '.join(f.signs)})" for f in FAMILIES)
        raise ValueError(
            f"tools were given, and how this model writes calls is not known: its chat template has no sign of a family. "
            f"Known, with their signs: {known}. Put a Family(name=..., signs=..., parse=...) of your own in front of "
            "interlens.calls.FAMILIES, or leave out the tools"
        )
    return found
