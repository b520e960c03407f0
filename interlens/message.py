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
            if not isinstance(value, str):
                raise TypeError(f"a message's {name} is a string, not {value!r}")
            value = clean(value)
        if name in ("author", "content", "fed") and name in self.__dict__ and value != self.__dict__[name]:
            Message.changes += 1
            if name != "fed":
                self.__dict__.update(fed=None, records=())
        self.__dict__[name] = value

    def copy(self, **changes: Any) -> Message:
        """A copy with its own metadata. Changing author or content forgets the recorded tokens."""
        if not changes.keys() <= self.__dataclass_fields__.keys():
            raise TypeError(f"a message has {', '.join(self.__dataclass_fields__)}; not {', '.join(changes)}")
        if changes.get("content", self.content) != self.content or changes.get("author", self.author) != self.author:
            changes = {"fed": None, "records": (), **changes}
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **{"metadata": dict(self.metadata), **changes})
        return other
