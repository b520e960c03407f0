"""The plain text measures count what they say they count."""

from types import SimpleNamespace

import pytest

from interlens.message import Message
from sweeps.analyzers import (
    DELIGHT_WORDS,
    DISTASTE_WORDS,
    enthusiasm,
    enthusiasm_rate,
    repetition_rate,
    valence_rate,
    words,
)


def test_rates_by_hand():
    assert words("It's GREAT, I love rain-water 42!") == ["it's", "great", "i", "love", "rain", "water"]
    assert enthusiasm_rate("I love it! It is great!!") == pytest.approx(100 * 5 / 6)
    assert valence_rate("a great and awful terrible day") == pytest.approx(100 * -1 / 6)
    assert repetition_rate("one two three four") == 0
    assert repetition_rate("a b c a b c") == pytest.approx(1 / 4)
    assert enthusiasm_rate("!!! 42") == valence_rate("") == repetition_rate("") == 0


def test_the_lists_do_not_overlap():
    assert DELIGHT_WORDS and DISTASTE_WORDS and not DELIGHT_WORDS & DISTASTE_WORDS


def test_only_what_was_said_after_the_branch_counts_and_never_the_moderator():
    said = [("moderator", "great!"), ("bob", "great!"), ("moderator", "wow!"), ("bob", "fine"), ("alice", "wow")]
    conversation = SimpleNamespace(
        transcript=[Message(author, content) for author, content in said], branch_start=2, moderator_name="moderator"
    )
    measured = enthusiasm(conversation)
    assert measured["enthusiasm.bob"] == 0 and measured["words.bob"] == 1
    assert measured["enthusiasm.alice"] == 100
    assert set(measured) == {
        f"{m}.{n}" for m in ("enthusiasm", "valence", "repetition", "words") for n in ("alice", "bob")
    }
