"""One live sequence in an engine, and how waiting rows are grouped for prefill. Pure bookkeeping; no model.

Invariants of a `Row`:
* `sequence` holds every token known so far; `written` columns of its slab row hold KV, always a prefix of it.
* `fed` is the next position to feed. Below `written` it recomputes records inside a reused prefix and writes nothing.
* While `fed < target` the row is being prefilled; afterwards it is live and feeds one token a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..interp.intervention import Intervention
from ..interp.select import Select, TokenSequence
from .request import Reply, Request
from .sampling import NoiseKey


class Ticket:
    """A submitted request. `reply` is None until it is done."""

    def __init__(self, request: Request):
        self.request = request
        self.reply: Reply | None = None
        self.cancelled = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """One intervention of a request with its site and layers resolved for the model."""

    intervention: Intervention
    site: str
    layers: frozenset[int]
    steady: bool
    """It covers every generated position or none: no need to ask at each decode step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Take:
    """One capture spec of a request with its sites and layers resolved: what to keep and how."""

    lanes: tuple[tuple[int, str], ...]
    """(layer, site) pairs."""
    tokens: Select
    pool: str | None
    offload: str | None
    clean: bool


@dataclass(eq=False, kw_only=True)
class Row:
    ticket: Ticket
    sequence: TokenSequence
    edits: tuple[Edit, ...]
    takes: tuple[Take, ...]
    noise: NoiseKey
    max_new_tokens: int
    target: int = 0
    written: int = 0
    fed: int = 0
    reused: int = 0
    draining: bool = False
    """Finished, but its last token is still to be fed for capture."""
    finish_reason: str | None = None
    error: BaseException | None = None
    modified_by_forcing: bool = False
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    kept: Any = None
    """What the collector holds for this row."""

    @property
    def request(self) -> Request:
        return self.ticket.request

    def signature(self, stop: int | None = None) -> np.ndarray:
        """Per position the hash of the edits that touch it (0: none), int64. KV is shared only where these agree."""
        stop = len(self.sequence) if stop is None else stop
        signature = np.zeros(stop, dtype=np.int64)
        for edit in self.edits:
            digest = hashlib.blake2b(edit.intervention.fingerprint.encode(), digest_size=8).digest()
            mark = np.int64(int.from_bytes(digest, "little", signed=True))
            mask = edit.intervention.tokens.mask(self.sequence, 0, stop)
            with np.errstate(over="ignore"):
                signature[mask] = signature[mask] * np.int64(6364136223846793005) + mark
        return signature

    def first_taken(self, stop: int) -> int:
        """The first position below `stop` that some take of this run selects, or `stop`."""
        first = stop
        for take in self.takes:
            selected = take.tokens.mask(self.sequence, 0, stop).nonzero()[0]
            if len(selected):
                first = min(first, int(selected[0]))
        return first

    def wants_last(self) -> bool:
        """Some take selects the last token of the finished sequence."""
        last = len(self.sequence) - 1
        return any(take.tokens.mask(self.sequence, last, last + 1)[0] for take in self.takes)


def prefill_groups(lengths: Sequence[int], *, overhead: int = 48, area: int = 8192) -> list[list[int]]:
    """Split rows to prefill into groups of similar length, as indices into `lengths`, shortest first.

    A group costs its padded area (rows times longest) plus `overhead` tokens; the split is the cheapest one by dynamic
    programming over the sorted lengths, with no group's area above `area` unless it is one row.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best: list[float] = [0.0]
    cut = [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        choice, cost = end - 1, float("inf")
        for begin in range(end - 1, -1, -1):
            padded = (end - begin) * longest
            if padded > area and end - begin > 1:
                break
            if best[begin] + padded + overhead < cost:
                choice, cost = begin, best[begin] + padded + overhead
        best.append(cost)
        cut.append(choice)
    groups = []
    end = len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return groups[::-1]
