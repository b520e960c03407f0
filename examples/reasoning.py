"""Reasoning and answer, apart in token ids: capture both, steer only one.

The embedded model does not reason by itself; shown three examples in its private context, it writes think tags.

    python examples/reasoning.py
"""

import torch

from interlens import ContextItem, Conversation, Select, SteeringSpec

SHOWN = {
    "Is ice cream hot?": ("Ice cream is frozen. Frozen things are cold.", "No, it is cold."),
    "Is a whale a fish?": ("Whales breathe air. Fish do not.", "No, it is a mammal."),
    "Is bread baked?": ("Bread is made in an oven. An oven bakes.", "Yes, it is baked."),
}


def main() -> None:
    examples = []
    for question, (plan, answer) in SHOWN.items():
        examples += [ContextItem(question), ContextItem(f"<think>\n{plan}\n</think>\n\n{answer}", "assistant")]
    conversation = Conversation.from_models(
        ["smollm2"], names=["thinker"], shared_context="Is cereal a soup?", private_context=examples,
        thinking=("<think>", "</think>"), temperature=0.0, max_new_tokens=48,
    )  # fmt: skip
    with conversation.capture(layers=[16]) as cache:
        message = conversation.sample("thinker")
        record = cache.records[0]
        direction = torch.randn(record.tensor.shape[1], generator=torch.Generator().manual_seed(0))
        only_answer = SteeringSpec(direction, layers=16, coef=0.5, mode="norm_add", tokens=Select.phase("answer"))
        steered = conversation.sample("thinker", steering=only_answer)
    print(f"thought: {message.metadata['reasoning']}\nsaid:    {message.content}\n")
    for phase, (start, stop) in record.phases.items():
        norm = record.tensor[start:stop].float().norm(dim=-1).median()
        print(f"{phase:>10}: {stop - start:3} tokens, median norm {norm:.1f} at layer 16")
    print(f"\nwith its answer steered away, it thought the same: {steered.metadata['reasoning']}")
    print(f"said: {steered.content}\ntokens steered: {steered.metadata['steering']['tokens_modified']}")


if __name__ == "__main__":
    main()
