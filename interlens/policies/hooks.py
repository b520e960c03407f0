"""Reviewing a message before it is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..message import Message
from ..work import ReadableConversation


@dataclass(frozen=True)
class Verdict:
    """What a hook decided. Make one with `approve`, `deny` or `edit`."""

    kind: str
    message: Message | None = None
    reason: str = ""


def approve() -> Verdict:
    """Say it as it is."""
    return Verdict("approve")


def deny(reason: str = "") -> Verdict:
    """Do not say it: the step gives None and the transcript stays as it was."""
    return Verdict("deny", reason=reason)


def edit(message: Message) -> Verdict:
    """Say this instead. Another text forgets the tokens of the original."""
    if not isinstance(message, Message):
        raise TypeError(f"edit takes a message, e.g. edit(message.copy(content=...)), not {message!r}")
    return Verdict("edit", message=message)


class MessageHook:
    """Sees every message of a step before it is committed. Hooks run in order; each sees what the last one left.

    A conversation uses the very hook it was given; a branch, and each conversation of a rollout, uses a copy with the
    state of that moment. A hook that all of them shall share has a `__deepcopy__` that returns `self`; functions are
    shared anyway.
    """

    def review(self, message: Message, conversation: ReadableConversation) -> Verdict:
        """`message` is a copy; `conversation` can be read only (see `read_only`)."""
        raise NotImplementedError


@runtime_checkable
class Reviewing(Protocol):
    """What a hook must have; a `MessageHook`, or a class of one's own that inherits nothing."""

    def review(self, message: Message, conversation: Any) -> Verdict:
        """What to do with the message."""
        ...


Hook = Reviewing | Callable[[Message, Any], Verdict]
"""A hook, or a function (message, conversation) that does the same."""


def copies(hooks: list[Hook]) -> list[Hook]:
    """The hooks of a branch."""
    made = []
    for hook in hooks:
        try:
            made.append(copy.deepcopy(hook))
        except Exception as error:
            raise TypeError(
                f"{hook!r} cannot be copied for a branch ({error}); give it a __deepcopy__, which may return self to "
                "share it"
            ) from error
    return made


def review(hooks: list[Hook], message: Message, conversation: ReadableConversation) -> Message | None:
    """The message that remains after all hooks, or None. A callable (message, conversation) is a hook too."""
    for hook in hooks:
        verdict = (hook.review if isinstance(hook, Reviewing) else hook)(message.copy(), conversation)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"{hook!r} must return approve(), deny() or edit(message), not {verdict!r}")
        if verdict.kind == "deny":
            return None
        if (changed := verdict.message) is not None:
            kept = changed.content == message.content and changed.author == message.author
            message = message.copy(metadata=changed.copy().metadata) if kept else changed.copy()
    return message
