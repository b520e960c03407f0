"""The engine against what people use today, on the embedded model in bfloat16.

    python benchmarks/engine.py [--only NAME ...] [--threads 2] [--out benchmarks/results/engine.json]

Both sides of each row run in this process, interleaved; medians are compared and ratios printed. `--list` names rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import draws  # noqa: F401 (its rows register themselves)
import first
import numpy as np
import torch
from bench import LAYERS, ROWS, Bench, interleaved, median, row

from interlens import Conversation
from interlens.engine import Engine, Request, Sampling
from interlens.interp import CaptureSpec, SteeringSpec
from interlens.loading import load


@row
def steering_and_capture(bench: Bench) -> dict:
    """Steered, captured conversations: the engine at 32 and 64 rows against one at a time. Reach 16x and 22x."""
    num_tokens, result = 48, {}
    rates = []
    for _ in range(3):
        drawn, seconds = first.one_at_a_time(bench.model, bench.prompts[:2], num_tokens)
        rates.append(drawn / seconds)
    for n in (32, 64):
        ours = []
        for _ in range(3):
            drawn, seconds = first.batched(bench.model, [bench.prompts[i % 4] for i in range(n)], num_tokens)
            ours.append(drawn / seconds)
            drawn, seconds = first.one_at_a_time(bench.model, bench.prompts[:2], num_tokens)
            rates.append(drawn / seconds)
        result[f"ratio at {n} rows"] = median(ours) / median(rates)
        result[f"tokens/s at {n} rows"] = median(ours)
    return {**result, "tokens/s one at a time": median(rates)}


@row
def interventions_cost(bench: Bench) -> dict:
    """Time with steering and capture at 3 layers over time without. Reach 1.10, aim 1.03."""
    on, off = interleaved(
        7,
        lambda: bench.run(bench.requests(32, 32, steer=True, capture=True), reuse=False)[0],
        lambda: bench.run(bench.requests(32, 32), reuse=False)[0],
    )
    return {"ratio": median([a / b for a, b in zip(on, off, strict=True)]), "seconds off": median(off)}


@row
def equal_lengths(bench: Bench) -> dict:
    """`generate` over engine, same batch of 32, no interventions. Reach 0.95, aim above 1."""
    prompt = bench.prompts[0]
    sampled = interleaved(
        3,
        lambda: bench.run(bench.requests(32, 32, prompt=prompt), reuse=False)[0],
        lambda: bench.generate([prompt] * 32, 32),
    )
    greedy = interleaved(
        3,
        lambda: bench.run(bench.requests(32, 32, prompt=prompt, temperature=0), reuse=False)[0],
        lambda: bench.generate([prompt] * 32, 32, sample=False),
    )
    return {
        "ratio sampled": median(sampled[1]) / median(sampled[0]),
        "ratio greedy": median(greedy[1]) / median(greedy[0]),
    }


def _geometric(n: int) -> list[int]:
    lengths = np.random.default_rng(0).geometric(1 / 24, n)
    return [int(length) for length in np.clip(lengths, 2, 120)]


@row
def ragged(bench: Bench) -> dict:
    """96 requests of geometric lengths at 32 rows, greedy: engine against `generate` in waves of 32. Reach 1.8x."""
    lengths, prompt = _geometric(96), bench.prompts[0]

    def waves() -> float:
        return sum(bench.generate([prompt] * 32, max(lengths[i : i + 32]), sample=False) for i in range(0, 96, 32))

    requests = bench.requests(96, lengths, prompt=prompt, temperature=0)
    bench.run(bench.requests(32, 2, temperature=0))
    bench.generate([prompt] * 32, 2, sample=False)
    ours, theirs = interleaved(3, lambda: bench.run(requests, reuse=False)[0], waves, warm=True)
    return {"ratio": median(theirs) / median(ours), "tokens": sum(lengths), "seconds": median(ours)}


@row
def continuous_batching(bench: Bench) -> dict:
    """The same 96 requests against transformers' continuous batching, equal token counts asserted. Reach 1.3x.

    Greedy, both sharing the prompt they have in common. At 32 rows both, and with as many rows as there are requests;
    theirs with the best of three token budgets for each, with its prefix sharing and without.
    """
    lengths, prompt = _geometric(96), bench.prompts[0]

    def ours(rows: int) -> float:
        requests = bench.requests(96, lengths, prompt=prompt, temperature=0)
        return bench.run(requests, rows=rows)[0]

    def theirs(*settings) -> float:
        return _continuously(bench, prompt, lengths, *settings)

    result = {}
    for rows in (32, 96):
        settings = min(itertools.product((64, 256, 1024), (True, False)), key=lambda given: theirs(rows, *given))
        mine, others = interleaved(3, lambda: ours(rows), lambda: theirs(rows, *settings))  # noqa: B023
        result[f"ratio at {rows} rows"] = median(others) / median(mine)
        result[f"seconds at {rows} rows"] = f"ours {median(mine):.2f}, theirs {median(others):.2f}, {settings}"
    return result


def _continuously(bench: Bench, prompt, lengths: list[int], rows: int, budget: int, sharing: bool) -> float:
    """Seconds that transformers' continuous batching takes for replies of these lengths to one prompt."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    start = time.perf_counter()
    bench.model.set_attn_implementation("sdpa")
    settings = ContinuousBatchingConfig(
        max_batch_tokens=budget, max_requests_per_batch=rows, page_size=32, num_blocks=96 * 6,
        allow_block_sharing=sharing, use_cuda_graph=False, use_async_batching=False,
    )  # fmt: skip
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(lengths))
    with bench.model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        for i, length in enumerate(lengths):
            manager.add_request(input_ids=list(prompt), request_id=str(i), max_new_tokens=length)
        done: dict[str, int] = {}
        while len(done) < len(lengths):
            out = manager.get_result(timeout=60)
            if out is None:
                raise RuntimeError("continuous batching stopped answering")
            if out.is_finished():
                done[out.request_id] = len(out.generated_tokens)
    bench.model.set_attn_implementation("sdpa")
    assert [done[str(i)] for i in range(len(lengths))] == lengths
    return time.perf_counter() - start


