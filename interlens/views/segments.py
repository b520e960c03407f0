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
from dataclasses import dataclass
from typing import Any, Literal

CACHE_SIZE = 65536


@dataclass(frozen=True)
class Item:
    """One part of a prompt. `text` for markup and content, `ids` for tokens; a mark is a position."""

    kind: Literal["markup", "content", "tokens", "mark"]
    text: str = ""
    index: int | None = None
    """Transcript index of a content or of tokens."""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of a stream, and where its contents and marks are: half-open, absolute."""

    ids: tuple[int, ...]
    contents: tuple[tuple[int | None, int, int], ...]
    """(transcript index or None, start, stop), in order."""
    marks: tuple[int, ...]


class Segments:
    """Tokenises streams for one tokenizer, with a cache of pieces."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
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

    def tokens(self, items: list[Item]) -> Tokens:
        """Token ids of a stream of items."""
        ids: list[int] = []
        contents: list[tuple[int | None, int, int]] = []
        marks: list[int] = []
        piece: list[Item] = []
        fresh = True  # the piece starts where the tokeniser would see a start

        def flush() -> None:
            nonlocal fresh
            if piece:
                piece_ids, spans, piece_marks = self._piece(tuple((i.kind, i.text) for i in piece), fresh)
                base = len(ids)
                owners = [i.index for i in piece if i.kind == "content"]
                contents.extend((owner, base + s, base + e) for owner, (s, e) in zip(owners, spans, strict=True))
                marks.extend(base + m for m in piece_marks)
                ids.extend(piece_ids)
                piece.clear()
                fresh = False

        for item in items:
            if item.kind == "tokens":
                flush()
                contents.append((item.index, len(ids), len(ids) + len(item.ids)))
                ids.extend(item.ids)
                fresh = False
            elif item.kind == "markup":
                first, *rest = self._cut_markup(item.text)
                if first:
                    piece.append(Item("markup", first))
                for text in rest:
                    flush()
                    piece.append(Item("markup", text))
            elif item.kind == "mark" and not piece:
                marks.append(len(ids))
            else:
                piece.append(item)
        flush()
        return Tokens(ids=tuple(ids), contents=tuple(contents), marks=tuple(marks))

    def _cut_markup(self, text: str) -> tuple[str, ...]:
        """`text` cut in front of every special token: the first part is what comes before the first (maybe "")."""
        if text not in self._cuts:
            starts = [m.start() for m in self._cut.finditer(text)] if self._cut else []
            edges = [0, *starts, len(text)]
            self._cuts[text] = tuple(text[a:b] for a, b in zip(edges, edges[1:], strict=False))
        return self._cuts[text]

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
        forged = self._special and any(k == "content" and self._special.search(t) for k, t in parts)
        if forged or not getattr(self.tokenizer, "is_fast", True):
            return self._tokenise_apart(parts, fresh)
        text = "".join(t for _, t in parts)
        pairs = self._encode(text, fresh)
        spans, marks, char, done = [], [], 0, 0
        for kind, part in parts:
            start, char = char, char + len(part)
            if kind == "mark":
                marks.append(next((n for n, (_, s, _) in enumerate(pairs) if s >= start), len(pairs)))
            elif kind == "content":
                inside = [n for n, (_, s, e) in enumerate(pairs) if n >= done and s < char and e > start]
                first = inside[0] if inside else max(done, sum(1 for _, _, e in pairs if e <= start))
                done = inside[-1] + 1 if inside else first
                spans.append((first, done))
        return tuple(i for i, _, _ in pairs), tuple(spans), tuple(marks)

    def _tokenise_apart(self, parts: tuple[tuple[str, str], ...], fresh: bool) -> tuple:
        ids: list[int] = []
        spans, marks = [], []
        for kind, text in parts:
            start = len(ids)
            if kind == "mark":
                marks.append(start)
                continue
            plain = kind == "content"
            ids += [i for i, _, _ in self._encode(text, fresh and not ids, plain=plain)] if text else []
            if plain:
                spans.append((start, len(ids)))
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
