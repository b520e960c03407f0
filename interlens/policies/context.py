"""What to do when a prompt and its generation budget do not fit the context limit. Tokens are the template's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from ..errors import ContextOverflow
from ..participants.base import Participant
from ..read_only import read_only
from ..views.view import View, ViewMessage
from ..work import ReadableConversation, Steps, TurnOptions, TurnRequest
from .stopping import least


@dataclass(frozen=True, kw_only=True)
class Room:
    """The space a view has to fit into."""

    count: Callable[[View], int]
    """Prompt tokens of a view."""
    limit: int | None
    """Tokens of prompt and reply together; None: nothing is known to limit them, and nothing is counted."""
    budget: int
    """Tokens of the reply."""
    participant: Participant
    request: TurnRequest
    conversation: LimitedConversation

    def fits(self, view: View) -> bool:
        """Whether the view's prompt and the reply fit the limit."""
        return self.limit is None or self.count(view) + self.budget <= self.limit

    def overflow(self, view: View, advice: str) -> ContextOverflow:
        """The error that says by how much a view does not fit, and what to do."""
        return ContextOverflow(
            f"{self.participant.name}'s prompt of {self.count(view)} tokens and a reply of up to {self.budget} do not "
            f"fit a context of {self.limit}; {advice}"
        )


@runtime_checkable
class LimitedConversation(ReadableConversation, Protocol):
    """What fitting a view needs of its conversation."""

    context_limit: int | None
    context_policy: ContextPolicy


def room_of(conversation: LimitedConversation, participant: Participant, request: TurnRequest) -> Room | None:
    """The room of a participant's next prompt. None: it has no prompt of its own (a script, a person)."""
    if not participant.has_prompt:
        return None
    check(conversation, participant)
    limit = _limit(conversation, participant)
    budget = request.options.max_new_tokens
    return Room(
        count=participant.count_tokens, limit=limit, participant=participant, request=request,
        budget=participant.max_new_tokens if budget is None else budget, conversation=read_only(conversation),
    )  # fmt: skip


def _limit(conversation: LimitedConversation, participant: Participant) -> int | None:
    limits = (conversation.context_limit, participant.context_limit)
    return min((n for n in limits if n is not None), default=None)


def check(conversation: LimitedConversation, participant: Participant) -> None:
    """Raise ValueError where the conversation's context policy could not do what it is for."""
    if not participant.has_prompt or participant.can_count():
        return
    policy, limit = type(conversation.context_policy).__name__, conversation.context_limit
    if limit is None and not conversation.context_policy.counts:
        return
    what = policy if limit is None else f"context_limit={limit}"
    raise ValueError(
        f"{what} needs the tokens of {participant.name!r}'s prompts, which cannot be counted here: give its "
        f"{participant.__class__.__name__} context_limit=... and count_tokens=... (a function of messages and tools, or a "
        "number of characters per token as an estimate), or use ErrorPolicy or SlidingWindowPolicy without a limit"
    )


class ContextPolicy:
    """Subclasses implement `fit`, a generator: it may ask a participant (see SummarizePolicy).

    It has its say before every generation of everyone who has a prompt: local models, APIs, participants of one's own
    that set `has_prompt`; once more after every round of tool results. What it notes meanwhile is kept with the turn:
    every turn works on a copy, which a sample and a turn that is denied or fails leave behind.
    """

    counts: bool = False
    """Whether it can do nothing for a participant whose tokens cannot be counted; such a pair is refused."""

    def fit(self, view: View, room: Room) -> Steps:
        """The view to use. Raises ContextOverflow when nothing helps."""
        raise NotImplementedError


class ErrorPolicy(ContextPolicy):
    """Raises ContextOverflow."""

    def fit(self, view, room):
        """The view as it is, or ContextOverflow."""
        if not room.fits(view):
            raise room.overflow(
                view, "lower max_new_tokens, or use DropOldestPolicy, SlidingWindowPolicy or SummarizePolicy"
            )
        return view
        yield


class DropOldestPolicy(ContextPolicy):
    """Leaves out the oldest messages, as few as possible. Framing and the moderator's opening stay."""

    counts = True

    def fit(self, view, room):
        """The view without its oldest messages."""
        if room.fits(view):
            return view
        loose = _loose(view)
        low, high = 1, len(loose)  # leaving out `high` fits, or nothing does
        if not loose or not room.fits(_without(view, loose)):
            raise room.overflow(_without(view, loose), "even without any earlier message; lower max_new_tokens")
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if room.fits(_without(view, loose[:middle])) else (middle + 1, high)
        return _without(view, loose[:high])
        yield


