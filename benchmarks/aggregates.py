"""How fast aggregates stream over stored vectors, against reading the same bytes; memory does not grow with rows.

    python benchmarks/aggregates.py [--cells 24000]

Writes a run folder with the package's own writer (no model), then, in this one process and in CPU time:
  read        the activation files read into memory, file by file (`numpy.fromfile`)
  sums        `difference_of_means` and `moments` recomputed from them: index, expressions, tensors, float64
  fits        one evaluation pass over the pooled vectors of a place
Anonymous memory (RssAnon) is sampled first, over a quarter of the run and over all of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import sweeps
from interlens.interp.activation_cache import ActivationRecord
from interlens.message import Message
from sweeps.aggregates import registry
from sweeps.aggregates.recompute import added
from sweeps.compose import from_plain
from sweeps.config.schema import AggregateConfig
from sweeps.driver import enter
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand

WIDTH, TOKENS, LAYERS, REPEATS = 576, 24, (8, 12, 16, 20), 9
CONTRAST = "framing == 'warm' vs framing == 'cold'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=24_000)
    with tempfile.TemporaryDirectory() as folder_name:
        run = written(Path(folder_name), parser.parse_args().cells)
        memory(run)
        streaming(run)
        fits(run)


def written(root: Path, cells: int) -> sweeps.run.Run:
    """A run folder of made-up records: per cell a pooled vector at four layers, and the rows of its tokens at one."""
    model = root / "tiny"
    model.mkdir()
    (model / "config.json").write_text(
        f'{{"num_hidden_layers": 30, "hidden_size": {WIDTH}, "num_attention_heads": 9, "vocab_size": 50}}'
    )
    config = from_plain({
        "scenario": {
            "items": [{"id": f"i{n}"} for n in range(cells // 20)],
            "participants": {"bob": {"model": "tiny"}},
            "branch": {"turns": 1, "seeds": 10},
        },
        "models": {"tiny": {"source": str(model), "dtype": "float32"}},
        "grid": {"framing": {"warm": "Be warm.", "cold": "Be cold."}},
        "capture": [
            {"participants": ["bob"], "layers": list(LAYERS), "pool": "mean"}, {"participants": ["bob"], "layers": [16]},
        ],
        "plan": {"unit_cells": 2000},
        "run": {"dir": str(root / "run")},
    })  # fmt: skip
    enter.enter(config, config.run.dir)
    generator, count, begun = torch.Generator().manual_seed(0), 0, time.process_time()
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"bob": "tiny"})
        for cell in unit.cells:
            rows = torch.randn(TOKENS, WIDTH, generator=generator)
            tokens = tuple(range(TOKENS))
            shared = {"tokens": tokens, "positions": tokens, "selection": "generated(0)"}
            kept = [
                *(ActivationRecord("bob", 1, layer, "residual", rows.mean(0)[None], (0, 1), {"answer": (0, 1)}, pool="mean",
                                   num_pooled=TOKENS, **shared) for layer in LAYERS),
                ActivationRecord("bob", 1, 16, "residual", rows, (0, TOKENS), {"answer": (0, TOKENS)}, **shared),
            ]  # fmt: skip
            writer.add_cell(cell, [Message("moderator", "?"), Message("bob", "!")], kept, {}, start=0)
            count += 1
        writer.commit()
    run = sweeps.open(config.run.dir)
    size = sum(Path(path).stat().st_size for path in run.files("activations")) / 1e9
    print(f"{count} cells, {count * (TOKENS + len(LAYERS))} rows of {WIDTH} float32, {size:.2f} GB, ", end="")
    print(f"written in {time.process_time() - begun:.0f} CPU s\n")
    return run


def built(name: str, **options: object) -> object:
    return registry.build([AggregateConfig(name=name, options=options)])[0]


SUMS = {
    "difference of means, tokens": built("difference_of_means", contrast=CONTRAST, pool=None),
    "moments, tokens": built("moments", by="framing", pool=None),
    "difference of means, pooled": built("difference_of_means", contrast=CONTRAST),
    "moments, pooled": built("moments", by="framing"),
}


def streaming(run: sweeps.run.Run) -> None:
    """Medians of repeats, the sides in turn."""
    files = run.files("activations")
    size = sum(Path(path).stat().st_size for path in files)
    sides = {"read the same bytes": lambda: [np.fromfile(path, np.uint8).size for path in files]}
    sides |= {name: lambda a=aggregate: recompute(run, a) for name, aggregate in SUMS.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, action in sides.items():
            times[name].append(timed(action)[0])
    pooled = size * len(LAYERS) / (TOKENS + len(LAYERS))
    read = size / statistics.median(times["read the same bytes"]) / 1e9
    print(f"{'':34}{'CPU s':>8}{'GB/s':>8}{'of read':>9}")
    for number, (name, seconds) in enumerate(times.items()):
        used = size if number == 0 else pooled if name.endswith("pooled") else size - pooled
        speed = used / statistics.median(seconds) / 1e9
        print(f"{name:34}{statistics.median(seconds):8.2f}{speed:8.2f}" + f"{speed / read:8.0%}")


def recompute(run: sweeps.run.Run, aggregate: object, units: int | None = None) -> dict:
    state = aggregate.zero()
    for shard in itertools.islice(run.shards(), units):
        state = added(state, shard, aggregate)
    return state


def memory(run: sweeps.run.Run) -> None:
    """Peak anonymous memory above the start, over a quarter of the units and over all."""
    units = len(list(run.commits()))
    recompute(run, SUMS["moments, tokens"], 1)  # what is loaded and cached once
    peaks = [peak(lambda n=n: recompute(run, SUMS["moments, tokens"], n)) for n in (max(units // 4, 1), units)]
    print(
        f"moments: {peaks[0]:.1f} MB above the start over {max(units // 4, 1)} units, {peaks[1]:.1f} MB over {units}\n"
    )


def fits(run: sweeps.run.Run) -> None:
    print()
    for name in ("difference_of_means", "lda", "logistic"):
        for rows in (1000, 4000):
            made = built(name, contrast=CONTRAST, permutations=0, draws=200, max_rows=rows)
            data = next(made.places(run))
            seconds, found = timed(lambda m=made, d=data: m.evaluation(d))
            used = found["evaluation"]
            print(f"{name:22} 5-fold evaluation of {used['rows']} of {used['rows_stored']} rows: {seconds:6.2f} CPU s")


def timed(action) -> tuple[float, object]:
    begun = time.process_time()
    result = action()
    return time.process_time() - begun, result


def peak(action) -> float:
    """The most anonymous memory above the start while `action` runs, in MB."""
    highest, done = anonymous(), threading.Event()
    start = highest

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return (highest - start) / 1024


def anonymous() -> int:
    """RssAnon in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
