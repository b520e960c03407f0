"""Values as models write them in tool calls: JSON that is not quite JSON, Gemma's braces, and bare texts.

A bare text ("90210", "null") tells no type. It is kept as `Written` until `typed` gives it the type that the tool's
schema asks for.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

DEEPEST = 50
"""Levels of lists and objects that arguments may have."""
NO_JSON = (ValueError, RecursionError)
NO_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What reading a text as that may raise."""
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings


class Written(str):
    """A text that a model wrote without saying of which type it is."""


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `at`, after white space, and where it ends. Raises one of NO_JSON."""
    return _DECODER.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))


def read_braces(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value that begins at `at` in Gemma's notation, and where it ends. Raises one of NO_JSON.

    {key:value,...}, [value,...], texts between two `quote`s, which are taken as they are, JSON texts, and bare texts.
    """
    return _Braces(text, quote).value(at, 0)


class _Braces:
    def __init__(self, text: str, quote: str):
        self.text, self.quote = text, quote
        self.bare = re.compile(rf"(?:(?!{re.escape(quote)})[^,\]}}])*")
        self.key = re.compile(rf"(?:(?!{re.escape(quote)})[^:,{{}}\[\]])*")

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > 2 * DEEPEST:
            raise ValueError("nested too deeply")
        at = self._blank(at)
        if self.text.startswith(self.quote, at):
            return self._quoted(at)
        if self.text[at : at + 1] == "{":
            return self._members(at + 1, depth, "}")
        if self.text[at : at + 1] == "[":
            return self._members(at + 1, depth, "]")
        if self.text[at : at + 1] == '"':
            with suppress(*NO_JSON):
                return read_json(self.text, at)
        found = self.bare.match(self.text, at)
        if found is None or found.end() == len(self.text) or not found[0].strip():
            raise ValueError(f"no value at character {at}")
        return Written(found[0].strip()), found.end()

    def _blank(self, at: int) -> int:
        while self.text[at : at + 1].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise ValueError("a text that does not end")
        return self.text[start:end], end + len(self.quote)

    def _members(self, at: int, depth: int, close: str) -> tuple[Any, int]:
        pairs: dict[str, Any] = {}
        items: list[Any] = []
        at = self._blank(at)
        while self.text[at : at + 1] != close:
            if close == "}":
                key, at = self._name(at)
                pairs[key], at = self.value(at, depth + 1)
            else:
                item, at = self.value(at, depth + 1)
                items.append(item)
            at = self._blank(at)
            if self.text[at : at + 1] == ",":
                at = self._blank(at + 1)
            elif self.text[at : at + 1] != close:
                raise ValueError(f"neither ',' nor {close!r} at character {at}")
        return (pairs if close == "}" else items), at + 1

    def _name(self, at: int) -> tuple[str, int]:
        if self.text.startswith(self.quote, at):
            name, at = self._quoted(at)
        elif self.text[at : at + 1] == '"':
            name, at = read_json(self.text, at)
        else:
            found = self.key.match(self.text, at)
            name, at = (found[0].strip(), found.end()) if found else ("", at)
        at = self._blank(at)
        if self.text[at : at + 1] != ":":
            raise ValueError(f"no ':' at character {at}")
        return name, at + 1


class _Spelled(ast.NodeTransformer):
    """JSON's true, false and null in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words[node.id]), node) if node.id in words else node


def python_literal(node: ast.expr) -> Any:
    """The value of a Python literal; JSON's words count too. Raises one of NO_PYTHON."""
    return ast.literal_eval(_Spelled().visit(node))


def literal(text: str) -> Any:
    """What a bare text says if nothing is known of its type: JSON, or itself."""
    with suppress(*NO_JSON):
        return json.loads(text, strict=False)
    return {"True": True, "False": False, "None": None}.get(text.strip(), str(text))


def typed(value: Any, schema: Any) -> Any:
    """`value` with every bare text in it of the type that its JSON schema asks for. ValueError for one that cannot be."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, Written):
        return _of_type(value, _types(schema), schema)
    if isinstance(value, Mapping):
        own, other = schema.get("properties") or {}, schema.get("additionalProperties")
        return {k: typed(v, own.get(k, other)) for k, v in value.items()}
    if isinstance(value, list):
        return [typed(v, schema.get("items")) for v in value]
    return value


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows; empty: any."""
    given = schema.get("type")
    types = {t.lower() for t in ([given] if isinstance(given, str) else given or ())}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(choice) if isinstance(choice, Mapping) else set()
    if not types and (schema.get("enum") or "const" in schema):
        types = {_NAMES.get(type(v), "object") for v in schema.get("enum") or [schema["const"]]}
    return types | {"null"} if schema.get("nullable") and types else types


_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def _of_type(text: Written, types: set[str], schema: Mapping[str, Any]) -> Any:
    if types == {"string"}:
        return str(text)
    found = _read(text, types)
    if not types:
        return found
    name = _NAMES.get(type(found), "object")
    if name in types or (name == "integer" and "number" in types):
        return typed(found, schema)
    if name == "number" and "integer" in types and found.is_integer():
        return int(found)
    if isinstance(found, str) and "string" not in types:
        raise ValueError(f"{text[:200]!r} is no {' or '.join(sorted(types))}")
    return str(text) if "string" in types else found


def _read(text: str, types: Iterable[str]) -> Any:
    found = literal(text)
    if isinstance(found, str) and {"array", "object"} & set(types):  # a list as Python prints it
        with suppress(*NO_PYTHON):
            found = python_literal(ast.parse(text.strip(), mode="eval").body)
            found = list(found) if isinstance(found, (tuple, set)) else found
    return found
