"""One turn of a conversation, from the view to the committed message, as a generator of `work.Work`."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from .capturing import Capturing, by_spec, refuse
from .interp.activation_cache import CaptureSpec, as_tuple
from .message import Message
from .participants.base import Participant
from .policies.context import ContextPolicy, LimitedConversation, room_of
from .policies.hooks import Hook, review
from .policies.stopping import StopCondition, least
from .read_only import read_only
from .seeing import SeenConversation, build
from .views.view import View
from .work import Steps, Turn, TurnOptions, TurnRequest, Work


@runtime_checkable
class LiveConversation(SeenConversation, LimitedConversation, Protocol):
    """What a turn reads of its conversation, and does to it."""

    context_policy: ContextPolicy
    conditions: list[StopCondition]
    capturing: list[Capturing]
    message_hooks: list[Hook]

    def next_call(self, commit: bool) -> tuple[int, int | None]:
        """(call number, sample number or None) of a turn that begins; message 0 is filled by now."""
        ...

    def aside(self) -> LiveConversation:
        """The same conversation with policies of its own, in which a sample leaves nothing behind."""
        ...

    def denied(self) -> None:
        """A step was denied: the next one gets a call number of its own."""
        ...

    def commit(self, message: Message) -> None:
        """Add what was said in a turn."""
        ...


def take(
    conversation: LiveConversation,
    speaker: Participant,
    options: TurnOptions,
    *,
    commit: bool,
    extra: Sequence[Message] = (),
) -> Generator[Work, Any, Turn]:
    """One turn of `speaker`. `extra`: messages that are seen as if they came after the transcript (for samples)."""
    refuse(speaker, options)
    call, sample = conversation.next_call(commit)  # which may fill message 0
    index = len(conversation.transcript) + len(extra)
    if not commit:
        conversation = conversation.aside()
    policy = copy.deepcopy(conversation.context_policy)
    blocks = [b for b in conversation.capturing if speaker.name in b.names]
    request = _request(conversation, speaker, options, [b.spec for b in blocks], call, index)
    request = replace(request, fit=lambda request, view: fit(conversation, policy, speaker, view, request))
    conversation.communication.begins(read_only(conversation), speaker.name)
    view = yield from fit(conversation, policy, speaker, build(conversation, speaker, extra), request)
    message = yield from speaker.turn(view, request)
    if not isinstance(message, Message) or message.author != speaker.name:
        raise TypeError(f"{speaker!r} must answer with a Message of its own, not {message!r}")
    records = list(message.records)
    message = message.copy(records=())
    if commit:
        kept = _reviewed(conversation, message, index)
        if kept is None:
            conversation.denied()
            denied = message.copy(metadata={**message.metadata, "finish_reason": "denied"})
            return Turn(message=None, index=index, denied=denied)
        message = kept
    for record in records:
        record.participant, record.message_idx, record.sample = speaker.name, index, sample
    specs = as_tuple(request.options.capture)
    parts = dict(zip(specs, by_spec(records, specs, speaker.num_layers), strict=True)) if records else {}
    message.records = tuple(r for spec in dict.fromkeys(as_tuple(options.capture)) for r in parts.get(spec, ()))
    if commit:
        conversation.commit(message)
        conversation.context_policy = policy
    for block in blocks if parts else ():
        block.cache.add_batch(parts[block.spec])
    return Turn(message=message, index=index, records=records)


def _request(
    conversation: LiveConversation, speaker: Participant, options: TurnOptions, blocks: list[CaptureSpec], call: int,
    index: int,
) -> TurnRequest:  # fmt: skip
    """What is asked of the speaker: its options within the limits of the run, everything that is captured, its noise."""
    if options.forced is not None:
        options = replace(options, max_new_tokens=max(1, len(options.forced)))
    limit = least(c.turn_limit(read_only(conversation)) for c in conversation.conditions)
    if limit is not None:
        own = speaker.max_new_tokens or None if options.max_new_tokens is None else options.max_new_tokens
        options = replace(options, max_new_tokens=least((limit, own)))
    specs = tuple(dict.fromkeys((*as_tuple(options.capture), *blocks)))
    seed = conversation.seed if speaker.seed is None else speaker.seed
    key = (seed, conversation.key, conversation.turns_taken, call)
    return TurnRequest(options=replace(options, capture=specs), key=key, index=index, tokens_left=limit)


def _reviewed(conversation: LiveConversation, message: Message, index: int) -> Message | None:
    """What the message hooks leave of it; None: denied. RuntimeError if the transcript has changed since the turn began."""
    if len(conversation.transcript) != index:
        raise RuntimeError(
            f"the transcript had {index} messages when {message.author}'s turn began and has "
            f"{len(conversation.transcript)} now: a tool or another thread changed it meanwhile; let them use sample() "
            "or branch()"
        )
    return review(conversation.message_hooks, message, read_only(conversation))


def fit(
    conversation: LiveConversation, policy: ContextPolicy, speaker: Participant, view: View, request: TurnRequest
) -> Steps:
    """The view, made to fit the context limit by a policy."""
    room = room_of(conversation, speaker, request)
    return view if room is None else (yield from policy.fit(view, room))
