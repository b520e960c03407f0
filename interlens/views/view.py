"""What one participant sees of a conversation, as messages. How they become tokens is `render`'s business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..message import Fed, Message

if TYPE_CHECKING:
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

    def chat(self) -> list[dict[str, str]]:
        """As the role/content dicts that chat APIs take, labelled; visible reasoning comes before its content."""
        return [{"role": m.role, "content": self.label(m) + shown(m)} for m in self.messages]

    def with_messages(self, messages) -> View:
        return replace(self, messages=tuple(messages))


def shown(message: ViewMessage) -> str:
    """Content, with the reasoning its reader may see in front."""
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}" if message.reasoning else message.content


def build(conversation: Conversation, participant: Participant, extra: Sequence[Any] = ()) -> View:
    """The view of `participant`: its system prompt and private context, then the transcript with roles swapped.

    `extra`: messages that are not in the transcript but are seen as if they came next.
    """
    from ..policies.communication import CommunicationPolicy
    from ..policies.templating import fill

    row, visibility = conversation.row, str(conversation.reasoning_visibility)
    system = [fill(part, row) for part in (conversation.shared_system_prompt, participant.system_prompt)]
    system_text = "\n\n".join(text for text in system if text)
    messages = [ViewMessage(role="system", content=system_text)] if system_text else []
    for item in participant.private_context:
        content, role, author = fill(item.content, row), item.role_hint, item.author
        messages.append(ViewMessage(role=role, content=content, author=author))
    name, policy, shows = participant.name, conversation.communication, visibility != "strip"
    hears_all = type(policy).visible is CommunicationPolicy.visible
    seen = conversation.seen.setdefault((name, visibility), {})
    for index, message in enumerate([*conversation.transcript, *extra]):
        if not hears_all and message.author != name and not policy.visible(conversation, index, message, name):
            continue
        known = seen.get(index)
        if (
            known is None or known[0] is not message or known[1] is not message.content
            or known[2] is not message.author or known[3] is not message.fed
            or (shows and known[4] is not message.metadata.get("reasoning"))
        ):  # fmt: skip
            known = seen[index] = (
                message, message.content, message.author, message.fed, message.metadata.get("reasoning"),
                _seen(message, index, name, visibility),
            )  # fmt: skip
        messages.append(known[5])
    return View(
        pov=participant.name, messages=tuple(messages), speakers=tuple(p.name for p in conversation.participants),
        moderator=conversation.moderator_name, branch_start=conversation.branch_start,
        tools=(*getattr(participant, "tools", ()), *conversation.communication.tools(conversation, participant.name)),
    )  # fmt: skip


def _seen(message: Message, index: int, reader: str, visibility: str) -> ViewMessage:
    own = message.author == reader
    keep = visibility == "shared" or (own and visibility == "self_retain")
    return ViewMessage(
        role="assistant" if own else "user", content=message.content, author=message.author, index=index,
        fed=message.fed if own else None, keep_reasoning=keep,
        reasoning=str(message.metadata.get("reasoning") or "") if keep else "",
    )  # fmt: skip
