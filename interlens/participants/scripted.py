"""Speakers without a model: a list of lines, a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..message import Message
from .base import Participant


class ScriptedParticipant(Participant):
    """Says its lines in order; which one comes next follows from how often it has spoken, so branches agree.

    cycle: begin again after the last line; otherwise running out is an IndexError.
    """

    def __init__(self, name: str, lines: Iterable[str], cycle: bool = True, **options: Any):
        super().__init__(name, **options)
        self.lines = tuple(lines)
        self.cycle = cycle
        if not self.lines:
            raise ValueError(f"scripted participant {name!r} has no lines; give at least one")

    def reply(self, view, request) -> Message:
        """The next line. IndexError after the last one if they do not begin again."""
        n = sum(m.role == "assistant" and m.index is not None for m in view)
        if n >= len(self.lines) and not self.cycle:
            raise IndexError(
                f"{self.name!r} has {len(self.lines)} lines and has said them all; use cycle=True or more lines"
            )
        return Message(self.name, self.lines[n % len(self.lines)], {"finish_reason": "stop"})

    def turn(self, view, request):
        """The next line, without a thread."""
        return self.reply(view, request)  # nothing to wait for
        yield


class HumanParticipant(Participant):
    """A person. `ask(view) -> str` shows the view and returns what they say; None asks on the terminal."""

    def __init__(self, name: str, ask: Callable[[Any], str] | None = None, **options: Any):
        super().__init__(name, **options)
        self.ask = ask

    def reply(self, view, request) -> Message:
        """What the person says."""
        return Message(self.name, (self.ask or _terminal)(view), {"finish_reason": "stop"})


def _terminal(view) -> str:
    for message in view[-3:]:
        print(f"{message.author or message.role}: {message.content}")
    return input(f"{view.pov}> ")
