"""How families write tool calls.

A parser takes the raw text of a reply, special tokens included and reasoning left out (harmony: kept), and gives the
text without the calls, and the calls. A call that cannot be read is a Call with an `error`, which becomes its result.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Parsed = tuple[str, list["Call"]]

DEEPEST = 50
"""Levels of lists and objects that arguments may have."""
_NO_JSON = (ValueError, RecursionError)
_NO_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What reading a text as that may raise."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call as a model wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why it could not be read."""

    def __post_init__(self):
        levels, inside = 0, [self.arguments]
        while inside := [v for x in inside for v in _members(x)]:
            levels += 1
            if levels > DEEPEST:
                object.__setattr__(self, "arguments", {})
                object.__setattr__(self, "error", f"arguments are nested in more than {DEEPEST} levels")
                return


def _members(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def _call(data: Any) -> Call:
    """A Call from parsed JSON of the forms {"name", "arguments" | "parameters"} and {"function": {...}}."""
    if isinstance(data, Mapping) and isinstance(data.get("function"), Mapping):
        data = data["function"]
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        return Call(name="", error=f'a call is {{"name": ..., "arguments": {{...}}}}, not {_shown(data)}')
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(*_NO_JSON):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping):
        return Call(name=data["name"], error=f"arguments must be a JSON object, not {_shown(arguments)}")
    return Call(name=data["name"], arguments=dict(arguments))


def _shown(data: Any) -> str:
    with suppress(RecursionError):
        return json.dumps(data)[:200]
    return "something nested too deeply"


def _json_call(text: str, name: str | None = None) -> list[Call]:
    """Calls in a JSON text: one or a list. With `name` the text is only the arguments."""
    try:
        data = json.loads(text)
    except _NO_JSON as error:
        return [Call(name=name or "", error=f"not valid JSON ({error}): {text.strip()[:200]}")]
    if name is not None:
        return [_call({"name": name, "arguments": data})]
    return [_call(d) for d in data] if isinstance(data, list) else [_call(data)]


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def parse_hermes(text: str) -> Parsed:
    """Hermes, Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>; Qwen-Coder's <function=...> inside too."""
    calls: list[Call] = []
    for body in _HERMES.findall(text):
        functions = _XML_FUNCTION.findall(body)
        if functions:
            for name, inner in functions:
                arguments = {k.strip(): _literal(v) for k, v in _XML_PARAMETER.findall(inner)}
                calls.append(Call(name=name.strip(), arguments=arguments))
        else:
            calls += _json_call(body)
    return _HERMES.sub("", text), calls


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except _NO_JSON:
        return text


def parse_llama(text: str) -> Parsed:
    """Llama 3: the whole reply is {"name": ..., "parameters": ...}, after <|python_tag|> or not; several with ";"."""
    body = text.replace("<|python_tag|>", "").strip()
    if not body.startswith("{") or '"name"' not in body:
        found = _pythonic(body) if body.startswith("[") else None
        return ("", found) if found else (text, [])
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            data, at = decoder.raw_decode(body, at)
        except _NO_JSON as error:
            calls.append(Call(name="", error=f"not valid JSON ({error}): {body[at:].strip()[:200]}"))
            break
        calls.append(_call(data))
        at += len(body[at:]) - len(body[at:].lstrip("; \n"))
    return "", calls


_MISTRAL_NAMED = re.compile(
    r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\](.*?)(?=\[TOOL_CALLS\]|$)", re.DOTALL
)


