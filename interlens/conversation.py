"""A conversation: who speaks, what was said, and the next turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .message import Message
from .transcript import Transcript
from .turns import Turn, Work

if TYPE_CHECKING:
    from .interp.activation_cache import ActivationCache
    from .participants.base import Participant
    from .rollout import RolloutReport
    from .views.view import View


class Conversation:
    """Participants, in speaking order, and their transcript.

    `seed` and `key` decide all noise (see `rollout`); `turns_taken` counts committed generated turns; `row` is the data
    row of a rollout; `stop_reason` says why the last `run` ended; `branch_start` is the index of the first message
    after the trunk, or None.
    """

    def __init__(
        self,
        participants: Sequence[Participant],
        transcript: Transcript | None = None,
        shared_context: Any = None,
        shared_system_prompt: Any = None,
        moderator_name: str = "moderator",
        context_policy: Any = None,
        context_limit: int | None = None,
        reasoning_visibility: str = "strip",
        message_hooks: Iterable[Any] = (),
        communication: Any = None,
        seed: int = 0,
    ):
        self.participants = list(participants)
        self.transcript = Transcript() if transcript is None else transcript
        self.shared_context = shared_context
        self.shared_system_prompt = shared_system_prompt
        self.moderator_name = moderator_name
        self.context_policy = context_policy
        self.context_limit = context_limit
        self.reasoning_visibility = reasoning_visibility
        self.message_hooks = list(message_hooks)
        self.communication = communication
        self.seed = seed
        self.key: Any = None
        self.turns_taken = 0
        self.row: Mapping[str, Any] | None = None
        self.stop_reason: str | None = None
        self.branch_start: int | None = None

    @classmethod
    def from_models(
        cls,
        models: Sequence[Any],
        names: Sequence[str] | None = None,
        *,
        transcript: Transcript | None = None,
        shared_context: Any = None,
        shared_system_prompt: Any = None,
        moderator_name: str = "moderator",
        context_policy: Any = None,
        context_limit: int | None = None,
        reasoning_visibility: str = "strip",
        message_hooks: Iterable[Any] = (),
        communication: Any = None,
        seed: int = 0,
        **participant_options: Any,
    ) -> Conversation:
        raise NotImplementedError

    def participant(self, which: Participant | str | int) -> Participant:
        raise NotImplementedError

    def turn(
        self, speaker: Participant | str | int, *, commit: bool = True, **options: Any
    ) -> Generator[Work, Any, Turn]:
        """The next turn as a generator of Work; `rollout.Scheduler` runs many. `options`: fields of TurnOptions."""
        raise NotImplementedError

    def step(
        self, speaker, *, steering=None, capture=None, patch=None, return_logprobs=False, max_new_tokens=None
    ) -> Message | None:
        raise NotImplementedError

    def run(
        self, turns: int | None = None, until: Any = None, first: Any = None, prompt: str | None = None
    ) -> Transcript:
        raise NotImplementedError

    def sample(self, speaker, message=None, *, as_author: str | None = None, **options: Any):
        raise NotImplementedError

    def sample_all(self, message=None, *, as_author: str | None = None, **options: Any) -> dict[str, Message]:
        raise NotImplementedError

    def capture(
        self, sites=("residual",), layers=None, offload="cpu", participants=None, **spec: Any
    ) -> AbstractContextManager[ActivationCache]:
        raise NotImplementedError

    def view(self, pov) -> View:
        raise NotImplementedError

    def render_templated(self, pov, *, add_generation_prompt: bool = False, tokenize: bool = False) -> str | list[int]:
        raise NotImplementedError

    def branch(self, seed: int | None = None) -> Conversation:
        raise NotImplementedError

    def branch_from(self, ref: int | Message, seed: int | None = None) -> Conversation:
        raise NotImplementedError

    def rewind(self, to: int | Message) -> None:
        raise NotImplementedError

    def edit(self, ref, content: str | None = None, author: str | None = None, **metadata: Any) -> Message:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def rollout(
        self, n: int | None = None, *, data=None, seed: int | None = None, turns: int | None = None, until: Any = None,
        analyzer: Callable[[Conversation], dict] | None = None, capture: Any = None,
    ) -> RolloutReport:  # fmt: skip
        raise NotImplementedError

    def save(self, directory: str | Path) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls, directory: str | Path, allow: Iterable[str] = ()) -> Conversation:
        raise NotImplementedError
