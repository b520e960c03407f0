"""Two models debate, and one of them is watched while it speaks.

python examples/debate.py
"""

from interlens import Conversation, StopStringCondition


def main() -> None:
    conversation = Conversation.from_models(
        ("smollm2", "smollm2"),
        names=("alice", "bob"),
        shared_context="Let's debate: is cereal a soup? Answer in one sentence.",
        temperature=0.7,
        max_new_tokens=24,
        seed=3,
    )
    conversation.participant("alice").system_prompt = "You are sure that cereal is a soup."
    conversation.participant("bob").system_prompt = "You are sure that cereal is not a soup."
    with conversation.capture(layers=[8, 16], participants=["bob"]) as cache:
        conversation.run(turns=4, until=StopStringCondition(["I agree"]))
    print(conversation.transcript.pretty())
    print(f"\nended after {conversation.stop_reason}")
    for record in cache.query(layer=16):
        start, stop = record.phases["answer"]
        norm = record.tensor[start:stop].float().norm(dim=-1).mean()
        print(f"bob, message {record.message_idx}: {stop - start} answer tokens, mean norm {norm:.1f} at layer 16")
    second_thought = conversation.branch_from(2)  # the same talk up to bob's first answer, and another way on
    second_thought.transcript.append("moderator", "Now each of you argue for the other side.")
    print("\nand from message 2 on, told to change sides:")
    print(second_thought.run(turns=1)[-1].content)


if __name__ == "__main__":
    main()
