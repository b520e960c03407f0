"""`sweeps plan`: how large a sweep would be, without loading a model; with `--measure`, how long it would take."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens.interp.select import Select

from ..config.grid import applied
from ..config.schema import SweepConfig
from ..config.tokens import parse_tokens
from ..driver import enter
from ..driver.size import size
from ..folder import commits
from ..folder.cells import pack
from ..folder.plan_reader import PlanFile
from ..folder.space import human
from ..plan.loads import _turns
from ..replica.replica import Replica

if TYPE_CHECKING:
    from ..folder.cells import Unit


def describe(config: SweepConfig) -> str:
    """The plan in a few lines, for people."""
    found = size(config)
    axes = [f"  {axis.path}: {', '.join(map(str, axis.labels))}" for axis in config.grid]
    trunk = f", {found.trunks} trunks of {config.scenario.trunk.turns} turns" if config.scenario.trunk.turns else ""
    notes = [
        f"{e.kind} on {', '.join(e.participants)} edits the trunk's positions too (tokens: {e.tokens}), "
        "so these rows share no KV with unsteered ones"
        for e in config.intervention
        if config.scenario.trunk.turns and _touches_trunk(parse_tokens(e.tokens))
    ]
    notes += [
        f"patch on {', '.join(e.participants)} from {_from(e.from_)}: a patched cell runs after its donor"
        for e in config.intervention if e.kind == "patch"
    ]  # fmt: skip
    if found.recomputed:
        notes.append(
            f"captures select about {found.recomputed} prompt positions, which are run through the model again"
        )
    return "\n".join([
        f"{config.experiment} -> {config.run.dir}",
        f"{found.cells} cells in {found.units} units: {found.items} items{trunk}, "
        + ("replayed" if config.scenario.replay else f"{config.scenario.branch.turns} turns a cell"),
        *axes,
        f"about {found.tokens} tokens to generate, if every reply uses its budget" if not config.scenario.replay
        else f"about {found.tokens} tokens of replies to feed, besides their prompts; none to generate",
        f"about {human(found.bytes)} to write: {human(found.tensor_bytes)} of activations, "
        f"{human(found.other_bytes)} of tables",
        *notes,
    ])  # fmt: skip


def _from(given: Any) -> str:
    return given if isinstance(given, str) else ", ".join(f"{k}={v}" for k, v in given.items()) or "the cell itself"


def _touches_trunk(select: Select) -> bool:
    if select.op in ("or", "minus"):
        return _touches_trunk(select.args[0]) or (select.op == "or" and _touches_trunk(select.args[1]))
    return select.op in ("all", "prompt") or (select.op == "phase" and select.args[0] == "prompt")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One unit, run."""

    cells: int
    seconds: float
    load_s: float
    tokens: int
    bytes: int
    budget: int = 0
    """Tokens that it might have generated: its cells', and those of the trunks it samples, which other units share."""


def measure(config: SweepConfig) -> Measured:
    """Run the plan's first unit on one replica in this process, in a folder that is deleted afterwards."""

    root = Path(tempfile.mkdtemp(prefix="sweeps-measure-"))
    try:
        enter.enter(replace(config, run=replace(config.run, dir=str(root), force=True)), root)
        plan = PlanFile(root)
        unit = next(plan.unit(info.id) for info in plan.infos() if info.num_cells)
        runner = Replica(config.to_dict(), str(root), unit.cast, config.cluster.threads)
        load_s = runner.load()["load_s"]
        begun = time.monotonic()
        ack = runner.run(pack(unit, {}, 0))
        seconds = time.monotonic() - begun
        commit = commits.read_commit(root, unit.id)
        if commit is None or not commit.cells:
            raise RuntimeError(f"the measured unit did not finish: {ack.get('first_error') or ack.get('error')}")
        written = sum(file["bytes"] for file in commit.files)
        return Measured(cells=len(commit.cells), seconds=seconds, load_s=load_s, tokens=runner.tokens, bytes=written,
                        budget=unit_budget(config, unit))  # fmt: skip
    finally:
        shutil.rmtree(root, ignore_errors=True)


def unit_budget(config: SweepConfig, unit: Unit) -> int:
    """Tokens that a unit may generate, the trunks that it owns included; 0 for a replay."""
    if config.scenario.replay:
        return 0
    known: dict[tuple, int] = {}

    def budgeted(condition: Mapping[str, Any], part: str) -> int:
        key = (part, *condition.items())
        if key not in known:
            known[key] = sum(load.generated for load in _turns(applied(config, condition), part))
        return known[key]

    trunks = sum(budgeted(trunk.condition, "trunk") for trunk in unit.trunks if trunk.id in unit.owns)
    return trunks + sum(budgeted(cell.condition, "branch") for cell in unit.cells)


def extrapolate(config: SweepConfig, measured: Measured) -> str:
    """What one unit says of the whole plan, for people."""
    found, replicas = size(config), config.cluster.replicas
    times = found.cells / measured.cells
    work = found.tokens / measured.budget if measured.budget and found.tokens else times
    seconds = measured.load_s + measured.seconds * work / replicas
    return (
        f"measured: {measured.cells} cells in {measured.seconds:.1f} s, "
        f"{measured.tokens / measured.seconds:.0f} tokens/s, after {measured.load_s:.1f} s of loading\n"
        f"the whole plan, by that: {round(measured.tokens * work)} tokens, {human(measured.bytes * times)}, "
        f"about {seconds / 60:.1f} minutes on {replicas} replicas of this speed"
    )
