"""Who can speak."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ..message import Message
from ..templating import ContextItem
from ..tools import Tool
from ..views.render import Rendered
from ..views.view import View
from ..work import Ask, Steps, TurnRequest


class Participant:
    """A named speaker. Subclasses implement `reply`; local models implement `turn` themselves.

    A participant belongs to one conversation: `Conversation.branch` copies it with `clone`.
    """

    capturable: bool = False
    """Whether capture, interventions and logprobs can be served."""
    system_prompt: Any = None
    private_context: tuple[ContextItem, ...] = ()
    seed: int | None = None
    has_prompt: bool = False
    """Whether what it is shown becomes a prompt of limited length, so that context policies have their say. If so, it
    has `count_tokens`, `context_limit` and `max_new_tokens`."""
    context_limit: int | None = None
    """Tokens of prompt and reply that it can take; None: not known."""
    max_new_tokens: int = 0
    tools: tuple[Tool, ...] = ()

    @property
    def num_layers(self) -> int | None:
        """Decoder layers of its model; None: it has none, or they are not known."""
        return None

    def outline(self) -> Any:
        """Its model, or the architecture without weights; None: there is none, or it is not known yet."""
        return None

    def render(self, view: View, generate: bool = True) -> Rendered:
        """The view as its model is fed it. ValueError for a participant without a chat template."""
        raise ValueError(f"{self.name!r} is a {type(self).__name__}: it has no chat template, see conv.view(...)")

    def can_count(self) -> bool:
        """Whether `count_tokens` can be asked."""
        return True

    def count_tokens(self, view: View) -> int:
        """Prompt tokens of a view."""
        raise NotImplementedError(f"{type(self).__name__} has a prompt and must implement count_tokens(view)")

    def __init__(
        self,
        name: str,
        *,
        system_prompt: Any = None,
        private_context: Iterable[ContextItem] = (),
        seed: int | None = None,
    ):
        if not name or not isinstance(name, str):
            raise ValueError(f"a participant's name is a non-empty string, got {name!r}")
        self.name = name
        self.system_prompt = system_prompt
        self.private_context = tuple(private_context)
        self.seed = seed

    def reply(self, view: View, request: TurnRequest) -> Message:
        """Answer `view`. Runs in a thread; may block."""
        raise NotImplementedError(f"{type(self).__name__} must implement reply(view, request)")

    def turn(self, view: View, request: TurnRequest) -> Steps:
        """The whole turn as a generator of Work, returning the Message. The default asks `reply` in a thread."""
        return (yield Ask(participant=self, call=lambda: self.reply(view, request)))

    def clone(self) -> Participant:
        """A copy for another conversation: weights are shared, settings and state are not."""
        other = copy.copy(self)
        try:
            other.__dict__.update({name: copy.deepcopy(value) for name, value in self.__dict__.items()})
        except Exception as error:
            raise TypeError(
                f"{self!r} cannot be copied for a branch ({error}); give it a clone(), which may share what it holds"
            ) from error
        return other

    def __deepcopy__(self, memo: dict) -> Participant:
        return self.clone()

    def needs(self) -> str:
        """What it needs that cannot be saved with it; "" for nothing."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"
