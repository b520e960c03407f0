"""A tool call, and reading calls out of a reply. How each family marks them is `calls`' business."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .written import DEEPEST, NO_JSON, NO_PYTHON, python_literal, read_json, typed

Parsed = tuple[str, list["Call"]]
Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its parameters."""


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


def call_of(data: Any) -> Call:
    """A Call from parsed JSON of the forms {"name", "arguments" | "parameters"} and {"function": {...}}."""
    if isinstance(data, Mapping) and isinstance(data.get("function"), Mapping):
        data = data["function"]
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        return Call(name="", error=f'a call is {{"name": ..., "arguments": {{...}}}}, not {_shown(data)}')
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(*NO_JSON):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping):
        return Call(name=data["name"], error=f"arguments must be a JSON object, not {_shown(arguments)}")
    return Call(name=data["name"], arguments=dict(arguments))


def _shown(data: Any) -> str:
    with suppress(RecursionError):
        return json.dumps(data)[:200]
    return "something nested too deeply"


def json_calls(data: Any, name: str | None = None) -> list[Call]:
    """Calls in JSON data: one or a list. With `name` the data are only the arguments."""
    if name is not None:
        return [call_of({"name": name, "arguments": data})]
    return [call_of(d) for d in data] if isinstance(data, list) else [call_of(data)]


def unread(text: str, error: Exception | str, name: str = "", kind: str = "JSON") -> Call:
    return Call(name=name, error=f"not valid {kind} ({error}): {text.strip()[:200]}")


@dataclass
class Reader:
    """Goes through a reply, from mark to mark, and puts aside what is no call."""

    text: str
    at: int = 0
    left: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def found(self, mark: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Every place of `mark` that is not inside what was taken as a call. `at` stands behind it, for the caller to
        move on; where it is put back to the mark's start, the mark is text."""
        look = 0
        while found := mark.search(self.text, max(look, self.at)):
            begun, self.at = self.at, found.end()
            yield found
            look = found.end()
            if self.at == found.start():
                self.at = begun
            else:
                self.left.append(self.text[begun : found.start()])
        self.left.append(self.text[self.at :])

    def skip(self, end: str) -> None:
        """Move behind `end` if only white space stands before it."""
        found = re.compile(rf"\s*{re.escape(end)}").match(self.text, self.at)
        self.at = found.end() if found else self.at

    def rest_to(self, *ends: str) -> str:
        """The text up to the nearest of `ends`, or to the last character; move there."""
        places = [n for n in (self.text.find(end, self.at) for end in ends) if n >= 0]
        start, self.at = self.at, min(places, default=len(self.text))
        return self.text[start : self.at]

    def json(self, end: str, begin: str, name: str | None = None) -> None:
        """Calls in the JSON that stands here, up to `end`; `begin`: the mark with which another call begins."""
        start = self.at
        try:
            data, self.at = read_json(self.text, start)
        except NO_JSON as error:
            self.calls.append(unread(self.rest_to(end, begin), error, name or ""))
        else:
            stop, again = self.text.find(end, self.at), self.text.find(begin, self.at)
            more = self.text[self.at : stop] if stop >= 0 and not 0 <= again < stop else ""
            if more.strip():
                self.at = stop
                self.calls.append(unread(self.text[start:stop], "more text after it", name or ""))
            else:
                self.calls += json_calls(data, name)
        self.skip(end)

    def parsed(self, tools: Tools | None) -> Parsed:
        """The text that is left, and the calls, with arguments of the types that the tools' schemas ask for."""
        return "".join(self.left), [_typed(c, (tools or {}).get(c.name)) for c in self.calls]


def _typed(call: Call, schema: Mapping[str, Any] | None) -> Call:
    own, arguments = (schema or {}).get("properties") or {}, {}
    for name, value in call.arguments.items():
        try:
            arguments[name] = typed(value, own.get(name))
        except ValueError as error:
            return replace(call, arguments={}, error=call.error or f"argument {name!r}: {error}")
    return replace(call, arguments=arguments)


def python_calls(text: str) -> list[Call] | None:
    """Calls written in Python with literal keyword arguments; None if the text is not that. Nothing is executed."""
    text = text.strip()
    try:
        body = ast.parse(text).body
    except NO_PYTHON:
        return None
    values = [node.value for node in body if isinstance(node, ast.Expr)]
    if len(values) < len(body):
        return None
    calls = []
    for node in (n for v in values for n in (v.elts if isinstance(v, (ast.List, ast.Tuple)) else [v])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and node.args:
            node = node.args[0]
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
            return None
        name = ast.get_source_segment(text, node.func) or ""
        asked = ast.get_source_segment(text, node)
        try:
            arguments = {k.arg: python_literal(k.value) for k in node.keywords if k.arg}
        except NO_PYTHON:
            calls.append(Call(name=name, error=f"arguments must be literals: {asked}"))
            continue
        error = "arguments must be given by name" if node.args else None
        calls.append(Call(name=name, arguments=arguments, error=error))
    return calls
