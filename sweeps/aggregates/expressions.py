"""Contrasts and filters as expressions over named columns: a small grammar of our own, never `eval`.

    contrast := condition " vs " condition            framing == 'warm' vs framing == 'cold'
    condition := any of: or, and, not, ( ), and comparisons
    comparison := name (== | != | < | <= | > | >=) literal | name in [literal, ...] | name not in [...] | name
    literal := 'text' | "text" | number | true | false | null

Names are letters, digits, `_` and dots (`intervention.coef`, `item.topic`, `outcome.score`). Comparing with null, or a
number with a text, is false for an order and unequal for `==`; a bare name is true where its value is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[^\W\d][\w.]*(?:\[\d+\])?(?:[\w.]*))"
    r"|(?P<op>==|!=|<=|>=|<|>|\(|\)|\[|\]|,))"
)

_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}

_RESERVED = {"and", "or", "not", "in", "vs", *_CONSTANTS}

_ORDER = ("<", "<=", ">", ">=")

Row = Mapping[str, Any]

_Test = Callable[[Row], bool]


@dataclass(frozen=True)
class Expression:
    """A parsed condition: call it with a row (name -> value)."""

    source: str
    names: frozenset[str]
    test: _Test

    def __call__(self, row: Row) -> bool:
        """Whether the row meets the condition. KeyError for a missing column, naming those there are."""
        for name in self.names:
            if name not in row:
                raise KeyError(f"no column {name!r} in {self.source!r}; there are: {', '.join(sorted(row)) or 'none'}")
        return self.test(row)

    def check(self, known: Iterable[str]) -> None:
        """ValueError if the expression uses a name that is not among `known`."""
        known = set(known)
        for name in sorted(self.names - known):
            raise ValueError(f"no column {name!r} in {self.source!r}; there are: {', '.join(sorted(known)) or 'none'}")


@dataclass(frozen=True)
class Contrast:
    """Two conditions; a row is positive, negative, or neither."""

    source: str
    positive: Expression
    negative: Expression

    @property
    def names(self) -> frozenset[str]:
        return self.positive.names | self.negative.names

    def side(self, row: Row) -> str | None:
        """ "pos", "neg" or None. ValueError for a row that is both."""
        positive, negative = self.positive(row), self.negative(row)
        if positive and negative:
            raise ValueError(f"a row is on both sides of {self.source!r}; make the two conditions exclude each other")
        return "pos" if positive else "neg" if negative else None

    def check(self, known: Iterable[str]) -> None:
        """ValueError if either side uses a name that is not among `known`."""
        known = set(known)
        self.positive.check(known)
        self.negative.check(known)


def parse(source: str) -> Expression:
    """Parse a condition. ValueError saying where it stops making sense."""
    parser = _Parser(source)
    test = parser.disjunction()
    parser.end()
    return Expression(source, frozenset(parser.names), test)


def parse_contrast(source: str) -> Contrast:
    """Parse `condition vs condition`."""
    parser = _Parser(source)
    start = 0
    first = parser.disjunction()
    first_names, split = frozenset(parser.names), parser.position()
    parser.names.clear()
    parser.expect("vs")
    after = parser.position()
    second = parser.disjunction()
    parser.end()
    return Contrast(
        source,
        Expression(source[start:split].strip(), first_names, first),
        Expression(source[after:].strip(), frozenset(parser.names), second),
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    return a == b


def _ordered(a: Any, b: Any, op: str) -> bool:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    if not numbers and not (isinstance(a, str) and isinstance(b, str)):
        return False
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[op]


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, source: str):
        if not isinstance(source, str) or not source.strip():
            raise ValueError(f"an expression is a text such as \"framing == 'warm'\", got {source!r}")
        self.source = source
        self.names: set[str] = set()
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while source[at:].strip():
            match = _TOKEN.match(source, at)
            if match is None:
                raise ValueError(f"cannot read {source!r} from {source[at:].strip()[:20]!r}")
            kind = match.lastgroup or ""
            self._tokens.append((kind, match.group(kind), match.start(kind)))
            at = match.end()
        self._next = 0

    def position(self) -> int:
        return self._tokens[self._next][2] if self._next < len(self._tokens) else len(self.source)

    def peek(self) -> str | None:
        """The next operator or word; None at the end or before a text."""
        kind, token, _ = self._tokens[self._next] if self._next < len(self._tokens) else ("", None, 0)
        return None if kind == "text" else token

    def take(self) -> tuple[str, str]:
        if self._next >= len(self._tokens):
            raise ValueError(f"{self.source!r} ends too early")
        kind, token, _ = self._tokens[self._next]
        self._next += 1
        return kind, token

    def expect(self, token: str) -> None:
        at = self.position()
        if self.peek() != token:
            raise ValueError(f"expected {token!r} in {self.source!r} at {self.source[at : at + 20]!r}")
        self._next += 1

    def end(self) -> None:
        if self._next < len(self._tokens):
            at = self.position()
            raise ValueError(f"cannot read the rest of {self.source!r}: {self.source[at : at + 20]!r}")

    def disjunction(self) -> _Test:
        tests = [self.conjunction()]
        while self.peek() == "or":
            self.take()
            tests.append(self.conjunction())
        return tests[0] if len(tests) == 1 else lambda row: any(test(row) for test in tests)

    def conjunction(self) -> _Test:
        tests = [self.negation()]
        while self.peek() == "and":
            self.take()
            tests.append(self.negation())
        return tests[0] if len(tests) == 1 else lambda row: all(test(row) for test in tests)

    def negation(self) -> _Test:
        if self.peek() == "not":
            self.take()
            test = self.negation()
            return lambda row: not test(row)
        if self.peek() == "(":
            self.take()
            test = self.disjunction()
            self.expect(")")
            return test
        return self.comparison()

    def comparison(self) -> _Test:
        kind, name = self.take()
        if kind != "name" or name in _RESERVED:
            raise ValueError(f"expected a column name in {self.source!r}, got {name!r}")
        self.names.add(name)
        op = self.peek()
        if op in ("==", "!="):
            self.take()
            value, equal = self.literal(), op == "=="
            return lambda row: _same(row[name], value) is equal
        if op in _ORDER:
            self.take()
            limit = self.literal()
            return lambda row: _ordered(row[name], limit, op)
        if op in ("in", "not"):
            self.take()
            if op == "not":
                self.expect("in")
            values = self.listing()
            return lambda row: any(_same(row[name], value) for value in values) is (op == "in")
        return lambda row: bool(row[name])

    def listing(self) -> list[Any]:
        self.expect("[")
        values = []
        while self.peek() != "]":
            if values:
                self.expect(",")
            values.append(self.literal())
        self.expect("]")
        return values

    def literal(self) -> Any:
        kind, token = self.take()
        if kind == "number":
            value = float(token)
            return int(value) if value.is_integer() else value
        if kind == "text":
            return re.sub(r"\\(.)", r"\1", token[1:-1])
        if kind == "name" and token in _CONSTANTS:
            return _CONSTANTS[token]
        raise ValueError(f"expected a value in {self.source!r}, got {token!r}; texts need quotes, e.g. '{token}'")
