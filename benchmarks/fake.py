"""A replica for `benchmarks/scale.py` that costs nothing but what a sweep itself costs."""

from __future__ import annotations

import torch

from interlens.interp.activation_cache import ActivationRecord
from sweeps.aggregates import CellResult, registry
from sweeps.config.schema import SweepConfig
from sweeps.folder.cells import unpack
from sweeps.folder.writer import UnitWriter


class Fake:
    """A replica that commits its units without running them: one outcome per cell, no messages."""

    def __init__(self, config, run_dir, cast, threads=1):
        plain = SweepConfig.from_dict(config)
        self.root = run_dir
        self.sums = registry.sums(registry.build(plain.aggregate))

    def load(self):
        return {"models": {}}

    def counters(self):
        return {"units": {}, "tokens": 0}

    def stop(self):
        pass

    def run(self, packed):
        unit, trunk_units, _ = unpack(packed)
        writer = UnitWriter(self.root, unit, {})
        states = {s.name: s.zero() for s in self.sums}
        for trunk in unit.trunks:
            if trunk.id not in trunk_units:
                writer.add_trunk(trunk.id, ())
        vector, common = torch.ones(1, 8), {"tokens": (1,), "positions": (0,), "pool": "mean", "num_pooled": 1}
        records = [ActivationRecord("alice", 1, 0, "residual", vector, (0, 1), {"answer": (0, 1)}, **common)]
        for cell in unit.cells:
            writer.add_cell(cell, (), (), {"words": 1.0})
            result = CellResult(cell=cell, item_row=unit.items[cell.item], messages=[], records=records)
            for aggregate in self.sums:
                aggregate.add(states[aggregate.name], result)
        for name, state in states.items():
            writer.add_sums(name, state)
        return {"unit": unit.id, "outcome": writer.commit()}
