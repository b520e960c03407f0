"""`sweeps analyze RUN name=...`: outcomes of stored conversations, new or computed again, without the participants' models.

A run's text does not change. What comes out stands in `RUN/analyses/`, per unit, and is read over what cells were
committed with; cut off, the same command goes on where it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from interlens import Conversation, participants
from interlens.scheduler import Scheduler

from ..config.build import build
from ..config.digest import digest
from ..config.schema import JudgeConfig
from ..errors import ConfigError, did_you_mean
from ..folder import analyses
from ..folder.cells import Cell, Unit
from ..folder.writer import outcome_row
from ..replica.analysis import Analyzers, analysed, imported
from ..replica.judges import Judge, make
from ..replica.models import Models
from ..run import Run

HELP = """sweeps analyze RUN name=MODULE:FUNCTION     an analyzer, new or changed, over every finished cell
sweeps analyze RUN name=JUDGE [key=value]   a judge of the run's configuration, or a new one: prompt=..., model=..., ...

No conversation is sampled again and no participant's model is loaded. The values stand in RUN/analyses/ and are read as
outcomes over earlier ones of the same name; `sweeps aggregate RUN` takes them up. Exit code 3: some have no value, and
outcomes named failed.<name> say why."""


def analyze(run: Run, given: Sequence[str]) -> tuple[int, int]:
    """Compute what `given` (key=value) names over the finished cells: (cells with a value, cells without).

    ConfigError for what cannot be imported, asked or read; code that only the folder names is never imported.
    """
    options = dict(_parsed(text) for text in given)
    name = options.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError("which one? give name=MODULE:FUNCTION for an analyzer, or name=JUDGE")
    analyzers: Analyzers = {}
    judges: list[Judge] = []
    if ":" in name:
        if options:
            raise ConfigError(f"an analyzer takes no options; given: {', '.join(options)}")
        analyzers = imported([name])
        about: dict[str, Any] = {"name": name, "kind": "analyzer", "source": _source(analyzers[name])}
    else:
        judge = _judge(run, name, options)
        config = replace(run.config, scenario=replace(run.config.scenario, judges={name: judge}))
        judges = make(config, Models(config))
        about = {"name": name, "kind": "judge", "judge": asdict(judge)}
    version = _version(run, about)
    analyses.begin(run.store, version, about)
    for commit in run.commits():
        if commit.cells and not analyses.done(run.store, version, commit.unit):
            unit = run.plan.unit(commit.unit.split(".")[0])
            cells = [cell for cell in unit.cells if cell.id in set(commit.cells)]
            analyses.write(run.store, version, commit.unit, _rows(run, unit, cells, analyzers, judges))
    return _counted(run.refresh(), name)


def _version(run: Run, about: Mapping[str, Any]) -> str:
    """The version to work on: the first whose values are not all there, or are and none of them failed."""
    units = [commit.unit for commit in run.commits() if commit.cells]
    attempt = 0
    while True:
        version = digest({**about, "attempt": attempt})
        complete = all(analyses.done(run.store, version, unit) for unit in units)
        if not complete or not analyses.any_failed(run.store, version):
            return version
        attempt += 1


def _rows(
    run: Run, unit: Unit, cells: Sequence[Cell], analyzers: Analyzers, judges: Sequence[Judge]
) -> list[dict[str, Any]]:
    """Rows of `outcomes` of a unit's cells; all judges of a unit are asked together."""
    scheduler = Scheduler(max_live=64)
    for cell in cells:
        scheduler.add(analysed(_conversation(run, unit, cell), analyzers, judges), tag=cell)
    rows = {}
    for done in scheduler:
        if done.error is not None:
            raise done.error
        rows[done.tag.id] = {"cell": done.tag.id, "trunk": done.tag.trunk, **outcome_row(done.value)}
    return [rows[cell.id] for cell in cells]


def _conversation(run: Run, unit: Unit, cell: Cell) -> Conversation:
    """What was said, by stand-ins of the participants' names: their models are not loaded."""
    scenario = run.config_of(unit.part).scenario
    people = [participants.ScriptedParticipant(name, [""]) for name in scenario.participants]
    made = Conversation(people, moderator_name=scenario.moderator, seed=scenario.seed)
    made.row, made.key = unit.items[cell.item], (cell.item, cell.trunk_seed, cell.branch_seed)
    for message in run.messages(cell.id):
        made.transcript.append(message.copy())
        made.turns_taken += message.author in scenario.participants
    made.branch_start = run.num_trunk_messages(cell.id)
    return made


def _judge(run: Run, name: str, options: Mapping[str, Any]) -> JudgeConfig:
    """The run's judge of that name with these options, or a new one."""
    own = run.config.scenario.judges
    if name not in own and "prompt" not in options:
        raise ConfigError(
            f"no judge {name!r} in this run{did_you_mean(name, own)}; give prompt=... and model=... for a new one"
        )
    base = asdict(own[name]) if name in own else {}
    if base.get("base_url") and "base_url" not in options:
        raise ConfigError(
            f"judge {name!r} of this folder asks {base['base_url']!r}; an address that a folder names is used only when you "
            f"name it too: base_url={base['base_url']}"
        )
    return build(JudgeConfig, {**base, **options}, f"judge {name!r}")


def _counted(run: Run, name: str) -> tuple[int, int]:
    failed = sum(1 for found in run.analysed.values() if found.get(analyses.FAILED + name))
    return len(run.analysed) - failed, failed


def _source(function: Any) -> str:
    """What an analyzer is made of, so that an edited one is another version."""
    try:
        return digest(inspect.getsource(inspect.getmodule(function) or function))
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{function!r} has no source to tell its versions by ({error}); name a function of a file"
        ) from None


def _parsed(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"cannot read {text!r}; options are key=value, as in name=my_module:measure")
    if key in ("name", "prompt"):
        return key, value
    try:
        return key, yaml.safe_load(value) if value else None
    except yaml.YAMLError:
        return key, value
