"""Models behind a chat API, through the official SDKs (extra `api`).

Requests are retried here, not in the SDK: rate limits, server errors, timeouts, cut connections and answers that cannot
be read, with growing waits or as long as the server says. A turn either gets an answer or raises APIFailed.
"""

from __future__ import annotations

import copy
import email.utils
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import APIFailed, BudgetExceeded
from ..message import Message
from ..reasoning import split_text
from ..templating import ContextItem
from ..tools import ToolRegistry, as_tools, entry
from ..views.view import View, ViewMessage
from ..work import Ask, Steps, TurnRequest
from .base import Participant
from .options import check_sampling
from .providers import GO_ON, PROVIDERS, YOU_FIRST, Answer, Malformed, Query

LONGEST_WAIT_S = 60.0
MARKUP_TOKENS = 4
"""What an estimate adds for the markup of each message."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per million tokens."""

    prompt: float
    completion: float


@dataclass(kw_only=True)
class Usage:
    """What was used so far, by a participant and all its clones in this process."""

    requests: int = 0
    """Answered ones."""
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """Dollars; 0 without prices."""


class APIParticipant(Participant):
    """A model behind a chat API. Nothing inside it can be captured, steered, patched or scored.

    provider: "openai" (with `base_url` any server that speaks its protocol), "anthropic" or "openrouter". The key comes
        from `api_key` or the provider's environment variable, and is never saved or pickled.
    max_retries: tries after the first. max_in_flight: requests at once, of this participant in all conversations.
    timeout_s: of one request. prices, max_cost, max_tokens_total: what tokens cost, and how many dollars and tokens may
        be used in all; a turn that begins after that raises BudgetExceeded.
    context_limit, count_tokens: the tokens of prompt and reply that the model takes, and how to count a prompt's: a
        function (messages, tools) -> int of role/content dicts and tool schemas, or a number, the characters per token of
        an estimate. Without them no context policy but ErrorPolicy and SlidingWindowPolicy is possible, and the API
        itself says when a prompt is too long.
    extra: passed on to every call of the SDK.
    """

    has_prompt = True

    def __init__(
        self, name: str, model_id: str, provider: str = "openai", base_url: str | None = None, *,
        api_key: str | None = None, temperature: float | None = None, top_p: float | None = None,
        max_new_tokens: int = 512, seed: int | None = None, tools: Any = (), max_tool_iters: int = 4,
        timeout_s: float = 60.0, max_retries: int = 5, max_in_flight: int = 8, backoff_s: float = 0.5,
        prices: Prices | None = None, max_cost: float | None = None, max_tokens_total: int | None = None,
        system_prompt: Any = None, private_context: Iterable[ContextItem] = (), context_limit: int | None = None,
        count_tokens: Callable[[list[dict], list[dict]], int] | float | None = None,
        extra: dict[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__(name, system_prompt=system_prompt, private_context=private_context, seed=seed)
        if provider not in PROVIDERS:
            raise ValueError(f"no provider {provider!r}; possible: {', '.join(sorted(PROVIDERS))}")
        if max_cost is not None and prices is None:
            raise ValueError("max_cost needs prices=Prices(prompt=..., completion=...) to count by")
        if context_limit is not None and count_tokens is None:
            raise ValueError(
                "context_limit needs count_tokens=... to count by: a function of messages and tools, or a number of "
                "characters per token as an estimate"
            )
        if isinstance(count_tokens, (int, float)) and not count_tokens > 0:
            raise ValueError(f"count_tokens={count_tokens} characters per token; a number must be above 0")
        check_sampling(name, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
        self.model_id, self.provider, self.base_url = model_id, provider, base_url
        self.temperature, self.top_p, self.max_new_tokens = temperature, top_p, max_new_tokens
        self.tools, self.max_tool_iters = as_tools(tools), max_tool_iters
        self.timeout_s, self.max_retries, self.backoff_s = timeout_s, max_retries, backoff_s
        self.max_in_flight = max_in_flight
        self.prices, self.max_cost, self.max_tokens_total = prices, max_cost, max_tokens_total
        self.context_limit, self.counter = context_limit, count_tokens
        self.extra = dict(extra or {})
        self.usage = Usage()
        self._line = _Line(api_key, max_in_flight)

    def clone(self) -> APIParticipant:
        """A copy for another conversation; usage, connection and limits are shared."""
        other = copy.copy(self)  # usage is shared, and so are the connection and its limits
        other._line = self._line
        other.extra = dict(self.extra)
        return other

    def stop(self) -> None:
        """Send nothing more, for this participant and its clones; what waits for its turn fails with APIFailed."""
        self._line.stopped = True

    def needs(self) -> str:
        """The API, the model, and its key."""
        where = f" at {self.base_url}" if self.base_url else ""
        return f"API {self.provider}, model {self.model_id!r}{where}, and its key"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_line"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._line = _Line(None, self.max_in_flight)

    # -- a turn -----------------------------------------------------------------------------------------------------
    def turn(self, view: View, request: TurnRequest) -> Steps:
        """Ask the API, run the tools it calls, and ask again, at most `max_tool_iters` times."""
        registry, trail, spent, generated = ToolRegistry(view.tools), [], Usage(), 0
        for round_ in range(self.max_tool_iters + 1 if view.tools else 1):
            query = self._query(view, request, round_)
            answer = yield Ask(participant=self, call=lambda query=query: self._ask(query, spent))
            generated += answer.completion_tokens
            out = request.tokens_left is not None and generated >= request.tokens_left
            if not answer.calls or round_ == self.max_tool_iters or out:
                break
            entries = []
            grown = [ViewMessage(role="assistant", content=answer.content, author=self.name, calls=answer.calls)]
            for i, call in answer.calls:
                result, failed = yield Ask(participant=self, call=lambda call=call: registry.run(call))
                grown.append(ViewMessage(role="tool", content=result, author=call.name, call_id=i))
                entries.append(entry(call, result, failed))
            trail.append(
                {"raw_completion": answer.content, "n_tokens": answer.completion_tokens, "calls": entries}
            )  # fmt: skip
            request, view = yield from request.after(generated, view.with_messages([*view, *grown]))
        return self._message(answer, query, request, trail, spent)

    def can_count(self) -> bool:
        """Whether `count_tokens` was given."""
        return self.counter is not None

    def count_tokens(self, view: View) -> int:
        """Prompt tokens of a view, as `count_tokens=` counts or estimates them."""
        messages, tools = _sent(view), [dict(t.schema) for t in view.tools]
        if isinstance(self.counter, Callable):
            return self.counter(messages, tools)
        if self.counter is None:
            raise ValueError(f"{self.name!r} cannot count tokens: give it count_tokens=...")
        characters = len(json.dumps(tools)) if tools else 0
        for message in messages:
            calls = "".join(f"{c.name}{json.dumps(dict(c.arguments))}" for _, c in message.get("calls", ()))
            characters += len(message["content"]) + len(calls)
        return math.ceil(characters / self.counter) + MARKUP_TOKENS * len(messages)

    def _query(self, view: View, request: TurnRequest, round_: int) -> Query:
        limit = request.options.max_new_tokens
        digest = hashlib.blake2b(repr((request.key, round_)).encode(), digest_size=4).digest()
        return Query(
            model=self.model_id, messages=_sent(view), temperature=self.temperature, top_p=self.top_p,
            max_tokens=self.max_new_tokens if limit is None else limit, extra=self.extra,
            seed=int.from_bytes(digest, "big") >> 1, tools=[dict(t.schema) for t in view.tools],
        )  # fmt: skip

    def _message(self, answer: Answer, query: Query, request: TurnRequest, trail: list, spent: Usage) -> Message:
        thought, content = split_text(answer.content)
        reasoning = "\n\n".join(part for part in (answer.reasoning.strip(), thought) if part)
        sampling = {"temperature": query.temperature, "top_p": query.top_p, "max_new_tokens": query.max_tokens}
        metadata: dict[str, Any] = {
            "raw_completion": answer.content,
            "n_tokens": answer.completion_tokens,
            "n_prompt_tokens": answer.prompt_tokens,
            "finish_reason": "tool" if answer.calls else answer.finish_reason,
            "seed": request.key[0],
            "sampling": {**sampling, "seed": query.seed},
            "api": {"provider": self.provider, "model": self.model_id, **asdict(spent)},
        }
        if reasoning:
            metadata["reasoning"] = reasoning
        if trail:
            metadata["tool_trail"] = trail
        return Message(self.name, content.strip(), metadata)

    # -- one request ------------------------------------------------------------------------------------------------
    def _ask(self, query: Query, spent: Usage) -> Answer:
        """Runs in a thread. Counts into `spent` (this turn) and `usage` (everything)."""
        line, provider = self._line, PROVIDERS[self.provider]
        for attempt in range(self.max_retries + 1):
            self._check_budget()
            try:
                with line.slots:
                    if line.stopped:
                        raise APIFailed(f"{self.name!r} was told to ask no more")
                    client = line.client(
                        lambda key: provider.client(api_key=key, base_url=self.base_url, timeout_s=self.timeout_s)
                    )
                    answer = provider.ask(client, query)
            except Exception as error:
                wait = _wait(error, attempt, self.backoff_s)
                if wait is None or attempt == self.max_retries:
                    self._count(spent, failures=1)
                    raise APIFailed(
                        f"{self.name!r} got no answer from {self.provider} model {self.model_id!r}"
                        f"{f' at {self.base_url}' if self.base_url else ''} in {attempt + 1} tries; the last one: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                self._count(spent, retries=1)
                line.pause(wait)
                continue
            cost = 0.0
            if self.prices:
                cost = answer.prompt_tokens * self.prices.prompt + answer.completion_tokens * self.prices.completion
            self._count(
                spent, requests=1, prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens,
                cost=cost / 1e6,
            )  # fmt: skip
            return answer
        raise AssertionError("unreachable")

    def _check_budget(self) -> None:
        used = self.usage
        if self.max_cost is not None and used.cost >= self.max_cost:
            raise BudgetExceeded(
                f"{self.name!r} has spent ${used.cost:.4f} of max_cost=${self.max_cost}; raise it to go on"
            )
        tokens = used.prompt_tokens + used.completion_tokens
        if self.max_tokens_total is not None and tokens >= self.max_tokens_total:
            raise BudgetExceeded(f"{self.name!r} has used {tokens} of max_tokens_total={self.max_tokens_total} tokens")

    def _count(self, spent: Usage, **amounts: float) -> None:
        with self._line.lock:
            for usage in (spent, self.usage):
                for name, amount in amounts.items():
                    setattr(usage, name, getattr(usage, name) + amount)


def _sent(view: View) -> list[dict[str, Any]]:
    """The messages of a view as they are sent: somebody has to speak before a reply."""
    messages = view.chat()
    roles = {m["role"] for m in messages}
    if roles.isdisjoint(("user", "tool")):
        messages.append({"role": "user", "content": GO_ON if "assistant" in roles else YOU_FIRST})
    return messages


class _Line:
    """The connection of a participant and its clones: one client, so many requests at once."""

    def __init__(self, api_key: str | None, max_in_flight: int):
        self.slots = threading.BoundedSemaphore(max_in_flight)
        self.stopped = False
        self.lock = threading.Lock()
        self.pause: Callable[[float], None] = time.sleep
        self._api_key, self._client = api_key, None

    def client(self, make: Callable[[str | None], Any]) -> Any:
        with self.lock:
            if self._client is None:
                self._client = make(self._api_key)
            return self._client


def _wait(error: BaseException, attempt: int, backoff_s: float) -> float | None:
    """Seconds until the next try; None if another try cannot help."""
    status = getattr(error, "status_code", None)
    told = None
    if isinstance(status, int) and status >= 300:
        if status not in (408, 409, 425, 429) and status < 500:
            return None
        told = _retry_after(getattr(error, "response", None))
    elif not _is_broken_line(error):
        return None
    return min(told if told is not None else backoff_s * 2**attempt, LONGEST_WAIT_S)


def _is_broken_line(error: BaseException) -> bool:
    """Timeouts, cut connections, answers that cannot be read."""
    names = {cls.__name__ for cls in type(error).__mro__}
    known = {"APIConnectionError", "APITimeoutError", "APIResponseValidationError", "JSONDecodeError", "TransportError"}
    return isinstance(error, (Malformed, ConnectionError, TimeoutError, UnicodeDecodeError)) or bool(names & known)


def _retry_after(response: Any) -> float | None:
    """The server's Retry-After header, in seconds; it may be a date."""
    value = getattr(response, "headers", {}).get("retry-after")
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