def parse_mistral(text: str) -> Parsed:
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}], or [TOOL_CALLS]name[ARGS]{...}."""
    before, found, body = text.partition("[TOOL_CALLS]")
    if not found:
        return text, []
    named = _MISTRAL_NAMED.findall(found + body)
    if named:
        return before, [call for name, arguments in named for call in _json_call(arguments.strip(), name)]
    return before, _json_call(body.strip())


_GEMMA_BLOCK = re.compile(r"```(?:tool_code|python)\s*\n(.*?)(?:```|$)", re.DOTALL)
_GEMMA_CALL = re.compile(r"<start_function_call>\s*call:([\w.-]+)\{(.*?)\}\s*(?:<end_function_call>|$)", re.DOTALL)
_GEMMA_PAIR = re.compile(r"([\w-]+):(?:<escape>(.*?)<escape>|([^,]*))(?:,|$)", re.DOTALL)


def parse_gemma(text: str) -> Parsed:
    """Gemma: a ```tool_code block of Python calls, or <start_function_call>call:name{key:value}<end_function_call>."""
    calls: list[Call] = []
    for name, body in _GEMMA_CALL.findall(text):
        pairs = {
            k: quoted if quoted or not plain else _literal(plain.strip())
            for k, quoted, plain in _GEMMA_PAIR.findall(body)
        }
        calls.append(Call(name=name, arguments=pairs))
    for block in _GEMMA_BLOCK.findall(text):
        calls += _pythonic(block) or []
    rest = _GEMMA_CALL.sub("", text)
    return (_GEMMA_BLOCK.sub("", rest), calls) if calls else (text, [])


def _pythonic(text: str) -> list[Call] | None:
    """Calls written in Python with literal keyword arguments; None if the text is not that. Nothing is executed."""
    text = text.strip()
    try:
        tree = ast.parse(text, mode="eval").body
    except _NO_PYTHON:
        return None
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    calls = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and node.args:
            node = node.args[0]
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
            return None
        name = ast.get_source_segment(text, node.func) or ""
        try:
            arguments = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
        except _NO_PYTHON:
            asked = ast.get_source_segment(text, node)
            calls.append(Call(name=name, error=f"arguments must be literals: {asked}"))
            continue
        error = "arguments must be given by name" if node.args else None
        calls.append(Call(name=name, arguments=arguments, error=error))
    return calls


_HARMONY = re.compile(
    r"(?:<\|channel\|>\w++\s++to=functions\.([\w.-]++)|to=functions\.([\w.-]++)<\|channel\|>\w++)[^<]*+"
    r"(?:<\|constrain\|>\s*+\w++\s*+)?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|$)",
    re.DOTALL,
)


def parse_harmony(text: str) -> Parsed:
    """gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>."""
    calls = [
        call for name, name2, body in _HARMONY.findall(text) for call in _json_call(body.strip() or "{}", name or name2)
    ]
    return _HARMONY.sub("", text), calls


_LFM = re.compile(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|$)", re.DOTALL)


def parse_pythonic(text: str) -> Parsed:
    """LFM2 and others: <|tool_call_start|>[name(key=value)]<|tool_call_end|>."""
    calls = []
    for body in _LFM.findall(text):
        found = _pythonic(body)
        calls += found if found is not None else [Call(name="", error=f"not Python calls: {body.strip()[:200]}")]
    return _LFM.sub("", text), calls


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family writes calls. It applies to templates that contain one of `signs`."""

    name: str
    signs: tuple[str, ...]
    parse: Callable[[str], Parsed]
    in_reasoning: bool = False
    """Whether calls stand where this package sees reasoning (harmony's commentary channel)."""


FAMILIES: list[Family] = [
    Family(name="harmony", signs=("<|channel|>",), parse=parse_harmony, in_reasoning=True),
    Family(name="pythonic", signs=("<|tool_call_start|>",), parse=parse_pythonic),
    Family(name="hermes", signs=("<tool_call>",), parse=parse_hermes),
    Family(name="mistral", signs=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), parse=parse_mistral),
    Family(name="llama", signs=("<|python_tag|>", "ipython"), parse=parse_llama),
    Family(name="gemma", signs=("<start_function_call>", "tool_code", "<start_of_turn>"), parse=parse_gemma),
]
"""Looked through in order; put your own in front."""


def family_of(template: str, takes_tools: bool = True) -> Family:
    """The family of a chat template; Hermes, which `describe` asks for, where the template shows no tools."""
    hermes = next(f for f in FAMILIES if f.name == "hermes")
    if not takes_tools:
        return hermes
    return next((f for f in FAMILIES if any(sign in template for sign in f.signs)), hermes)
