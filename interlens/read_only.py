"""A conversation as its hooks and policies see it: all of it can be read, nothing of it changed.

What they decide they return (`edit(message)`, a name, a reason); a change behind a turn's back would differ between a
conversation alone and one in a rollout. `branch()` gives them a conversation of their own to try things on.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, TypeVar, cast

from .transcript import Transcript
from .work import ReadableConversation

C = TypeVar("C", bound=ReadableConversation)
_CHANGE = frozenset({
    "add_capture", "aside", "capture", "commit", "denied", "edit", "must_open", "next_call", "play", "reset",
    "rewind", "rollout", "run",
    "sample", "sample_all", "step", "turn",
})  # fmt: skip
"""What is done to a conversation, or takes a turn of it."""


def read_only(conversation: C) -> C:
    """`conversation`, to be read only."""
    return conversation if isinstance(conversation, ReadOnly) else cast(C, ReadOnlyConversation(conversation))


class ReadOnly:
    """Stands for another object. `isinstance` sees that object's class."""

    __slots__ = ("_of",)

    def __init__(self, of: Any):
        object.__setattr__(self, "_of", of)

    @property
    def __class__(self):
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _refused(f"setting {name}")

    def __delattr__(self, name: str) -> None:
        raise _refused(f"deleting {name}")

    def __repr__(self) -> str:
        return repr(self._of)

    def __deepcopy__(self, memo: dict) -> Any:
        return self


class ReadOnlyConversation(ReadOnly):
    """Messages are copies; participants are read-only too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGE:
            raise _refused(f"{name}()")
        value = getattr(self._of, name)
        if isinstance(value, dict):
            return MappingProxyType(value)
        return tuple(value) if isinstance(value, list) else value

    @property
    def transcript(self) -> Transcript:
        """The transcript; whoever takes a message gets a copy."""
        return ReadOnlyTranscript(self._of.transcript)

    @property
    def participants(self) -> tuple[Any, ...]:
        """The participants, read-only too."""
        return tuple(map(ReadOnly, self._of.participants))

    def participant(self, which: Any) -> Any:
        """One participant, read-only too."""
        return ReadOnly(self._of.participant(which))


class ReadOnlyTranscript(Transcript):
    """The messages of another transcript; whoever takes one gets a copy."""

    def __init__(self, of: Transcript):
        self._messages = of._messages

    def __getitem__(self, index):
        found = self._messages[index]
        return Transcript(m.copy() for m in found) if isinstance(index, slice) else found.copy()

    def __iter__(self) -> Iterator:
        return (m.copy() for m in self._messages)

    def __reversed__(self) -> Iterator:
        return (m.copy() for m in reversed(self._messages))

    def _refuse(self, *given: Any, **named: Any) -> Any:
        raise _refused("changing the transcript")

    __setitem__ = __delitem__ = insert = append = rewind = edit = _refuse


def _refused(what: str) -> TypeError:
    return TypeError(
        f"hooks and policies see a conversation read-only, and {what} would change it: return what you decide, e.g. "
        "edit(message), or work on conversation.branch()"
    )
