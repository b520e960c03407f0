"""Replay against a plain batched forward of the same tokens, both in one run.

    python benchmarks/replay.py [--rows 128] [--repeats 3]

Made-up questions and answers of many lengths go through SmolLM2 (bfloat16, one thread, CPU time, sides in turn):
  replay   one unit of a `scenario.replay` sweep, whole: texts to tokens, batches by length, means of the answers at three
           layers, shard and commit
  plain    the same token sequences through transformers: sorted by length, padded batches of 8, no mask (pads stand at
           the end, where causal attention does not see them), no cache, logits of one position, nothing kept
Prints tokens/s of both and their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

import sweeps
from interlens.engine import engine_for
from sweeps.compose import from_plain
from sweeps.driver import enter
from sweeps.folder.cells import pack
from sweeps.folder.plan_reader import PlanFile
from sweeps.replica.replica import Replica

BATCH = 8
"""Of plain; the fastest of 32, 8, 2 and 1 on two CPU cores."""
WORDS = [
    "the", "a", "river", "stone", "light", "under", "over", "walks", "sees",
    "quiet", "morning", "answer", "because", "garden", "never", "often", "small", "bright",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = written(root, given.rows)
        replayed(root / "warm", source)  # loads the model
        times: dict[str, list[float]] = {"replay": [], "plain": []}
        for n in range(given.repeats):
            seconds, model, ids = replayed(root / f"run{n}", source)
            times["replay"].append(seconds)
            times["plain"].append(plain(model, ids))
        tokens = sum(map(len, ids))
    rates = {side: tokens / statistics.median(seconds) for side, seconds in times.items()}
    lengths = sorted(map(len, ids))
    print(f"{given.rows} conversations, {tokens} tokens, {lengths[0]} to {lengths[-1]} each; {given.repeats} repeats")
    for side, rate in rates.items():
        print(f"{side:8} {rate:8.0f} tokens/s of CPU time   ({', '.join(f'{s:.2f}' for s in times[side])} s)")
    print(f"replay / plain: {rates['replay'] / rates['plain']:.2f}")


def written(root: Path, rows: int) -> Path:
    """A file of conversations: a question of 10 to 120 words, an answer of 10 to 120."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(10, 120))) + "."

    path = root / "rows.jsonl"
    said = ([{"role": "user", "content": text()}, {"role": "assistant", "content": text()}] for _ in range(rows))
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    return path


def replayed(root: Path, source: Path) -> tuple[float, torch.nn.Module, list[list[int]]]:
    """CPU seconds of one unit that replays all rows; the model, and the tokens that were fed."""
    config = from_plain({
        "scenario": {"replay": str(source), "participants": {"bob": {"model": "smollm2"}}},
        "models": {"smollm2": {"source": "smollm2", "dtype": "bfloat16"}},
        "capture": {"layers": [8, 16, 24], "tokens": "answer", "pool": "mean"},
        "plan": {"unit_cells": 100_000}, "cluster": {"rows": 32}, "run": {"dir": str(root)},
    })  # fmt: skip
    enter.enter(config, root)
    unit = next(PlanFile(root).units())
    replica = Replica(config.to_dict(), str(root), unit.cast, 1)
    replica.load()
    packed = pack(unit, {}, 0)
    model = replica.models.of(config, config.scenario.participants["bob"]).model
    engine_for(model).forget()  # nothing of an earlier repeat is reused
    begun = time.process_time()
    ack = replica.run(packed)
    seconds = time.process_time() - begun
    assert ack["outcome"] == "won" and not ack["failed"], ack
    run = sweeps.open(root)
    table = run.table("messages", columns=["author", "prompt_tokens", "tokens"]).to_pylist()
    ids = [[*row["prompt_tokens"], *row["tokens"]] for row in table if row["author"] == "bob"]
    return seconds, model, ids


def plain(model: torch.nn.Module, ids: list[list[int]]) -> float:
    """CPU seconds of the same tokens through the model alone."""
    order = sorted(ids, key=len)
    begun = time.process_time()
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            longest = max(map(len, rows))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            model(input_ids=padded, logits_to_keep=1, use_cache=False)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
