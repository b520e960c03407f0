"""`sweeps capture RUN layers=20,24`: more layers or sites of a finished run, without sampling anything again.

What RUN has committed is fed through the models once more, under the interventions that were in force, into
`RUN/captures/<hash>/`: a run folder of the same cells. RUN itself does not change; `sweeps.open(RUN)` reads both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from .. import errors
from ..config.build import build
from ..config.digest import digest
from ..config.grid import set_path
from ..config.schema import CaptureConfig, SweepConfig
from ..driver import enter
from ..driver import entry as entry_module
from ..errors import ConfigError, did_you_mean
from ..folder import about as about_module
from ..folder import files, names, plan_reader, plan_writer, space
from ..folder.cells import Unit
from ..folder.store import Store
from ..plan import loads, replay
from ..plan.normal import normalized
from ..plan.patches import has_patches
from ..run import Run, open

HELP = """sweeps capture RUN [key=value ...]

Captures more of a finished run, by teacher forcing: no text changes, nothing is sampled. The run's own captures are
taken again with what is given here in place of their own; a run without captures needs participants= where several
are local.

  layers=20,24  sites=residual,mlp  tokens=answer  pool=mean (or null)  participants=bob  turns=branch  special=drop
  cluster.replicas=2  run.progress=plain  ...   where and how, as for sweeps run

The records go to RUN/captures/<hash>/; sweeps.open(RUN) finds them beside the run's own.
"""

_LISTS = ("layers", "sites", "participants")


def capture(run_dir: str | Path, arguments: Sequence[str]) -> int:
    """Capture what `arguments` (key=value) ask for; the exit code of the run that does it.

    ConfigError for a run that is not finished, a key that does not exist, or what is recorded already; RunRefused for
    what the disk has no room for.
    """
    run = open(run_dir)
    if pending := run.counts["pending"]:
        raise ConfigError(
            f"{str(run_dir)!r} has {pending} pending cells; finish the run first, then capture more of it"
        )
    if not run.counts["done"]:
        raise ConfigError(f"{str(run_dir)!r} has no finished cell to capture")
    given, others = _read(arguments)
    plain = run.config.to_dict()
    plain["cluster"] = SweepConfig(scenario=run.config.scenario).to_dict()["cluster"]
    for path, value in others.items():
        set_path(plain, path, value, path)
    wanted = _wanted(run, given)
    known = [one for each in (run, *run.captures) for capture in each.config.capture for one in _single(capture)]
    config = _changed(build(SweepConfig, plain), wanted)
    asked = [one for entry in config.capture for one in _single(entry)]
    target = _target(run, config.capture)
    begun = target.exists(names.RUN)
    if not begun and (twice := [one for one in asked if one in known]):
        shown = ", ".join(f"{k}={v}" for k, v in twice[0].items() if v is not None)
        raise ConfigError(f"{str(run_dir)!r} has this already: {shown}; leave it out")
    if not begun:
        _check_space(run, config)
    elif missing := run.held_cells - set(open(target).cells["cell"].to_pylist()):
        raise ConfigError(
            f"this was captured before {len(missing)} of the {len(run.held_cells)} cells were finished; to capture it of "
            f"all of them, delete {target} and give this command again"
        )
    return entry_module.run(replace(config, run=replace(config.run, dir=str(target))), target, enter=_Enter(run))


def _check_space(run: Run, config: SweepConfig) -> None:
    """Say about how much will be written; RunRefused where the disk has not the room, unless forced."""
    asked = replace(run.config, capture=config.capture)
    try:
        cell, trunk = loads.tensor_bytes(asked), loads.tensor_bytes(asked, "trunk")
    except (ConfigError, OSError):  # given conversations that lie there no more
        return
    size = space.human(needed := cell * run.counts["done"] + trunk * len(run.held_trunks))
    if config.run.progress != "none":
        print(f"about {size} of activations to write, if every reply used its budget", flush=True)
    free, left = space.free_bytes(run.store), space.RESERVE_BYTES
    if free is not None and not config.run.force and needed > max(0, free - left):
        raise errors.RunRefused(
            f"capturing this needs about {size} and the disk of {str(run.root)!r} has {space.human(free)} free, of "
            f"which {space.human(left)} stay free; capture less (pool=mean), or force it (run.force=true)"
        )


def _read(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the captures, settings of cluster and run by dotted path)."""
    fields = [f.name for f in dataclasses.fields(CaptureConfig) if f.name != "max_norm"]
    given: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        try:
            value = yaml.safe_load(f"[{text}]" if key in _LISTS and not text.startswith("[") else text)
        except yaml.YAMLError:
            value = text
        if equals and key in fields:
            given[key] = text if key == "tokens" else value
        elif equals and key.startswith(("cluster.", "run.")):
            others[key] = value
        else:
            raise ConfigError(f"cannot read {argument!r}{did_you_mean(key, fields)}, cluster.<key>, run.<key>")
    return given, others


