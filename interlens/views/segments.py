"""Text and tokens to token ids, piece by piece, with every piece tokenised once.

A rendered prompt is a stream of items: markup, contents, tokens that a model generated itself, and marks. It is cut in
front of special tokens that stand in markup, where tokenisers cut too; so tokenising the pieces gives what tokenising
the whole would give, and a longer conversation only tokenises its new pieces. Generated tokens are spliced as they are.
Special tokens spelled out inside a content are tokenised as plain text: no one can forge markup.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any, Literal, NamedTuple

CACHE_SIZE = 65536


class Item(NamedTuple):
    """One part of a prompt. `text` for markup and content, `ids` for tokens; a mark is a position."""

    kind: Literal["markup", "content", "tokens", "mark"]
    text: str = ""
    index: int | None = None
    """Transcript index of a content or of tokens."""
    ids: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Tokens:
    """Token ids of a stream, and where its contents and marks are: half-open, absolute. Not to be changed."""

    items: list[Item]
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    """The ids in pieces, which streams that begin alike share."""
    length: int = 0
    """How many ids."""
    contents: list[tuple[int | None, tuple[int, int]]] = field(default_factory=list)
    """(transcript index or None, span), in order."""
    marks: list[int] = field(default_factory=list)
    special: list[tuple[int, int]] = field(default_factory=list)
    """Spans of markup, and of special tokens within contents."""
    joints: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """Places from which a stream that begins alike may go on: lengths of items, chunks, ids, contents, marks, special.
    """

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids."""
        made: list[int] = []
        for chunk in self.chunks:
            made += chunk
        return tuple(made)

    def add(self, ids: tuple[int, ...]) -> None:
        """Add a piece of text or of tokens."""
        self.chunks.append(ids)
        self.length += len(ids)

    def until(self, items: list[Item]) -> Tokens:
        """A copy of what can be kept for `items`: everything up to the last joint in their common beginning."""
        joints = self.joints
        if joints and self.items[: (last := joints[-1][0])] != items[:last]:  # mostly the very same objects
            common = next(n for n, (a, b) in enumerate(zip_longest(self.items, items)) if a != b)
            joints = [j for j in joints if j[0] <= common]
        _, chunks, length, contents, marks, special = joints[-1] if joints else (0, 0, 0, 0, 0, 0)
        return Tokens(
            items=items, chunks=self.chunks[:chunks], length=length, contents=self.contents[:contents],
            marks=self.marks[:marks], special=self.special[:special], joints=joints[:],
        )  # fmt: skip


