"""A model that calls a Python function. A model this small needs to be shown how, so its private context does.

python examples/tool_user.py
"""

from interlens import ContextItem, Conversation


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def shown(question: str, a: int, b: int) -> list[ContextItem]:
    call = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    return [
        ContextItem(question),
        ContextItem(call, "assistant"),
        ContextItem(f"<tool_response>\n{a * b}\n</tool_response>"),
        ContextItem(f"It is {a * b}.", "assistant"),
    ]


def main() -> None:
    examples = [
        *shown("What is 12 times 7?", 12, 7),
        *shown("How much is 31 multiplied by 9?", 31, 9),
        *shown("What is 5 times 18?", 5, 18),
        *shown("Multiply 40 and 11.", 40, 11),
    ]
    conversation = Conversation.from_models(
        ["smollm2"], names=["clerk"], shared_context="What is 64 times 23?", tools=[multiply], private_context=examples,
        temperature=0.0, max_new_tokens=48,
    )  # fmt: skip
    with conversation.capture(layers=[16]) as cache:
        message = conversation.step("clerk")
    for part in message.metadata["tool_trail"]:
        for call in part["calls"]:
            print(f"called {call['name']}({call['arguments']}) -> {call['result']}")
    print(f"clerk: {message.content}")
    print(f"captured the generation after the last call: {len(cache)} record of {len(cache.records[0].tensor)} tokens")


if __name__ == "__main__":
    main()
