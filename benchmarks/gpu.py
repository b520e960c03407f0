"""The engine on one GPU: decoding with steering and capture, and how fast captures leave the device.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json]

Prints and keeps: tokens per second with and without steering and capture (ratio), offload GB/s against the measured
peak of a pinned copy (aim >= 90 %), and the slowdown of decoding by offloading (aim <= 3 %). Takes under 8 minutes;
without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from interlens.engine import Engine, Request, Sampling
from interlens.engine.offload import Mover
from interlens.interp import CaptureSpec, SteeringSpec
from interlens.loading import load


def timed(function) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def offload_rate(megabytes: int = 48, batches: int = 40) -> dict[str, float]:
    """GB/s of `Mover` over many batches, and of a bare copy into one pinned buffer of the same size."""
    source = torch.randn(megabytes << 18, 2, device="cuda").to(torch.bfloat16)
    size = source.numel() * source.element_size()
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    mover = Mover(torch.device("cuda"))
    parts = list(source.chunk(16))
    shares = np.array_split(np.arange(len(source)), 16)

    def bare():
        for _ in range(batches):
            pinned.copy_(source, non_blocking=True)

    def ours():
        for claims in [mover.move(parts, "cpu", shares) for _ in range(batches)]:
            for claim in claims:
                claim.rows()

    bare()
    ours()
    peak = statistics.median(size * batches / timed(bare) for _ in range(5)) / 1e9
    rate = statistics.median(size * batches / timed(ours) for _ in range(5)) / 1e9
    return {"offload GB/s": rate, "pinned peak GB/s": peak, "share of peak": rate / peak}


def decoding(rows: int, num_tokens: int = 128) -> dict[str, float]:
    """Tokens per second of plain, steered and captured decoding at this many rows."""
    model, tokenizer = load("smollm2", dtype="bfloat16", device="cuda")
    chat = [{"role": "user", "content": "Is cereal a soup?"}]
    prompt = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    layers = (8, 16, 24)
    steers = [SteeringSpec(torch.randn(576), layers=layers, coef=0.5) for _ in range(rows)]

    def run(steer: bool, capture: bool):
        requests = [
            Request(
                tokens=prompt,
                sampling=Sampling(max_new_tokens=num_tokens),
                key=(0, i),
                interventions=(steers[i],) if steer else (),
                capture=(CaptureSpec(layers=layers),) if capture else (),
            )
            for i in range(rows)
        ]
        for reply in Engine(model, rows=rows, reuse=False).run(requests):
            if reply.error:
                raise reply.error

    sides = {"plain": (False, False), "steered": (True, False), "captured": (False, True), "both": (True, True)}
    for setting in sides.values():
        run(*setting)
    seconds = {name: [] for name in sides}
    for _ in range(5):
        for name, setting in sides.items():
            seconds[name].append(timed(lambda setting=setting: run(*setting)))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {f"tokens/s {name}": rows * num_tokens / value for name, value in median.items()}
    return {**result, **{f"{name} / plain": median[name] / median["plain"] for name in sides if name != "plain"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    results: dict = {"device": torch.cuda.get_device_name(), "offload": offload_rate()}
    for rows in (32, 128):
        results[f"{rows} rows"] = decoding(rows)
    text = json.dumps(results, indent=2)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
