"""What makes a trunk or a cell itself: the home of every id.

A trunk's id hashes what its text depends on; a cell's id its trunk, its resolved settings and its branch seed. Values
are hashed, not how they were written: labels, paths, cluster, report and aggregate settings are in no id, 6 is 6.0, and
a source enters by its content. Fields marked `later` are left out while they are neutral, so that old ids stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.digest import _hash, digest, identity
from ..config.grid import conditions, full_path
from ..config.schema import InterventionConfig, SweepConfig
from ..errors import ConfigError
from . import inputs, model_sizes
from .casts import _models, cast_of
from .normal import resolved
from .patches import donor_condition, entry, parse_from, patches


def _participants(config: SweepConfig) -> list[list[Any]]:
    """In speaking order, models by name, adapters by content."""
    found: list[list[Any]] = []
    for name, p in config.scenario.participants.items():
        model = model_sizes.model_name(config, p.model) if p.is_local and p.model else p.model
        adapter = inputs.adapter_source(config, p)
        found.append([name, {**identity(p), "model": model, "adapter": config.inputs.get(adapter or "", adapter)}])
    return found


def _intervention(config: SweepConfig, edit: InterventionConfig) -> dict[str, Any]:
    """A direction by its content; `random:<seed>` is its own content. So is `from:`: by values, not labels."""
    plain = {**identity(edit), "direction": config.inputs.get(edit.direction or "", edit.direction)}
    if edit.kind == "patch":
        given = parse_from(edit.from_)
        plain["from"] = {full_path(p): config.inputs.get(entry(p, v), v) for p, v in given.labels.items()}
        if given.run is not None:
            plain["from"] |= {"run": config.inputs.get(f"run:{given.run}", given.run)}
    return plain


def trunk_settings(config: SweepConfig) -> dict[str, Any]:
    """All but item and seed that a trunk's text depends on: interventions only where they act in the trunk."""
    scenario = config.scenario
    settings = {
        "trunk": identity(scenario.trunk), "participants": _participants(config), "models": _models(config),
        "opening": scenario.opening, "moderator": scenario.moderator, "seed": scenario.seed,
        "reasoning_visibility": scenario.reasoning_visibility,
    }  # fmt: skip
    edits = [_intervention(config, e) for e in config.intervention if e.turns in ("trunk", "all")]
    return {**settings, "intervention": edits} if edits else settings


def cell_settings(config: SweepConfig) -> dict[str, Any]:
    """All but trunk and branch seed that a cell's text and records depend on."""
    scenario = config.scenario
    return {
        **({"replay": scenario.side} if scenario.replay else {}),
        "branch": identity(scenario.branch), "participants": _participants(config), "models": _models(config),
        "opening": scenario.opening, "moderator": scenario.moderator, "framing": scenario.framing,
        "seed": scenario.seed, "reasoning_visibility": scenario.reasoning_visibility, "logprobs": scenario.logprobs,
        "intervention": [_intervention(config, e) for e in config.intervention],
        "capture": [identity(c) for c in config.capture],
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """A condition, hashed."""

    condition: Mapping[str, Any]
    digest: str
    cast: str = ""
    sources: tuple[Mapping[str, Any] | None, ...] = ()
    """Per patch the labels of its `from:`; None where it comes from another run."""


class Identities:
    """The conditions of a grid, hashed once, and the ids that follow. ConfigError where two points coincide."""

    def __init__(self, config: SweepConfig):
        on_trunk = tuple(axis for axis in config.grid if axis.is_trunk)
        after = tuple(axis for axis in config.grid if not axis.is_trunk)
        self.by_trunk: list[tuple[Point, list[Point]]] = []
        """(trunk settings, the conditions that continue such a trunk), in plan order."""
        for shared in self._points(config, on_trunk, trunk_settings):
            base = resolved(config, dict(shared.condition))
            base = dataclasses.replace(base, grid=after)
            points = [
                dataclasses.replace(p, condition={**shared.condition, **p.condition})
                for p in self._points(base, after, cell_settings)
            ]
            self.by_trunk.append((shared, points))
        self._grid = config.grid
        self._at = {_key(point.condition): (shared, point) for shared, points in self.by_trunk for point in points}

    def donors(self, point: Point, row_digest: str, trunk_seed: int, branch_seed: int) -> tuple[str, ...]:
        """Per patch the id of the cell it comes from: the same item and seeds; "" for another run's."""
        found = []
        for labels in point.sources:
            if labels is None:
                found.append("")
                continue
            shared, donor = self._at[_key(donor_condition(self._grid, point.condition, labels))]
            found.append(self.cell(self.trunk(row_digest, shared, trunk_seed), donor, branch_seed))
        return tuple(found)

    @staticmethod
    def _points(config: SweepConfig, axes: tuple, settings: Any) -> Iterator[Point]:
        seen: dict[str, Mapping[str, Any]] = {}
        for condition in conditions(axes):
            under = resolved(config, condition)
            hashed = digest(settings(under))
            if hashed in seen:
                raise ConfigError(
                    f"two points of the grid are the same cells: {_named(seen[hashed])} and {_named(condition)}; "
                    "give them different values, or remove one"
                )
            seen[hashed] = condition
            given = [parse_from(edit.from_) for edit in patches(under)]
            sources = tuple(None if one.run is not None else one.labels for one in given)
            yield Point(condition=condition, digest=hashed, cast=cast_of(under), sources=sources)

    @staticmethod
    def trunk(row_digest: str, shared: Point, seed: int) -> str:
        """Id of a trunk: item row, settings, trunk seed."""
        return _hash(f'{{"item":"{row_digest}","seed":{seed},"settings":"{shared.digest}"}}')

    @staticmethod
    def cell(trunk: str, point: Point, seed: int) -> str:
        """Id of a cell: trunk, settings, branch seed."""
        return _hash(f'{{"seed":{seed},"settings":"{point.digest}","trunk":"{trunk}"}}')


def _key(condition: Mapping[str, Any]) -> frozenset:
    return frozenset(condition.items())


def _named(condition: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={label!r}" for path, label in condition.items()) or "the base"
