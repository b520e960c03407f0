"""What is refused when a participant is made: sampling that cannot be, and options that do not exist."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any


def check_sampling(
    name: str, *, temperature: float | None, top_p: float | None, max_new_tokens: int, top_k: int | None = None
) -> None:
    """ValueError for values that no draw can be made with. None: no limit, or the provider's own."""
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"{name}: temperature is {temperature}; it must be a finite number of at least 0 (0: greedy)")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"{name}: top_p is {top_p}; it must lie in (0, 1], or be None")
    for option, value in (("top_k", top_k), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {option} is {value}; it must be at least 1")


def check_names(given: Iterable[str], *takers: Callable[..., Any]) -> None:
    """TypeError, with the nearest and all possible names, for an option that none of `takers` has."""
    parameters = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = sorted({*known, "load_options"} - {"self", "weights", "name"})
    for option in given:
        if option not in known:
            close = difflib.get_close_matches(option, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ";"
            raise TypeError(f"no option {option!r}{meant} possible: {', '.join(known)}")
