"""What an aggregate is: a `Sum` that streams and the `CellResult` it is given (a `Fit` over stored data: `fit.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.message import Message

    from ..folder.cells import Cell


State = dict[str, np.ndarray]
"""The state of a Sum: flat, float64 arrays of at least one dimension, ready for safetensors."""

Spread = Callable[[str, Sequence[tuple]], Iterator[tuple[int, Any]]]
"""Runs a function (`module:name`) once per tuple of plain arguments in other processes: (number, result) as they finish."""


@dataclass(kw_only=True)
class CellResult:
    """One finished cell, as the replica hands it to the sums."""

    cell: Cell
    item_row: Mapping[str, Any]
    """The scenario row of the cell's item."""
    messages: list[Message]
    """The whole conversation: the trunk's messages, then the cell's own."""
    records: list[ActivationRecord]
    """Records of the cell's own messages (never the trunk's)."""
    outcomes: Mapping[str, Any] = field(default_factory=dict)
    num_trunk_messages: int = 0
    """`messages[num_trunk_messages:]` are the cell's own."""
    routing: Sequence[Mapping[str, Any]] | None = None
    """The cell's rows of the table `routing`; None where none was recorded."""


@runtime_checkable
class Sum(Protocol):
    """A streaming aggregate. `add` either adds all of a result or raises and leaves the state as it was."""

    name: str

    def zero(self) -> State: ...

    def add(self, state: State, result: CellResult) -> None:
        """Add one cell to `state`, in place."""
        ...

    def merge(self, a: State, b: State) -> State:
        """The state of both together, a new one; `a` and `b` stay as they are."""
        ...

    def finish(self, state: State) -> dict[str, Any]:
        """The result as plain JSON values (arrays allowed; they are written as lists or safetensors)."""
        ...
