"""A scripted replica: no models; items say what their cells do. What it writes, it commits as a real one does."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from sweeps.config.schema import (
    BranchConfig,
    ClusterConfig,
    ParticipantConfig,
    PlanConfig,
    RunConfig,
    ScenarioConfig,
    SweepConfig,
    TrunkConfig,
)
from sweeps.failpoints import reach
from sweeps.folder import commits
from sweeps.folder.cells import part_of, unpack


def config(rows, *, turns=0, trunk_seeds=1, seeds=2, unit_cells=4, cluster=None, **run) -> SweepConfig:
    """A sweep of scripted talk over these items; `cluster` overrides fields of its section."""
    return SweepConfig(
        experiment="fake",
        scenario=ScenarioConfig(
            items=tuple(rows),
            participants={"alice": ParticipantConfig(kind="scripted", lines=("hello",))},
            trunk=TrunkConfig(turns=turns, seeds=trunk_seeds),
            branch=BranchConfig(turns=1, seeds=seeds),
        ),
        plan=PlanConfig(unit_cells=unit_cells),
        cluster=ClusterConfig(**{"executor": "inline", **(cluster or {})}),
        run=RunConfig(progress="none", interval_s=0.2, **run),
    )


def items(n: int, **special) -> list[dict]:
    """n items; `special` maps an item's id ("i3") to what its cells do: kill, hang, raise, slow, kill_trunk."""
    return [{"id": f"i{k}", "do": special.get(f"i{k}", "")} for k in range(n)]


class FakeReplica:
    """Does what its items say, and counts how often each cell and trunk was run (one line per run in `ran`)."""

    def __init__(self, config, run_dir, cast, threads=1):
        self.root, self.units = Path(run_dir), {}
        self.stopping = threading.Event()
        self.pause_s = float(os.environ.get("SWEEPS_FAKE_PAUSE_S", "0"))

    def load(self):
        reach("replica.loaded")
        self.note(f"load {os.getpid()} gpus={os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        return {"models": {}, "load_s": 0.0}

    def counters(self):
        return {"units": dict(self.units), "tokens": 0}

    def stop(self):
        self.stopping.set()

    def note(self, line):
        with open(self.root.parent / "ran", "a") as out:
            out.write(line + "\n")

    def run(self, packed):
        unit, trunk_units, _ = unpack(packed)
        self.units[unit.id] = 0
        reach("replica.started")
        held, failed, trunks = [], [], []
        for trunk in unit.trunks:
            if trunk.id in trunk_units:
                assert trunk.id in commits.read_commit(self.root, trunk_units[trunk.id]).trunks
                continue
            if unit.items[trunk.item]["do"] == "kill_trunk":
                os.kill(os.getpid(), signal.SIGKILL)
            self.note(f"trunk {trunk.id}")
            trunks.append(trunk.id)
        for cell in unit.cells:
            do = unit.items[cell.item]["do"]
            if self.stopping.wait(self.pause_s):
                break
            self.units[unit.id] += 1
            if do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while do == "hang":
                time.sleep(1)
            if do == "raise":
                failed.append(cell)
            else:
                self.note(f"cell {cell.id}")
                held.append(cell)
        left = {c.id for c in unit.cells} - {c.id for c in (*held, *failed)}
        if left and not (held or failed or trunks):
            return {"unit": unit.id, "outcome": "returned"}
        children = [part_of(unit, f"{unit.id}.0", left).to_dict()] if left else []
        commit = commits.Commit(
            unit=unit.id,
            attempt=os.urandom(4).hex(),
            cells=tuple(c.id for c in held),
            failed=tuple(c.id for c in failed),
            trunks=tuple(trunks),
            children=tuple(children),
        )
        reach("writer.before_commit")
        outcome = commits.write_commit(self.root, commit)
        reach("writer.committed")
        return {"unit": unit.id, "outcome": outcome, "failed": len(failed), "first_error": "it was told to"}


class Leaking(FakeReplica):
    """Its loading fails, and names a secret that only its own process knows."""

    def load(self):
        os.environ["NODE_API_KEY"] = "correct-horse-battery"
        raise RuntimeError("no answer from https://hub.example?key=correct-horse-battery")
