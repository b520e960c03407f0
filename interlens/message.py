"""One thing said, and the tokens it was made of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .interp.activation_cache import ActivationRecord
    from .interp.select import Layout


def plain(value: Any) -> Any:
    """Plain JSON values only."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, bool, type(None))) else clean(str(value))


@dataclass(frozen=True, kw_only=True)
class Fed:
    """The tokens really fed for one turn: the prompt, and what was generated after it (stop token included)."""

    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    """Phase of each generated token."""
    layout: Layout | None = None
    template_hash: str = ""
    """Of the tokenizer and chat template that produced the prompt. Tokens are only spliced into views of the same."""


_SURROGATES = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` without halves of characters, which nothing can encode: they become U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a message's {name} is a string, not {value!r}")
    return clean(value)


def _own(value: Any) -> Any:
    """`value` with lists and dicts of its own."""
    if isinstance(value, dict):
        return {k: _own(v) if isinstance(v, (dict, list)) else v for k, v in value.items()}
    return [_own(v) if isinstance(v, (dict, list)) else v for v in value]


@dataclass
class Message:
    """`author` said `content`. Two messages are equal when author, content and metadata are.

    `metadata` holds plain JSON values only (see docs/conversations.md for its keys), never a tensor, never a NaN.
    """

    changes: ClassVar[int] = 0
    """How often any message was given another author, content or tokens: what was made of messages before is stale."""

    author: str
    content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    fed: Fed | None = field(default=None, compare=False, repr=False)
    """What the speaker's model was fed; None for anything that no local model said."""
    records: tuple[ActivationRecord, ...] = field(default=(), compare=False, repr=False)
    """Records of a `capture=` given to this very turn; never saved. Blocks of `conv.capture` have their own cache."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Another author or content is not what the recorded tokens say: they are forgotten."""
        if name in ("author", "content"):
            value = _text(name, value)
        if name in ("author", "content", "fed") and name in self.__dict__ and value != self.__dict__[name]:
            Message.changes += 1
            if name != "fed":
                self.__dict__.update(fed=None, records=())
        self.__dict__[name] = value

    def copy(self, **changes: Any) -> Message:
        """A copy with metadata of its own. Changing author or content forgets the recorded tokens."""
        if not changes.keys() <= self.__dataclass_fields__.keys():
            raise TypeError(f"a message has {', '.join(self.__dataclass_fields__)}; not {', '.join(changes)}")
        said = {name: _text(name, changes[name]) for name in ("author", "content") if name in changes}
        if any(text != getattr(self, name) for name, text in said.items()):
            changes = {"fed": None, "records": (), **changes}
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **{"metadata": _own(dict(self.metadata)), **changes, **said})
        return other
