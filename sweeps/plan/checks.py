"""Whether a configuration is possible, found out before anything is loaded or written.

`checked` returns the configuration with defaults written out: participants that were left open, layers counted from
the front, canonical site names, and the content hash of every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from interlens import preview
from interlens.errors import InterlensError

from ..config.digest import canonical
from ..config.limits import check_choices, check_scenario
from ..config.schema import AxisConfig, ScenarioConfig, SweepConfig
from ..config.turns import Part, acts, captures_turn, speakers
from ..errors import ConfigError
from . import inputs, items, model_sites, model_sizes, patches, replay
from .judges import check, columns_check
from .normal import normalized, resolved


def checked(config: SweepConfig) -> SweepConfig:
    """The configuration, complete. ConfigError in one line for the first thing that is impossible."""
    check_scenario(config.scenario)
    check_choices(config)
    config = normalized(config)
    under = [resolved(config, {axis.path: label}) for axis in config.grid for label in axis.labels]
    for point in under:
        check_scenario(point.scenario)
    for axis in config.grid:
        _check_axis(axis)
    most = max(point.scenario.branch.turns for point in (config, *under))
    for i, c in enumerate(config.capture):
        if not isinstance(c.turns, str) and max(c.turns) >= most:
            raise ConfigError(f"capture[{i}].turns: no turn {max(c.turns)}; scenario.branch has {most}, counted from 0")
    _check_reach((config, *under))
    for point in (config, *under):
        for name, judge in point.scenario.judges.items():
            check(point, name, judge)
    texts = {t for point in (config, *under) for t in (*_texts(point.scenario), *columns_check(point))}
    items.check(config.scenario.source, texts)
    if config.scenario.replay:
        _check_replay(config.scenario, [point.scenario for point in (config, *under)])
    model_sites.check((config, *under))
    inputs.check_widths((config, *under))
    patches.check(config)
    return replace(config, inputs=inputs.hashes(config))


def require_models(config: SweepConfig) -> None:
    """ConfigError unless every local model, judge and adapter that some condition uses is there to be loaded.

    Reads configurations and headers, and asks the hub about hub ids that its cache does not hold; loads no weights.
    """
    for point in inputs.points(config, ("scenario.participants", "scenario.judges", "models")):
        people, judges = point.scenario.participants, point.scenario.judges
        asked = [
            (f"participants.{n}", p.model, inputs.adapter_source(point, p)) for n, p in people.items() if p.is_local
        ]
        asked += [(f"judges.{n}", judge.model, None) for n, judge in judges.items() if judge.kind == "model"]
        for where, model, adapter in asked:
            entry = model_sizes.model(point, model or "")
            try:
                preview.require(entry.source, revision=entry.revision, adapter=adapter)
            except InterlensError as error:
                raise ConfigError(f"scenario.{where}: {error}") from None


def _check_reach(points: Sequence[SweepConfig]) -> None:
    """ConfigError for an edit or a capture that acts in no turn of anybody it names, under any value of any axis."""
    if points[0].scenario.replay:
        return
    parts: tuple[Part, ...] = ("trunk", "branch")
    said = {(part, turn, who) for p in points for part in parts for turn, who in enumerate(speakers(p, part))}
    spoken = sorted(said)
    for kind, verb in (("intervention", acts), ("capture", captures_turn)):
        for i in range(len(getattr(points[0], kind))):
            entries = [getattr(p, kind)[i] for p in points if i < len(getattr(p, kind))]
            if any(who in e.participants and verb(e, part, turn) for e in entries for part, turn, who in spoken):
                continue
            turns = ", ".join(f"{part} {turn}: {who}" for part, turn, who in spoken) or "none"
            raise ConfigError(
                f"{kind}[{i}] can never act: {', '.join(entries[0].participants)} has no turn that turns="
                f"{entries[0].turns} names; who speaks when: {turns}"
            )


def _check_axis(axis: AxisConfig) -> None:

    seen: dict[bytes, int] = {}
    for number, (label, value) in enumerate(zip(axis.labels, axis.values, strict=True)):
        first = seen.setdefault(canonical(value), number)
        if first != number:
            raise ConfigError(
                f"two points of the grid are the same cells: {axis.path}={axis.labels[first]!r} and {axis.path}={label!r}; "
                "give them different values, or remove one"
            )


def _texts(scenario: ScenarioConfig) -> list[tuple[str, str]]:
    """(where, text) of everything that an item's columns fill."""
    people = scenario.participants.items()
    systems = [(f"scenario.participants.{name}.system_prompt", p.system_prompt) for name, p in people]
    given = [("scenario.opening", scenario.first_message), ("scenario.framing", scenario.framing), *systems]
    return [(where, text) for where, text in given if text is not None]


def _check_replay(scenario: ScenarioConfig, under: Sequence[ScenarioConfig]) -> None:
    """A replay says what is in its rows and nothing else; every row has every side."""
    given = {
        "items": scenario.items, "opening": any(s.first_message for s in under),
        "framing": any(s.framing for s in under), "trunk.turns": scenario.trunk.turns,
    }  # fmt: skip
    if extra := [name for name, value in given.items() if value]:
        raise ConfigError(f"scenario.{extra[0]} adds to conversations that a replay has whole; leave it out")
    sides = {s.side: s for s in (under[1:] if any(s.side != scenario.side for s in under) else under)}
    for row in items.read(scenario.source):
        for side in sides.values():
            replay.conversation(row, side)
