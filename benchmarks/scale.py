"""What a sweep costs beside its models: driver time and memory, planning, resuming, writing, reading, files.

    python benchmarks/scale.py [--cells 1000000] [--plan-cells 10000000] [section ...]

Sections: driver, plan, write, read, files, replicas, multirun; all but the last two (which run the embedded model) if
none is named. Cells are fake: their replicas write what a scripted cell would, without talking. Prints
ratios and slopes; each line says what was asked for. Everything measured on both sides is measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve()
SECTIONS = ("driver", "plan", "write", "read", "files")


def settings(cells: int, folder: Path):
    """A sweep of `cells` scripted cells: 2 trunk seeds, 2 conditions, 4 branch seeds an item."""
    from sweeps.compose import from_plain

    items = folder / f"items-{cells}.jsonl"
    if not items.exists():
        with items.open("w") as out:
            out.writelines(json.dumps({"id": f"i{n}", "topic": f"topic {n}"}) + "\n" for n in range(cells // 16))
    return from_plain({
        "scenario": {
            "items": str(items), "participants": {"alice": {"kind": "scripted", "lines": ["hello"]}},
            "trunk": {"turns": 1, "seeds": 2}, "branch": {"turns": 1, "seeds": 4},
        },
        "grid": {"framing": {"warm": "Be warm.", "cold": "Be cold."}},
        "aggregate": {"moments": {"by": ["framing"]}},
        "cluster": {"executor": "ray", "replicas": 2, "num_cpus": 1},
        "run": {"progress": "none", "dir": str(folder / f"run-{cells}")},
    })  # fmt: skip


# ---- sections


def drive(cells: int, folder: Path) -> dict:
    """Run (or resume) a sweep of fake cells in this process; what it cost this process."""
    import ray

    from sweeps.driver import entry

    config = settings(cells, folder)
    used, stop = [0.0], threading.Event()

    def sample():
        while not stop.wait(0.5):
            if ray.is_initialized():
                try:
                    key = "object_store_memory"
                    used.append(ray.cluster_resources().get(key, 0.0) - ray.available_resources().get(key, 0.0))
                except Exception as error:  # the cluster is coming or going
                    print(f"(no sample: {type(error).__name__})", file=sys.stderr)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    cpu, wall = time.process_time(), time.monotonic()
    code = entry.run(config, config.run.dir, replica="benchmarks.fake:Fake")
    stop.set()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"code": code, "cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall, "rss": peak,
            "object_store": max(used)}  # fmt: skip


def section_driver(args, folder: Path) -> None:
    small, large = args.cells // 10, args.cells
    few, many = apart("drive", small, folder), apart("drive", large, folder)
    again = apart("drive", large, folder)
    assert few["code"] == many["code"] == again["code"] == 0, (few, many, again)
    show("driver CPU", f"{many['cpu_s']:.1f} s for {large} cells, {many['cpu_s'] / large * 1e6:.1f} us a cell",
         f"<= 50 us a cell; {few['cpu_s']:.1f} s for {small}; {many['wall_s']:.0f} s of wall time")  # fmt: skip
    show("driver memory", f"{many['rss'] / few['rss']:.2f} x from {small} to {large} cells", "<= 1.10 x; "
         f"{few['rss'] / 1e6:.0f} and {many['rss'] / 1e6:.0f} MB")  # fmt: skip
    show("resume", f"{again['wall_s']:.1f} s over {large} committed cells", "< 20 s at a million")
    show("object store", f"{many['object_store'] / 1e6:.2f} MB at most", "< 5 MB")


def write_plan(cells: int, folder: Path) -> dict:
    """Expand a plan into a folder, and look at it as a driver does that begins."""
    from sweeps.folder import files, plan_reader, plan_writer
    from sweeps.folder.store import open_store
    from sweeps.plan.expand import expand

    config, root = settings(cells, folder), folder / f"plan-{cells}"
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun = time.monotonic()
    open_store(root).write_new("config-0.yaml", files.dump_yaml(config.to_dict()))
    planned = plan_writer.write(root, 0, config.grid, expand(config))
    wall_s, plan = time.monotonic() - begun, plan_reader.PlanFile(root)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    units = sum(1 for _ in plan.infos())
    assert len(plan.cell_ids()) == planned and len(plan.unit("u000000").cells) and units
    listed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cells": planned, "wall_s": wall_s, "rss": peak, "idle": idle, "listed": listed}


def section_plan(args, folder: Path) -> None:
    found = apart("write_plan", args.plan_cells, folder)
    show("planning", f"{found['rss'] / 1e6:.0f} MB, {found['wall_s'] / found['cells'] * 1e6:.1f} us a cell",
         f"< 500 MB for {found['cells']} cells, planned and written; {found['idle'] / 1e6:.0f} MB are Python, torch and "
         f"Arrow before it begins; {found['listed'] / 1e6:.0f} MB once a driver has listed every id")  # fmt: skip


def one_unit(cells: int, folder: Path):
    """A unit of cells whose records are bf16 rows at one layer and means at eight: (unit, records of one cell)."""
    import torch

    from interlens.interp.activation_cache import ActivationRecord
    from sweeps.folder.cells import Cell, Unit

    made = tuple(Cell(id=f"c{n:08d}", item="i", trunk="t", condition={}, trunk_seed=0, branch_seed=n, unit="u000000")
                 for n in range(cells))  # fmt: skip
    rows = torch.randn(40, 1024).to(torch.bfloat16)
    common = {"tokens": tuple(range(40)), "positions": tuple(range(40))}
    records = [ActivationRecord("bob", 1, 16, "residual", rows, (0, 40), {"answer": (0, 40)}, **common)]
    return Unit(id="u000000", cells=made), records


def section_write(args, folder: Path) -> None:
    from sweeps.folder.writer import UnitWriter

    unit, records = one_unit(3000, folder)
    size = len(unit.cells) * sum(r.tensor.numel() * r.tensor.element_size() for r in records)
    ratios = []
    for attempt in range(3):
        root = folder / f"write-{attempt}"
        data = os.urandom(1 << 20) * (size >> 20)
        begun = time.monotonic()
        with open(folder / f"raw-{attempt}", "wb") as out:
            out.write(data)
            os.fsync(out.fileno())
        raw = len(data) / (time.monotonic() - begun)
        writer = UnitWriter(root, unit, {"bob": "m"})
        for cell in unit.cells:
            writer.add_cell(cell, (), records)
        begun = time.monotonic()
        writer.commit()
        ratios.append(size / (time.monotonic() - begun) / raw)
    on_disk = sum(p.stat().st_size for p in (root / "activations").rglob("*.safetensors"))
    tries = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    show("shard writing", f"{max(ratios):.2f} of a raw write and fsync", f">= 0.70; all tries {tries}; {size >> 20} MB")
    show("bytes on disk", f"{on_disk / size:.4f} x the tensors", "<= 1.05 x")


def section_read(args, folder: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from sweeps.folder.store import open_store
    from sweeps.folder.tensors import open_file

    tensor = torch.randn(100_000, 1024)
    save_file({"residual.16.mean": tensor, "residual.12.mean": tensor.clone()}, folder / "layer.safetensors")
    flat = np.memmap(folder / "flat", dtype=np.float32, mode="w+", shape=tuple(tensor.shape))
    flat[:] = tensor.numpy()
    flat.flush()

    def ours():
        mapped = open_file(open_store(folder), "layer.safetensors")
        return mapped.rows("residual.16.mean", 0, len(tensor)).numpy().mean(0)

    def theirs():
        return np.memmap(folder / "flat", dtype=np.float32, mode="r", shape=tuple(tensor.shape)).mean(0)

    np.testing.assert_allclose(ours(), theirs(), atol=1e-5)
    best = {read.__name__: min(timed(read) for _ in range(5)) for read in (ours, theirs)}
    found = f"{best['theirs'] / best['ours']:.2f} of numpy over a flat memory-mapped file"
    show("reading a layer back", found, ">= 0.70")


def section_files(args, folder: Path) -> None:
    import torch

    from interlens.interp.activation_cache import ActivationRecord
    from sweeps.folder.writer import UnitWriter

    unit, _ = one_unit(1024, folder)
    common = {"tokens": (1, 2), "positions": (0, 1), "pool": "mean", "num_pooled": 2}
    records = [ActivationRecord("bob", 1, layer, "residual", torch.randn(1, 1024), (0, 1), {"answer": (0, 1)}, **common)
               for layer in range(8)]  # fmt: skip
    writer = UnitWriter(folder / "files", unit, {"bob": "m"})
    for cell in unit.cells:
        writer.add_cell(cell, (), records, {"words": 1.0})
    writer.add_sums("outcomes", {"count": torch.ones(1).numpy()})
    writer.commit()
    per_unit = sum(1 for path in (folder / "files").rglob("*") if path.is_file())
    units = -(-100_000 // 1024)
    found = f"{per_unit * units} for 100000 rollouts x 8 layers at 1024 cells a unit"
    show("files", found, f"< 1000; {per_unit} a unit")


def section_replicas(args, folder: Path) -> None:
    """Two one-CPU replicas against one, beside two bare processes against one: the same engine work on both sides."""
    tries = [(bare_processes(1), bare_processes(2), swept_replicas(1, folder / f"{k}"), swept_replicas(2, folder / f"{k}"))
             for k in range(3)]  # fmt: skip
    one, two, swept_one, swept_two = (statistics.median(rates) for rates in zip(*tries, strict=True))
    ideal, ours = two / one, swept_two / swept_one
    show("two replicas", f"{ours / ideal:.2f} of what two bare processes gain ({ours:.2f} x against {ideal:.2f} x)",
         f">= 0.9; tokens/s bare {one:.0f} and {two:.0f}, swept {swept_one:.0f} and {swept_two:.0f}")  # fmt: skip


BARE = """
import sys, time
from interlens.engine import Engine, Request, Sampling
from interlens.loading import load
import torch
torch.set_num_threads(1)
model, tokenizer = load("smollm2")
engine = Engine(model, rows=16)
prompt = tuple(tokenizer("Let's talk about rain.")["input_ids"])
ask = lambda n: [Request(tokens=prompt, key=(i,), sampling=Sampling(max_new_tokens=n)) for i in range(16)]
engine.run(ask(2))
print("ready", flush=True); sys.stdin.readline()
begun = time.monotonic()
replies = [reply for _ in range(4) for reply in engine.run(ask(48))]
print(sum(len(r.tokens) for r in replies) / (time.monotonic() - begun))
"""


def bare_processes(n: int) -> float:
    """Tokens per second of n processes with an engine each, started together."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = [subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=env) for _ in range(n)]  # fmt: skip
    for process in made:
        process.stdout.readline()
    for process in made:
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.stdout.readline()) for process in made)


