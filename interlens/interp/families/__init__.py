"""Where the sites of a model family are: one small table per family, one file per kind of block.

A `Point` is a place in a decoder layer (or, for `embed`, `final_norm` and `logits`, in the text decoder or the whole
model) at which a value can be read and replaced. A `Family` maps site names to points; a site may have several, tried
in order, of which the first whose module exists in a given layer counts (dense and sparse layers in one stack).
To add a family, add a file here that defines `FAMILIES`, a tuple of `Family`; nothing else needs to change.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place: which module, which end of it, and how the value there relates to the site."""

    path: str
    """Module path inside the layer (or text decoder); "" is the layer itself."""
    end: str = "out"
    """"in": the module's input. "out": its output. "linear": what a router's linear map gives, before selection."""
    in_place: bool = False
    """The model keeps a second reference to this very tensor (the skip connection): an edit must be written into it."""
    shared: bool = False
    """The model changes this tensor in place afterwards: readers get a copy."""
    columns: Callable[[Any, int], Any] | None = None
    """(layer, full width) -> indices of the site's columns in a fused projection, in the site's own order."""
    scale: Callable[[Any, Any], Any] | None = None
    """(layer, module's input) -> factor that turns the module's value into the contribution the site means."""
    when: Callable[[Any], bool] | None = None
    """(text config) -> whether this point holds in this configuration."""


def out(path: str, **options) -> Point:
    """The output of the module at `path`."""
    return Point(path=path, end="out", **options)


def into(path: str, **options) -> Point:
    """The input of the module at `path`."""
    return Point(path=path, end="in", **options)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one or several `model_type`s whose blocks are built alike."""

    model_types: tuple[str, ...]
    points: Mapping[str, Point | tuple[Point, ...]]
    layers: str = "layers"
    """Name of the list of decoder layers in the text decoder."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Site -> why this family does not have it."""

    def candidates(self, site: str) -> tuple[Point, ...]:
        """The points at which a site may be, to be tried in order."""
        found = self.points.get(site, ())
        return found if isinstance(found, tuple) else (found,)


@cache
def registry() -> dict[str, Family]:
    """`model_type` -> family, over every file of this package and every family registered by a user."""
    table: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for family in module.FAMILIES:
            for model_type in family.model_types:
                if model_type in table:
                    raise ValueError(f"model type {model_type!r} is claimed by two families")
                table[model_type] = family
    return table


def register_family(family: Family) -> None:
    """Add a family at run time (for architectures outside transformers)."""
    for model_type in family.model_types:
        registry()[model_type] = family
