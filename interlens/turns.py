"""One turn as a generator: it yields what has to be done and receives the outcome.

    Generate(participant, request)  -> receives the engine's Reply
    Ask(participant, call)          -> receives what call() returned; it runs in a thread

`Conversation.turn(...)` makes such a generator; `scheduler.Scheduler` serves many of them. What a call raises is thrown
into the generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .capturing import as_tuple, by_spec, refuse
from .message import Message

if TYPE_CHECKING:
    from .conversation import Conversation
    from .engine.request import Request
    from .interp.activation_cache import ActivationRecord, CaptureSpec
    from .interp.intervention import Intervention
    from .participants.base import Participant
    from .policies.context import ContextPolicy
    from .views.view import View


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Have the participant's engine (`participant.engine`) answer a request. The turn receives the Reply."""

    participant: Any
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
    """The context policy's word on a view that has grown since, by tool results; None: as it is."""

    def after(self, spent: int, view: View) -> Steps:
        """(request, view) of the turn's next generation: `spent` tokens have been generated so far, `view` has grown."""
        request = self
        if self.tokens_left is not None and self.options.max_new_tokens is not None:
            left = min(self.options.max_new_tokens, self.tokens_left - spent)
            request = replace(self, options=replace(self.options, max_new_tokens=left))
        if self.fit is not None:
            view = yield from self.fit(request, view)
        return request, view


def take(
    conversation: Conversation,
    speaker: Participant,
    options: TurnOptions,
    *,
    commit: bool,
    extra: Sequence[Message] = (),
) -> Generator[Work, Any, Turn]:
    """One turn of `speaker`. `extra`: messages that are seen as if they came after the transcript (for samples)."""
    from .policies.hooks import review
    from .policies.stopping import least
    from .read_only import read_only
    from .views.view import build

    refuse(speaker, options)
    call, sample = conversation.next_call(commit)  # which may fill message 0
    index = len(conversation.transcript) + len(extra)
    if not commit:
        conversation = conversation.aside()
    key = (
        conversation.seed if speaker.seed is None else speaker.seed,
        conversation.key,
        conversation.turns_taken,
        call,
    )
    if options.forced is not None:
        options = replace(options, max_new_tokens=max(1, len(options.forced)))
    limit = least(c.turn_limit(read_only(conversation)) for c in conversation.conditions)
    if limit is not None:
        own = speaker.max_new_tokens or None if options.max_new_tokens is None else options.max_new_tokens
        options = replace(options, max_new_tokens=least((limit, own)))
    blocks = [b for b in conversation.capturing if speaker.name in b.names]
    asked = as_tuple(options.capture)
    specs = tuple(dict.fromkeys((*asked, *(b.spec for b in blocks))))
    request = TurnRequest(options=replace(options, capture=specs), key=key, index=index, tokens_left=limit)
    policy = copy.deepcopy(conversation.context_policy)
    request = replace(request, fit=lambda request, view: fit(conversation, policy, speaker, view, request))
    conversation.communication.begins(read_only(conversation), speaker.name)
    view = yield from fit(conversation, policy, speaker, build(conversation, speaker, extra), request)
    message = yield from speaker.turn(view, request)
    if not isinstance(message, Message) or message.author != speaker.name:
        raise TypeError(f"{speaker!r} must answer with a Message of its own, not {message!r}")
    records = list(message.records)
    message = message.copy(records=())
    if commit and len(conversation.transcript) != index:
        raise RuntimeError(
            f"the transcript had {index} messages when {speaker.name}'s turn began and has {len(conversation.transcript)} "
            "now: a tool or another thread changed it meanwhile; let them use sample() or branch()"
        )
    if commit:
        kept = review(conversation.message_hooks, message, read_only(conversation))
        if kept is None:
            conversation.denied()
            denied = message.copy(metadata={**message.metadata, "finish_reason": "denied"})
            return Turn(message=None, index=index, denied=denied)
        message = kept
    for record in records:
        record.participant, record.message_idx, record.sample = speaker.name, index, sample
    parts = {}
    if records:
        parts = dict(zip(specs, by_spec(records, specs, getattr(speaker, "num_layers", None)), strict=True))
        message.records = tuple(r for spec in dict.fromkeys(asked) for r in parts[spec])
    if commit:
        conversation.commit(message)
        conversation.context_policy = policy
    for block in blocks if parts else ():
        block.cache.add_batch(parts[block.spec])
    return Turn(message=message, index=index, records=records)


def fit(
    conversation: Conversation, policy: ContextPolicy, speaker: Participant, view: View, request: TurnRequest
) -> Steps:
    """The view, made to fit the context limit by a policy."""
    from .policies.context import room_of

    room = room_of(conversation, speaker, request)
    return view if room is None else (yield from policy.fit(view, room))
