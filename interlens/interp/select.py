"""`Select`: the one language for "which tokens".

A selection is a causal function of a `TokenSequence`: whether position p is selected depends only on the prompt, its
layout, and the tokens up to p. The same `mask` therefore serves prefill, decode and a finished sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ..given import Given, whole
from ..reasoning import Markers, PhaseTracker

PHASES = ("prompt", "reasoning", "answer")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a view knows of a token sequence and token ids alone do not say. All positions are absolute, half-open."""

    message_spans: Mapping[int, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Transcript index -> its content tokens in the prompt (no markup)."""
    special_spans: tuple[tuple[int, int], ...] = ()
    """Prompt tokens that are BOS, stop or markup."""
    special_ids: frozenset[int] = frozenset()
    """Token ids that count as special when generated (stop tokens, markup)."""
    markers: Markers | None = None
    """How reasoning is opened and closed; None: everything generated is answer."""
    branch_start: int | None = None
    """The first position after the trunk; None: no trunk."""


class TokenSequence:
    """One prompt and what was generated after it: ids, phases, layout. Grows by `append`."""

    def __init__(self, prompt: list[int], layout: Layout | None = None):
        self.ids: list[int] = list(prompt)
        self.num_prompt = len(self.ids)
        self.layout = layout or Layout()
        self.phases: list[str] = []
        """Phase of each generated token."""
        self._tracker = PhaseTracker(self.layout.markers)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def generated(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[self.num_prompt :]

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.ids.append(token)
        self.phases.append(self._tracker.feed(token))

    def phase_at(self, position: int) -> str:
        """The phase of the token at a position."""
        return "prompt" if position < self.num_prompt else self.phases[position - self.num_prompt]


@dataclass(frozen=True)
class Select:
    """A selection of token positions. Build with the class methods; combine with `|` and `-`."""

    op: str
    args: tuple = ()

    @classmethod
    def of(cls, given: Any, what: str = "tokens") -> Select:
        """A selection as a caller gives it: a Select, or its text (see `parse`). ValueError for anything else."""
        if isinstance(given, Select):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        raise ValueError(
            f"{what} must be a Select, such as Select.phase('answer'), or its text as Select.parse reads it, such as "
            f"'answer - special'; got {given!r}"
        )

    @classmethod
    def all(cls) -> Select:
        """Every position of the sequence."""
        return cls("all")

    @classmethod
    def prompt(cls) -> Select:
        """[0, P)."""
        return cls("prompt")

    @classmethod
    def generated(cls, lead: Given = 0) -> Select:
        """[P - lead, S). `lead=1` starts at the position that predicts the first new token."""
        lead = whole(lead, "lead of Select.generated")
        if lead < 0:
            raise ValueError(f"lead must be a whole number >= 0, got {lead!r}")
        return cls("generated", (lead,))

    @classmethod
    def phase(cls, name: str) -> Select:
        """Positions of one phase: prompt, reasoning or answer."""
        if name not in PHASES:
            raise ValueError(f"no phase {name!r}; there are: {', '.join(PHASES)}")
        return cls("phase", (name,))

    @classmethod
    def positions(cls, *positions: Given) -> Select:
        """These absolute positions; negative ones count from the end of the prompt."""
        if not positions:
            raise ValueError("Select.positions() names no position; give at least one")
        return cls("positions", tuple(whole(p, "a position") for p in positions))

    @classmethod
    def window(cls, start: Given, stop: Given, of: str = "prompt") -> Select:
        """Half-open window within the prompt (negatives from its end) or within what was generated."""
        if of not in ("prompt", "generated"):
            raise ValueError(f"window of {of!r}; possible: 'prompt', 'generated'")
        start, stop = whole(start, "the start of a window"), whole(stop, "the stop of a window")
        if of == "generated" and (start < 0 or stop < 0):
            raise ValueError("a window of what was generated cannot count from its end, unknown while generating")
        if (start < 0) == (stop < 0) and start >= stop:
            raise ValueError(f"window({start}, {stop}) can never match: it is empty")
        return cls("window", (start, stop, of))

    @classmethod
    def message(cls, index: Given) -> Select:
        """Content tokens of transcript message `index` in this view, without markup."""
        return cls("message", (whole(index, "the index of a message"),))

    @classmethod
    def special(cls) -> Select:
        """BOS, stop and markup tokens."""
        return cls("special")

    @classmethod
    def branch(cls) -> Select:
        """Every position from the first token after the trunk; all positions where there is no trunk."""
        return cls("branch")

    @classmethod
    def parse(cls, text: str) -> Select:
        """Read `answer | window(0, 8, of=generated) - special`; `|` and `-` bind alike, from left to right.

        Words: all, prompt, generated, reasoning, answer, branch, special, window(...), message(i), positions(...),
        phase(name), parentheses. `parse(str(selection)) == selection`. ValueError says where it stopped.
        """
        return _Parser(text).whole()

    def __or__(self, other: Select | str) -> Select:
        other = Select.of(other, "the right side of |")
        return Select("or", (self, other))

    def __sub__(self, other: Select | str) -> Select:
        other = Select.of(other, "the right side of -")
        if self == other:
            raise ValueError(f"{self} - {other} can never match: it is empty")
        return Select("minus", (self, other))

    def __str__(self) -> str:
        if self.op in ("or", "minus"):
            return f"({self.args[0]} {'|' if self.op == 'or' else '-'} {self.args[1]})"
        return f"{self.op}({', '.join(map(str, self.args))})"

    def mask(self, sequence: TokenSequence, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Which of the absolute positions [start, stop) are selected: bool [stop - start]. `stop` <= len(sequence)."""
        stop = len(sequence) if stop is None else stop
        return _MASKS[self.op](self, sequence, start, stop)

    def check(self, sequence: TokenSequence) -> None:
        """Raise ValueError where this selection names something this view does not have."""
        if self.op in ("or", "minus"):
            for part in self.args:
                part.check(sequence)
        elif self.op == "message" and self.args[0] not in sequence.layout.message_spans:
            known = sorted(sequence.layout.message_spans)
            raise ValueError(f"no message {self.args[0]} in this view; it has: {', '.join(map(str, known)) or 'none'}")
        elif self.op == "positions" and min(self.args) < -sequence.num_prompt:
            raise ValueError(f"position {min(self.args)} lies before a prompt of {sequence.num_prompt} tokens")


def _span_mask(spans, start: int, stop: int) -> np.ndarray:
    mask = np.zeros(max(stop - start, 0), dtype=bool)
    for first, last in spans:
        if last > start and first < stop:
            mask[max(first - start, 0) : max(last - start, 0)] = True
    return mask


def _from_end(position: int, sequence: TokenSequence) -> int:
    return position + sequence.num_prompt if position < 0 else position


def _all(select, sequence, start, stop):
    return np.ones(max(stop - start, 0), dtype=bool)


def _prompt(select, sequence, start, stop):
    return _span_mask([(0, sequence.num_prompt)], start, stop)


def _generated(select, sequence, start, stop):
    return _span_mask([(max(sequence.num_prompt - select.args[0], 0), stop)], start, stop)


def _phase(select, sequence, start, stop):
    name = select.args[0]
    if name == "prompt":
        return _prompt(select, sequence, start, stop)
    mask = np.zeros(max(stop - start, 0), dtype=bool)
    for position in range(max(start, sequence.num_prompt), stop):
        mask[position - start] = sequence.phases[position - sequence.num_prompt] == name
    return mask


def _positions(select, sequence, start, stop):
    spans = [(p, p + 1) for p in (_from_end(p, sequence) for p in select.args)]
    return _span_mask(spans, start, stop)


def _window(select, sequence, start, stop):
    first, last, of = select.args
    if of == "generated":
        return _span_mask([(first + sequence.num_prompt, last + sequence.num_prompt)], start, stop)
    first, last = _from_end(first, sequence), _from_end(last, sequence)
    return _span_mask([(max(first, 0), min(last, sequence.num_prompt))], start, stop)


def _message(select, sequence, start, stop):
    span = sequence.layout.message_spans.get(select.args[0])
    return _span_mask([span] if span else [], start, stop)


def _special(select, sequence, start, stop):
    mask = _span_mask(sequence.layout.special_spans, start, stop)
    for position in range(max(start, sequence.num_prompt), stop):
        mask[position - start] |= sequence.ids[position] in sequence.layout.special_ids
    return mask


def _branch(select, sequence, start, stop):
    return _span_mask([(sequence.layout.branch_start or 0, stop)], start, stop)


def _or(select, sequence, start, stop):
    return select.args[0].mask(sequence, start, stop) | select.args[1].mask(sequence, start, stop)


def _minus(select, sequence, start, stop):
    return select.args[0].mask(sequence, start, stop) & ~select.args[1].mask(sequence, start, stop)


_MASKS = {
    "all": _all,
    "prompt": _prompt,
    "generated": _generated,
    "phase": _phase,
    "positions": _positions,
    "window": _window,
    "message": _message,
    "special": _special,
    "branch": _branch,
    "or": _or,
    "minus": _minus,
}


class _Parser:
    """Recursive descent over the language of `Select.parse`."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.tokens = [(m.group(), m.start()) for m in re.finditer(r"\w+|[^\w\s]", text)]

    def fail(self, wanted: str) -> ValueError:
        token, start = self.tokens[self.at] if self.at < len(self.tokens) else ("the end", len(self.text))
        words = "all, prompt, generated, reasoning, answer, branch, special, window, message, positions, phase"
        return ValueError(f"selection {self.text!r}: {token!r} at column {start}, expected {wanted}; words: {words}")

    def next_is(self, *options: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at][0] in options:
            self.at += 1
            return self.tokens[self.at - 1][0]
        return None

    def whole(self) -> Select:
        result = self.expression()
        if self.at < len(self.tokens):
            raise self.fail("'|', '-' or the end")
        return result

    def expression(self) -> Select:
        result = self.term()
        while operator := self.next_is("|", "-"):
            other = self.term()
            result = result | other if operator == "|" else result - other
        return result

    def term(self) -> Select:
        if self.next_is("("):
            inner = self.expression()
            if not self.next_is(")"):
                raise self.fail("')'")
            return inner
        start, name = self.at, self.tokens[self.at][0] if self.at < len(self.tokens) else ""
        self.at += 1
        arguments, options = self.arguments() if self.next_is("(") else ([], {})
        builders = {
            "all": Select.all, "prompt": Select.prompt, "generated": Select.generated, "branch": Select.branch,
            "special": Select.special, "window": Select.window, "message": Select.message,
            "positions": Select.positions, "phase": Select.phase,
            "reasoning": lambda: Select.phase("reasoning"), "answer": lambda: Select.phase("answer"),
        }  # fmt: skip
        if name not in builders:
            self.at = start
            raise self.fail("a selection")
        try:
            return builders[name](*arguments, **options)
        except TypeError as error:
            raise ValueError(f"selection {self.text!r}: {name} does not take these arguments ({error})") from None

    def arguments(self) -> tuple[list, dict]:
        positional: list = []
        named: dict = {}
        while not self.next_is(")"):
            if (positional or named) and not self.next_is(","):
                raise self.fail("',' or ')'")
            value = self.value()
            if isinstance(value, str) and self.next_is("="):
                named[value] = self.value()
            else:
                positional.append(value)
        return positional, named

    def value(self) -> int | str:
        sign = -1 if self.next_is("-") else 1
        if self.at >= len(self.tokens) or not re.fullmatch(r"\w+", self.tokens[self.at][0]):
            raise self.fail("a number or a name")
        word = self.tokens[self.at][0]
        self.at += 1
        return sign * int(word) if word.isdigit() else word
