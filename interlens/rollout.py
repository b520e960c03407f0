"""Many conversations at once, and what became of each. `scheduler` says how they share engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from .capturing import Capturing, check_sites
from .errors import UnsupportedIntervention
from .interp.activation_cache import ActivationCache, CaptureSpec, as_tuple
from .policies.stopping import Until
from .scheduler import drive
from .transcript import Transcript
from .work import Captures, ReadableConversation, Steps

__all__ = ["RolloutReport", "RolloutResult", "rollout", "run"]


C = TypeVar("C", bound="RollableConversation")


@runtime_checkable
class RollableConversation(ReadableConversation, Protocol):
    """What a rollout does to a conversation."""

    key: Any
    seed: int
    unopened: bool
    capturing: list[Capturing]

    def with_row(self: C, row: Mapping[str, Any] | None) -> C:
        """A branch whose texts are filled from `row`."""
        ...

    def must_open(self) -> None:
        """Fill message 0 if it is still missing; what filling it raises."""
        ...

    def play(self, turns: int | None = None, until: Until = None) -> Steps:
        """Take turns until `turns` or a stop condition."""
        ...

    def add_capture(self, spec: CaptureSpec, cache: ActivationCache) -> Capturing:
        """Record into `cache` from now on."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutResult(Generic[C]):
    """One conversation of a rollout. With `error` set, `transcript` holds the turns before it."""

    index: int
    row: Mapping[str, Any] | None
    conversation: C
    analysis: dict[str, Any] | None = None
    error: BaseException | None = None
    traceback: str | None = None
    cache: ActivationCache | None = None

    @property
    def transcript(self) -> Transcript:
        """What was said; with `error` set, in the turns before it."""
        return self.conversation.transcript

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended; "error" for a failed one."""
        return "error" if self.error is not None else self.conversation.stop_reason


@dataclass(frozen=True, kw_only=True)
class RolloutReport(Generic[C]):
    """What became of every conversation, in order."""

    results: list[RolloutResult[C]] = field(default_factory=list)

    @property
    def failed(self) -> list[RolloutResult[C]]:
        """The results that have an error."""
        return [r for r in self.results if r.error is not None]

    def transcripts(self) -> list[Transcript]:
        """The transcript of each conversation, in order."""
        return [r.transcript for r in self.results]

    def analyses(self) -> list[dict[str, Any] | None]:
        """What the analyzer gave; None for a failed conversation."""
        return [r.analysis for r in self.results]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[RolloutResult[C]]:
        return iter(self.results)


def rollout(
    conversation: C, n: int | None = None, *, data: Iterable[Mapping[str, Any]] | None = None,
    seed: int | None = None, turns: int | None = None, until: Until = None,
    analyzer: Callable[[C], dict] | None = None, capture: Captures = None,
) -> RolloutReport[C]:  # fmt: skip
    """See `Conversation.rollout`."""
    if conversation.capturing:
        raise UnsupportedIntervention(
            "a rollout inside a capture block would record nothing there, since its conversations are branches; give "
            "rollout(..., capture=CaptureSpec(...)): each result then has its own cache"
        )
    rows = None if data is None else list(data)
    for number, row in enumerate(rows or ()):
        if not isinstance(row, Mapping):
            raise TypeError(f"row {number} of data is no mapping of columns to values: {row!r}")
    if rows is not None and not rows:
        raise ValueError("data has no rows")
    if n is None and rows is None:
        raise ValueError("how many conversations? give n=..., data=[...], or both")
    if n is not None and n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    count = len(rows or ()) if n is None else n
    made = []
    for i in range(count):
        other = conversation.with_row(dict(rows[i % len(rows)]) if rows else conversation.row)
        other.key = i
        if seed is not None:
            other.seed = seed
        made.append(other)
    if all(other.unopened for other in made):  # no row fits: the text is wrong, not the rows
        made[0].must_open()
    return run(made, turns=turns, until=until, analyzer=analyzer, capture=capture)


def run(
    conversations: Sequence[C], *, turns: int | None = None, until: Until = None,
    analyzer: Callable[[C], dict] | None = None, capture: Captures = None, max_live: int | None = None,
) -> RolloutReport[C]:  # fmt: skip
    """Run several conversations together, each as `conversation.run(turns, until)` would. One that fails fails alone.

    capture: CaptureSpecs, for every participant that can be captured; each result has its own cache.
    """
    if turns is None and until is None:
        raise ValueError("a run needs an end: give turns=..., until=..., or both")
    conversations = list(conversations)
    if len({id(c) for c in conversations}) < len(conversations):
        raise ValueError("a conversation is given twice; to run it twice, give conversation.branch(seed=...) as well")
    caches = [_begin_capture(c, capture) for c in conversations]
    outcomes = drive((_analyzed(c, turns, until, analyzer) for c in conversations), max_live=max_live)
    results = []
    for i, (conversation, outcome, (cache, blocks)) in enumerate(zip(conversations, outcomes, caches, strict=True)):
        conversation.capturing = [b for b in conversation.capturing if b not in blocks]
        results.append(
            RolloutResult(
                index=i, row=conversation.row, conversation=conversation, analysis=outcome.value, error=outcome.error,
                traceback=outcome.traceback, cache=cache,
            )
        )  # fmt: skip
    return RolloutReport(results=results)


def _begin_capture(conversation: RollableConversation, capture: Captures) -> tuple[ActivationCache | None, list]:
    specs = as_tuple(capture)
    if not specs:
        return None, []
    for spec in specs:
        check_sites(spec)  # all of them before the first is in force
    cache = ActivationCache(offload=specs[0].offload)
    return cache, [conversation.add_capture(spec, cache) for spec in specs]


def _analyzed(conversation: RollableConversation, turns: int | None, until: Until, analyzer: Any) -> Steps:
    yield from conversation.play(turns, until)
    if analyzer is None:
        return None
    found = analyzer(conversation)
    if not isinstance(found, Mapping) or not all(isinstance(v, (str, Real)) for v in found.values()):
        raise TypeError(f"an analyzer gives a dict of numbers and strings, not {found!r}")
    return dict(found)
