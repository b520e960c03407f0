"""Reads a run folder: lazily, memory-mapped, trusting only commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from .config import SweepConfig
from .store import Commit

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationCache, ActivationRecord
    from interlens.message import Message
    from torch import Tensor


def open(path: str | Path | Sequence[str | Path]) -> Run:
    """A run folder, or several read as one. ConfigError where there is none or its schema is unknown."""
    raise NotImplementedError


class Run:
    """One run folder, as far as it is committed."""

    root: Path

    @cached_property
    def config(self) -> SweepConfig:
        """As the run was last started (config-<k>.yaml)."""
        raise NotImplementedError

    @cached_property
    def cells(self) -> pa.Table:
        """One row per planned cell: plan columns, every axis, and `state`: done | failed | pending. `.to_pandas()`."""
        raise NotImplementedError

    def commits(self) -> Iterator[Commit]:
        """Every commit, in order of unit id."""
        raise NotImplementedError

    def files(self, table: str) -> list[str]:
        """Absolute paths of the committed files of messages | records | activations | stats | outcomes | failures."""
        raise NotImplementedError

    def table(self, name: str, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """A committed table (messages, records, outcomes, failures) with its schema; `filter`: a pyarrow expression."""
        raise NotImplementedError

    def messages(self, cell: str) -> list[Message]:
        """The whole conversation of a cell, its trunk's messages first, with `fed` restored."""
        raise NotImplementedError

    def trunk(self, trunk: str) -> list[Message]:
        """The committed messages of a trunk, verbatim. KeyError where no commit holds it."""
        raise NotImplementedError

    def outcomes(self) -> pa.Table:
        """One row per finished cell: cell, item, every axis, seeds, and every analyzer value as a column."""
        raise NotImplementedError

    def query(self, *, cell=None, trunk=None, participant=None, message_idx=None, layer=None, site=None, model=None,
              pool: Any = ..., where: Any = None) -> list[ActivationRecord]:  # fmt: skip
        """Records that match, in stored order, their tensors memory-mapped slices. pool: ... any, None unpooled."""
        raise NotImplementedError

    def at(self, **filters: Any) -> Tensor:
        """The tensor of exactly one record, else KeyError saying how many and what distinguishes them."""
        raise NotImplementedError

    def cache(self, cell: str) -> ActivationCache:
        """An ActivationCache of a cell's records, its trunk's included."""
        raise NotImplementedError

    def vectors(self, *, site: str = "residual", layer: int | None = None, participant: str | None = None,
                pool: str | None = "mean", where: Any = None) -> tuple[np.ndarray, pa.Table]:  # fmt: skip
        """Pooled records as one array [N, D] float32 and the table of their N rows: the index columns, joined with the
        cell's item, axes and seeds. Trunk records have cell null."""
        raise NotImplementedError

    def sums(self, name: str) -> Iterator[Mapping[str, np.ndarray]]:
        """The committed states of a sum, one per unit, in order of unit id."""
        raise NotImplementedError
