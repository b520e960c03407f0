"""Where does the model keep the capital? Trace one fact through layers and positions, and draw it.

A clean and a corrupt prompt of equal length differ in one word. Each cell restores one hidden state of the clean run in
the corrupt run, and shows how much of the clean answer's lead comes back (0: none, 1: all).

    python examples/causal_trace.py [--out causal_trace.png] [--every 1]
"""

import argparse

import matplotlib
import torch

from interlens.loading import load
from interlens.studies import causal_trace

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLEAN, CORRUPT = "The capital of France is the city of", "The capital of Japan is the city of"
ANSWERS = (" Paris", " Tokyo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="causal_trace.png")
    parser.add_argument("--every", type=int, default=1, help="how many layers apart")
    given = parser.parse_args()
    model, tokenizer = load("smollm2", dtype="float32", device="cpu")
    clean, corrupt = (tokenizer(text, return_tensors="pt").input_ids[0] for text in (CLEAN, CORRUPT))
    right, wrong = (tokenizer(word).input_ids[0] for word in ANSWERS)

    def lead(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, right] - logits[0, -1, wrong]

    with torch.no_grad():
        best, worst = lead(model(clean[None]).logits), lead(model(corrupt[None]).logits)
    print(f"lead of{ANSWERS[0]} over{ANSWERS[1]}: {best:.2f} on the clean prompt, {worst:.2f} on the corrupt one")
    words = [tokenizer.decode([token]) for token in corrupt]
    figure, axes = plt.subplots(1, 3, figsize=(13, 5), sharey=True, layout="constrained")
    layers = range(0, model.config.num_hidden_layers, given.every)
    for axis, site in zip(axes, ("residual", "attn", "mlp"), strict=True):
        restored = (causal_trace(model, clean, corrupt, lead, site=site, layers=layers) - worst) / (best - worst)
        layer, position = divmod(int(restored.argmax()), restored.shape[1])
        print(f"{site:<9} restores most at layer {layers[layer]}, {words[position]!r}: {restored.max():.0%}")
        image = axis.imshow(restored, aspect="auto", origin="lower", cmap="RdBu_r", vmin=-1, vmax=1)
        shown = range(0, len(layers), max(len(layers) // 10, 1))
        axis.set(title=site, xticks=range(len(words)), yticks=shown, yticklabels=[layers[row] for row in shown])
        axis.set_xticklabels(words, rotation=60, ha="right")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="share of the lead restored")
    figure.savefig(given.out, dpi=150)
    print(f"drawn to {given.out}")


if __name__ == "__main__":
    main()
