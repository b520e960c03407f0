"""Texts that are filled from a data row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DatasetField:
    """The value of one column of the conversation's row."""

    column: str


def dataset_field(column: str) -> DatasetField:
    """Stands for a column of the data row in shared context, system prompts and private context."""
    return DatasetField(column)


def needs_row(part: Any) -> bool:
    """Whether `part` can only be filled with a row."""
    if isinstance(part, (tuple, list)):
        return any(needs_row(p) for p in part)
    return isinstance(part, DatasetField) or callable(part)


def fill(part: Any, row: Mapping[str, Any] | None) -> str:
    """`part` as text: a string, a `dataset_field`, a callable of the row, or a tuple of these (joined); None is ""."""
    if part is None:
        return ""
    if isinstance(part, str):
        return part
    if isinstance(part, (tuple, list)):
        return "".join(fill(p, row) for p in part)
    if row is None and needs_row(part):
        raise ValueError(f"{part!r} is filled from a data row, and this conversation has none; use rollout(data=[...])")
    if isinstance(part, DatasetField) and row is not None:
        if part.column not in row:
            raise ValueError(f"no column {part.column!r} in the row; it has: {', '.join(map(str, row)) or 'none'}")
        return str(row[part.column])
    if callable(part):
        return str(part(row))
    raise TypeError(f"a text is a string, dataset_field(...), a callable or a tuple of these, not {part!r}")


@dataclass(frozen=True)
class ContextItem:
    """A message that only one participant sees, before the transcript."""

    content: Any
    role_hint: str = "user"
    """"user", "assistant" or "system"."""
    author: str = "moderator"

    def __post_init__(self):
        if self.role_hint not in ("user", "assistant", "system"):
            raise ValueError(f"role_hint is 'user', 'assistant' or 'system', not {self.role_hint!r}")
