"""Charts as inline SVG: lines with bands over a numeric axis, points with intervals over levels. Colours are CSS's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, join, number, tag

SIZE = (560, 300)

LEFT, RIGHT, TOP, BOTTOM = 68, 16, 14, 44


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value with its interval; `label` is what a pointer resting on it shows."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line. `style`: a CSS class, s0 to s5. `band`: intervals are drawn as an area."""

    name: str
    points: Sequence[Point]
    style: str = "s0"
    band: bool = False
    line: bool = True


def chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str,
    x_names: Sequence[str] | None = None,
    reference: float | None = None,
    y_range: tuple[float, float] | None = None,
    size: tuple[int, int] = SIZE,
) -> Markup:
    """A chart with axes, grid and legend. `x_names`: levels at x = 0, 1, ...; `reference`: a dashed line at this y."""
    series = [s for s in series if s.points]
    if not series:
        return tag("p", "Nothing to draw.", class_="quiet")
    frame = _Frame(series, x_names, reference, y_range, size)
    drawn = [_band(s, frame) for s in series if s.band] + [_marks(s, frame) for s in series]
    mark = None
    if reference is not None:
        y = frame.y(reference)
        mark = tag("line", x1=LEFT, x2=frame.right, y1=_f(y), y2=_f(y), class_="reference")
    svg = tag(
        "svg", tag("title", title), _axes(frame, x_label, y_label, x_names), mark, *drawn,
        viewBox=f"0 0 {size[0]} {size[1]}", role="img", aria_label=title, class_="chart",
    )  # fmt: skip
    keys = join(tag("span", tag("i", class_=f"key {s.style}"), s.name, class_="legend") for s in series)
    return tag("figure", svg, tag("figcaption", keys if len(series) > 1 else title))


class _Frame:
    """Scales from data to the drawing."""

    def __init__(self, series, x_names, reference, y_range, size):
        self.right, self.bottom = size[0] - RIGHT, size[1] - BOTTOM
        xs = [p.x for s in series for p in s.points]
        ys = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
        ys += [reference] if reference is not None else []
        self.x_low, self.x_high = (-0.5, len(x_names) - 0.5) if x_names else _padded(min(xs), max(xs), 0.04)
        self.y_low, self.y_high = y_range or _padded(min(ys), max(ys), 0.06)
        self.x_ticks = sorted(set(xs)) if not x_names and len(set(xs)) <= 10 else ticks(self.x_low, self.x_high)
        self.y_ticks = ticks(self.y_low, self.y_high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        value = min(max(value, self.y_low), self.y_high)
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - TOP)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within [low, high]."""
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _f(value: float) -> str:
    return f"{value:.1f}"


def _axes(frame: _Frame, x_label: str, y_label: str, x_names: Sequence[str] | None) -> Markup:
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(tag("line", x1=LEFT, x2=frame.right, y1=_f(y), y2=_f(y), class_="grid"))
        parts.append(tag("text", number(tick), x=LEFT - 8, y=_f(y + 4), text_anchor="end"))
    named = list(enumerate(x_names)) if x_names else [(tick, number(tick)) for tick in frame.x_ticks]
    for tick, name in named:
        parts.append(tag("text", name, x=_f(frame.x(tick)), y=frame.bottom + 18, text_anchor="middle"))
    middle = (TOP + frame.bottom) / 2
    parts.append(
        tag("text", x_label, x=(LEFT + frame.right) / 2, y=frame.bottom + 38, text_anchor="middle", class_="label")
    )
    turned = f"rotate(-90 12 {middle})"
    parts.append(tag("text", y_label, x=12, y=middle, text_anchor="middle", class_="label", transform=turned))
    return tag("g", *parts, class_="axes")


def _band(s: Series, frame: _Frame) -> Markup | None:
    points = [(p.x, p.low, p.high) for p in s.points if p.low is not None and p.high is not None]
    if len(points) < 2:
        return None
    upper = [f"{_f(frame.x(x))},{_f(frame.y(high))}" for x, _, high in points]
    lower = [f"{_f(frame.x(x))},{_f(frame.y(low))}" for x, low, _ in reversed(points)]
    return tag("path", d="M" + "L".join(upper + lower) + "Z", class_=f"band {s.style}")


def _marks(s: Series, frame: _Frame) -> Markup:
    parts = []
    if s.line and len(s.points) > 1:
        path = "M" + "L".join(f"{_f(frame.x(p.x))},{_f(frame.y(p.y))}" for p in s.points)
        parts.append(tag("path", d=path, class_=f"line {s.style}"))
    for p in s.points:
        x = _f(frame.x(p.x))
        if not s.band and p.low is not None and p.high is not None:
            parts.append(
                tag("line", x1=x, x2=x, y1=_f(frame.y(p.low)), y2=_f(frame.y(p.high)), class_=f"bar {s.style}")
            )
        dot = tag("circle", tag("title", p.label) if p.label else None, cx=x, cy=_f(frame.y(p.y)), r=3.5,
                  class_=f"dot {s.style}")  # fmt: skip
        parts.append(dot)
    return tag("g", *parts)
