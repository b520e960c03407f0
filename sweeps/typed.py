"""What was typed wins: group choices and axes of the command line stand over what an experiment writes inline.

Hydra composes an experiment's own keys after every group, so that `cluster=gpu` loses to an experiment that writes
`cluster: {replicas: 2}`. Here a typed choice is composed once more without the experiment and merged after it: mappings
key by key; lists, axes, null and `none` replace. Then the keys that were typed for that section stand over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

SECTIONS = {"model": "models"}
"""Group -> the section it fills, where that has another name."""

GROUPS = ("model", "scenario", "capture", "intervention", "grid", "aggregate", "cluster", "experiment", "debug")


def typed_wins(composed: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The composition with typed groups, deletions and axes over it, and in a line each what they changed.

    `overrides`: as typed, flags left out. Needs Hydra as it was initialised for the composition.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = [o for o in parsed if _group(o) in GROUPS and _group(o) not in ("experiment", "debug")]
    keys = [o for o in parsed if o.key_or_group not in GROUPS and not o.is_hydra_override()]
    axes = [o for o in keys if o.key_or_group.startswith("grid.") and not o.is_delete()]
    if not groups and not axes:
        return composed, []
    made, notes = OmegaConf.create(OmegaConf.to_container(composed, resolve=False)), []
    assert isinstance(made, DictConfig)
    OmegaConf.set_struct(made, False)
    alone = _without_experiment(parsed) if groups else composed
    for override in groups:
        section = SECTIONS.get(_group(override), _group(override))
        chosen = None if override.is_delete() else _plain(alone).get(section)
        before = _plain(made).get(section)
        after = _over(before, chosen, section)
        if after != before:
            made[section] = after
            notes += _notes(section, before, after, override.input_line or "")
        for key in (k for k in keys if k.key_or_group.split(".")[0] == section):
            _apply(made, key)
    for override in axes:
        axis = override.key_or_group.removeprefix("grid.")
        before = _plain(made).get("grid")
        if isinstance(before, Mapping) and before.get(axis) != override.value():
            made["grid"] = {**before, axis: override.value()}
            notes.append(f"grid.{axis} is {override.value()}, as typed: an axis is replaced, never added to")
    return made, notes


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def _group(override: Override) -> str:
    return override.key_or_group.partition("@")[0]


def _without_experiment(parsed: Sequence[Override]) -> Any:
    """The groups that were typed, composed without an experiment."""
    kept = [o.input_line for o in parsed if o.input_line and _group(o) in GROUPS and _group(o) != "experiment"]
    kept += [o.input_line for o in parsed if o.input_line and o.key_or_group == "hydra.searchpath"]
    return hydra.compose("config", overrides=[line for line in kept if not line.startswith("~")])


def _over(before: Any, chosen: Any, section: str) -> Any:
    """A typed choice over what the experiment has."""
    if not chosen or not isinstance(chosen, Mapping) or not isinstance(before, Mapping):
        return {} if chosen is None and section in ("grid", "aggregate") else chosen
    return {**before, **chosen} if section == "grid" else _merged(before, chosen)


def _merged(before: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merged(before[k], v) if isinstance(v, Mapping) and v and isinstance(before.get(k), Mapping) else v
            for k, v in chosen.items()}  # fmt: skip
    return {**before, **both}


def _apply(made: DictConfig, key: Override) -> None:
    """A typed key once more, over its section as the typed group has it."""
    if key.is_delete():
        parent, _, last = key.key_or_group.rpartition(".")
        holder = OmegaConf.select(made, parent)
        if isinstance(holder, DictConfig) and last in holder:
            del holder[last]
        return
    OmegaConf.update(made, key.key_or_group, key.value(), merge=True, force_add=True)


def _notes(section: str, before: Any, after: Any, typed: str) -> list[str]:
    """What a typed group changed of an experiment's own keys."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return [f"{section}: {typed} replaces the experiment's own"]
    gone = [f"{section}.{key} (none left)" for key in before if key not in after]
    both = [key for key in after if key in before and after[key] != before[key]]
    changed = [f"{section}.{key} {before[key]!r} -> {after[key]!r}" for key in both]
    return [f"{line[:160]}: by {typed}" for line in (*gone, *changed)]
