"""What to do when a prompt and its generation budget do not fit the context limit. Tokens are the template's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import ContextOverflow
from ..turns import Steps
from ..views.view import View, ViewMessage

if TYPE_CHECKING:
    from ..turns import TurnRequest


@dataclass(frozen=True, kw_only=True)
class Room:
    """The space a view has to fit into."""

    count: Callable[[View], int]
    """Prompt tokens of a view."""
    limit: int
    """Tokens of prompt and reply together."""
    budget: int
    """Tokens of the reply."""
    participant: Any
    request: TurnRequest
    conversation: Any

    def fits(self, view: View) -> bool:
        return self.count(view) + self.budget <= self.limit

    def overflow(self, view: View, advice: str) -> ContextOverflow:
        return ContextOverflow(
            f"{self.participant.name}'s prompt of {self.count(view)} tokens and a reply of up to {self.budget} do not "
            f"fit a context of {self.limit}; {advice}"
        )


class ContextPolicy:
    """Subclasses implement `fit`, a generator: it may ask a participant (see SummarizePolicy)."""

    def fit(self, view: View, room: Room) -> Steps:
        """The view to use. Raises ContextOverflow when nothing helps."""
        raise NotImplementedError


class ErrorPolicy(ContextPolicy):
    """Raises ContextOverflow."""

    def fit(self, view, room):
        if not room.fits(view):
            raise room.overflow(
                view, "lower max_new_tokens, or use DropOldestPolicy, SlidingWindowPolicy or SummarizePolicy"
            )
        return view
        yield


class DropOldestPolicy(ContextPolicy):
    """Leaves out the oldest messages, as few as possible. Framing and the moderator's opening stay."""

    def fit(self, view, room):
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
        loose = _loose(view) if self.keep_system else list(range(len(view)))
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
    summarizer: Any = None
    prompt: str = "Summarise the conversation above in a few sentences, so that it can go on from your summary alone."
    _written: dict[str, tuple[int, str]] = field(default_factory=dict, repr=False)
    """Reader -> (last transcript index that its summary covers, summary)."""

    def fit(self, view, room):
        covered, text = self._written.get(view.pov, (-1, ""))
        if room.fits(view):
            return view
        loose = _loose(view)
        old = loose[: -self.keep_last] if self.keep_last else loose
        if not old:
            raise room.overflow(view, f"with the last {self.keep_last} messages; lower keep_last or max_new_tokens")
        last = view[old[-1]].index
        if last < covered:  # the transcript was rewound
            covered, text = -1, ""
        fresh = [view[n] for n in old if view[n].index > covered]
        if fresh:
            text = yield from self._summary(text, fresh, view, room)
            self._written[view.pov] = (last, text)
        told = ViewMessage(role="user", content=f"Summary of the conversation so far: {text}", author=view.moderator)
        kept = [m for n, m in enumerate(view) if n not in set(old)]
        kept.insert(old[0], told)
        view = view.with_messages(kept)
        if not room.fits(view):
            raise room.overflow(view, "even with a summary; lower keep_last or max_new_tokens")
        return view

    def _summary(self, before: str, fresh: list[ViewMessage], view: View, room: Room):
        writer = room.participant if self.summarizer is None else self.summarizer
        if isinstance(writer, str):
            writer = room.conversation.participant(writer)
        lines = [f"(Earlier: {before})"] if before else []
        lines += [f"{m.author}: {m.content}" for m in fresh]
        asked = ViewMessage(role="user", content="\n\n".join([*lines, self.prompt]))
        options = replace(room.request.options, capture=None, patch=None, steering=None, return_logprobs=False)
        key = (*room.request.key[:3], ["summary", view.pov, fresh[-1].index])
        request = replace(room.request, options=options, key=key)
        message = yield from writer.turn(View(pov=writer.name, messages=(asked,)), request)
        return message.content


def _loose(view: View) -> list[int]:
    """Positions of messages that may be left out: not framing, not the moderator's opening."""
    return [
        n for n, m in enumerate(view)
        if m.index is not None and m.role != "system" and not (m.index == 0 and m.author == view.moderator)
    ]  # fmt: skip


def _without(view: View, positions: list[int]) -> View:
    gone = set(positions)
    return view.with_messages(m for n, m in enumerate(view) if n not in gone)
