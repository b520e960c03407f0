"""What the harness itself costs per turn: views, templates, tokens, bookkeeping; everything but model forwards.

64 conversations of two speakers on a scripted engine whose answers cost nothing, with the embedded model's tokenizer
and 64 new tokens a turn. Prints milliseconds of CPU time per turn at 10, 20, 40 and 80 turns, and per turn of one
conversation alone; a conversation twice as long must take about twice as long.

    python benchmarks/conversations.py
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time

from transformers import AutoTokenizer

from interlens import Conversation
from interlens.dequantise import converted
from interlens.engine.request import Reply
from interlens.participants.model import ModelParticipant
from interlens.participants.weights import Weights
from interlens.sources import embedded_file

WORDS = [
    "soup",
    "salad",
    "cereal",
    "bread",
    "milk",
    "spoon",
    "bowl",
    "warm",
    "cold",
    "sweet",
    "salty",
    "think",
    "argue",
    "agree",
    "doubt",
    "because",
    "however",
]


class Instant:
    """An engine that has its answer at once."""

    def __init__(self, tokenizer, num_tokens: int):
        self.tokenizer, self.num_tokens, self.count, self.spent = tokenizer, num_tokens, 0, 0.0

    def submit(self, request):
        start = time.process_time()
        words = random.Random(self.count).choices(WORDS, k=self.num_tokens)
        self.count += 1
        ids = self.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"][: self.num_tokens - 1]
        reply = Reply(tokens=(*ids, self.tokenizer.eos_token_id), phases=("answer",) * (len(ids) + 1))
        self.spent += time.process_time() - start
        return type("Ticket", (), {"reply": reply})()

    def step(self) -> bool:
        return False

    def cancel(self, ticket) -> None:
        pass


def cost_ms(tokenizer, conversations: int, turns: int) -> float:
    """CPU milliseconds per turn, the engine's own left out. Caches of templates and pieces start empty."""
    from interlens.views import template

    template._templates.clear()
    engine = Instant(tokenizer, 64)
    weights = Weights(engine=engine, tokenizer=tokenizer)
    people = [ModelParticipant(name, weights, system_prompt="Be brief.") for name in ("alice", "bob")]
    conversation = Conversation(people, shared_context="Let's debate: is cereal a soup?")
    gc.collect()
    gc.freeze()  # what torch and transformers keep is not the harness's: full collections would walk it for every turn
    start = time.process_time()
    report = conversation.rollout(conversations, turns=turns)
    spent = time.process_time() - start - engine.spent
    gc.unfreeze()
    assert not report.failed, report.failed[0].traceback
    return spent / (conversations * turns) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=64)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(converted(embedded_file("smollm2"), label="smollm2"))
    cost_ms(tokenizer, 2, 4)  # imports and first uses
    print(f"{'turns':>6} {f'ms a turn, {arguments.conversations} together':>28} {'ms a turn, one alone':>22}")
    costs = {}
    for turns in (10, 20, 40, 80):
        costs[turns] = cost_ms(tokenizer, arguments.conversations, turns)
        print(f"{turns:>6} {costs[turns]:>28.3f} {cost_ms(tokenizer, 1, turns):>22.3f}")
    fine = costs[20] < 2.0 and costs[80] / costs[20] < 2.0
    print(
        f"at 20 turns {costs[20]:.2f} ms a turn (limit 2); one of 80 costs {costs[80] / costs[20]:.2f} times one of 20"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
