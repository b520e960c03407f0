"""Made-up runs, written as every run is but kept in memory, for laws of aggregates that need many cells in a moment."""

import itertools

import numpy as np
import torch

from interlens.interp.activation_cache import ActivationRecord
from interlens.message import Message
from sweeps.aggregates import CellResult, registry
from sweeps.config.schema import AxisConfig, InterventionConfig, ParticipantConfig, ScenarioConfig, SweepConfig
from sweeps.folder import files, names, plan_writer
from sweeps.folder.about import about
from sweeps.folder.cells import Cell, Trunk, Unit
from sweeps.folder.store import MemoryStore, open_store
from sweeps.folder.writer import UnitWriter
from sweeps.run import Run


def record(vector, participant="bob", layer=16, message_idx=4, pool="mean", num_pooled=5):
    tensor = torch.tensor(np.asarray(vector)[None], dtype=torch.float32)
    return ActivationRecord(
        participant, message_idx, layer, "residual", tensor, (0, 1),
        {"answer": (0, 1)}, pool=pool, num_pooled=num_pooled,
    )  # fmt: skip


def results(axis="framing", labels=("warm", "cold"), items=10, trunk_seeds=2, branch_seeds=2, layers=(8, 16), width=24,
            signal=3.0, seed=0, dose=False):  # fmt: skip
    """Finished cells: every item and trunk has its own offset; the axis moves vectors and the outcome `score`."""
    rng = np.random.default_rng(seed)
    axis_vector = rng.standard_normal((len(layers), width))
    axis_vector /= np.linalg.norm(axis_vector, axis=1, keepdims=True)
    made = []
    for item in range(items):
        for trunk_seed in range(trunk_seeds):
            family = 2 * rng.standard_normal((len(layers), width))
            for branch_seed in range(branch_seeds):
                noise = rng.standard_normal()
                for label in labels:
                    dose_at = float(label) if dose else {labels[0]: 0.5, labels[-1]: -0.5}.get(label, 0.0)
                    cell = Cell(id=f"c{len(made)}", item=f"i{item}", trunk=f"t{item}.{trunk_seed}",
                                condition={axis: label}, trunk_seed=trunk_seed, branch_seed=branch_seed,
                                unit=f"u{len(made) // 16}")  # fmt: skip
                    rows = family + rng.standard_normal((len(layers), width)) + signal * dose_at * axis_vector
                    made.append(CellResult(
                        cell=cell, item_row={"id": f"i{item}", "even": item % 2 == 0}, messages=[],
                        records=[record(row, layer=layer) for layer, row in zip(layers, rows, strict=True)],
                        outcomes={"score": 10 + 2 * dose_at + noise + 0.1 * rng.standard_normal()},
                    ))  # fmt: skip
    return made, axis_vector


def stored(made, *, axis="framing", labels=("warm", "cold"), interventions=(), root=None, aggregate=(),
           texts=("I love it!",), failures=(), more_axes=()):  # fmt: skip
    """A run of these cells, written as every run is: in memory, or in the folder `root`.

    `texts`: what is said in it, in turns. `failures`: rows (cell, error, traceback, attempts) of cells that failed instead.
    """
    config = SweepConfig(
        experiment="stored",
        scenario=ScenarioConfig(participants={name: ParticipantConfig(model="tiny") for name in ("alice", "bob")}),
        grid=(AxisConfig(path=axis, labels=labels, values=labels), *more_axes),
        intervention=interventions,
        aggregate=aggregate,
    )
    store = MemoryStore() if root is None else open_store(root)
    units = list(_units(made))
    store.write_new(names.config(0), files.dump_yaml(config.to_dict()))
    plan_writer.write(store, 0, config.grid, units)
    store.write_new(names.RUN, files.dump_json(about(config)))
    texts, failed = itertools.cycle(texts), {row["cell"]: row for row in failures}
    sums = registry.sums(registry.build(aggregate, config))
    results_of = {result.cell.id: result for result in made}
    for unit in units:
        writer = UnitWriter(store, unit, {"alice": "tiny", "bob": "tiny"})
        states = {each.name: each.zero() for each in sums}
        for trunk in unit.owns:
            item = next(cell.item for cell in unit.cells if cell.trunk == trunk)
            said = Message("alice", next(texts), {"finish_reason": "length"})
            writer.add_trunk(trunk, [Message("moderator", f"About {item}."), said])
        for cell in unit.cells:
            if cell.id in failed:
                row = failed[cell.id]
                writer.fail_cell(cell, row["error"], row["traceback"], row["attempts"])
                continue
            result = results_of[cell.id]
            said = Message("bob", next(texts), {"finish_reason": "stop"})
            writer.add_cell(cell, [said], result.records, result.outcomes, start=2)
            for each in sums:
                each.add(states[each.name], result)
        for name, state in states.items():
            writer.add_sums(name, state)
        writer.commit()
    return Run(store)


def _units(made):
    """The cells by unit, each with the trunks that no unit before it owns."""
    by_unit, owned = {}, set()
    for result in made:
        by_unit.setdefault(result.cell.unit, []).append(result)
    for name, of_unit in by_unit.items():
        trunks = {r.cell.trunk: Trunk(id=r.cell.trunk, item=r.cell.item, seed=r.cell.trunk_seed) for r in of_unit}
        own = tuple(trunk for trunk in trunks if trunk not in owned)
        owned |= {*own}
        items = {r.cell.item: dict(r.item_row) for r in of_unit}
        yield Unit(id=name, cells=tuple(r.cell for r in of_unit), trunks=tuple(trunks.values()), owns=own, items=items)


def steer(direction, layers=(16,)):
    return InterventionConfig(kind="steer", participants=("bob",), layers=layers, direction=direction)
