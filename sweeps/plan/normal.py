"""The configuration under a condition, with defaults written out: participants, layers from the front, canonical sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from interlens.errors import InterlensError
from interlens.interp.select import Select
from interlens.interp.sites import split_name

from ..config.grid import applied
from ..config.limits import MODES, POOLS, one_of
from ..config.schema import CaptureConfig, InterventionConfig, SweepConfig
from ..config.tokens import parse_tokens
from ..errors import ConfigError, did_you_mean
from . import directions, model_sizes, patches


def resolved(config: SweepConfig, condition: Mapping[str, Any]) -> SweepConfig:
    """The configuration under a condition (axis path -> label), defaults written out: what a cell or trunk is run with."""
    try:
        return normalized(applied(config, dict(condition)))
    except ConfigError as error:
        point = ", ".join(f"{path}={label}" for path, label in condition.items())
        raise ConfigError(f"{error} (with {point})") from None


def normalized(config: SweepConfig) -> SweepConfig:
    """Defaults written out in what captures and interventions name. ConfigError for what cannot be."""
    for name, participant in config.scenario.participants.items():
        if participant.is_local and participant.model is not None:
            model_sizes.check_source(model_sizes.model(config, participant.model).source, f"participants.{name}.model")
    for name, judge in config.scenario.judges.items():
        if judge.kind == "model":
            model_sizes.check_source(model_sizes.model(config, judge.model).source, f"scenario.judges.{name}.model")
    if config.scenario.logprobs and not any(p.is_local for p in config.scenario.participants.values()):
        raise ConfigError(
            "scenario.logprobs=true, but nobody who speaks has weights here "
            f"({', '.join(config.scenario.participants) or 'no participants'}), and only those have logprobs; leave it out"
        )
    capture = tuple(_capture(config, c, f"capture[{i}]") for i, c in enumerate(config.capture))
    edits = tuple(_intervention(config, e, f"intervention[{i}]") for i, e in enumerate(config.intervention))
    return replace(config, capture=capture, intervention=edits)


def _participants(config: SweepConfig, given: tuple[str, ...], where: str) -> tuple[str, ...]:
    cast = config.scenario.participants
    local = [name for name, p in cast.items() if p.is_local]
    for name in given:
        if name not in cast:
            raise ConfigError(f"{where}.participants: no participant {name!r}{did_you_mean(name, cast)}")
        if name not in local:
            raise ConfigError(
                f"{where}.participants: {name!r} has no weights here; possible: {', '.join(local) or 'none'}"
            )
    if not given and len(local) != 1:
        raise ConfigError(f"{where}.participants is missing; name some of: {', '.join(local) or 'none is local'}")
    if len(set(given)) < len(given):
        raise ConfigError(f"{where}.participants names one twice: {', '.join(given)}")
    return given or tuple(local)


def _turns(turns: Any, where: str) -> None:
    if isinstance(turns, str):
        one_of(f"{where}.turns", turns, ("branch", "trunk", "all"))
    elif any(t < 0 for t in turns) or not turns:
        raise ConfigError(f"{where}.turns is {list(turns)}; possible: branch, trunk, all, or turn numbers from 0")


def _layers(config: SweepConfig, who: tuple[str, ...], layers: Any, site: str, where: str) -> tuple[int, ...]:
    counts = {name: model_sizes.of(config, config.scenario.participants[name].model) for name in who}
    found: list[int] = []
    for layer in layers:
        for name, shape in counts.items():
            if shape is not None and not -shape.layers <= layer < shape.layers:
                raise ConfigError(
                    f"{where}.layers: no layer {layer} in {shape.name!r} ({name}); it has {shape.layers}, "
                    f"0 to {shape.layers - 1}"
                )
        if layer < 0:
            depths = {s.layers for s in counts.values() if s is not None}
            if len(depths) != 1 or None in counts.values():
                raise ConfigError(
                    f"{where}.layers: {layer} counts from the end of models of different or unknown depth"
                )
            layer += depths.pop()
        found.append(layer)
    if len(set(found)) < len(found):
        raise ConfigError(f"{where}.layers names a layer twice: {list(layers)}")
    return tuple(found)


def _site(site: str, layers: Any, where: str) -> str:
    try:
        name, layer = split_name(site)
    except InterlensError as error:
        raise ConfigError(f"{where}: {error}") from None
    if layer is not None and (layers is None or tuple(layers) != (layer,)):
        raise ConfigError(f"{where}: {site!r} names layer {layer}; give layers: [{layer}], or the site {name!r}")
    return name


def _capture(config: SweepConfig, c: CaptureConfig, where: str) -> CaptureConfig:
    if c.max_norm is not None and not c.max_norm > 0:
        raise ConfigError(f"{where}.max_norm is {c.max_norm}; it must be above 0, or null for no limit")
    who = _participants(config, c.participants, where)
    if not c.sites:
        raise ConfigError(f"{where}.sites is empty; name at least one, as in [residual]")
    sites = tuple(_site(site, c.layers, f"{where}.sites") for site in c.sites)
    parse_tokens(c.tokens, f"{where}.tokens")
    one_of(f"{where}.pool", c.pool, POOLS)
    one_of(f"{where}.special", c.special, ("drop", "keep"))
    one_of(f"{where}.source", c.source, ("run", "clean"))
    one_of(f"{where}.routing", c.routing, ("cell", "message"))
    _turns(c.turns, where)
    layers = None if c.layers is None else _layers(config, who, c.layers, sites[0], where)
    if layers == ():
        raise ConfigError(f"{where}.layers is empty; name layers, or null for all")
    return replace(c, participants=who, sites=sites, layers=layers)


def _intervention(config: SweepConfig, e: InterventionConfig, where: str) -> InterventionConfig:
    one_of(f"{where}.kind", e.kind, ("steer", "patch"))
    who = _participants(config, e.participants, where)
    site = _site(e.site, e.layers, f"{where}.site")
    tokens = parse_tokens(e.tokens, f"{where}.tokens")
    one_of(f"{where}.mode", e.mode, MODES)
    _turns(e.turns, where)
    layers = _layers(config, who, e.layers, site, where)
    if e.kind == "patch":
        _check_patch(e, tokens, where)
        return replace(e, participants=who, site=site, layers=layers)
    if e.from_ is not None:
        raise ConfigError(f"{where}.from is for kind patch; a steering has a direction")
    if not e.direction:
        raise ConfigError(f"{where}.direction is missing; {directions.DIRECTIONS}")
    directions.parse_direction(e.direction, f"{where}.direction")
    if not e.layers:
        raise ConfigError(f"{where}.layers is empty; name the layers to steer")
    return replace(e, participants=who, site=site, layers=layers)


def _check_patch(e: InterventionConfig, tokens: Select, where: str) -> None:
    """No layers is no patch: a baseline on the grid."""
    patches.parse_from(e.from_, where)
    if e.direction is not None or e.coef != 1.0 or e.mode != "add":
        raise ConfigError(f"{where}: direction, coef and mode are for kind steer; a patch puts values in as they are")
    if e.turns in ("trunk", "all"):
        raise ConfigError(f"{where}.turns is {e.turns!r}; patches act after the trunk: branch, or turn numbers from 0")
    if not patches.selects_prompt(tokens):
        raise ConfigError(
            f"{where}.tokens: {e.tokens!r} selects only what is generated, which differs between donor and recipient; "
            "name prompt tokens, such as message(0), positions(-1), prompt - special"
        )
