"""Chat APIs: how each is asked, and what its answer is. Neutral messages in, an `Answer` out."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..calls import Call

YOU_FIRST = "(You speak first.)"
GO_ON = "(Go on.)"
"""What a user says where nobody has."""


class Malformed(Exception):
    """The server answered with something that is no answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, Call], ...] = ()
    """(call id, call) of every tool call."""
    finish_reason: str = "stop"
    """"stop", "length" or "tool"."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Query:
    """One question. `messages`: role/content dicts; an assistant's may carry `calls`, a tool's has `id` and `name`."""

    model: str
    messages: Sequence[dict[str, Any]]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    tools: Sequence[dict[str, Any]] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """Passed on to the SDK's call as it is."""


@runtime_checkable
class Provider(Protocol):
    """An API behind its official SDK."""

    def client(self, *, api_key: str | None, base_url: str | None, timeout_s: float) -> Any:
        """The SDK's client, its own retries off."""
        ...

    def ask(self, client: Any, query: Query) -> Answer:
        """Raises whatever the SDK raises, or Malformed."""
        ...


class OpenAI:
    """OpenAI, and everything that speaks its chat completions protocol."""

    default_url: str | None = None
    key_variable = "OPENAI_API_KEY"

    def client(self, *, api_key, base_url, timeout_s):
        """The SDK's client."""
        import os

        from openai import DefaultHttpxClient
        from openai import OpenAI as Client

        key = api_key or os.environ.get(self.key_variable)
        if base_url is not None and not key:
            key = "none"  # a server of one's own asks for none; the SDK insists on one
        http = DefaultHttpxClient(event_hooks=_deadline(timeout_s))
        made = Client(
            api_key=key, base_url=base_url or self.default_url, timeout=timeout_s, max_retries=0, http_client=http
        )
        weakref.finalize(made, http.close)
        return made

    def ask(self, client, query):
        """One chat completion."""
        options: dict[str, Any] = {"temperature": query.temperature, "top_p": query.top_p, "seed": query.seed}
        options = {k: v for k, v in options.items() if v is not None}
        if query.tools:
            options["tools"] = list(query.tools)
        found = client.chat.completions.create(
            model=query.model, messages=[self._message(m) for m in query.messages],
            **{"max_tokens": query.max_tokens, **options, **query.extra},
        )  # fmt: skip
        try:
            choice, usage = found.choices[0], found.usage
            message = choice.message
            calls = tuple((c.id, _call(c.function.name, c.function.arguments)) for c in message.tool_calls or ())
            reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
            return Answer(
                content=_text(message.content or ""), reasoning=str(reasoning), calls=calls,
                finish_reason=_REASONS.get(choice.finish_reason or "stop", "stop"),
                prompt_tokens=int(getattr(usage, "prompt_tokens", 0) or 0),
                completion_tokens=int(getattr(usage, "completion_tokens", 0) or 0),
            )  # fmt: skip
        except (AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise Malformed(f"no completion in the answer ({error}): {str(found)[:200]}") from error

    @staticmethod
    def _message(message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            return {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
        made = {"role": message["role"], "content": message["content"]}
        if message.get("calls"):
            made["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
                for i, c in message["calls"]
            ]
        return made


class OpenRouter(OpenAI):
    """OpenRouter, which speaks OpenAI's protocol."""

    default_url = "https://openrouter.ai/api/v1"
    key_variable = "OPENROUTER_API_KEY"


class Anthropic:
    """Anthropic's messages API."""

    def client(self, *, api_key, base_url, timeout_s):
        """The SDK's client."""
        from anthropic import Anthropic as Client
        from anthropic import DefaultHttpxClient

        given = {k: v for k, v in (("api_key", api_key), ("base_url", base_url)) if v is not None}
        http = DefaultHttpxClient(event_hooks=_deadline(timeout_s))
        made = Client(timeout=timeout_s, max_retries=0, http_client=http, **given)
        weakref.finalize(made, http.close)
        return made

    def ask(self, client, query):
        """One message."""
        system = "\n\n".join(m["content"] for m in query.messages if m["role"] == "system")
        options: dict[str, Any] = {"system": system} if system else {}
        if query.temperature is not None:  # the API takes one of the two, and newer SDKs no longer name them
            options["extra_body"] = {"temperature": query.temperature}
        elif query.top_p is not None:
            options["extra_body"] = {"top_p": query.top_p}
        if query.tools:
            options["tools"] = [
                {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
                for f in (t["function"] for t in query.tools)
            ]
        found = client.messages.create(
            model=query.model, messages=self._messages(query.messages),
            **{"max_tokens": query.max_tokens, **options, **query.extra},
        )  # fmt: skip
        try:
            blocks = list(found.content)
            return Answer(
                content="".join(b.text for b in blocks if b.type == "text"),
                reasoning="".join(b.thinking for b in blocks if b.type == "thinking"),
                calls=tuple(
                    (b.id, Call(name=_text(b.name), arguments=dict(b.input))) for b in blocks if b.type == "tool_use"
                ),
                finish_reason=_REASONS.get(found.stop_reason or "stop", "stop"),
                prompt_tokens=int(found.usage.input_tokens or 0),
                completion_tokens=int(found.usage.output_tokens or 0),
            )
        except (AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise Malformed(f"no message in the answer ({error}): {str(found)[:200]}") from error

    @staticmethod
    def _messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Roles alternate, a user's come first and last, and hold blocks; tool results are a user's."""
        made: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "system":
                continue
            role = "assistant" if message["role"] == "assistant" else "user"
            blocks: list[dict[str, Any]] = []
            if message["role"] == "tool":
                blocks.append({"type": "tool_result", "tool_use_id": message["id"], "content": message["content"]})
            elif message["content"].strip():
                blocks.append({"type": "text", "text": message["content"]})
            for i, call in message.get("calls") or ():
                blocks.append({"type": "tool_use", "id": i, "name": call.name, "input": dict(call.arguments)})
            if made and made[-1]["role"] == role:
                made[-1]["content"] += blocks
            elif blocks:
                made.append({"role": role, "content": blocks})
        if not made or made[0]["role"] == "assistant":
            made.insert(0, {"role": "user", "content": [{"type": "text", "text": YOU_FIRST}]})
        if made[-1]["role"] == "assistant":  # which would be read as the beginning of the reply
            made.append({"role": "user", "content": [{"type": "text", "text": GO_ON}]})
        return made


def _deadline(timeout_s: float) -> dict[str, Any]:
    """Hooks of an HTTP client that end a request after `timeout_s` in all; its own timeout begins anew with every byte,
    and servers send blanks while one waits."""

    def asked(request: Any) -> None:
        request.extensions["ends"] = time.monotonic() + timeout_s

    def answered(response: Any) -> None:
        whole, ends = response.stream, response.request.extensions["ends"]
        # SDKs differ in the HTTP library they use, and each wants streams of its own kind
        kind = next(c for c in type(whole).__mro__ if c.__name__ == "SyncByteStream")

        class Timed(kind):
            def __iter__(self):
                for chunk in whole:
                    if time.monotonic() > ends:
                        raise TimeoutError(f"no whole answer within {timeout_s} s")
                    yield chunk

            def close(self):
                whole.close()

        response.stream = Timed()

    return {"request": [asked], "response": [answered]}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {str(value)[:80]}")
    return value


def _call(name: str, arguments: str | None) -> Call:
    name = _text(name)
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return Call(name=name, error=f"not valid JSON ({error}): {str(arguments)[:200]}")
    if not isinstance(found, dict):
        return Call(name=name, error=f"arguments must be a JSON object, not {str(arguments)[:200]}")
    return Call(name=name, arguments=found)


_REASONS = {
    "stop": "stop", "length": "length", "tool_calls": "tool", "end_turn": "stop", "stop_sequence": "stop",
    "max_tokens": "length", "tool_use": "tool",
}  # fmt: skip

PROVIDERS: dict[str, Provider] = {"openai": OpenAI(), "openrouter": OpenRouter(), "anthropic": Anthropic()}
