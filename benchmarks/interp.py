"""What looking costs: capture by number of sites, cache queries, moments against a plain float64 sum.

    python benchmarks/interp.py [--threads 1]

Both sides of each comparison run in this process, interleaved; medians of CPU time are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from interlens.interp import ActivationCache, ActivationRecord, CaptureSpec, capture_activations
from interlens.interp.locate import verify
from interlens.interp.packing import run_forward
from interlens.loading import load
from interlens.statistics import Moments


def medians(*calls, repeats: int = 5) -> list[float]:
    """Median CPU seconds of each call; all run in turn, after one round to warm up."""
    times: list[list[float]] = [[] for _ in calls]
    for round in range(repeats + 1):
        for call, kept in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            if round:
                kept.append(time.process_time() - start)
    return [statistics.median(kept) for kept in times]


def capture() -> None:
    model, _ = load("smollm2", device="cpu", check_sites=False)
    ids = torch.randint(1000, 40000, (8, 128), generator=torch.Generator().manual_seed(0))
    specs = {
        "1 site, 1 layer": CaptureSpec(layers=16),
        "1 site, 30 layers": CaptureSpec(),
        "1 site, 30 layers, mean": CaptureSpec(pool="mean"),
        "5 sites, 30 layers": CaptureSpec(("resid_pre", "attn", "resid_mid", "mlp", "residual")),
        "9 sites, 30 layers": CaptureSpec(
            ("resid_pre", "attn", "resid_mid", "mlp", "residual", "q", "k", "v", "head_out")
        ),
    }

    def plain() -> None:
        with torch.no_grad():
            run_forward(model, ids)

    calls = [plain, *(lambda spec=spec: capture_activations(model, ids, spec) for spec in specs.values())]
    base, *rest = medians(*calls, repeats=3)
    print(f"forward of 8 x 128 tokens, SmolLM2 bf16: {base * 1e3:.0f} ms of CPU time")
    for name, seconds in zip(specs, rest, strict=True):
        print(f"  with capture of {name:<24} {seconds * 1e3:>6.0f} ms   x {seconds / base:.2f}")
    (once,) = medians(lambda: verify(model), repeats=2)
    print(f"  contracts checked at load {once * 1e3:>14.0f} ms")


def queries() -> None:
    cache, tensor = ActivationCache(offload=None), torch.zeros(1, 4)
    for n in range(100_000):
        cache._append(ActivationRecord("ab"[n % 2], n // 20, n % 20 // 2, "residual", tensor, (1, 1)))

    def look() -> None:
        for n in range(10_000):
            cache.at(participant="ab"[n % 2], message_idx=n // 20, layer=n % 20 // 2)

    (seconds,) = medians(look, repeats=3)
    print(f"10 000 `at` calls among 100 000 records: {seconds:.3f} s")


def moments() -> None:
    rows = torch.randn(50_000, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    size = rows.numel() * rows.element_size() / 1e9

    def plain() -> np.ndarray:
        return rows.double().sum(0).numpy()

    ours, theirs = medians(lambda: Moments.of(rows), plain)
    print(f"moments of {size:.3f} GB of bf16: {size / ours:.2f} GB/s; a plain float64 sum: {size / theirs:.2f} GB/s")
    print(f"  ratio {ours / theirs:.2f} (mean and variance against a sum alone)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    capture()
    queries()
    moments()
