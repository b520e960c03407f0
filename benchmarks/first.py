"""Tokens per second of steered, captured conversations: one at a time with transformers, against our engine at 32 rows.

    python benchmarks/first.py [--threads 2] [--tokens 48]

Both sides run in this process on the embedded model in bfloat16 and draw the same number of tokens per conversation.
"""

import argparse
import time

import torch

from interlens.engine import Engine, Request, Sampling
from interlens.interp import CaptureSpec, SteeringSpec
from interlens.loading import load

LAYERS = (8, 16, 24)
QUESTIONS = ("Is cereal a soup?", "Why is the sky blue?", "What makes a good friend?", "How do bees find flowers?")


def one_at_a_time(model, prompts, num_tokens: int) -> tuple[int, float]:
    """`generate` with a hand-written steering hook, then a clean forward with hooks for capture: tokens, seconds."""
    start, drawn = time.perf_counter(), 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        offset = torch.randn(576, generator=torch.Generator().manual_seed(i)).to(model.dtype)
        handles = [
            model.model.layers[layer].register_forward_hook(lambda m, a, out, d=offset: out + 0.5 * d)
            for layer in LAYERS
        ]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.8, top_p=0.95, top_k=0,
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
        )  # fmt: skip
        for handle in handles:
            handle.remove()
        kept: list[torch.Tensor] = []
        layers = [model.model.layers[layer] for layer in LAYERS]
        handles = [layer.register_forward_hook(lambda m, a, out, k=kept: k.append(out[0].clone())) for layer in layers]
        with torch.no_grad():
            model(out, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        assert [len(value) for value in kept] == [out.shape[1]] * len(LAYERS)
        drawn += out.shape[1] - len(prompt)
    return drawn, time.perf_counter() - start


def batched(model, prompts, num_tokens: int) -> tuple[int, float]:
    """The same through the engine: steering different per row, capture in the same forwards."""
    engine = Engine(model, rows=len(prompts))
    requests = [
        Request(
            tokens=tuple(prompt),
            sampling=Sampling(temperature=0.8, top_p=0.95, max_new_tokens=num_tokens),
            key=(0, i),
            interventions=(
                SteeringSpec(torch.randn(576, generator=torch.Generator().manual_seed(i)), layers=LAYERS, coef=0.5),
            ),
            capture=(CaptureSpec(layers=LAYERS),),
        )
        for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    replies = engine.run(requests)
    seconds = time.perf_counter() - start
    for reply, prompt in zip(replies, prompts, strict=True):
        if reply.error:
            raise reply.error
        assert len(reply.records) == len(LAYERS)
        assert all(len(record.tensor) == len(prompt) + num_tokens for record in reply.records)
    return sum(len(reply.tokens) for reply in replies), seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load("smollm2", dtype="bfloat16")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]
    many = [prompts[i % len(prompts)] for i in range(options.rows)]
    batched(model, many, 4)
    one_at_a_time(model, prompts[:1], 4)
    rates = {"one": [], "many": []}
    for _ in range(3):
        drawn, seconds = one_at_a_time(model, prompts[:2], options.tokens)
        rates["one"].append(drawn / seconds)
        drawn, seconds = batched(model, many, options.tokens)
        rates["many"].append(drawn / seconds)
    one, several = (sorted(values)[1] for values in (rates["one"], rates["many"]))
    print(f"threads {options.threads}, {options.tokens} tokens each, steering and capture at layers {LAYERS}")
    print(f"(a) one conversation at a time, generate + clean forward: {one:8.1f} tokens/s")
    print(f"(b) engine at {options.rows} rows:                               {several:8.1f} tokens/s")
    print(f"ratio: {several / one:.1f}x")


if __name__ == "__main__":
    main()
