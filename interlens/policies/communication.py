"""Who speaks next, and who hears what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..message import Message
from ..tools import Tool
from ..work import ReadableConversation


class CommunicationPolicy:
    """A conversation copies its policy, so its state is the conversation's own. Everything here sees it read-only."""

    def next_speaker(self, conversation: ReadableConversation) -> str:
        """Name of the participant whose turn it is."""
        raise NotImplementedError

    def visible(self, conversation: ReadableConversation, index: int, message: Message, pov: str) -> bool:
        """Whether `pov` sees a message that is not its own."""
        return True

    def tools(self, conversation: ReadableConversation, pov: str) -> tuple[Any, ...]:
        """Tools that `pov` has because of this policy."""
        return ()

    def begins(self, conversation: ReadableConversation, pov: str) -> None:
        """Called when a turn, or a sample, of `pov` begins; it may come to nothing."""

    def spoken(self, conversation: ReadableConversation, message: Message) -> None:
        """Called when a turn has been committed."""

    def rewound(self, conversation: ReadableConversation) -> None:
        """Called when the transcript was cut or changed."""


def _next_in(order: Sequence[str], conversation: ReadableConversation, first: str | None) -> str:
    spoke = next((m.author for m in reversed(conversation.transcript) if m.author in order), None)
    if spoke is None:
        return first if first is not None else order[0]
    return order[(order.index(spoke) + 1) % len(order)]


class RoundRobinPolicy(CommunicationPolicy):
    """In the participants' order, beginning with `first`; after anyone's turn comes the one after them."""

    def __init__(self, first: str | None = None):
        self.first = first

    def next_speaker(self, conversation):
        """Whoever comes after the last speaker in the participants' order."""
        names = [p.name for p in conversation.participants]
        first = None if self.first is None else conversation.participant(self.first).name
        return _next_in(names, conversation, first)


class DirectPipingPolicy(CommunicationPolicy):
    """Each in `chain` (default: all) hears only the one before it, and the moderator."""

    def __init__(self, chain: Sequence[str] | None = None):
        self.chain = None if chain is None else tuple(chain)

    def _order(self, conversation) -> list[str]:
        chain = [p.name for p in conversation.participants] if self.chain is None else list(self.chain)
        return [conversation.participant(name).name for name in chain]

    def next_speaker(self, conversation):
        """Whoever comes after the last speaker in the chain."""
        return _next_in(self._order(conversation), conversation, None)

    def visible(self, conversation, index, message, pov):
        """Messages of the one before in the chain, and of the moderator."""
        order = self._order(conversation)
        if message.author not in order or pov not in order:
            return message.author == conversation.moderator_name
        return order[(order.index(message.author) + 1) % len(order)] == pov


class MessagingPolicy(CommunicationPolicy):
    """Mailboxes: agents take turns, hear the moderator only, and write to each other with tools.

    Each agent gets `send_message(to, content)` and `read_messages()`. What an agent says outside of them is its own
    note. Without a tool-calling model an agent simply never sends. Mail of a turn that was denied, or that is only a
    sample, is not delivered.
    """

    def __init__(self, agents: Sequence[str] | None = None):
        self.agents = None if agents is None else tuple(agents)
        self.boxes: dict[str, list[dict[str, str]]] = {}
        """Undelivered mail, oldest first: {"from": ..., "content": ...}."""
        self._pending: list[tuple[str, str, dict[str, str]]] = []
        self._before: list[tuple[int, dict[str, list[dict[str, str]]]]] = []
        """(transcript index, `boxes` before it) of every message that sent or read mail."""

    def _order(self, conversation) -> list[str]:
        names = [p.name for p in conversation.participants] if self.agents is None else list(self.agents)
        return [conversation.participant(name).name for name in names]

    def next_speaker(self, conversation):
        """Whoever comes after the last speaker among the agents."""
        return _next_in(self._order(conversation), conversation, None)

    def visible(self, conversation, index, message, pov):
        """The moderator's messages; to those who are no agents, all."""
        return message.author == conversation.moderator_name or pov not in self._order(conversation)

    def begins(self, conversation, pov):
        """Forget what an unfinished turn of `pov` sent and read."""
        # what an unfinished turn left behind; in place, as tools hold on to the list
        self._pending[:] = [entry for entry in self._pending if entry[1] != pov]

    def tools(self, conversation, pov):
        """`send_message` and `read_messages`, for agents."""
        names = self._order(conversation)
        if pov not in names:
            return ()
        box, pending = self.boxes.get(pov, []), self._pending
        read = [0]

        def send_message(to: str, content: str) -> str:
            """
            Send a message to another agent's mailbox.

            Args:
                to: The name of the agent to send to.
                content: The text of the message.
            """
            if to not in names or to == pov:
                raise ValueError(f"no agent {to!r}; you can write to: {', '.join(n for n in names if n != pov)}")
            pending.append(("send", pov, {"to": to, "from": pov, "content": content}))
            return f"sent to {to}"

        def read_messages() -> list:
            """
            Read the messages in your mailbox that you have not read yet.
            """
            new = box[read[0] :]
            read[0] = len(box)
            pending.append(("read", pov, {"n": str(read[0])}))
            return [dict(mail) for mail in new]

        return (Tool.from_function(send_message), Tool.from_function(read_messages))

    def spoken(self, conversation, message):
        """Deliver what the turn sent, and take away what it read."""
        done = [e for e in self._pending if e[1] == message.author]
        if done:
            self._before.append((len(conversation.transcript) - 1, {k: list(v) for k, v in self.boxes.items()}))
        for kind, who, entry in done:
            if kind == "send":
                self.boxes.setdefault(entry["to"], []).append({"from": who, "content": entry["content"]})
        read = max((int(entry["n"]) for kind, _, entry in done if kind == "read"), default=0)
        del self.boxes.get(message.author, [])[:read]
        self.begins(conversation, message.author)

    def rewound(self, conversation):
        """Boxes as they were before the messages that are gone."""
        while self._before and self._before[-1][0] >= len(conversation.transcript):
            self.boxes = self._before.pop()[1]
