"""Analyzers that come with the package: plain measures of text, `(conversation) -> dict` of numbers and strings.

They look at what each participant said after the branch point. A configuration names them by import path, like a
user's own: `scenario.analyzers: ["sweeps.analyzers:enthusiasm"]`.
"""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def words(text: str) -> list[str]:
    """Lower-case words: runs of letters, inner apostrophes kept."""
    return _WORD.findall(text.lower())


_DELIGHT = """
amazing awesome beautiful beautifully best brilliant cheerful delicious delight delighted delightful delightfully enjoy
enjoyable enjoyed enjoying excellent excited exciting fantastic fun glad glorious gorgeous great happily happy
incredible joy joyful joyous love loved lovely loves magical marvelous marvellous perfect pleased pleasure splendid
superb thrilled thrilling wonderful wonderfully wow yummy
"""

_DISTASTE = """
annoying appalling atrocious awful awfully bad bitter boring detest detestable disgust disgusted disgusting disgustingly
dislike distaste distasteful dreadful dull foul gross hate hated hates hideous horrible horribly horrid loathe loathsome
miserable nasty nauseating offensive repulsive revolting rotten sad sick sickening terrible terribly ugly unbearable
unpleasant vile worse worst yuck
"""

DELIGHT_WORDS = frozenset(words(_DELIGHT))
"""Common English words of delight, all of them listed above. No weights, no negation: "not great" counts as "great"."""

DISTASTE_WORDS = frozenset(words(_DISTASTE))
"""Common English words of distaste, likewise."""

UNITS = {"enthusiasm": "per 100 words", "valence": "per 100 words", "repetition": "(share of trigrams)", "words": ""}
"""How `enthusiasm` below counts, for labels; in the order of interest."""


def enthusiasm_rate(text: str) -> float:
    """Exclamation marks plus words of delight, per 100 words. 0 for a text without words."""
    said = words(text)
    return 100.0 * (text.count("!") + sum(word in DELIGHT_WORDS for word in said)) / len(said) if said else 0.0


def valence_rate(text: str) -> float:
    """Words of delight minus words of distaste, per 100 words. 0 for a text without words."""
    said = words(text)
    score = sum((word in DELIGHT_WORDS) - (word in DISTASTE_WORDS) for word in said)
    return 100.0 * score / len(said) if said else 0.0


def repetition_rate(text: str) -> float:
    """Share of three-word sequences that had occurred before in the text: 0 in fresh text, near 1 in a loop."""
    said = words(text)
    trigrams = list(zip(said, said[1:], said[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def enthusiasm(conversation: Any) -> dict[str, float]:
    """Per participant, over what it said after the branch point: enthusiasm, valence, repetition and word count.

    Keys are `<measure>.<participant>`. A participant that said nothing has no key.
    """
    said: dict[str, list[str]] = {}
    for message in list(conversation.transcript)[getattr(conversation, "branch_start", None) or 0 :]:
        if message.author != conversation.moderator_name:
            said.setdefault(message.author, []).append(message.content)
    measured: dict[str, float] = {}
    for name, texts in said.items():
        text = "\n".join(texts)
        measured[f"enthusiasm.{name}"] = enthusiasm_rate(text)
        measured[f"valence.{name}"] = valence_rate(text)
        measured[f"repetition.{name}"] = repetition_rate(text)
        measured[f"words.{name}"] = float(len(words(text)))
    return measured


def colours(conversation: Any) -> dict[str, float]:
    """For `fact_patching`: 1 where the last answer has the word in the item's column `clean`, `corrupt`; `neither`."""
    said = words(conversation.transcript[-1].content)
    found = {column: float(conversation.row[column] in said) for column in ("clean", "corrupt")}
    return {**found, "neither": float(not any(found.values()))}
