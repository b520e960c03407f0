"""Aggregates: what a run computes from its cells. A registry, one file each, of two kinds.

A **Sum** streams: it runs on the replicas while cells finish, its state is a flat dict of float64 arrays, and any split
and order of the cells gives the same result to rounding. A **Fit** runs once the data is in, over what is stored. An
aggregate has one of them or both; its result is plain JSON in `RUN/aggregates/<name>.json`, directions beside it in
`<name>.safetensors`. Mathematics lives in `interlens.statistics` and `interlens.probes`; an aggregate names columns.

To add a kind, add a file to `kinds/` that ends with `AGGREGATE = <its class>`; nothing else needs to change.
In a configuration, `aggregate: {<name>: {kind: <kind>, ...options}}`; the kind is the name where it is left out.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.limits import NAME
from .base import Sum
from .fit import Fit

if TYPE_CHECKING:
    from ..config.schema import AggregateConfig, SweepConfig


@cache
def kinds() -> tuple[str, ...]:
    """The kinds there are: every file of `kinds/` that says `AGGREGATE = <its class>`, by the file's name."""
    files = sorted((Path(__file__).parent / "kinds").glob("*.py"))
    return tuple(file.stem for file in files if re.search(r"^AGGREGATE = ", file.read_text("utf-8"), re.MULTILINE))


SHORT_NAMES = {"directions": "difference_of_means", "dose_response": "outcomes"}


def build(aggregate: Iterable[AggregateConfig], config: SweepConfig | None = None) -> list[Sum | Fit]:
    """The aggregates of a configuration's `aggregate:` section, in its order.

    ValueError for an unknown kind, option or expression; with `config`, also for columns that none of its cells will
    have. Call it before a run starts.
    """
    built: list[Any] = [_build_one(entry.name, dict(entry.options or {})) for entry in aggregate]
    for made in built:
        if config is not None and hasattr(made, "check"):
            try:
                made.check(config)
            except ValueError as error:
                raise ValueError(f"aggregate {made.name!r}: {error}") from error
    return built


def _build_one(name: str, options: dict[str, Any]) -> Sum | Fit:
    if not NAME.fullmatch(name):  # it becomes a file's
        raise ValueError(
            f"{name[:80]!r} cannot name an aggregate; use up to 64 letters, digits, '_', '-', '.' or blanks"
        )
    kind = options.pop("kind", SHORT_NAMES.get(name, name))
    path = f"{__package__}.kinds.{kind}:AGGREGATE" if kind in kinds() else str(kind)
    if ":" not in path:
        raise ValueError(
            f"no aggregate {kind!r}; there are: {', '.join(kinds())}; or give an import path 'module:Class'"
        )
    module, _, attribute = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"aggregate {name!r}: cannot import {path!r}: {error}") from error
    _check_options(made, f"aggregate {name!r} ({kind})", options)
    try:
        return made(name, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"aggregate {name!r} ({kind}): {error}") from error


def _check_options(made: Any, which: str, options: Mapping[str, Any]) -> None:
    """ValueError for an option that it does not have, or must be given and is not."""
    known = dict([*inspect.signature(made).parameters.items()][1:])
    listed = f"options: {', '.join(known) or 'none'}"
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for option in options:
            if option not in known:
                close = difflib.get_close_matches(option, known, 1)
                nearest = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(f"{which} has no option {option!r}; {nearest}{listed}")
    for option, p in known.items():
        if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and option not in options:
            shown = """, as in contrast: "framing == 'warm' vs framing == 'cold'\"""" * (option == "contrast")
            raise ValueError(f"{which} needs {option}{shown}; {listed}")


def sums(aggregates: Iterable[Sum | Fit]) -> list[Sum]:
    """Those that stream on replicas."""
    return [aggregate for aggregate in aggregates if isinstance(aggregate, Sum)]
