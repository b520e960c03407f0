"""One turn as a generator: it yields what has to be done and receives the outcome.

    Generate(participant, request)  -> receives the engine's Reply
    Ask(participant, call)          -> receives what call() returned; it runs in a thread

`Conversation.turn(...)` makes such a generator; `rollout.Scheduler` serves many of them. A failing Ask, and a Reply with
an error, are thrown into the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .message import Message

if TYPE_CHECKING:
    from .engine.request import Request
    from .interp.activation_cache import ActivationRecord, CaptureSpec
    from .interp.intervention import Intervention
    from .participants.base import Participant


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Have the participant's engine (`participant.engine`) answer a request. The turn receives the Reply."""

    participant: Participant
    request: Request


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Have `call` run in a thread. The turn receives its result."""

    participant: Participant
    call: Callable[[], Any]


Work = Generate | Ask
Steps = Generator[Work, Any, Any]
"""What the scheduler runs: yields Work, receives its outcome, returns anything."""


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What one turn may override. None: the participant's own."""

    steering: Intervention | tuple[Intervention, ...] | None = None
    """Replaces the participant's own; () means none."""
    capture: CaptureSpec | tuple[CaptureSpec, ...] | None = None
    patch: Intervention | tuple[Intervention, ...] | None = None
    return_logprobs: bool = False
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The outcome of one turn."""

    message: Message | None
    """None: a message hook denied it."""
    index: int
    """The index the message has in the transcript, or would have had."""
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
    sampling_seed: int | None = None