class Segments:
    """Tokenises streams for one tokenizer, with a cache of pieces."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.special_ids: frozenset[int] = frozenset()
        """Ids that count as special inside a content too."""
        added = sorted(tokenizer.added_tokens_decoder.items(), key=lambda entry: -len(entry[1].content))
        cuts = [a.content for _, a in added if not a.lstrip and not a.single_word and a.content]
        specials = [a.content for _, a in added if a.special and a.content]
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        anchors = [a.content for _, a in added if a.special and not (a.lstrip or a.rstrip or a.single_word)]
        self._anchor = next((t for t in (tokenizer.eos_token, tokenizer.bos_token) if t in anchors), None)
        self._anchor = self._anchor or next(iter(anchors), None)
        self._pieces: OrderedDict[tuple, tuple] = OrderedDict()
        self._cuts: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def tokens(self, items: list[Item], before: Tokens | None = None) -> Tokens:
        """Token ids of a stream of items. `before`: an earlier stream, of which a common beginning is taken over."""
        made = before.until(items) if before is not None else Tokens(items=items)
        done = made.joints[-1][0] if made.joints else 0
        piece: list[Item] = []
        for n in range(done, len(items)):
            item = items[n]
            if item.kind == "tokens":
                self._flush(piece, made)
                self._content(made, item.index, made.length, item.ids)
                made.add(item.ids)
                notes = len(made.contents), len(made.marks), len(made.special)
                made.joints.append((n + 1, len(made.chunks), made.length, *notes))
            elif item.kind == "markup":
                first, *rest = self._cut_markup(item.text)
                if first:
                    piece.append(Item("markup", first))
                for text in rest:
                    self._flush(piece, made)
                    piece.append(Item("markup", text))
            elif item.kind == "mark" and not piece:
                made.marks.append(made.length)
            else:
                piece.append(item)
        self._flush(piece, made)
        if made.contents and made.contents[-1][1][1] < made.length:
            made.special.append((made.contents[-1][1][1], made.length))
        elif not made.contents and made.length:
            made.special.append((0, made.length))
        return made

    def _flush(self, piece: list[Item], made: Tokens) -> None:
        """Tokenise what has gathered."""
        if not piece:
            return
        fresh = not made.length and not made.joints  # where the tokeniser would see a start
        ids, spans, marks = self._piece(tuple((i.kind, i.text) for i in piece), fresh)
        base = made.length
        made.marks += [base + m for m in marks]
        owners = [i.index for i in piece if i.kind == "content"]
        for owner, (start, stop) in zip(owners, spans, strict=True):
            self._content(made, owner, base + start, ids[start:stop])
        made.add(ids)
        piece.clear()

    def _content(self, made: Tokens, index: int | None, start: int, ids: tuple[int, ...]) -> None:
        """Note a content; what lies between it and the one before is markup."""
        end = made.contents[-1][1][1] if made.contents else 0
        if start > end:
            made.special.append((end, start))
        if not self.special_ids.isdisjoint(ids):
            made.special += [(start + n, start + n + 1) for n, i in enumerate(ids) if i in self.special_ids]
        made.contents.append((index, (start, start + len(ids))))

    def _cut_markup(self, text: str) -> tuple[str, ...]:
        """`text` cut in front of every special token: the first part is what comes before the first (maybe "")."""
        if text not in self._cuts:
            starts = [m.start() for m in self._cut.finditer(text)] if self._cut else []
            edges = [0, *starts, len(text)]
            self._cuts[text] = tuple(text[a:b] for a, b in pairwise(edges))
        return self._cuts[text]

    def spells_special(self, text: str) -> bool:
        """Whether a special token is spelled out in it."""
        return self._special is not None and self._special.search(text) is not None

    def end_of_first_special(self, text: str) -> int:
        """Where the first special token of a markup, and the white space after it, end; 0 if it has none."""
        found = self._cut.search(text) if self._cut else None
        return len(text) - len(text[found.end() :].lstrip()) if found else 0

    def _piece(self, parts: tuple[tuple[str, str], ...], fresh: bool) -> tuple:
        key = (parts, fresh)
        with self._lock:
            if key in self._pieces:
                self._pieces.move_to_end(key)
                return self._pieces[key]
        made = self._tokenise(parts, fresh)
        with self._lock:
            self._pieces[key] = made
            while len(self._pieces) > CACHE_SIZE:
                self._pieces.popitem(last=False)
        return made

    def _tokenise(self, parts: tuple[tuple[str, str], ...], fresh: bool) -> tuple:
        """(ids, content spans, marks) of one piece; positions within the piece."""
        forged = any(k == "content" and self.spells_special(t) for k, t in parts)
        if forged or not getattr(self.tokenizer, "is_fast", True):
            return self._tokenise_apart(parts, fresh)
        text = "".join(t for _, t in parts)
        pairs = self._encode(text, fresh)
        spans, marks, char, done = [], [], 0, 0
        for kind, part in parts:
            start, char = char, char + len(part)
            if kind == "mark":
                marks.append(_first_from(pairs, start))
            elif kind == "content":
                # a special token of the markup may swallow white space of the content, and stays markup
                inside = [
                    n for n, (i, s, e) in enumerate(pairs)
                    if n >= done and s < char and e > start and (s >= start or i not in self.special_ids)
                ]  # fmt: skip
                first = inside[0] if inside else max(done, sum(1 for _, _, e in pairs if e <= start))
                done = inside[-1] + 1 if inside else first
                spans.append((first, done))
        return tuple(i for i, _, _ in pairs), tuple(spans), tuple(marks)

    def _tokenise_apart(self, parts: tuple[tuple[str, str], ...], fresh: bool) -> tuple:
        ids: list[int] = []
        spans, marks = [], []
        for plain, group in groupby(parts, key=lambda part: part[0] == "content"):
            for run in ([part] for part in group) if plain else (list(group),):  # markup on both sides of a mark is one
                start, text = len(ids), "".join(t for _, t in run)
                pairs = self._encode(text, fresh and not ids, plain=plain) if text else []
                edges = accumulate(len(t) if kind == "markup" else 0 for kind, t in run)
                marks += [
                    start + _first_from(pairs, c) for (kind, _), c in zip(run, edges, strict=True) if kind == "mark"
                ]
                ids += [i for i, _, _ in pairs]
                spans += [(start, len(ids))] if plain else []
        return tuple(ids), tuple(spans), tuple(marks)

    def _encode(self, text: str, fresh: bool, plain: bool = False) -> list[tuple[int, int, int]]:
        """(id, first char, last char + 1) of each token. Not `fresh`: as it would come out in the middle of a text."""
        if plain:  # specials spelled out stay text
            ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            return [(i, 0, 0) for i in ids]
        anchored = not fresh and self._anchor is not None and not (self._cut and self._cut.match(text))
        lead = len(self._anchor) if anchored else 0
        whole = self._anchor + text if anchored else text
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        rows = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        pairs = [(i, s - lead, e - lead) for i, (s, e) in rows]
        return pairs[1:] if anchored else pairs


def _first_from(pairs: list[tuple[int, int, int]], char: int) -> int:
    """Which token is the first that begins at `char` or later."""
    return next((n for n, (_, start, _) in enumerate(pairs) if start >= char), len(pairs))
