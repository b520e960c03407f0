"""A panel of three with a moderator: private roles, a question from the chair, and a hook that keeps answers short.

python examples/panel.py
"""

from interlens import AutoModelParticipant, ContextItem, Conversation, Message, MessageHook
from interlens.policies import approve, edit

ROLES = {
    "chef": "You are a chef. You care about taste.",
    "doctor": "You are a doctor. You care about health.",
    "miser": "You are a miser. You care about the price.",
}


class FirstSentence(MessageHook):
    """Cuts what is said after its first sentence."""

    def review(self, message: Message, conversation: Conversation):
        sentence, dot, rest = message.content.partition(". ")
        return edit(Message(message.author, sentence + dot.strip(), message.metadata)) if rest else approve()


def main() -> None:
    panel = [
        AutoModelParticipant.from_pretrained(
            "smollm2", name=name, system_prompt=role, temperature=0.6, max_new_tokens=24
        )
        for name, role in ROLES.items()
    ]
    panel[2].private_context = (ContextItem("Between us: you own a bread factory."),)
    conversation = Conversation(
        panel,
        shared_context="What is the best breakfast?",
        moderator_name="chair",
        message_hooks=[FirstSentence()],
        seed=5,
    )
    conversation.run(turns=3)
    conversation.run(turns=1, first="doctor", prompt="Doctor, is bread healthy?")
    print(conversation.transcript.pretty())
    print("\nWhat the miser is fed next:\n")
    print(conversation.render_templated("miser", add_generation_prompt=True))


if __name__ == "__main__":
    main()
