"""What was said, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, MutableSequence
from pathlib import Path
from typing import Any, overload

from .encoding import load_transcript, save_transcript
from .message import Message


class Transcript(MutableSequence[Message]):
    """A list of messages. Slices are Transcripts; `==` compares messages."""

    def __init__(self, messages: Iterable[Message] = ()):
        self._messages: list[Message] = [_message(m) for m in messages]

    # -- a list -----------------------------------------------------------------------------------------------------
    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Transcript: ...
    def __getitem__(self, index):
        found = self._messages[index]
        return Transcript(found) if isinstance(index, slice) else found

    def __setitem__(self, index, value) -> None:
        """Replace one message: its recorded tokens are forgotten with it."""
        if isinstance(index, slice):
            self._messages[index] = [_message(m) for m in value]
        else:
            self._messages[index] = _message(value)

    def __delitem__(self, index) -> None:
        del self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __reversed__(self) -> Iterator[Message]:
        return reversed(self._messages)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Transcript):
            return self._messages == other._messages
        return self._messages == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Transcript({self._messages!r})"

    def insert(self, index: int, value: Message) -> None:
        """Put a message before `index`."""
        self._messages.insert(index, _message(value))

    def append(self, message: Message | str, content: str | None = None, **metadata: Any) -> Message:  # ty: ignore[incompatible-method-override]
        """Append a Message, or one made of author and content. Returns it."""
        if isinstance(message, str):
            if content is None:
                raise ValueError(f"append({message!r}) has an author but no content; give append(author, content)")
            message = Message(message, content, metadata)
        elif content is not None or metadata:
            raise ValueError(
                "append(message) takes nothing else; to build one give append(author, content, **metadata)"
            )
        self._messages.append(_message(message))
        return message

    # -- as a whole -------------------------------------------------------------------------------------------------
    def index_of(self, ref: int | Message) -> int:
        """Index of `ref`: an index (negatives from the end), or the Message itself (by identity, then equality)."""
        if isinstance(ref, Message):
            for same in (lambda m: m is ref, lambda m: m == ref):
                hits = [i for i, m in enumerate(self._messages) if same(m)]
                if len(hits) == 1:
                    return hits[0]
                if hits:
                    raise ValueError(
                        f"{len(hits)} equal messages {ref.author}: {ref.content!r}; give the index instead"
                    )
            raise ValueError(f"this message is not in the transcript: {ref.author}: {ref.content!r}")
        if not isinstance(ref, int) or isinstance(ref, bool):
            raise TypeError(f"a message is named by its index or by the Message itself, not {ref!r}")
        if not -len(self) <= ref < len(self):
            raise IndexError(f"no message {ref}: the transcript has {len(self)}")
        return ref % len(self)

    def copy(self) -> Transcript:
        """Messages are copied too; the tokens recorded on them are shared, as they never change."""
        return Transcript(m.copy() for m in self._messages)

    def rewind(self, to: int | Message) -> None:
        """Drop everything after `to`, which stays."""
        del self._messages[self.index_of(to) + 1 :]

    def edit(
        self, ref: int | Message, content: str | None = None, author: str | None = None, **metadata: Any
    ) -> Message:
        """Replace content, author or metadata entries of one message; returns the new one."""
        i = self.index_of(ref)
        old = self._messages[i]
        changes = {k: v for k, v in (("content", content), ("author", author)) if v is not None}
        self._messages[i] = old.copy(metadata={**old.metadata, **metadata}, **changes)
        return self._messages[i]

    def pretty(self, metadata: bool = False) -> str:
        """The transcript as text, one block per message."""
        blocks = []
        for i, m in enumerate(self._messages):
            block = f"[{i}] {m.author}: {m.content}"
            if metadata and m.metadata:
                block += "\n    " + json.dumps(m.metadata, ensure_ascii=False, sort_keys=True)
            blocks.append(block)
        return "\n\n".join(blocks)

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically, with the recorded tokens."""
        save_transcript(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        """Read what `save` wrote; ValueError for another schema version."""
        return load_transcript(Path(path))


def _message(value: Any) -> Message:
    if not isinstance(value, Message):
        raise TypeError(f"a transcript holds Message objects, not {type(value).__name__}: {value!r}")
    return value
