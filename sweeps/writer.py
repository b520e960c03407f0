"""Writes one unit: its files under attempt-unique names, then the one commit that makes them exist for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .plan import Cell, Unit

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.message import Message


class UnitWriter:
    """Streams a unit's trunks and cells to files; `commit` closes the unit.

    A failed cell leaves only its row in `failures`. Nothing is visible to readers before `commit` returns "won".
    """

    def __init__(self, root: str | Path, unit: Unit, models: Mapping[str, str], attempt: str | None = None):
        """`models`: participant -> model name, the partition of its records. `attempt`: 8 hex digits, None: random."""
        raise NotImplementedError

    def add_trunk(self, trunk: str, messages: Sequence[Message], records: Sequence[ActivationRecord] = ()) -> None:
        """The trunk's own messages, indices from 0 (the opening, where there is one, included)."""
        raise NotImplementedError

    def add_cell(self, cell: Cell, messages: Sequence[Message], records: Sequence[ActivationRecord] = (),
                 outcomes: Mapping[str, Any] | None = None, *, start: int = 0) -> None:  # fmt: skip
        """A finished cell: its messages after the trunk; `start` is the transcript index of the first of them."""
        raise NotImplementedError

    def fail_cell(self, cell: Cell, error: str, traceback: str, attempts: int = 1) -> None:
        """The cell failed: its row in `failures`, and nothing else of it."""
        raise NotImplementedError

    def fail_trunk(self, trunk: str, error: str, traceback: str, attempts: int = 1) -> None:
        """The trunk failed; its cells are failed by the caller with its error."""
        raise NotImplementedError

    def add_sums(self, name: str, state: Mapping[str, np.ndarray]) -> None:
        """A sum's state over this unit's finished cells (float64 arrays)."""
        raise NotImplementedError

    def commit(self, children: Sequence[Unit] = (), counters: Mapping[str, Any] | None = None) -> str:
        """Flush everything and close the unit: "won", or "lost" where another attempt had closed it."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Give up: delete what this attempt has written (it was never committed)."""
        raise NotImplementedError
