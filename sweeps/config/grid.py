"""The grid: axes as users write them, and the configuration under a condition."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError, did_you_mean
from .build import build
from .schema import AxisConfig, InterventionConfig, SweepConfig

ROOTS = {
    "framing": "scenario.framing",
    "trunk": "scenario.trunk",
    "side": "scenario.side",
}
"""The short forms."""

ACTS = ("scenario.framing", "scenario.side", "scenario.branch.", "scenario.participants.", "scenario.trunk.",
        "scenario.logprobs", "scenario.opening", "scenario.reasoning_visibility", "intervention", "models.")  # fmt: skip
"""What an axis may vary: everything else is in no cell's text or records, or acts before the branch point."""


def full_path(path: str) -> str:
    """`framing` and `trunk.x` written out."""
    head, _, rest = path.partition(".")
    return f"{ROOTS[head]}{'.' + rest if rest else ''}" if head in ROOTS else path


def axes(grid: Any) -> list[AxisConfig]:
    """The axes of a `grid:` section. Nested maps are dotted paths until a list or a map of named values is reached."""
    if not isinstance(grid, Mapping):
        raise ConfigError(f"grid must be a mapping of dotted config paths to lists or named values, got {grid!r}")
    found: dict[str, AxisConfig] = {}
    for path, value in _leaves(grid, ""):
        found[path] = _axis(path, value)
    return list(found.values())


CONTROLS = ("random", "orthogonal", "zero")
"""What `controls:` of a steering intervention may name."""


def with_controls(edits: list[Any], axes: list[AxisConfig]) -> tuple[list[Any], list[AxisConfig]]:
    """The interventions without their `controls:`, and the axes with what these ask for.

    random, orthogonal: an axis over the direction, `found` and a drawn one of equal norm (orthogonal to it). zero: 0
    among the coefficients. ConfigError for other names, and where the grid varies the direction itself.
    """
    edits, axes = list(edits), list(axes)
    for number, edit in enumerate(edits):
        if not isinstance(edit, Mapping) or "controls" not in edit:
            continue
        edit = dict(edit)
        named = edit.pop("controls") or ()
        named = (named,) if isinstance(named, str) else tuple(named)
        where = f"intervention[{number}].controls"
        if unknown := [name for name in named if name not in CONTROLS]:
            raise ConfigError(f"{where}: no control {unknown[0]!r}; possible: {', '.join(CONTROLS)}")
        if edit.get("kind", "steer") != "steer" or not edit.get("direction"):
            raise ConfigError(f"{where} are for steering along a direction; give one, or leave them out")
        prefix = "intervention" if len(edits) == 1 else f"intervention.{number}"
        known = {axis.path: at for at, axis in enumerate(axes)}
        drawn = [name for name in named if name != "zero"]
        if drawn and f"{prefix}.direction" in known:
            raise ConfigError(f"{where}: the grid varies {prefix}.direction already; name the controls there")
        if drawn:
            directions = {"found": edit["direction"], **{name: f"{name}:1:{edit['direction']}" for name in drawn}}
            axes.append(_axis(f"{prefix}.direction", directions))
        if "zero" in named:
            at = known.get(f"{prefix}.coef")
            if at is None:
                axes.append(_axis(f"{prefix}.coef", list(dict.fromkeys([0, edit.get("coef", 1.0)]))))
            elif 0 not in axes[at].values:
                labels, values = (
                    ("0" if isinstance(axes[at].labels[0], str) else 0, *axes[at].labels),
                    (0, *axes[at].values),
                )
                axes[at] = AxisConfig(path=axes[at].path, labels=labels, values=values)
        edits[number] = edit
    return edits, axes


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping) and _is_section(path, value):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


_SECTION = re.compile(r"scenario(\.(trunk|branch|participants(\.[^.]+)?))?|models(\.[^.]+)?")

_EDIT = re.compile(r"intervention(\.\d+)?")

_EDIT_KEYS = {f.name.rstrip("_") for f in dataclasses.fields(InterventionConfig)}


def _is_section(path: str, value: Mapping[str, Any]) -> bool:
    """True where the map below `path` continues the path; a map of named values does not."""
    if _EDIT.fullmatch(path):
        return all(key in _EDIT_KEYS or str(key).isdigit() for key in value)
    return bool(_SECTION.fullmatch(full_path(path)))


