"""Which cell gives its activations to which: `from:` of a patch, read and checked before anything runs.

`from: {axis: value}` names a point of the grid; the other axes, item and seeds are the recipient's own. The cell itself
(`{}`) gives what it computes without that patch. `from: run:<path>` names the same cell of another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from interlens.interp.select import Select

from ..config.grid import applied, conditions, full_path
from ..config.schema import AxisConfig, InterventionConfig, SweepConfig
from ..errors import ConfigError, did_you_mean
from .casts import cast_of

POSSIBLE = "possible: axis values as in {framing: warm}, {} for the cell itself, run:<run folder>"


@dataclass(frozen=True, kw_only=True)
class From:
    """`from:` of a patch, taken apart."""

    run: str | None = None
    """Folder of another run; None: this one."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> label of the donor."""


def parse_from(given: Any, where: str = "intervention") -> From:
    """What `from:` names. ConfigError says what is possible."""
    if isinstance(given, str) and given.startswith("run:") and len(given) > 4:
        return From(run=given[4:])
    if isinstance(given, Mapping):
        labels = {str(axis): label for axis, label in given.items() if axis != "run"}
        return From(run=given.get("run") and str(given["run"]).removeprefix("run:"), labels=labels)
    raise ConfigError(f"{where}.from is {'missing' if given is None else repr(given)}; {POSSIBLE}")


def patches(config: SweepConfig) -> list[InterventionConfig]:
    """The patches of an applied configuration, in order."""
    return [edit for edit in config.intervention if edit.kind == "patch" and edit.layers]


def selects_prompt(select: Select) -> bool:
    """False for a selection that has no position of any prompt."""
    if select.op == "or":
        return any(map(selects_prompt, select.args))
    if select.op == "minus":
        return selects_prompt(select.args[0])
    if select.op == "phase":
        return select.args[0] == "prompt"
    return select.op != "generated" and not (select.op == "window" and select.args[2] == "generated")


def donor_condition(axes: tuple[AxisConfig, ...], condition: Mapping[str, Any], labels: Mapping[str, Any],
                    where: str = "intervention") -> dict[str, Any]:  # fmt: skip
    """The condition with these axes at other labels. ConfigError for an axis or a label that the grid does not have."""
    known = {full_path(axis.path): axis for axis in axes}
    found = dict(condition)
    for path, label in labels.items():
        axis = known.get(full_path(path))
        if axis is None:
            raise ConfigError(
                f"{where}.from: no axis {path!r} in this grid{did_you_mean(path, (a.path for a in axes))}; {POSSIBLE}"
            )
        if label not in axis.labels:
            raise ConfigError(f"{where}.from: no value {label!r} on axis {path!r}{did_you_mean(label, axis.labels)}")
        found[axis.path] = axis.labels[axis.labels.index(label)]
    return found


def values(config: SweepConfig) -> Iterator[tuple[str, Any]]:
    """(`from` as it stands in `inputs`, value) of every axis value that some patch names: what ids hash of it."""
    axes = {full_path(axis.path): axis for axis in config.grid}
    for edit in _every(config):
        for path, label in parse_from(edit.from_).labels.items():
            axis = axes.get(full_path(path))
            if axis is not None and label in axis.labels:
                yield entry(path, label), axis.values[axis.labels.index(label)]


def entry(path: str, label: Any) -> str:
    """The name under which an axis value of a `from:` stands in `inputs`."""
    return f"from:{full_path(path)}={label}"


def runs(config: SweepConfig) -> list[str]:
    """Folders of other runs that some patch reads from."""
    found = (parse_from(edit.from_).run for edit in _every(config))
    return [path for path in dict.fromkeys(found) if path]


def has_patches(config: SweepConfig) -> bool:
    """True if some condition patches."""
    return any(True for _ in _every(config))


def ties_trunks(config: SweepConfig) -> bool:
    """True if a patch may reach from one trunk of an item into another: they then stay in one unit."""
    return any(axis.is_trunk for axis in config.grid) and has_patches(config)


def _every(config: SweepConfig) -> Iterator[InterventionConfig]:
    """Every patch under the base and every single axis value."""
    under = [config]
    for axis in config.grid:
        if full_path(axis.path).startswith("intervention"):
            under += [applied(config, {axis.path: label}) for label in axis.labels]
    return (edit for c in under for edit in c.intervention if edit.kind == "patch" and edit.from_ is not None)


def check(config: SweepConfig) -> None:
    """ConfigError for a donor that the grid does not have, that has another cast, or that waits for its recipient."""

    if not has_patches(config):
        return
    points = [tuple(c.items()) for c in conditions(config.grid)]
    donors: dict[tuple, list[tuple]] = {}
    casts = {}
    for point in points:
        under = applied(config, dict(point))
        casts[point] = cast_of(under)
        donors[point] = [
            tuple(donor_condition(config.grid, dict(point), given.labels, f"intervention[{i}]").items())
            for i, edit in enumerate(under.intervention)
            if edit.kind == "patch" and edit.layers and (given := parse_from(edit.from_)).run is None
        ]
    for point in points:
        for donor in donors[point]:
            if casts[donor] != casts[point]:
                raise ConfigError(
                    f"the patch of {_named(point)} comes from {_named(donor)}, which has other models; "
                    "donor and recipient must have the same cast"
                )
    settled: set[tuple] = set()
    for point in points:
        _follow(point, donors, settled, ())


def _follow(point: tuple, donors: Mapping[tuple, list[tuple]], settled: set[tuple], path: tuple) -> None:
    if point in path:
        circle = " <- ".join(map(_named, (*path[path.index(point) :], point)))
        raise ConfigError(f"patches wait for each other in a circle: {circle}; let one of them come without a patch")
    if point not in settled:
        for donor in donors[point]:
            if donor != point:
                _follow(donor, donors, settled, (*path, point))
        settled.add(point)


def _named(point: tuple) -> str:
    return "{" + ", ".join(f"{path}: {label}" for path, label in point) + "}"
