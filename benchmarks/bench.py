"""What the rows of `benchmarks/engine.py` stand on: the embedded model, requests to it, and both sides timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import first
import numpy as np
import torch

from interlens.engine import Engine, Request, Sampling
from interlens.interp import CaptureSpec, Select, SteeringSpec
from interlens.loading import load

LAYERS = (8, 16, 24)


LOGITS = CaptureSpec(sites=("logits",), tokens=Select.generated(lead=1))


ROWS: dict[str, Callable] = {}


def row(function: Callable) -> Callable:
    """Register a row: a function of a Bench that gives what it measured; its docstring is printed."""
    ROWS[function.__name__] = function
    return function


class Bench:
    """The model, some prompts, and how requests are made."""

    def __init__(self):
        self.model, self.tokenizer = load("smollm2", dtype="bfloat16")
        self.vocab = self.model.config.vocab_size
        self.prompts = [self.chat(text) for text in first.QUESTIONS]

    def chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def text(self, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(1000, 40000, num_tokens).tolist())

    def requests(self, n: int, lengths, *, steer=False, capture=False, temperature=0.8, prompt=None) -> list[Request]:
        lengths = [lengths] * n if isinstance(lengths, int) else lengths
        direction = [torch.randn(576, generator=torch.Generator().manual_seed(i)) for i in range(n)]
        return [
            Request(
                tokens=tuple(prompt or self.prompts[i % len(self.prompts)]),
                sampling=Sampling(temperature=temperature, top_p=0.95, max_new_tokens=int(lengths[i])),
                key=(0, i),
                interventions=(SteeringSpec(direction[i], layers=LAYERS, coef=0.5),) if steer else (),
                capture=(CaptureSpec(layers=LAYERS),) if capture else (),
            )
            for i in range(n)
        ]

    def run(self, requests: list[Request], rows: int = 32, **settings) -> tuple[float, Engine, list]:
        engine = Engine(self.model, rows=rows, **settings)
        start = time.perf_counter()
        replies = engine.run(requests)
        seconds = time.perf_counter() - start
        for reply in replies:
            if reply.error:
                raise reply.error
        return seconds, engine, replies

    def generate(self, prompts, num_tokens: int, sample: bool = True) -> float:
        """transformers' `generate` of equal-length prompts, to exactly `num_tokens`: seconds."""
        ids = torch.tensor(prompts)
        settings = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0) if sample else dict(do_sample=False)
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
            **settings,
        )
        assert out.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - start


def interleaved(repeats: int, *sides: Callable[[], float], warm: bool = False) -> list[list[float]]:
    """Seconds of each side, `repeats` times in turn, after one unmeasured round unless they are `warm`."""
    for side in () if warm else sides:
        side()
    times = [[side() for side in sides] for _ in range(repeats)]
    return [list(values) for values in zip(*times, strict=True)]


def median(values) -> float:
    return statistics.median(values)