@row
def shared_trunk(bench: Bench) -> dict:
    """16 branches of a 1 000-token trunk. Reach: prefill = trunk + own tokens, and 4x faster than without sharing."""
    trunk = bench.text(1000)
    own = [bench.text(12, seed=i + 1) for i in range(16)]

    def requests():
        return [
            Request(tokens=trunk + tail, sampling=Sampling(max_new_tokens=8), key=(0, i)) for i, tail in enumerate(own)
        ]

    engines = []

    def sharing() -> float:
        seconds, engine, _ = bench.run(requests())
        engines.append(engine)
        return seconds

    shared, alone = interleaved(3, sharing, lambda: bench.run(requests(), reuse=False)[0])
    least = len(trunk) + sum(len(tail) for tail in own)
    computed = {engine.counters["prefill_tokens"] for engine in engines}
    return {"prefill / least": max(computed) / least, "ratio": median(alone) / median(shared)}


@row
def steered_conversation(bench: Bench) -> dict:
    """An 8-turn conversation steered from its start: tokens computed over the two final views. Reach 1.02."""
    conversation = Conversation.from_models(
        ("smollm2", "smollm2"),
        names=("alice", "bob"),
        shared_context="Let's debate: is cereal a soup?",
        max_new_tokens=32,
    )
    engine = conversation.participant("alice").engine
    before = dict(engine.counters)
    spec = SteeringSpec(torch.randn(576, generator=torch.Generator().manual_seed(0)), layers=(16,), coef=0.5)
    for turn in range(8):
        conversation.step(turn % 2, steering=spec)
    computed = sum(engine.counters[k] - before[k] for k in ("prefill_tokens", "decode_tokens", "recomputed_tokens"))
    last = [m.fed for m in conversation.transcript if m.fed is not None][-2:]
    views = sum(len(fed.prompt) + len(fed.generated) for fed in last)
    return {"computed / views": computed / views, "computed": computed, "views": views}


@row
def capture_bytes(bench: Bench) -> dict:
    """Bytes that records hold over layers x tokens x D x dtype, and the most held meanwhile. Reach 1.2."""
    engine = Engine(bench.model, rows=32)
    tickets = [engine.submit(request) for request in bench.requests(32, 24, capture=True)]
    most = 0
    while engine.step():
        most = max(most, engine.bytes_held())
    records = [record for ticket in tickets for record in ticket.reply.records]
    needed = sum(record.tensor.numel() * record.tensor.element_size() for record in records)
    held = sum(record.tensor.untyped_storage().nbytes() for record in records)
    return {"records / payload": held / needed, "most held meanwhile / payload": most / needed}


