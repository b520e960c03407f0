"""A conversation: who speaks, what was said, and the next turn.

Every turn, here or in a rollout, is the same generator (`turns.take`); `step` runs one to its end. Nothing changes
until a turn is committed: a turn that fails, is denied, or is only a sample leaves the conversation as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .capturing import Capturing, check_places, check_sites
from .errors import UnsupportedIntervention
from .interp.activation_cache import ActivationCache, CaptureSpec
from .message import Message
from .participants.base import Participant
from .participants.model import ModelParticipant, participants_of
from .participants.options import check_names
from .policies.communication import CommunicationPolicy
from .policies.context import ContextPolicy
from .policies.hooks import Hook
from .policies.stopping import Until, condition
from .read_only import read_only
from .rollout import RolloutReport, rollout
from .saving import load, save
from .scheduler import drive, finish
from .seeing import build
from .state import ConversationState, ParticipantRef
from .transcript import Transcript
from .turns import fit, take
from .views.template import today
from .views.view import View
from .work import Captures, Edits, TurnOptions, TurnRequest, Work

UNSAVED = {"capturing", "conditions", "heard"}
"""Attributes of a conversation that belong to a block or a run that is going on."""
MAX_DENIED = 100
"""Denied turns in a row after which a run without a number of turns fails: it would go on for ever."""


class Conversation(ConversationState):
    """Participants, in speaking order, and their transcript.

    shared_context: message 0, by the moderator. shared_system_prompt: joins every system prompt. Both, like system
    prompts and private context, may be a `dataset_field`, a callable of the row, or a tuple of texts and these.
    reasoning_visibility: "strip", "self_retain" or "shared". seed: of all noise whose participant has none of its own.

    `key` and `turns_taken` are part of the noise too (see `scheduler`); `row` is the data row; `stop_reason` says why the
    last `run` ended; `date` ("2026-12-01") is the day that every prompt of a template with a date shows, by default the
    one on which the conversation was made; `branch_start` is the index of the first message after the trunk, or None.
    """

    @classmethod
    def from_models(
        cls, models: Sequence[Any], names: Sequence[str] | None = None, *, transcript: Transcript | None = None,
        shared_context: Any = None, shared_system_prompt: Any = None, moderator_name: str = "moderator",
        context_policy: ContextPolicy | None = None, context_limit: int | None = None,
        reasoning_visibility: str = "strip", message_hooks: Iterable[Hook] = (),
        communication: CommunicationPolicy | None = None, seed: int = 0,
        system_prompts: Sequence[Any] | Mapping[str, Any] | None = None, **participant_options: Any,
    ) -> Conversation:  # fmt: skip
        """A conversation between models: embedded names, hub ids, paths, or loaded models. Equal ids load once.

        names: default "a", "b", "c", ...; as many as models. participant_options: ModelParticipant's, for all of them.
        system_prompts: one for each model (None for none), or by name; `system_prompt` is one for all.
        """
        check_names(participant_options, ModelParticipant.__init__, cls.from_models)
        return cls(
            participants_of(models, names, participant_options, system_prompts), transcript, shared_context,
            shared_system_prompt, moderator_name, context_policy, context_limit, reasoning_visibility, message_hooks,
            communication, seed,
        )  # fmt: skip

    # -- taking turns -------------------------------------------------------------------------------------------------
    def turn(self, speaker: ParticipantRef, *, commit: bool = True, extra: Sequence[Message] = (), **options: Any):
        """The next turn as a generator of Work that returns a `Turn`; `scheduler.Scheduler` serves many of them.

        options: fields of TurnOptions. commit=False: a sample. extra: messages seen after the transcript (samples).
        """
        return take(self, self.participant(speaker), TurnOptions(**options), commit=commit, extra=extra)

    def step(
        self, speaker: ParticipantRef, *, steering: Edits = None, capture: Captures = None, patch: Edits = None,
        return_logprobs: bool = False, max_new_tokens: int | None = None,
    ) -> Message | None:  # fmt: skip
        """Commit one turn and return its message; None if a message hook denied it.

        steering: replaces the participant's own, () means none. capture: its records are the message's `records`.
        """
        steps = self.turn(
            speaker, steering=steering, capture=capture, patch=patch, return_logprobs=return_logprobs,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
        return finish(steps).message

    def run(
        self,
        turns: float | None = None,
        until: Until = None,
        first: ParticipantRef | None = None,
        prompt: str | None = None,
    ) -> Transcript:
        """Take turns until `turns` or a stop condition, whichever comes first; `stop_reason` says which.

        first: who begins. prompt: a moderator's message before the first turn.
        """
        finish(self.play(turns, until, first, prompt))
        return self.transcript

    def play(
        self,
        turns: float | None = None,
        until: Until = None,
        first: ParticipantRef | None = None,
        prompt: str | None = None,
    ) -> Generator[Work, Any, None]:
        """`run` as a generator of Work."""
        if turns is None and until is None:
            raise ValueError("a run needs an end: give turns=..., until=..., or both")
        if turns is not None and (turns < 0 or turns != int(turns)):
            raise ValueError(f"turns is {turns}; it must be a whole number of at least 0")
        speaker = None if first is None else self.participant(first).name
        stop = copy.deepcopy(condition(until))  # its state is this run's
        self.stop_reason, self.conditions = None, [stop] if stop else []
        if prompt is not None or self.unopened:
            self.must_open()
        if prompt is not None:
            self.transcript.append(self.moderator_name, prompt)
        taken, denied, message, watched = 0, 0, None, read_only(self)
        try:
            while True:
                self.stop_reason = (stop.check(watched, message and message.copy()) if stop else None) or (
                    f"{taken} turns" if turns is not None and taken >= turns else None
                )
                if self.stop_reason:
                    return
                name, speaker = speaker or self.communication.next_speaker(watched), None
                message = (yield from self.turn(name)).message
                taken += 1
                denied = denied + 1 if message is None else 0
                if turns is None and denied == MAX_DENIED:
                    raise RuntimeError(
                        f"message hooks denied {denied} turns in a row, the last of {name!r}, and nothing else would end "
                        "this run; give turns=..., or let a hook approve or edit what comes again and again"
                    )
        finally:
            self.conditions = []

    def sample(
        self, speaker: Any, message: Message | str | None = None, *, as_author: str | None = None, **options: Any
    ):
        """What `speaker` would say next, after `message` by `as_author` (default: the moderator). Nothing is kept.

        A list of speakers gives {name: Message}, each answering on its own. options: those of `step`.
        """
        several = isinstance(speaker, (list, tuple))
        names = [self.participant(s).name for s in (speaker if several else [speaker])]
        if isinstance(message, str):
            message = Message(as_author or self.moderator_name, message)
        elif message is not None and not isinstance(message, Message):
            raise TypeError(f"what to answer is a text or a Message, not {message!r}")
        elif message is not None and as_author is not None:
            message = message.copy(author=as_author)
        extra = () if message is None else (message,)
        outcomes = drive(self.turn(name, commit=False, extra=extra, **options) for name in names)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        said = {name: outcome.value.message for name, outcome in zip(names, outcomes, strict=True)}
        return said if several else said[names[0]]

    def sample_all(self, message: Message | str | None = None, *, as_author: str | None = None, **options: Any):
        """`sample` of every participant: {name: Message}."""
        return self.sample([p.name for p in self.participants], message, as_author=as_author, **options)

    # -- looking ------------------------------------------------------------------------------------------------------
    @contextmanager
    def capture(
        self,
        sites: str | Sequence[str] = ("residual",),
        layers: int | Sequence[int] | None = None,
        offload: str | None = "cpu",
        participants: ParticipantRef | Sequence[ParticipantRef] | None = None,
        **spec: Any,
    ) -> Iterator[ActivationCache]:
        """An ActivationCache that records every step, run and sample inside the block. Blocks nest.

        participants: names; None records all that can be captured and lists the others in `cache.skipped`.
        spec: `tokens`, `pool`, `source` of CaptureSpec.
        """
        wanted = CaptureSpec(sites=sites, layers=layers, offload=offload, **spec)
        cache = ActivationCache(offload=wanted.offload)
        block = self.add_capture(wanted, cache, participants)
        try:
            yield cache
        finally:
            self.capturing = [b for b in self.capturing if b is not block]
        if block.branched and not len(cache):
            raise UnsupportedIntervention(
                "this capture recorded nothing: a branch was made inside it, and a branch records into nothing of its "
                "parent's; open branch.capture(...) on the branch itself"
            )

    def add_capture(
        self,
        spec: CaptureSpec,
        cache: ActivationCache,
        participants: ParticipantRef | Sequence[ParticipantRef] | None = None,
    ) -> Capturing:
        """Record into `cache` from now on; `capture` is the block that also ends it.

        UnknownSite, UnsupportedIntervention where a participant cannot be captured there.
        """
        check_sites(spec)
        given = self.participants if participants is None else participants
        given = [self.participant(p) for p in ([given] if isinstance(given, (str, int, Participant)) else given)]
        cannot = [p.name for p in given if not p.capturable]
        if participants is not None and cannot:
            raise UnsupportedIntervention(
                f"cannot capture {', '.join(cannot)}: only local models can be; those here: "
                f"{', '.join(p.name for p in self.participants if p.capturable) or 'none'}"
            )
        for p in given:
            check_places(spec, p)
        if not any(p.capturable for p in given):
            raise UnsupportedIntervention(
                f"a capture here can record nobody: {', '.join(cannot)} are no local models, and only those can be "
                "captured; leave the capture out, or make one of them a ModelParticipant"
            )
        cache.skipped.extend(name for name in cannot if name not in cache.skipped)
        block = Capturing(spec, cache, frozenset(p.name for p in given if p.capturable))
        self.capturing.append(block)
        return block

    def view(self, pov: ParticipantRef) -> View:
        """What a participant sees: framing, then the transcript with roles swapped."""
        return build(self, self.participant(pov))

    def render_templated(
        self, pov: ParticipantRef, *, add_generation_prompt: bool = False, tokenize: bool = False
    ) -> str | list[int]:
        """Text or token ids exactly as the participant's model is fed them, tools and thinking flags included.

        With add_generation_prompt, the context policy has its say too, as in a turn.
        """
        speaker, view = self.participant(pov), self.view(pov)
        if add_generation_prompt:
            key = (self.seed if speaker.seed is None else speaker.seed, self.key, self.turns_taken, self._denied_call)
            request = TurnRequest(options=TurnOptions(), key=key, index=len(self.transcript))
            view = finish(fit(self, copy.deepcopy(self.context_policy), speaker, view, request))
        rendered = speaker.render(view, generate=add_generation_prompt)
        return list(rendered.ids) if tokenize else rendered.text

    # -- many, and for later ------------------------------------------------------------------------------------------

    def rollout(
        self, n: int | None = None, *, data: Any = None, seed: int | None = None, turns: int | None = None,
        until: Until = None, analyzer: Callable[[Conversation], dict] | None = None, capture: Captures = None,
    ) -> RolloutReport[Conversation]:  # fmt: skip
        """Many conversations that go on from here, together. This one does not change.

        data: rows (dicts), one conversation each; with `n`, the first n, beginning again after the last. seed: the
        conversations' seed; conversation i has the key i. analyzer(conversation) -> dict of numbers and strings.
        capture: CaptureSpecs; each result has its own cache.
        """
        return rollout(self, n, data=data, seed=seed, turns=turns, until=until, analyzer=analyzer, capture=capture)

    def save(self, directory: str | Path) -> None:
        """Write everything but weights into a folder, atomically."""
        save(Path(directory), {k: v for k, v in vars(self).items() if k not in UNSAVED}, self.needs())

    def needs(self) -> dict[str, str]:
        """Participant -> what it needs that is not saved with a conversation: a model, an API key."""
        return {p.name: p.needs() for p in self.participants if p.needs()}

    @classmethod
    def load(cls, directory: str | Path, allow: Iterable[str] = ()) -> Conversation:
        """Read a saved conversation; weights load when first needed, and nothing in the folder is executed.

        allow: import paths ("package.module:Name") of custom participants, policies, hooks and tools it may use.
        """
        conversation = cls.__new__(cls)
        conversation.capturing, conversation.conditions, conversation.heard = [], [], {}
        for name, value in load(Path(directory), allow).items():
            setattr(conversation, name, value)
        vars(conversation).setdefault("date", today())  # a folder from before days were kept
        conversation._check_names()
        return conversation
