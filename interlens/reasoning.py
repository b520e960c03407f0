"""Which generated tokens are reasoning and which are the answer.

The phase of a token is a function of the token ids up to and including it, so that steering while generating and
capture afterwards can never disagree. Boundaries are matched in token ids, never in decoded text.

A marker of several ordinary tokens ("<", "think", ">") opens reasoning only where a reply starts: its first token may
as well be an ordinary less-than sign, and in the middle of an answer it is taken for one. A marker that is one token
opens anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FAMILIES = {
    "think": ("<think>", "</think>"),
    "bracket": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "thought": ("<thought>", "</thought>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>", "<channel|>"),  # a channel's name, `thought`, stands on its first line
    "harmony": ("<|channel|>", "final<|message|>"),  # every channel but `final` is reasoning, and so is its header
}
"""Family -> the texts that open and close reasoning."""


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Token id sequences that open and close reasoning. `opened`: the prompt itself ends inside reasoning."""

    open: tuple[tuple[int, ...], ...] = ()
    close: tuple[tuple[int, ...], ...] = ()
    opened: bool = False
    blank: frozenset[int] = frozenset()
    """Tokens that may stand before a marker that must be at the start of a reply (white space)."""

    @cached_property
    def first_ids(self) -> frozenset[int]:
        """Tokens with which a marker begins."""
        return frozenset(marker[0] for marker in (*self.open, *self.close))


class PhaseTracker:
    """Labels generated tokens one at a time as "reasoning" or "answer". Markers belong to reasoning.

    Tokens that begin a reply like a marker of several tokens are reasoning until they turn out to be something else.
    """

    def __init__(self, markers: Markers | None):
        self.markers = markers or Markers()
        self.inside = self.markers.opened
        self._recent: tuple[int, ...] = ()
        self._at_start = True

    def feed(self, token: int) -> str:
        """Phase of `token`, the next one."""
        if self.inside:
            self._recent = _longest_beginning((*self._recent, token), self.markers.close)
            if self._recent in self.markers.close:
                self.inside, self._recent, self._at_start = False, (), False
            return "reasoning"
        if (token,) in self.markers.open:
            self.inside, self._recent = True, ()
            return "reasoning"
        if self._at_start:
            begun = (*self._recent, token)
            if any(marker[: len(begun)] == begun for marker in self.markers.open):
                self._recent = begun
                if begun in self.markers.open:
                    self.inside, self._recent = True, ()
                return "reasoning"
            self._at_start = not self._recent and token in self.markers.blank
            self._recent = ()
        return "answer"


