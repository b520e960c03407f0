"""When a run ends. A condition's state belongs to one run of one conversation: `run` works on a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..message import Message
from ..work import ReadableConversation


class StopCondition:
    """Subclasses implement `check`; it is called once before the first turn, with no message, and after every turn."""

    def check(self, conversation: ReadableConversation, message: Message | None) -> str | None:
        """Why the run ends now, or None. `message`: the last committed one; None at the start and for a denied turn."""
        raise NotImplementedError

    def turn_limit(self, conversation: ReadableConversation) -> int | None:
        """At most this many tokens for the next turn; None for no limit."""
        return None


Until = StopCondition | Callable[[Any], Any] | Sequence[Any] | None
"""When a run ends: a condition, a callable of the conversation, a sequence of these, or None."""


@dataclass
class TurnStopCondition(StopCondition):
    """After this many committed turns."""

    max_turns: int
    _turns: int = field(default=0, repr=False)

    def check(self, conversation, message):
        """The reason, once enough turns were committed."""
        self._turns += message is not None
        return f"{self._turns} turns" if self._turns >= self.max_turns else None


@dataclass
class TokenStopCondition(StopCondition):
    """After this many generated tokens."""

    max_tokens: int
    _tokens: int = field(default=0, repr=False)

    def check(self, conversation, message):
        """The reason, once enough tokens were generated."""
        self._tokens += num_tokens(message)
        return f"{self._tokens} tokens" if self._tokens >= self.max_tokens else None


@dataclass
class ElapsedTimeStopCondition(StopCondition):
    """At the first turn that ends this many seconds after the start of the run."""

    seconds: float
    _start: float | None = field(default=None, repr=False)

    def check(self, conversation, message):
        """The reason, once the time has passed."""
        self._start = time.monotonic() if self._start is None else self._start
        passed = time.monotonic() - self._start
        return f"{self.seconds} s elapsed" if passed >= self.seconds else None


@dataclass
class StopStringCondition(StopCondition):
    """After a message that contains one of the strings."""

    strings: Sequence[str]

    def __post_init__(self):
        self.strings = (self.strings,) if isinstance(self.strings, str) else tuple(self.strings)
        if not all(self.strings):
            raise ValueError("an empty stop string is in every message; give a longer one")

    def check(self, conversation, message):
        """The reason, once a message has one of the strings."""
        found = next((s for s in self.strings if message is not None and s in message.content), None)
        return f"stop string {found!r}" if found is not None else None


@dataclass
class AnyStopCondition(StopCondition):
    """When one of them says so; all of them see every turn."""

    conditions: Sequence[Any]

    def __post_init__(self):
        self.conditions = [c for c in map(condition, self.conditions) if c is not None]

    def check(self, conversation, message):
        """The first reason that one of them has."""
        reasons = [c.check(conversation, message) for c in self.conditions]
        return next((r for r in reasons if r), None)

    def turn_limit(self, conversation):
        """The smallest limit that one of them has."""
        return least(c.turn_limit(conversation) for c in self.conditions)


@dataclass
class TokenBudget(StopCondition):
    """At most so many generated tokens in the run, and in each turn; turns are cut short rather than exceed it."""

    per_conversation: int | None = None
    per_turn: int | None = None
    _spent: int = field(default=0, repr=False)

    def check(self, conversation, message):
        """The reason, once the budget is spent."""
        self._spent += num_tokens(message)
        done = self.per_conversation is not None and self._spent >= self.per_conversation
        return f"token budget {self.per_conversation} spent" if done else None

    def turn_limit(self, conversation):
        """What is left of the budget, and at most `per_turn`."""
        left = None if self.per_conversation is None else self.per_conversation - self._spent
        return least((left, self.per_turn))


@dataclass
class _Callable(StopCondition):
    says: Callable[[ReadableConversation], Any]

    def check(self, conversation, message):
        found = self.says(conversation)
        return (found if isinstance(found, str) else "until") if found else None


def num_tokens(message: Message | None) -> int:
    """Generated tokens of a message, those of its tool calls included."""
    if message is None:
        return 0
    trail = message.metadata.get("tool_trail") or ()
    return int(message.metadata.get("n_tokens") or 0) + sum(int(t.get("n_tokens") or 0) for t in trail)


def least(limits) -> int | None:
    """The smallest of some limits, of which None are none."""
    return min((limit for limit in limits if limit is not None), default=None)


def condition(until: Until) -> StopCondition | None:
    """`until` of a run as one condition: a condition, a sequence of them, a callable of the conversation, or None."""
    if until is None or isinstance(until, StopCondition):
        return until
    if isinstance(until, (list, tuple)):
        return AnyStopCondition(until)
    if callable(until):
        return _Callable(until)
    raise TypeError(f"until is a stop condition, a sequence of them, or a callable of the conversation, not {until!r}")
