"""What a turn asks for, and what it gives back.

    Generate(participant, request)  -> receives the engine's Reply
    Ask(participant, call)          -> receives what call() returned; it runs in a thread

A turn is a generator (`Steps`) that yields such Work and receives the outcome. `Conversation.turn(...)` makes one;
`scheduler.Scheduler` serves many of them. What a call raises is thrown into the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from .engine.request import Request
from .interp.activation_cache import ActivationRecord, CaptureSpec
from .interp.intervention import Intervention
from .interp.patching import AlignedPatch
from .message import Message
from .transcript import Transcript
from .views.view import View

Edit = Intervention | AlignedPatch
Edits = Edit | Sequence[Edit] | None
"""What is done to a turn's hidden states: one thing, several, or None."""
Captures = CaptureSpec | Sequence[CaptureSpec] | None


@runtime_checkable
class Speaker(Protocol):
    """Whoever can speak, as far as anyone but the conversation itself needs to know; see `participants.Participant`."""

    name: str
    seed: int | None
    capturable: bool


@runtime_checkable
class Serving(Protocol):
    """What answers requests: an `engine.Engine`, or what stands for one in a test."""

    def submit(self, request: Request) -> Any:
        """Queue a request; a ticket, whose `reply` is None until it is answered."""
        ...

    def step(self) -> bool:
        """Go on with all requests. False when there is nothing to do."""
        ...

    def cancel(self, ticket: Any) -> None:
        """Stop a request at the next step."""
        ...


@runtime_checkable
class Served(Protocol):
    """A participant with an engine."""

    @property
    def engine(self) -> Serving:
        """The engine of its model, shared by everybody who uses that model."""
        ...


@runtime_checkable
class ReadableConversation(Protocol):
    """What hooks, policies and stop conditions may read of a conversation. They get one that refuses to be changed."""

    @property
    def participants(self) -> Sequence[Speaker]:
        """In speaking order."""
        ...

    @property
    def transcript(self) -> Transcript:
        """What has been said; messages are copies."""
        ...

    @property
    def moderator_name(self) -> str:
        """The author of message 0 and of framing."""
        ...

    @property
    def row(self) -> Mapping[str, Any] | None:
        """The data row that fills the texts."""
        ...

    @property
    def seed(self) -> int:
        """Of all noise whose participant has none of its own."""
        ...

    @property
    def key(self) -> Any:
        """With the seed, what decides the noise."""
        ...

    @property
    def turns_taken(self) -> int:
        """Generated turns so far."""
        ...

    @property
    def stop_reason(self) -> str | None:
        """Why the last run ended."""
        ...

    @property
    def branch_start(self) -> int | None:
        """Index of the first message after the trunk, or None."""
        ...

    def participant(self, which: Any) -> Any:
        """A participant by name, by index, or itself; ValueError lists those there are."""
        ...


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Have the participant's engine (`participant.engine`) answer a request. The turn receives the Reply."""

    participant: Served
    request: Request


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Have `call` run in a thread. The turn receives its result."""

    participant: Speaker | None
    """Who is asked, as far as it is anybody."""
    call: Callable[[], Any]


Work = Generate | Ask
Steps = Generator[Work, Any, Any]
"""What the scheduler runs: yields Work, receives its outcome, returns anything."""


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What one turn may override. None: the participant's own."""

    steering: Edits = None
    """Replaces the participant's own; () means none."""
    capture: Captures = None
    patch: Edits = None
    return_logprobs: bool = False
    max_new_tokens: int | None = None
    forced: tuple[int, ...] | None = None
    """Teacher forcing: the reply is these tokens, fed as if they had been drawn."""

    def __post_init__(self):
        if self.max_new_tokens is not None and self.max_new_tokens < 1 and self.forced is None:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The outcome of one turn."""

    message: Message | None
    """None: a message hook denied it."""
    index: int
    """The index the message has in the transcript, or would have had."""
    denied: Message | None = None
    """What a hook denied; its finish_reason says so."""
    records: list[ActivationRecord] = field(default_factory=list)
    """Every record of the turn, addresses filled in; also those that went into caches of `conv.capture`."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """What a participant is asked for, next to its view."""

    options: TurnOptions
    key: tuple
    """(seed, conversation key, generated turns so far, call): decides all noise of the turn."""
    index: int
    """Transcript index the message will have."""
    tokens_left: int | None = None
    """All generations of the turn together may have so many tokens; None: no limit but each generation's own."""
    fit: Callable[[TurnRequest, View], Steps] | None = None
    """Makes a view that tool results have made longer fit the context limit again; None: it is left as it is."""

    def after(self, spent: int, view: View) -> Steps:
        """(request, view) of the turn's next generation: `spent` tokens have been generated so far, `view` has grown."""
        request = self
        if self.tokens_left is not None and self.options.max_new_tokens is not None:
            left = min(self.options.max_new_tokens, self.tokens_left - spent)
            request = replace(self, options=replace(self.options, max_new_tokens=left))
        if self.fit is not None:
            view = yield from self.fit(request, view)
        return request, view