def _longest_beginning(tokens: tuple[int, ...], markers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest end of `tokens` that begins one of the markers."""
    while tokens and not any(marker[: len(tokens)] == tokens for marker in markers):
        tokens = tokens[1:]
    return tokens


def phases_of(tokens: Iterable[int], markers: Markers | None) -> tuple[str, ...]:
    """Phase of each generated token."""
    tracker = PhaseTracker(markers)
    return tuple(tracker.feed(token) for token in tokens)


def is_inside(tokens: Iterable[int], markers: Markers) -> bool:
    """Whether a text of these tokens ends inside reasoning."""
    tracker = PhaseTracker(markers)
    for token in tokens:
        tracker.feed(token)
    return tracker.inside


def split_reply(tokens: tuple[int, ...], markers: Markers | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(reasoning, answer) tokens of a finished reply, markers left out.

    Unlike the phases this may look ahead: what only began like a marker is answer, and what stands before a closing
    marker that nothing opened is reasoning.
    """
    markers = markers or Markers()
    if not markers.opened and markers.first_ids.isdisjoint(tokens):
        return (), tokens
    reasoning: list[int] = []
    answer: list[int] = []
    inside, at_start, i = markers.opened, True, 0
    while i < len(tokens):
        wanted = markers.close if inside else tuple(m for m in markers.open if len(m) == 1 or at_start)
        hit = _marker_at(tokens, i, wanted)
        if hit:
            inside, at_start, i = not inside, False, i + hit
        elif not inside and (stray := _marker_at(tokens, i, markers.close)) and not reasoning:
            reasoning, answer, at_start, i = answer, [], False, i + stray
        else:
            (reasoning if inside else answer).append(tokens[i])
            at_start = at_start and not inside and tokens[i] in markers.blank
            i += 1
    return tuple(reasoning), tuple(answer)


def split_text(text: str) -> tuple[str, str]:
    """(reasoning, answer) of a text whose tokens are not known: tags at its start, tags that are closed, and what stands
    before a closing tag that nothing opened."""
    thoughts: list[str] = []

    def take(found: re.Match) -> str:
        thought = "".join(part or "" for part in found.groups()).strip()
        thoughts.append(_thought(thought) if FAMILIES["gemma4"][1] in found[0] else thought)
        return ""

    for tags in _TAGS:
        text = tags.sub(take, text)
    return "\n\n".join(part for part in thoughts if part), text.strip()


def _thought(text: str) -> str:
    """A thought without Gemma 4's name of the channel."""
    return _NAMED.sub("", text, count=1)


_NAMED = re.compile(r"\Athought(?:\n\s*|\Z)")

_TAGS = [
    re.compile(rf"\A\s*{o}(.*?)(?:{c}|\Z)|{o}(.*?){c}|\A((?:(?!{o}).)*?){c}", re.DOTALL)
    for o, c in (map(re.escape, pair) for name, pair in FAMILIES.items() if name != "harmony")
]


def _marker_at(tokens: tuple[int, ...], i: int, markers: Iterable[tuple[int, ...]]) -> int:
    """Length of the longest marker that stands at position i; 0 if none does."""
    return max((len(m) for m in markers if tokens[i : i + len(m)] == m), default=0)


_CHANNEL = re.compile(r"(?:<\|start\|>[^<]*)?(?:<\|channel\|>|^)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")


def reasoning_text(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    """Reasoning tokens as text, without markup; harmony's channel headers count as markup."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False)
    if "<|message|>" not in text:
        plain = tokenizer.decode(list(tokens), skip_special_tokens=True).strip()
        return _thought(plain) if FAMILIES["gemma4"][0] in tokenizer.get_added_vocab() else plain
    text = _CHANNEL.sub("\n\n", text).removesuffix("<|start|>assistant<|channel|>")
    return re.sub(r"\s*<\|[a-z]+\|>\s*", "\n\n", text).strip()


def find_markers(tokenizer: Any, template: str, texts: tuple[str, str] | None = None) -> Markers | None:
    """The markers of a tokenizer and its chat template, or those made of the two given texts; None if there are none.

    A family counts when its opening text is one token of the vocabulary, or stands in the template.
    """
    added = set(tokenizer.get_added_vocab())
    if texts is None:
        if "<|channel|>" in added and "<|message|>" in added:
            texts = FAMILIES["harmony"]
        else:
            known = [pair for name, pair in FAMILIES.items() if name != "harmony"]
            in_template = [pair for pair in known if pair[1] in template]
            in_vocabulary = [pair for pair in known if set(pair) <= added]
            texts = next(iter(in_template + in_vocabulary), None)
    if texts is None:
        return None
    return Markers(
        open=_ids_of(tokenizer, texts[0]),
        close=_ids_of(tokenizer, texts[1]),
        blank=frozenset(i for text in ("\n", "\n\n", " ", "  ", "\t") for i in _plain(tokenizer, text)),
    )


_SPEAKS_OF_THOUGHTS = re.compile(r"\b(?:enable_thinking|reasoning_content)\b")


def check_known(name: str, template: str, markers: Markers | None) -> None:
    """ValueError where a chat template speaks of thoughts and nothing tells how its model marks them."""
    spoken = _SPEAKS_OF_THOUGHTS.search(template)
    if markers is None and spoken:
        known = ", ".join(f"{o} {c}" for o, c in FAMILIES.values())
        raise ValueError(
            f"{name}: its chat template speaks of thoughts ({spoken[0]}), and how this model marks them is not known, so "
            f"that they would count as its answer. Known: {known}. Give thinking=(opening text, closing text), or "
            "thinking=False where it does not think"
        )


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids_of(tokenizer: Any, marker: str) -> tuple[tuple[int, ...], ...]:
    """Every way the marker is tokenised next to usual neighbours: the tokens that cover it, fewest neighbours first."""
    found: dict[tuple[int, ...], None] = {}
    for before in ("", "\n", "\n\n", " ", "."):
        for after in ("", "\n", "\n\n", " ", "a"):
            text = before + marker + after
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            first, last = len(before), len(before) + len(marker)
            covering = [
                i for i, (s, e) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
                if s < last and e > first
            ]  # fmt: skip
            starts = [s for s, e in encoded["offset_mapping"] if s < last and e > first]
            if (starts and starts[0] >= first) or not before.strip():
                found.setdefault(tuple(covering))
    return tuple(found)