@row
def decode_step(bench: Bench) -> dict:
    """One decode step over its matrix products and attention alone, same shapes and threads. Aim 1.3 at 32 rows."""
    return {f"{n} rows": _decode_step(bench, n) for n in (1, 8, 32, 128)}


def _bare(bench: Bench, n: int) -> Callable[[], float]:
    """Seconds of one token's matrix products and attention at n rows, nothing else."""
    functional, config, width = torch.nn.functional, bench.model.config, 80
    weights = [p for name, p in bench.model.named_parameters() if p.dim() == 2 and "embed" not in name]
    head = bench.model.get_input_embeddings().weight
    inputs = {size: torch.randn(n, size, dtype=torch.bfloat16) for size in {w.shape[1] for w in weights}}
    query = torch.randn(n, config.num_key_value_heads, 3, 64, dtype=torch.bfloat16)
    keys = torch.randn(n, config.num_key_value_heads, width, 64, dtype=torch.bfloat16)
    mask = torch.zeros(n, 1, 1, width, dtype=torch.bfloat16)

    @torch.no_grad()
    def bare() -> float:
        start = time.perf_counter()
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)
        functional.linear(inputs[config.hidden_size], head)
        for _ in range(config.num_hidden_layers):
            functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
        return time.perf_counter() - start

    return bare


def _decode_step(bench: Bench, n: int) -> str:
    engine = Engine(bench.model, rows=n, reuse=False)
    requests = bench.requests(n, 1000, prompt=bench.text(64), temperature=0)
    tickets = [engine.submit(request) for request in requests]
    while len(engine.live) < n:
        engine.step()

    def step() -> float:
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start

    ours, theirs = interleaved(7, step, _bare(bench, n))
    for ticket in tickets:
        engine.cancel(ticket)
    return f"{median(ours) * 1e3:.1f} ms, {median(ours) / median(theirs):.2f}x bare"


@row
def decode_profile(bench: Bench) -> dict:
    """Where a sampled decode step of steered, captured conversations spends its time: shares of operators at 32 rows."""
    from torch.profiler import ProfilerActivity, profile

    engine = Engine(bench.model, rows=32)
    tickets = [engine.submit(request) for request in bench.requests(32, 64, steer=True, capture=True)]
    while len(engine.live) < 32:
        engine.step()
    for _ in range(8):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(16):
            engine.step()
    for ticket in tickets:
        engine.cancel(ticket)
    kinds = {
        "matrix products": ("mm", "addmm", "bmm"),
        "attention": ("_scaled_dot_product_flash_attention_for_cpu",),
        "top-k": ("topk",),
    }
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares = dict.fromkeys([*kinds, "the rest"], 0.0)
    for event in events:
        name = event.key.removeprefix("aten::")
        kind = next((k for k, names in kinds.items() if name in names), "the rest")
        shares[kind] += event.self_cpu_time_total / total
    one, many = interleaved(7, _bare(bench, 1), _bare(bench, 32))
    return {**shares, "bare products and attention, 32 rows over 1 row": median(many) / median(one)}


@row
def moe_capture(bench: Bench) -> dict:
    """Routing and residual capture on the sparse upcycle of the embedded model over none. Reach 1.15."""
    model, tokenizer = load("smollm2-moe", dtype="bfloat16")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": first.QUESTIONS[0]}], add_generation_prompt=True
    )["input_ids"]
    routed = CaptureSpec(sites=("router", "residual"), layers=LAYERS)

    def run(capture) -> float:
        requests = [
            Request(tokens=tuple(prompt), sampling=Sampling(max_new_tokens=32), key=(0, i), capture=capture)
            for i in range(16)
        ]
        start = time.perf_counter()
        for reply in Engine(model, rows=16, reuse=False).run(requests):
            if reply.error:
                raise reply.error
        return time.perf_counter() - start

    on, off = interleaved(3, lambda: run((routed,)), lambda: run(()))
    return {"ratio": median([a / b for a, b in zip(on, off, strict=True)]), "seconds off": median(off)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine.json")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:24} {function.__doc__}" for name, function in ROWS.items()))
        return
    torch.set_num_threads(options.threads)
    bench = Bench()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        start = time.perf_counter()
        result = ROWS[name](bench)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        results[name] = {**shown, "threads": options.threads, "machine": platform.processor() or platform.machine()}
        print(f"{name}: {ROWS[name].__doc__}\n  {shown}  ({time.perf_counter() - start:.0f} s)", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