def swept_replicas(n: int, folder: Path) -> float:
    """Tokens per second between the first unit's dispatch and the last commit of a sweep with n replicas."""
    from sweeps.compose import from_plain
    from sweeps.driver import entry
    from sweeps.folder import commits

    config = from_plain({
        "scenario": {
            "items": [{"id": f"i{k}", "topic": "rain"} for k in range(16)], "opening": "Let's talk about {topic}.",
            "participants": {"alice": {"model": "smollm2", "max_new_tokens": 48}},
            "branch": {"turns": 1, "seeds": 8},
        },
        "models": {"smollm2": {"source": "smollm2", "dtype": "bfloat16"}},
        "plan": {"unit_cells": 16}, "cluster": {"executor": "ray", "replicas": n, "rows": 16},
        "run": {"progress": "none", "dir": str(folder / f"replicas-{n}")},
    })  # fmt: skip
    assert entry.run(config, config.run.dir) == 0
    root = Path(config.run.dir)
    tokens = sum(commit.counters["tokens"] for commit in commits.list_commits(root))
    busy = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    ready = max(e["clock"] for e in busy if e["event"] == "ready")
    return tokens / (max(e["clock"] for e in busy if e["event"] == "complete") - ready)


def section_multirun(args, folder: Path) -> None:
    """Ten jobs of one Hydra multirun against one sweep over the same ten points, which loads once and works the same."""
    points = [round(0.1 * n, 1) for n in range(1, 11)]
    plain = {
        "scenario": {
            "items": [{"id": "a", "topic": "rain"}, {"id": "b", "topic": "tea"}], "opening": "Let us talk about {topic}.",
            "participants": {"alice": {"model": "smollm2", "max_new_tokens": args.tokens}},
            "branch": {"turns": 1, "seeds": 16},
        },
        "plan": {"unit_cells": 32}, "run": {"progress": "none"},
        "cluster": {"executor": "ray", "replicas": 1, "rows": 32, "in_flight": 1},
    }  # fmt: skip
    own = folder / "own" / "experiment"
    own.mkdir(parents=True)
    for name, grid in (("ten", {}), ("one", {"scenario.branch.temperature": points})):
        written = json.dumps({**plain, "grid": grid} if grid else plain)
        (own / f"{name}.yaml").write_text(f"# @package _global_\n{written}\n")
    commands = {
        "one": ["--config-dir", str(own.parent), "experiment=one"],
        "ten": ["-m", "--config-dir", str(own.parent), "experiment=ten",
                f"scenario.branch.temperature={','.join(map(str, points))}"],
    }  # fmt: skip
    tries = []
    for number in range(2):
        where = {name: folder / f"multirun-{number}-{name}" for name in ("one", "ten")}
        one, ten = (timed(lambda name=name, at=at: command(commands[name], at)) for name, at in where.items())
        found = [json.loads(path.read_text()) for path in where["ten"].glob("runs/*/progress.json")]
        assert len(found) == 10 and all(job["state"] == "complete" for job in found), found
        tries.append((ten / one, one, ten))
    ratio, one, ten = min(tries)
    show("multirun", f"{ratio:.2f} x: {ten:.1f} s for 10 jobs, {one:.1f} s for one sweep of the same 10 points",
         f"<= 1.15 x; all tries {', '.join(f'{r:.2f}' for r, _, _ in tries)}")  # fmt: skip


def command(arguments: list[str], where: Path) -> None:
    """`sweeps run` in a process and working directory of its own."""
    where.mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-m", "sweeps", "run", *arguments], cwd=where, env=env, check=True)


# ---- helpers


def timed(action) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def show(what: str, found: str, wanted: str) -> None:
    print(f"{what:22} {found}   (asked: {wanted})", flush=True)


def apart(function: str, cells: int, folder: Path) -> dict:
    """Call one of this file's functions in a process of its own, so that its time and memory are its own."""
    command = [sys.executable, str(HERE), "--call", function, "--cells", str(cells), "--folder", str(folder)]
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=[])
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--plan-cells", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=96, help="of a reply, in multirun")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--call", choices=("drive", "write_plan"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        print(json.dumps(globals()[args.call](args.cells, args.folder)))
        return
    folder = Path(tempfile.mkdtemp(prefix="sweeps-scale-"))
    try:
        for name in args.sections or SECTIONS:
            globals()[f"section_{name}"](args, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    main()