def _wanted(run: Run, given: dict[str, Any]) -> tuple[CaptureConfig, ...]:
    if not given:
        raise ConfigError("say what to capture: layers=..., sites=..., tokens=..., pool=...; sweeps capture --help")
    base = [entry.__dict__ for entry in run.config.capture] or [{}]
    return tuple(dict.fromkeys(build(CaptureConfig, {**entry, **given}, "capture") for entry in base))


def _single(capture: CaptureConfig) -> Iterator[dict[str, Any]]:
    """A capture taken apart into what one record is found by."""
    plain = {**capture.__dict__, "turns": capture.turns if isinstance(capture.turns, str) else list(capture.turns)}
    for participant in capture.participants:
        for site in capture.sites:
            for layer in capture.layers or (None,):
                yield {**plain, "participants": participant, "sites": site, "layers": layer}


def _changed(config: SweepConfig, wanted: tuple[CaptureConfig, ...]) -> SweepConfig:
    """A configuration of the run with other captures, and nothing that would be computed twice."""
    scenario = replace(config.scenario, replay=replay.RECORDED, analyzers=(), judges={}, logprobs=False)
    return normalized(replace(config, capture=wanted, aggregate=(), scenario=scenario))


def _target(run: Run, capture: tuple[CaptureConfig, ...]) -> Store:
    return run.store.sub(names.capture(digest([dataclasses.asdict(c) for c in capture])[:8]))


class _Enter:
    """Starts the folder of a capture, or continues it; stands where `folder.enter` stands for a sweep."""

    def __init__(self, run: Run):
        self.run = run

    def __call__(self, config: SweepConfig, root: Store, confirm: Callable[[], None]) -> enter.Entered:
        run = self.run
        if root.exists(names.RUN):
            return enter.Entered(state="same", num_cells=plan_reader.PlanFile(root).num_cells, new_cells=0)
        for name in run.store.walk(names.INPUTS):
            if not (name.startswith(f"{names.INPUTS}/items-") or root.exists(name)):
                root.write_new(name, run.store.read(name))
        confirm()
        count = 0
        for part in range(len(run.plan.parts)):
            for leftover in (names.config(part), names.items(part), names.part(part)):
                root.delete(leftover)
            began = _changed(replace(run.config_of(part), cluster=config.cluster, run=config.run), config.capture)
            root.write_new(names.config(part), files.dump_yaml(began.to_dict()))
            units = (self._done(unit) for unit in run.plan.units() if unit.part == part)
            kept = (unit for unit in units if unit.cells or unit.trunks)
            count += plan_writer.write(root, part, began.grid, kept, patched=has_patches(began))
        kept = {"models": run.about["models"], "captures": str(run.about["experiment"]), "date": run.about.get("date")}
        about = {**about_module.about(config), **kept}
        root.write_new(names.RUN, files.dump_json(about))
        return enter.Entered(state="new", num_cells=count, new_cells=count)

    def _done(self, unit: Unit) -> Unit:
        """What the run holds of a unit."""
        done = self.run.held_cells
        cells = tuple(cell for cell in unit.cells if cell.id in done)
        needed = {cell.trunk for cell in cells} | set(unit.owns)
        kept = tuple(t for t in unit.trunks if t.id in needed and t.id in self.run.held_trunks)
        held = {t.id for t in kept}
        return replace(unit, cells=cells, trunks=kept, owns=tuple(t for t in unit.owns if t in held))