def _axis(path: str, value: Any) -> AxisConfig:
    if isinstance(value, Mapping):
        labels, values = tuple(map(str, value)), tuple(value.values())
    elif isinstance(value, (list, tuple)):
        labels, values = tuple(value), tuple(value)
    else:
        labels, values = (value,), (value,)
    if not values:
        raise ConfigError(f"grid.{path} has no values; give a list or a map of named values, or leave the axis out")
    if any(isinstance(label, (Mapping, list, tuple)) for label in labels):
        raise ConfigError(f"grid.{path}: values that are lists or maps need names; write {{name: value, ...}}")
    if unusable := [v for v in values if isinstance(v, float) and not math.isfinite(v)]:
        raise ConfigError(f"grid.{path} must hold finite numbers, got {unusable[0]}")
    if not full_path(path).startswith(ACTS):
        raise ConfigError(
            f"grid.{path}: nothing there can make another cell{did_you_mean(path, ('framing', 'trunk.<key>', *ACTS))}"
        )
    if full_path(path) in ("scenario.trunk.seeds", "scenario.branch.seeds"):
        raise ConfigError(
            f"grid.{path}: seeds are no axis; set scenario.{path.split('.')[-2]}.seeds to a number or a list"
        )
    return AxisConfig(path=path, labels=tuple(_label(v) for v in labels), values=values)


def _label(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def conditions(axes: tuple[AxisConfig, ...]) -> Iterator[dict[str, Any]]:
    """Every point of the grid (axis path -> label), the first axis slowest. One empty condition without axes."""
    for point in itertools.product(*(axis.labels for axis in axes)):
        yield dict(zip((axis.path for axis in axes), point, strict=True))


def applied(config: SweepConfig, condition: Mapping[str, Any]) -> SweepConfig:
    """The configuration under a condition (axis path -> label), its grid left out: what a cell or trunk runs with."""
    plain = config.to_dict()
    plain["grid"] = []
    known = {axis.path: axis for axis in config.grid}
    for path, label in condition.items():
        if path not in known:
            raise ConfigError(f"no axis {path!r} in this grid{did_you_mean(path, known)}")
        axis = known[path]
        if label not in axis.labels:
            raise ConfigError(f"no value {label!r} on axis {path!r}{did_you_mean(label, axis.labels)}")
        value = next(v for k, v in zip(axis.labels, axis.values, strict=True) if k == label)
        set_path(plain, full_path(path), value, f"grid.{path}")
    return build(SweepConfig, plain)


def set_path(plain: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set a dotted path in nested plain values. A list of one needs no index; unknown steps are a ConfigError."""
    node: Any = plain
    *steps, last = path.split(".")
    if path == "intervention":
        plain["intervention"] = [] if value is None else [value] if isinstance(value, Mapping) else list(value)
        return
    for step in steps:
        node = _step(node, step, where)
    if isinstance(node, list):
        node = _step(node, "", where) if not last.isdigit() else node
    if isinstance(node, list):
        node[_index(node, last, where)] = value
    elif isinstance(node, dict) and (last in node or path.startswith("models.")):
        node[last] = value
    else:
        raise ConfigError(f"{where}: no key {last!r} there{did_you_mean(last, node if isinstance(node, dict) else ())}")


def _step(node: Any, step: str, where: str) -> Any:
    if isinstance(node, list):
        if step.isdigit():
            return node[_index(node, step, where)]
        if not node:
            raise ConfigError(
                f"{where}: this sweep has no {where.split('.')[1]} to vary; give it one (intervention=steer and its keys, "
                "or an intervention: section), or take the axis out of the grid"
            )
        if len(node) != 1:
            raise ConfigError(
                f"{where}: there are {len(node)} entries; name one by its number, as in intervention.0.coef"
            )
        node = node[0]
        return node if step == "" else _step(node, step, where)
    if not isinstance(node, dict) or step not in node:
        raise ConfigError(f"{where}: no key {step!r} there{did_you_mean(step, node if isinstance(node, dict) else ())}")
    return node[step]


def _index(node: list, step: str, where: str) -> int:
    if not step.isdigit() or int(step) >= len(node):
        raise ConfigError(f"{where}: no entry {step!r}; there are {len(node)}, counted from 0")
    return int(step)
