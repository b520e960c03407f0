"""What one participant sees of a conversation, as messages. How they become tokens is `render`'s business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..message import Fed

if TYPE_CHECKING:
    from ..calls import Call


@dataclass(frozen=True, kw_only=True)
class ViewMessage:
    """One message as its reader sees it."""

    role: str
    """system, user, assistant or tool."""
    content: str
    author: str = ""
    index: int | None = None
    """Transcript index; None for framing (system prompts, private context, tool results)."""
    fed: Fed | None = None
    """The reader's own recorded tokens."""
    keep_reasoning: bool = False
    """Whether own recorded tokens are fed with their reasoning."""
    reasoning: str = ""
    """Reasoning text that the reader may see (visibility `shared`, or its own under `self_retain`)."""
    in_tools: bool = False
    """A generation of the turn that is going on: fed as generated, its stop token included."""
    calls: tuple[tuple[str, Call], ...] = ()
    """(call id, call) of every tool call that an API made in the turn that is going on."""
    call_id: str = ""
    """Of a tool result: the call it answers, as an API names it."""
    original: ViewMessage | None = None
    """What this was before it was fitted to a template."""


@dataclass(frozen=True, kw_only=True)
class View(Sequence):
    """A read-only sequence of ViewMessages for the participant `pov`."""

    pov: str
    messages: tuple[ViewMessage, ...] = ()
    speakers: tuple[str, ...] = ()
    """Names of all participants, in speaking order."""
    moderator: str = "moderator"
    tools: tuple[Any, ...] = ()
    """Tools the participant may call."""
    branch_start: int | None = None
    date: str = ""
    """The day that a template with a date shows ("2026-12-01"); "": the present one."""

    def __getitem__(self, index):
        return self.messages[index]

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[ViewMessage]:
        return iter(self.messages)

    @property
    def labelled(self) -> bool:
        """Whether others' messages carry their speaker's name: with three participants or more."""
        return len(self.speakers) > 2

    def label(self, message: ViewMessage) -> str:
        """ "name: " in front of a message of somebody else, or ""."""
        if message.role != "user" or message.index is None or not self.labelled or not message.author:
            return ""
        return f"{message.author}: "

    def chat(self) -> list[dict[str, Any]]:
        """As the role/content dicts that chat APIs take, labelled; visible reasoning comes before its content.

        A message that made tool calls has `calls`, a tool's result has `id` and `name`.
        """
        made = []
        for m in self.messages:
            plain: dict[str, Any] = {"role": m.role, "content": self.label(m) + shown(m)}
            if m.calls:
                plain["calls"] = m.calls
            if m.role == "tool":
                plain |= {"id": m.call_id, "name": m.author}
            made.append(plain)
        return made

    def with_messages(self, messages) -> View:
        """The same view with other messages."""
        return replace(self, messages=tuple(messages))


def shown(message: ViewMessage) -> str:
    """Content, with the reasoning its reader may see in front."""
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}" if message.reasoning else message.content