@dataclass
class SlidingWindowPolicy(ContextPolicy):
    """Only ever shows the last `keep_last` messages, and with `keep_system` the framing and the moderator's opening."""

    keep_last: int
    keep_system: bool = True

    def __post_init__(self):
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}")

    def fit(self, view, room):
        """The view with its last messages only."""
        turn = [n for n, m in enumerate(view) if m.role == "tool" or m.in_tools or m.calls]  # what is going on stays
        loose = _loose(view) if self.keep_system else [n for n in range(len(view)) if n not in turn]
        view = _without(view, loose[: -self.keep_last])
        if not room.fits(view):
            raise room.overflow(view, f"with the last {self.keep_last} messages; lower keep_last or max_new_tokens")
        return view
        yield


@dataclass
class SummarizePolicy(ContextPolicy):
    """Once the view does not fit, replaces all but the last `keep_last` messages by a summary.

    `summarizer`: the participant (or its name) that writes it; None: the speaker itself. A summary is written once and
    extended when more messages fall out of the window.
    """

    keep_last: int = 4
    summarizer: Participant | str | None = None
    prompt: str = "Summarise the conversation above in a few sentences, so that it can go on from your summary alone."
    _written: dict[str, tuple[int, str, str]] = field(default_factory=dict, repr=False)
    """Reader -> (last transcript index that its summary covers, summary, digest of what it covers)."""
    counts = True

    def fit(self, view, room):
        """The view with a summary in place of its oldest messages."""
        if room.fits(view):
            return view
        loose = _loose(view)
        old = loose[: -self.keep_last] if self.keep_last else loose
        if not old:
            raise room.overflow(view, f"with the last {self.keep_last} messages; lower keep_last or max_new_tokens")
        last = view[old[-1]].index
        covered, text, of = self._written.get(view.pov, (-1, "", ""))
        if last < covered or of != _digest(view[n] for n in old if view[n].index <= covered):
            covered, text = -1, ""  # nothing written yet, or the transcript was rewound or changed
        fresh = [view[n] for n in old if view[n].index > covered]
        if fresh:
            text = yield from self._summary(text, fresh, view, room)
            self._written[view.pov] = (last, text, _digest(view[n] for n in old))
        told = ViewMessage(role="user", content=f"Summary of the conversation so far: {text}", author=view.moderator)
        kept = [m for n, m in enumerate(view) if n not in set(old)]
        kept.insert(old[0], told)
        view = view.with_messages(kept)
        if not room.fits(view):
            raise room.overflow(view, "even with a summary; lower keep_last or max_new_tokens")
        return view

    def _summary(self, before: str, fresh: list[ViewMessage], view: View, room: Room):
        """`before`, extended by what the `fresh` messages say; in pieces where the writer has no room for them all."""
        writer = room.participant if self.summarizer is None else self.summarizer
        if isinstance(writer, str):
            writer = room.conversation.participant(writer)
        lines = [f"(Earlier: {before})"] if before else []
        lines += [f"{m.author}: {m.content}" for m in fresh]
        asked = View(pov=writer.name, messages=(ViewMessage(role="user", content="\n\n".join([*lines, self.prompt])),))
        options = TurnOptions(max_new_tokens=least((room.request.tokens_left, writer.max_new_tokens or None)))
        key = (*room.request.key[:3], ["summary", view.pov, fresh[-1].index])
        request = replace(room.request, options=options, key=key, tokens_left=None, fit=None)
        there = room_of(room.conversation, writer, request) if writer.can_count() else None
        if there is not None and not there.fits(asked):
            if len(fresh) == 1:
                raise there.overflow(asked, f"so message {fresh[0].index} cannot be summarised; lower max_new_tokens")
            half = len(fresh) // 2
            before = yield from self._summary(before, fresh[:half], view, room)
            return (yield from self._summary(before, fresh[half:], view, room))
        message = yield from writer.turn(asked, request)
        return message.content


def _digest(messages: Iterable[ViewMessage]) -> str:
    said = json.dumps([(m.index, m.author, m.content) for m in messages])
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def _loose(view: View) -> list[int]:
    """Positions of messages that may be left out: not framing, not the moderator's opening."""
    return [
        n for n, m in enumerate(view)
        if m.index is not None and m.role != "system" and not (m.index == 0 and m.author == view.moderator)
    ]  # fmt: skip


def _without(view: View, positions: list[int]) -> View:
    gone = set(positions)
    return view.with_messages(m for n, m in enumerate(view) if n not in gone)
