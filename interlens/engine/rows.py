"""One live sequence in an engine, and how waiting rows are grouped for prefill. Pure bookkeeping; no model.

Invariants of a `Row`:
* `sequence` holds every token known so far; `written` columns of its slab row hold KV, always a prefix of it.
* `fed` is the next position to feed. Below `written` it recomputes records inside a reused prefix and writes nothing.
* While `fed < target` the row is being prefilled; afterwards it is live and feeds one token a step.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..interp.intervention import Intervention
from ..interp.select import Select, TokenSequence
from .request import Reply, Request
from .sampling import NoiseKey

ROW_COUNTERS = ("prefill_tokens", "decode_tokens", "reused_tokens", "recomputed_tokens")


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
    """It covers every generated position: no need to ask at each decode step."""
    fingerprint: str

    @functools.cached_property
    def mark(self) -> np.int64:
        """The fingerprint as a number."""
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=8).digest()
        return np.int64(int.from_bytes(digest, "little", signed=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Take:
    """One capture spec of a request with its sites and layers resolved: what to keep and how."""

    order: int
    lanes: tuple[tuple[int, str], ...]
    """(layer, site) pairs."""
    tokens: Select
    pool: str | None
    offload: str | None
    clean: bool
    """From a forward of its own, without interventions."""
    max_norm: float | None = None
    """Rows above it are left out."""

    @property
    def kind(self) -> tuple[str | None, str | None, float | None]:
        """What a lane is named by, besides layer and site."""
        return self.pool, self.offload, self.max_norm


@dataclass(eq=False, kw_only=True)
class Row:
    """One live sequence: a request, the tokens it has so far, and what is edited and captured of it."""

    ticket: Ticket
    sequence: TokenSequence
    edits: tuple[Edit, ...]
    takes: tuple[Take, ...]
    noise: NoiseKey
    max_new_tokens: int
    clean_takes: tuple[Take, ...] = ()
    target: int = 0
    written: int = 0
    fed: int = 0
    index: int = -1
    """Its slab row."""
    finish_reason: str | None = None
    """Set when no more token is drawn; the row is done once everything it needs has been fed."""
    done: bool = False
    error: BaseException | None = None
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROW_COUNTERS, 0))
    prefix: Any = None
    """The KV it starts from, between being chosen and placed."""
    known: tuple[np.ndarray, np.ndarray] | None = None
    """Ids and signature up to `target`, while it waits."""
    fresh: bool = False
    """Computes everything itself."""
    reply: Reply | None = None
    """What an earlier row of the same ticket has answered; this one adds its clean records."""
    kept: Any = None
    """What the collector holds for this row."""
    records: list[tuple[int, Any]] = field(default_factory=list)
    """(number of the spec, record) of every row of the ticket so far."""

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.ticket.request

    def signature(self, stop: int | None = None) -> np.ndarray:
        """Per position the hash of the edits that touch it (0: none), int64. KV is shared only where these agree."""
        stop = len(self.sequence) if stop is None else stop
        signature = np.zeros(stop, dtype=np.int64)
        for edit in self.edits:
            mask = edit.intervention.tokens.mask(self.sequence, 0, stop)
            with np.errstate(over="ignore"):
                signature[mask] = signature[mask] * np.int64(6364136223846793005) + edit.mark
        return signature

    @property
    def wants_forced_logprobs(self) -> bool:
        """Whether log-probabilities of teacher-forced tokens are still to be scored."""
        return self.request.logprobs and self.request.forced is not None and self.reply is None

    @property
    def needs_all_logits(self) -> bool:
        """Logits of every position are captured, edited or scored."""
        if self.wants_forced_logprobs or any(edit.site == "logits" for edit in self.edits):
            return True
        return any(site == "logits" for take in self.takes for _, site in take.lanes)

    def touches(self, keys) -> bool:
        """Some edit or take of this row is at one of these (layer, site) pairs."""
        return any(
            any(edit.site == site and layer in edit.layers for edit in self.edits)
            or any((layer, site) in take.lanes for take in self.takes)
            for layer, site in keys
        )

    def append(self, token: int) -> None:
        """One more drawn token; decides whether it is the last and whether that one still has to be fed."""
        self.sequence.append(token)
        if token in self.request.sampling.stop_ids:
            self.finish_reason = "stop"
        elif self.num_drawn >= self.max_new_tokens:
            self.finish_reason = "length"
        self.done = self.finish_reason is not None and not self.wants_last()

    def start_over(self) -> None:
        """As if nothing had been fed; the tokens it has and what follows from them stay. Mends what is half done."""
        tokens = self.sequence.generated
        self.sequence = TokenSequence(list(self.request.tokens), self.request.layout)
        if self.request.forced is not None or self.max_new_tokens == 0:
            for token in tokens:
                self.sequence.append(token)
        else:
            self.finish_reason = None
            for token in tokens:
                self.append(token)
        if self.error is not None:
            self.finish_reason, self.edits, self.takes, self.clean_takes = "error", (), (), ()
        self.index, self.written, self.fed, self.target, self.done = -1, 0, 0, len(self.sequence), False
        self.prefix = self.known = None
        if self.wants_forced_logprobs:
            self.logprobs.clear()  # its prefill scores them again
        for values in self.logprobs.values():
            del values[self.num_drawn :]

    def note_fed(self, start: int, stop: int, decoding: bool) -> None:
        """Positions `start` to `stop` have been fed; what had been written before counts as computed again."""
        again = max(0, min(self.written, stop) - start)
        self.counters["recomputed_tokens"] += again
        self.counters["decode_tokens" if decoding else "prefill_tokens"] += stop - start - again
        self.fed = stop
        self.written = max(self.written, stop)

    def note_logprobs(self, logprobs, entropy, sampling_logprob: float | None) -> None:
        """Append values in nats of one or more tokens."""
        values = logprobs.tolist()
        self.logprobs.setdefault("logprobs", []).extend(values)
        self.logprobs.setdefault("surprisal", []).extend(-v for v in values)
        self.logprobs.setdefault("entropy", []).extend(entropy.tolist())
        if sampling_logprob is not None:
            self.logprobs.setdefault("sampling_logprobs", []).append(sampling_logprob)

    def alone(self) -> Row:
        """A row with the same tokens and edits that captures nothing."""
        return replace(self, takes=(), clean_takes=(), kept=None)

    def clean_follower(self, reply: Reply) -> Row:
        """A row that feeds the finished sequence once more, without edits, for the clean captures."""
        return replace(
            self, edits=(), takes=self.clean_takes, clean_takes=(), target=len(self.sequence), written=0, fed=0,
            index=-1, done=False, counters=dict.fromkeys(ROW_COUNTERS, 0), fresh=True, reply=reply, kept=None,
        )  # fmt: skip

    @property
    def num_drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.sequence) - self.sequence.num_prompt

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
