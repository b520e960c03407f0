"""Numbers as a caller gives them: Python's, numpy's and torch's alike. Texts and booleans are refused by name.

A text is a sequence of its characters and a boolean counts as 0 or 1, so without this "16" would be layers 1 and 6.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

Given = Any
"""A number, or several, as a caller gives them: what is taken is said by the function that takes it."""


def plain(value: Any) -> Any:
    """The Python value of a numpy scalar, or of an array or tensor without dimensions; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def whole(value: Any, what: str) -> int:
    """A whole number as an int. ValueError, naming `what`, for a text, a boolean or a number with a point."""
    number = plain(value)
    if not isinstance(number, bool):
        try:
            return operator.index(number)
        except TypeError:
            pass
    raise ValueError(f"{what} must be a whole number (of Python, numpy or torch), got {value!r}{_hint(number)}")


def wholes(values: Any, what: str) -> tuple[int, ...]:
    """One whole number, or a sequence, array or tensor of them, as ints in their order. ValueError as for `whole`."""
    values = plain(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        return tuple(whole(value, what) for value in values)
    try:
        return (whole(values, what),)
    except ValueError:
        raise ValueError(
            f"{what} must be a whole number or a sequence of them (of Python, numpy or torch), got {values!r}"
            f"{_hint(values)}"
        ) from None


def real(value: Any, what: str) -> float:
    """A finite number as a float. ValueError, naming `what`, for a text, a boolean, NaN or infinity."""
    number = plain(value)
    if not isinstance(number, (bool, str, bytes)):
        try:
            if math.isfinite(number):
                return float(number)
        except (TypeError, OverflowError):
            pass
    raise ValueError(f"{what} must be finite, a number (of Python, numpy or torch), got {value!r}{_hint(number)}")


def _hint(value: Any) -> str:
    """What may have been meant."""
    if isinstance(value, str):
        return "; a text is not read as a number: convert it first"
    if isinstance(value, bool):
        return "; True and False are not counted as 1 and 0"
    return ""
