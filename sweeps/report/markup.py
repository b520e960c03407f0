"""HTML from plain values. Everything is escaped unless it is already `Markup`, so model text can never become a tag."""

from __future__ import annotations

import html
import re
from typing import Any


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")

_VOID = {"meta", "br", "line", "rect", "circle", "path"}


def text(value: Any) -> Markup:
    """Escaped text. Control and direction-override characters are shown as symbols, broken surrogates as `?`."""
    if isinstance(value, Markup):
        return value
    shown = _CONTROL.sub(_visible, str(value)).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(shown, quote=True))


def _visible(match: re.Match) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `None` children and attributes are left out; `class_` and `font_size` become class and font-size."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = "".join(text(child) for child in children if child is not None)
    if not inner and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def join(parts: Any) -> Markup:
    """Several pieces one after the other."""
    return Markup("".join(text(part) for part in parts if part is not None))


def table(head: list[Any], rows: list[list[Any]], numeric: int = 1) -> Markup:
    """A table; columns from `numeric` on are aligned as numbers."""
    cells = lambda name, row: (  # noqa: E731
        tag(name, value, class_="num" if i >= numeric else None) for i, value in enumerate(row)
    )
    body = [tag("tr", *cells("td", row)) for row in rows]
    return tag("div", tag("table", tag("thead", tag("tr", *cells("th", head))), tag("tbody", *body)), class_="scroll")


def number(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits, a true minus sign, no exponent for ordinary sizes; – for none."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}".replace(",", "\u202f").replace("-", "−")
    written = f"{value:.{digits}g}"
    if "e" in written and 1 <= abs(value) < 1e6:
        written = f"{value:.0f}"
    return written.replace("-", "−")


def interval(found: dict[str, Any] | None, digits: int = 3) -> str:
    """`value (low to high)`."""
    if not found:
        return "–"
    return f"{number(found['value'], digits)} ({number(found['low'], digits)} to {number(found['high'], digits)})"
