"""Python functions that a model may call. How models write their calls is `calls`' business."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .calls import Call
from .message import clean, plain


@dataclass(frozen=True, eq=False)
class Tool:
    """A function with its JSON schema (the OpenAI form, `{"type": "function", "function": {...}}`)."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name by which a model calls it."""
        return self.schema["function"]["name"]

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Schema from type hints and a Google-style docstring, through transformers' own helper."""
        from transformers.utils import get_json_schema

        if inspect.iscoroutinefunction(function):
            raise ValueError(f"{function!r} cannot be a tool: it is async; give a plain function that waits for it")
        try:
            schema = get_json_schema(function)
        except Exception as error:
            raise ValueError(
                f"{getattr(function, '__name__', function)!r} cannot be a tool: {error}. It needs a type hint for "
                "every argument and a docstring with an 'Args:' section that describes each"
            ) from error
        schema["function"].pop("return", None)
        return cls(function, schema)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text: strings as they are, anything else as JSON. Raises what the function raises."""
        given = copy.deepcopy(dict(arguments))  # the trail tells what was asked, whatever becomes of it
        inspect.signature(self.function).bind(**given)
        result = self.function(**given)
        return clean(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


class ToolRegistry(Mapping[str, Tool]):
    """Tools by name. Functions become tools."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()):
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool | Callable[..., Any]) -> Tool:
        """Register a tool or a function. Two of one name are a ValueError. Works as a decorator."""
        made = tool if isinstance(tool, Tool) else Tool.from_function(tool)
        if made.name in self._tools:
            raise ValueError(f"there is already a tool {made.name!r}")
        self._tools[made.name] = made
        return made

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """Name -> the JSON schema of its parameters."""
        return {name: tool.schema["function"].get("parameters") or {} for name, tool in self._tools.items()}

    def run(self, call: Call) -> tuple[str, bool]:
        """(result text, whether it is an error). Never raises: what goes wrong is the model's to read."""
        if call.error:
            return f"error: {call.error}", True
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}", True
        try:
            return self._tools[call.name].call(call.arguments), False
        except (Exception, SystemExit) as error:
            return clean(f"error: {type(error).__name__}: {error}"), True


def entry(call: Call, result: str, failed: bool) -> dict[str, Any]:
    """A call and its result as the tool trail has them: plain JSON values."""
    return {"name": call.name, "arguments": plain(call.arguments), "result": result, "is_error": failed}


def as_tools(tools: Iterable[Any] | Mapping[str, Tool]) -> tuple[Tool, ...]:
    """Tools, functions, or a registry, as tools."""
    given = tools.values() if isinstance(tools, Mapping) else tools
    return tuple(ToolRegistry(given).values())


def schemas_json(tools: tuple[Tool, ...]) -> str:
    """The schemas of tools as JSON."""
    return _schemas_json(tuple(json.dumps(t.schema, ensure_ascii=False) for t in tools))


@lru_cache(maxsize=256)
def _schemas_json(schemas: tuple[str, ...]) -> str:
    return f"[{', '.join(schemas)}]"


def describe(tools: tuple[Tool, ...]) -> str:
    """Tools as a system prompt, for templates that cannot show them. Asks for calls in the Hermes form."""
    lines = "\n".join(json.dumps(t.schema, ensure_ascii=False) for t in tools)
    return (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON within tags:\n"
        '<tool_call>\n{"name": "function-name", "arguments": {...}}\n</tool_call>'
    )
