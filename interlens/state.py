"""What a conversation holds, and how it changes: its participants and transcript, committed turns, branches, message 0."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .capturing import Capturing
from .message import Message
from .participants.base import Participant
from .policies.communication import CommunicationPolicy, RoundRobinPolicy
from .policies.context import ContextPolicy, ErrorPolicy, check
from .policies.hooks import Hook, copies
from .policies.stopping import StopCondition
from .read_only import read_only
from .seeing import Heard
from .templating import fill, needs_row
from .transcript import Transcript
from .views.template import today
from .visibility import ReasoningVisibility

ParticipantRef = Participant | str | int
"""A participant, its name, or its index."""
S = TypeVar("S", bound="ConversationState")


class ConversationState:
    """Participants, in speaking order, their transcript, and the policies in force. See `Conversation`."""

    def __init__(
        self, participants: Sequence[Participant], transcript: Transcript | None = None, shared_context: Any = None,
        shared_system_prompt: Any = None, moderator_name: str = "moderator",
        context_policy: ContextPolicy | None = None, context_limit: int | None = None,
        reasoning_visibility: str = "strip", message_hooks: Iterable[Hook] = (),
        communication: CommunicationPolicy | None = None, seed: int = 0,
    ):  # fmt: skip
        self.participants = list(participants)
        self.transcript = Transcript() if transcript is None else transcript
        self.shared_context = shared_context
        self.shared_system_prompt = shared_system_prompt
        self.moderator_name = moderator_name
        self.context_policy = copy.deepcopy(context_policy) or ErrorPolicy()
        self.context_limit = context_limit
        self.reasoning_visibility = ReasoningVisibility(reasoning_visibility)
        self.message_hooks = list(message_hooks)
        self.communication = copy.deepcopy(communication) or RoundRobinPolicy()
        self.seed = seed
        self.date = today()
        self.key: Any = None
        self.turns_taken = 0
        self.row: Mapping[str, Any] | None = None
        self.stop_reason: str | None = None
        self.branch_start: int | None = None
        self.capturing: list[Capturing] = []
        """Open `capture` blocks, outermost first."""
        self.conditions: list[StopCondition] = []
        """Of the run that is going on."""
        self.heard: dict[tuple[str, str], Heard] = {}
        """(Reader, visibility) -> how it saw the transcript last, so that only what is new is made anew."""
        self._calls = 0  # samples and denied steps since the last commit
        self._denied_call = 0  # call number of the next step
        self.unopened = False  # message 0 could not be filled from the row
        self._fresh = copy.deepcopy((self.communication, self.context_policy))
        self._check_names()
        for p in self.participants:
            check(self, p)
        self._open()

    # -- who ----------------------------------------------------------------------------------------------------------
    def participant(self, which: ParticipantRef) -> Participant:
        """A participant by name, by index (negatives from the end), or itself."""
        names = [p.name for p in self.participants]
        if isinstance(which, Participant):
            if which in self.participants:
                return which
            which = which.name  # of a sibling branch: our own of that name
        if isinstance(which, str) and which in names:
            return self.participants[names.index(which)]
        if isinstance(which, int) and not isinstance(which, bool) and -len(names) <= which < len(names):
            return self.participants[which]
        raise ValueError(
            f"no participant {which!r}; there are: {', '.join(names)}, or their indices 0 to {len(names) - 1}"
        )

    def _check_names(self) -> None:
        names = [p.name for p in self.participants]
        if not names:
            raise ValueError("a conversation needs at least one participant")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two participants are named {name!r}; names must be unique")
            if name == self.moderator_name:
                raise ValueError(
                    f"participant {name!r} has the moderator's name; rename it, or give moderator_name=..."
                )

    # -- called by a turn ---------------------------------------------------------------------------------------------
    def next_call(self, commit: bool) -> tuple[int, int | None]:
        """(call number, sample number or None) of a turn that begins. Steps ignore samples: samples leave no trace."""
        self.must_open()
        if commit:
            return self._denied_call, None
        self._calls += 1
        return self._calls, self._calls

    def aside(self: S) -> S:
        """This conversation with policies of its own, in which a sample leaves nothing behind."""
        other = copy.copy(self)
        other.communication = copy.deepcopy(self.communication)
        return other

    def denied(self) -> None:
        """A step was denied: the next one gets a call number of its own."""
        self._calls += 1
        self._denied_call = self._calls

    def commit(self, message: Message) -> None:
        """Add what was said in a turn."""
        message.metadata.setdefault("finish_reason", "stop")
        self.transcript.append(message)
        self.turns_taken += 1
        try:
            self.communication.spoken(read_only(self), message.copy())
        except BaseException:
            del self.transcript[-1]
            self.turns_taken -= 1
            raise
        self._calls = self._denied_call = 0

    # -- going elsewhere ----------------------------------------------------------------------------------------------
    def branch(self: S, seed: int | None = None) -> S:
        """A conversation that goes on from here. It shares the weights and nothing else.

        It keeps seed and key, so that it is compared with its parent in pairs; with `seed` it draws anew.
        """
        for block in self.capturing:
            block.branched = True
        other = copy.copy(self)
        other.participants = [p.clone() for p in self.participants]
        other.transcript = self.transcript.copy()
        other.context_policy = copy.deepcopy(self.context_policy)
        other.communication = copy.deepcopy(self.communication)
        other.message_hooks = copies(self.message_hooks)
        other.row = None if self.row is None else copy.deepcopy(dict(self.row))
        other.capturing, other.conditions, other.heard = [], [], {}
        other._calls = self._denied_call
        if seed is not None:
            other.seed = seed
            for p in other.participants:
                p.seed = None
        return other

    def branch_from(self: S, ref: int | Message, seed: int | None = None) -> S:
        """A branch whose last message is `ref`."""
        index = self.transcript.index_of(ref)
        other = self.branch(seed)
        other.rewind(index)
        return other

    def rewind(self, to: int | Message) -> None:
        """Forget everything after `to`, which stays."""
        gone = self.transcript[self.transcript.index_of(to) + 1 :]
        self.transcript.rewind(to)
        self.turns_taken = max(0, self.turns_taken - sum("finish_reason" in m.metadata for m in gone))
        self._changed()

    def edit(
        self, ref: int | Message, content: str | None = None, author: str | None = None, **metadata: Any
    ) -> Message:
        """Change one message in place; another text or author forgets its recorded tokens."""
        message = self.transcript.edit(ref, content, author, **metadata)
        self._changed()
        return message

    def reset(self) -> None:
        """Back to the opening: no message but the shared context, no state in any policy."""
        self.transcript[:] = []
        self.turns_taken, self.stop_reason, self.branch_start = 0, None, None
        self.communication, self.context_policy = copy.deepcopy(self._fresh)
        self._changed()
        self._open()

    def _changed(self) -> None:
        self._calls = self._denied_call = 0
        self.communication.rewound(read_only(self))

    # -- message 0 ----------------------------------------------------------------------------------------------------
    def must_open(self) -> None:
        """Fill message 0 if it is still missing; what filling it raises."""
        if self.unopened or not self.transcript or (self.row is None and needs_row(self.shared_context)):
            self._open(demand=True)
            self.unopened = False

    def _open(self, demand: bool = False) -> None:
        """Message 0, as soon as it can be filled."""
        if self.shared_context is None or (self.row is None and needs_row(self.shared_context) and not demand):
            return
        opening = Message(self.moderator_name, fill(self.shared_context, self.row))
        first = self.transcript[0] if self.transcript else None
        if first is None or (first.author, first.content) != (opening.author, opening.content):
            self.transcript.insert(0, opening)

    def with_row(self: S, row: Mapping[str, Any] | None) -> S:
        """A branch whose texts are filled from `row`."""
        other = self.branch()
        other.row = row
        if row is not None and needs_row(self.shared_context):
            if self.row is not None and other.transcript:
                del other.transcript[0]
            try:
                other._open()
            except Exception:  # raised where its first turn begins: of many conversations, this one fails
                other.unopened = True
        return other
