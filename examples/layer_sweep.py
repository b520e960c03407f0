"""At which layer is a feeling readable, and at which does pushing it change the words? One sweep over all layers.

Sentences in two moods give a difference-of-means direction per layer. Reading: AUROC on sentences no fit has seen, with
an interval and shuffled labels beside it. Writing: steering a neutral prompt by each layer's direction, how far the
log-odds of a warm word against a cold one move.

    python examples/layer_sweep.py [--out layer_sweep.png]
"""

import argparse

import matplotlib
import torch

from interlens.interp import CaptureSpec, Select, SteeringSpec, capture_activations
from interlens.loading import load
from interlens.probes import evaluate

matplotlib.use("Agg")
import matplotlib.pyplot as plt

THINGS = (
    "the film",
    "my dinner",
    "this book",
    "the concert",
    "our holiday",
    "the new office",
    "her speech",
    "the game",
)
MOODS = {
    1: ("{} was wonderful and I loved it", "I am so happy with {}"),
    0: ("{} was awful and I hated it", "I am so sad about {}"),
}
WORDS_ONLY = Select.all() - Select.positions(0)  # the first token is an attention sink, with a norm of its own
PROMPT, WORDS = "When I think about the weather today, I feel", (" happy", " sad")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="layer_sweep.png")
    out = parser.parse_args().out
    model, tokenizer = load("smollm2", dtype="float32", device="cpu")
    rows, labels, groups = [], [], []
    for thing in THINGS:
        for label, patterns in MOODS.items():
            for pattern in patterns:
                ids = tokenizer(pattern.format(thing).capitalize(), return_tensors="pt").input_ids
                captured = capture_activations(model, ids, CaptureSpec(tokens=WORDS_ONLY, pool="mean"))
                rows.append(torch.stack([c.tensor[0] for c in captured]))
                labels.append(label)
                groups.append(thing)  # a test sentence is about a thing that no fit has seen
    states, y = torch.stack(rows), torch.tensor(labels)  # [sentence, layer, D]
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    warm, cold = (tokenizer(word).input_ids[0] for word in WORDS)

    def log_odds() -> float:
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        return float(logits[warm] - logits[cold])

    plain, reading, writing = log_odds(), [], []
    for layer in range(states.shape[1]):
        x = states[:, layer]
        reading.append(evaluate(x.numpy(), y.numpy(), groups, draws=200, permutations=5))
        spread = float(x.norm(dim=-1).mean())
        spec = SteeringSpec.difference_of_means(x[y == 1], x[y == 0], layer, coef=0.1 * spread)
        with spec.register(model):
            writing.append(log_odds() - plain)
    draw(reading, writing, out)
    best = max(range(len(writing)), key=writing.__getitem__)
    print(f"without steering, log-odds of{WORDS[0]} against{WORDS[1]}: {plain:+.2f}")
    print(f"steering moves them most at layer {best}: {writing[best]:+.2f}; drawn to {out}")


def draw(reading, writing, out: str) -> None:
    layers = range(len(writing))
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    above.plot(layers, [e.auroc.value for e in reading], label="difference of means")
    above.fill_between(layers, [e.auroc.low for e in reading], [e.auroc.high for e in reading], alpha=0.2)
    above.plot(layers, [e.shuffled["mean"] for e in reading], linestyle="--", color="grey", label="shuffled labels")
    above.set(ylabel="AUROC, unseen things", ylim=(0, 1.05))
    above.legend()
    below.bar(layers, writing)
    below.axhline(0, color="grey", linewidth=0.5)
    below.set(xlabel="layer", ylabel="change in log-odds\nwhen steered")
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
