"""Which stored rows an aggregate reads, and how each of them counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from interlens.interp.select import Select
from interlens.statistics import as_float64, norm_filter

from ..config.limits import PHASES, POOLS
from ..config.tokens import parse_tokens

if TYPE_CHECKING:
    import pyarrow as pa


WEIGHTS = ("token", "message")

UNCOUNTED = "weight: token, but a stored mean does not say how many tokens are in it"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options that every aggregate over captured rows has."""

    pool: str | None = "mean"
    """Of the records that are read; None: the unpooled ones, whose rows are tokens."""
    participant: str | None = None
    tokens: str | None = None
    """The capture's own `tokens:`, where several captures have this pool; None: each of them, apart."""
    phase: str | None = None
    """Of unpooled records, only the rows of one phase."""
    max_norm: float | None = None
    """Rows above it are left out (of unpooled records before anything is averaged), and counted."""
    weight: str | None = None
    """token: every token counts once, a mean by how many tokens are in it. message: every message counts once, unpooled
    rows by their mean. None: as stored, token for unpooled and message for pooled records."""

    def __post_init__(self) -> None:
        for name, given, possible in (
            ("pool", self.pool, POOLS), ("phase", self.phase, (None, *PHASES)), ("weight", self.weight, (None, *WEIGHTS)),
        ):  # fmt: skip
            if given not in possible:
                listed = ", ".join("null" if p is None else p for p in possible)
                raise ValueError(f"{name} is {given!r}; possible: {listed}")
        if self.phase is not None and self.pool is not None:
            raise ValueError(
                f"phase: {self.phase} chooses among tokens, and a pool of {self.pool} has none; pool: null"
            )
        if self.weight == "token" and self.pool not in ("mean", None):
            raise ValueError(f"weight: token needs means or tokens; the pool is {self.pool}")
        if self.tokens is not None:
            parse_tokens(self.tokens)

    @property
    def counted(self) -> str:
        """What counts once: "token" or "message"."""
        return self.weight or ("token" if self.pool is None else "message")

    @property
    def averages(self) -> bool:
        """Unpooled records are averaged before they count."""
        return self.pool is None and self.counted == "message"

    @cached_property
    def _selections(self) -> frozenset[str] | None:
        """What a record's `selection` may be: a capture leaves out special tokens unless told otherwise."""
        if self.tokens is None:
            return None
        named = parse_tokens(self.tokens)
        without = named - Select.special() if named != Select.special() else named
        return frozenset({str(named), str(without)})

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether a record with these columns is read."""
        return (
            row["pool"] == self.pool
            and self.participant in (None, row["participant"])
            and (self._selections is None or row["selection"] in self._selections)
        )

    @property
    def columns(self) -> frozenset[str]:
        """Columns of an index that `spans` and `weighed` look at, besides where each record lies."""
        counts = {"num_pooled"} if self.pool is not None and self.counted == "token" else set()
        return frozenset(counts | ({"phases"} if self.phase is not None else set()))

    def described(self) -> dict[str, Any]:
        """For a result: the options, and the weight in force."""
        names = ("pool", "participant", "tokens", "phase", "max_norm")
        return {**{name: getattr(self, name) for name in names}, "weight": self.counted}

    # ---- rows

    def spans(self, index: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """First and last row, [N] each, of every record in its stored tensor; within `phase`, which may be empty."""
        first, last = index["row_start"].to_numpy(), index["row_end"].to_numpy()
        if self.phase is None:
            return first, last
        spans = index["phases"].combine_chunks()
        of, flat = pc.list_parent_indices(spans).to_numpy(), spans.flatten()
        here = np.flatnonzero(pc.equal(flat.field("phase"), self.phase).to_numpy(zero_copy_only=False))
        start, stop = first.copy(), first.copy()
        start[of[here]] += flat.field("start").to_numpy()[here]
        stop[of[here]] += flat.field("end").to_numpy()[here]
        return start, stop

    def of_record(self, record: Any) -> tuple[Any, np.ndarray | None, np.ndarray | None]:
        """`weighed` of one record on a replica."""
        rows = record.tensor
        if self.phase is not None:
            first, last = record.phases.get(self.phase, (0, 0))
            rows = rows[first:last]
        return self.weighed(rows, np.array([len(rows)]), [record.num_pooled])

    def weighed(
        self, rows: Any, lengths: np.ndarray, num_pooled: Any
    ) -> tuple[Any, np.ndarray | None, np.ndarray | None]:
        """Rows [M, D] that count, how often each (None: once), and the norms [R, 1] of what `max_norm` left out.

        `rows`: those of whole records, one after the other; `lengths`: how many each has; `num_pooled`: of each.
        """
        removed = None
        times = np.asarray(num_pooled, float) if "num_pooled" in self.columns else None
        if times is not None and np.isnan(times).any():
            raise ValueError(UNCOUNTED)
        if self.max_norm is not None:
            rows = as_float64(rows)
            found = norm_filter(rows, max_norm=self.max_norm)
            of = np.repeat(np.arange(len(lengths)), lengths)[found.keep]
            lengths = np.bincount(of, minlength=len(lengths))
            if found.removed:
                removed = np.linalg.norm(rows[~found.keep], axis=1)[:, None]
            rows = rows[found.keep]
            times = times[found.keep] if times is not None else None
        if self.averages:
            rows = means(rows, lengths)
        return rows, times, removed


def means(rows: Any, lengths: np.ndarray) -> np.ndarray:
    """Float64 means [M, D] of runs of rows of these lengths; empty runs have none."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return np.zeros((0, rows.shape[1]))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.add.reduceat(as_float64(rows), starts, axis=0) / lengths[:, None]
