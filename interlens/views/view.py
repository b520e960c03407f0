"""What one participant sees of a conversation, as messages. How they become tokens is `render`'s business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from ..message import Fed, Message, clean

if TYPE_CHECKING:
    from ..calls import Call
    from ..conversation import Conversation
    from ..participants.base import Participant


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
        return replace(self, messages=tuple(messages))


def shown(message: ViewMessage) -> str:
    """Content, with the reasoning its reader may see in front."""
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}" if message.reasoning else message.content


def build(conversation: Conversation, participant: Participant, extra: Sequence[Any] = ()) -> View:
    """The view of `participant`: its system prompt and private context, then the transcript with roles swapped.

    `extra`: messages that are not in the transcript but are seen as if they came next.
    """
    from ..read_only import read_only
    from ..templating import fill

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
        tools=(*getattr(participant, "tools", ()), *given),
    )  # fmt: skip


@dataclass(frozen=True)
class Heard:
    """A transcript as one reader saw it last."""

    said: list[Message]
    shown: list[ViewMessage | None]
    """As the reader sees each; None: not at all."""
    changes: int | None
    """`Message.changes` at that time; None: what is seen depends on more than the messages being the same."""


def _heard(conversation: Conversation, name: str, visibility: str) -> list[ViewMessage]:
    """The transcript as `name` sees it. Only what is new since last time is looked at, where that is sure to do."""
    from ..policies.communication import CommunicationPolicy

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


def _hears(conversation: Conversation, index: int, message: Message, name: str) -> bool:
    from ..read_only import read_only

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
