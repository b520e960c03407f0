"""What cells cost before they are run: tokens, turns, rows and bytes, per condition; and how many cells make a unit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from interlens.interp.select import Select

from ..config.grid import applied, conditions
from ..config.schema import CaptureConfig, SweepConfig
from ..config.tokens import parse_tokens
from ..config.turns import budget, captures_turn, speakers
from . import items, model_sizes, replay

UNIT_BYTES = 512_000_000

MAX_UNIT_CELLS = 2048

UNKNOWN_LAYERS, UNKNOWN_WIDTH = 32, 4096
"""Assumed where a model's sizes cannot be read."""

CHARS_PER_TOKEN, MESSAGE_MARKUP, SYSTEM_TOKENS = 4.5, 5, 25
"""Of text; around a message; of the system prompt that a template adds where a participant has none."""


def default_unit_cells(config: SweepConfig) -> int:
    """Cells of a unit: about 512 MB of tensors, at most 2 048."""
    per_cell = tensor_bytes(config)
    return max(1, min(MAX_UNIT_CELLS, UNIT_BYTES // per_cell if per_cell else MAX_UNIT_CELLS))


def tensor_bytes(config: SweepConfig, part: str = "branch") -> int:
    """Bytes of activations that one cell (one trunk) keeps, every reply at its budget; of a replay's first rows the
    average."""
    if config.scenario.replay:
        rows = list(itertools.islice(items.read(config.scenario.source), 64))
        config = applied(config, next(conditions(config.grid)))
        return sum(load.tensors for row in rows for load in _replayed(config, row)) // max(1, len(rows))
    return sum(load.tensors for load in _turns(config, part))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one turn costs."""

    generated: int = 0
    prompt: int = 0
    tensors: int = 0
    records: int = 0
    record_tokens: int = 0
    recomputed: int = 0
    """Prompt positions that a capture selects: they are run through the model again where their KV is reused."""


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """What a turn is fed, in tokens."""

    tokens: int
    markup: int = 0
    """Of these, role markup and what the template adds: left out by captures unless `special: keep`."""
    shared: int = 0
    """Of these, before the branch point."""


def _turns(config: SweepConfig, part: str) -> Iterator[Load]:
    scenario = config.scenario
    said, messages = _text_tokens(scenario.first_message), int(bool(scenario.first_message))
    before = said
    if part == "branch":
        earlier = speakers(config, "trunk")
        said += sum(budget(config, n, "trunk") + MESSAGE_MARKUP for n in earlier)
        before = said
        said += _text_tokens(scenario.framing)
        messages += len(earlier) + bool(scenario.framing)
    for turn, name in enumerate(speakers(config, part)):
        own = scenario.participants[name].system_prompt
        system, added = (_text_tokens(own), MESSAGE_MARKUP) if own else (SYSTEM_TOKENS, SYSTEM_TOKENS)
        generated = budget(config, name, part)
        tokens = said + MESSAGE_MARKUP + system
        shared = before + system if part == "branch" else tokens + generated
        prompt = _Prompt(
            tokens=tokens if generated else 0, markup=added + (messages + 1) * MESSAGE_MARKUP,
            shared=shared if scenario.trunk.turns else 0,
        )  # fmt: skip
        yield _load(config, name, part, turn, prompt, generated)
        said, messages = said + MESSAGE_MARKUP + generated, messages + 1


def _replayed(config: SweepConfig, row: dict[str, Any]) -> Iterator[Load]:
    """The turns of a given conversation: what is said is fed, nothing is generated."""
    prompt, number, last = SYSTEM_TOKENS, 0, None
    said = replay.conversation(row, config.scenario)
    for message in said:
        last = config.scenario.participants.get(message.author)
        length = len(message.fed.generated) if message.fed else round(len(message.content) / CHARS_PER_TOKEN)
        prompt += MESSAGE_MARKUP
        if last is not None and last.is_local:
            yield _load(config, message.author, "branch", number, _Prompt(tokens=prompt), length)
        number += last is not None
        prompt += length
    if last is None or not last.is_local:
        for name, participant in config.scenario.participants.items():
            if participant.is_local:
                yield _load(config, name, "branch", number, _Prompt(tokens=prompt), 0)
                number += 1


def _load(config: SweepConfig, name: str, part: str, turn: int, prompt: _Prompt, generated: int) -> Load:
    caught = [c for c in config.capture if name in c.participants and captures_turn(c, part, turn)]
    kept = [_kept(config, c, name, prompt, generated) for c in caught]
    return Load(
        generated=generated, prompt=prompt.tokens, tensors=sum(k.tensors for k in kept),
        records=sum(k.records for k in kept),
        record_tokens=sum(k.record_tokens for k in kept), recomputed=max((k.recomputed for k in kept), default=0),
    )  # fmt: skip


def _text_tokens(text: str | None) -> int:
    return round(len(text) / CHARS_PER_TOKEN) + MESSAGE_MARKUP if text else 0


def _kept(config: SweepConfig, capture: CaptureConfig, name: str, prompt: _Prompt, generated: int) -> Load:
    shape = model_sizes.of(config, config.scenario.participants[name].model)
    from_prompt, from_reply = _selected(parse_tokens(capture.tokens), prompt, generated)
    if capture.special == "drop":
        from_prompt -= round(prompt.markup * from_prompt / max(prompt.tokens, 1))
    rows = min(from_prompt + from_reply, prompt.tokens + generated)
    values = [layers * width for layers, width in _vectors(config, capture, name)]
    records = sum(layers for layers, _ in _vectors(config, capture, name))
    tensors = sum(values) * (4 if capture.pool else rows * (shape.item_bytes if shape else 2))
    return Load(tensors=tensors, records=records, record_tokens=records * rows, recomputed=from_prompt)


def _vectors(config: SweepConfig, capture: CaptureConfig, name: str) -> Iterator[tuple[int, int]]:
    """(layers, width) of each captured site of a participant."""
    shape = model_sizes.of(config, config.scenario.participants[name].model)
    for site in capture.sites:
        every = 1 if site in ("embed", "final_norm", "logits") else shape.layers if shape else UNKNOWN_LAYERS
        layers = 1 if every == 1 else len(capture.layers) if capture.layers is not None else every
        yield layers, shape.site_width(site) if shape else UNKNOWN_WIDTH


def _selected(select: Select, fed: _Prompt, generated: int) -> tuple[int, int]:
    """About how many prompt and reply positions a selection takes."""
    op, args, prompt = select.op, select.args, fed.tokens
    if op == "or":
        parts = [_selected(part, fed, generated) for part in args]
        return min(sum(p for p, _ in parts), prompt), min(sum(g for _, g in parts), generated)
    if op == "minus":
        return _selected(args[0], fed, generated)
    if op == "all":
        return prompt, generated
    if op == "branch":
        return max(0, prompt - fed.shared), max(0, prompt + generated - max(fed.shared, prompt))
    if op == "prompt" or (op == "phase" and args[0] == "prompt"):
        return prompt, 0
    if op in ("generated", "phase"):
        return 0, generated
    if op == "window":
        first, last, of = args
        size = prompt if of == "prompt" else generated
        count = max(0, min(last + size * (last < 0), size) - min(first + size * (first < 0), size))
        return (count, 0) if of == "prompt" else (0, count)
    if op == "positions":
        return min(len(args), prompt), 0
    return min(30, prompt), 0  # a message, or the special tokens
