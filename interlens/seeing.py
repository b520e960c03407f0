"""What a participant sees of a conversation now: its view, made from the transcript by the policies in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol, runtime_checkable

from .message import Message, clean
from .participants.base import Participant
from .policies.communication import CommunicationPolicy
from .read_only import read_only
from .templating import fill
from .views.view import View, ViewMessage
from .work import ReadableConversation


@runtime_checkable
class SeenConversation(ReadableConversation, Protocol):
    """What a view is made from."""

    shared_system_prompt: Any
    communication: CommunicationPolicy
    heard: dict[tuple[str, str], Heard]
    """(Reader, visibility) -> how it saw the transcript last."""

    @property
    def date(self) -> str:
        """The day that prompts show, where a template shows one: "2026-12-01"."""
        ...

    @property
    def reasoning_visibility(self) -> str:
        """ "strip", "self_retain" or "shared"."""
        ...


def build(conversation: SeenConversation, participant: Participant, extra: Sequence[Any] = ()) -> View:
    """The view of `participant`: its system prompt and private context, then the transcript with roles swapped.

    `extra`: messages that are not in the transcript but are seen as if they came next.
    """
    row, visibility = conversation.row, str(conversation.reasoning_visibility)
    system = [clean(fill(part, row)) for part in (conversation.shared_system_prompt, participant.system_prompt)]
    system_text = "\n\n".join(text for text in system if text)
    messages = [ViewMessage(role="system", content=system_text)] if system_text else []
    for item in participant.private_context:
        content, role, author = clean(fill(item.content, row)), item.role_hint, item.author
        messages.append(ViewMessage(role=role, content=content, author=author))
    messages += _heard(conversation, participant.name, visibility)
    start = len(conversation.transcript)
    for index, message in enumerate(extra, start):
        if _hears(conversation, index, message, participant.name):
            messages.append(_seen(message, index, participant.name, visibility))
    given = conversation.communication.tools(read_only(conversation), participant.name)
    return View(
        pov=participant.name, messages=tuple(messages), speakers=tuple(p.name for p in conversation.participants),
        moderator=conversation.moderator_name, branch_start=conversation.branch_start,
        date=conversation.date,
        tools=(*participant.tools, *given),
    )  # fmt: skip


@dataclass(frozen=True)
class Heard:
    """A transcript as one reader saw it last."""

    said: list[Message]
    shown: list[ViewMessage | None]
    """As the reader sees each; None: not at all."""
    changes: int | None
    """`Message.changes` at that time; None: what is seen depends on more than the messages being the same."""


def _heard(conversation: SeenConversation, name: str, visibility: str) -> list[ViewMessage]:
    """The transcript as `name` sees it. Only what is new since last time is looked at, where that is sure to do."""
    said, changes = list(conversation.transcript), Message.changes
    last = conversation.heard.get((name, visibility)) or Heard([], [], None)
    shown = last.shown[: len(said)]
    hears_all = getattr(conversation.communication.visible, "__func__", None) is CommunicationPolicy.visible
    simple = hears_all and visibility == "strip"
    stands = simple and last.changes == changes and len(last.said) <= len(said)
    if not (stands and all(map(is_, last.said, said))):
        for index, before in enumerate(shown):
            hears = _hears(conversation, index, said[index], name)
            now = _seen(said[index], index, name, visibility) if hears else None
            shown[index] = before if before == now else now  # what is the same object costs no rendering
    for index in range(len(shown), len(said)):
        hears = _hears(conversation, index, said[index], name)
        shown.append(_seen(said[index], index, name, visibility) if hears else None)
    conversation.heard[name, visibility] = Heard(said, shown, changes if simple else None)
    return [m for m in shown if m is not None]


def _hears(conversation: SeenConversation, index: int, message: Message, name: str) -> bool:
    if message.author == name:
        return True
    return conversation.communication.visible(read_only(conversation), index, message.copy(), name)


def _seen(message: Message, index: int, reader: str, visibility: str) -> ViewMessage:
    own = message.author == reader
    keep = visibility == "shared" or (own and visibility == "self_retain")
    return ViewMessage(
        role="assistant" if own else "user", content=message.content, author=message.author, index=index,
        fed=message.fed if own else None, keep_reasoning=keep,
        reasoning=str(message.metadata.get("reasoning") or "") if keep else "",
    )  # fmt: skip
