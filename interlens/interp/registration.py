"""Interventions on a bare model, outside any engine: `spec.register(model)`.

While a registration is in force the model is marked (`hooks.registered`), and an engine refuses to run on it.
Positions count the real tokens of each row: an attention mask is respected, and with a cache, decoding goes on where
the prompt ended. The prompt is what the first forward without a past is given. Without a cache, a forward of the same
rows with one more token each is the same prompt, decoded further. Where a forward leaves open where the prompt ends (a
prefill in pieces, a cache that was filled before), selections that count from there are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from .attach import mark_registered
from .hooks import attach
from .intervention import Intervention
from .locate import num_layers, resolve_layers, site_width
from .select import Select, TokenSequence
from .sites import text_decoder, unwrap

_NEEDS_CONVERSATION = ("phase", "message", "special", "branch")


class Registration:
    """Edits in force on a model. Ends with `remove()` or with its with-block; removing twice does nothing."""

    def __init__(self, undo: list[Callable[[], None]]):
        self._undo = undo

    def remove(self) -> None:
        """Take the interventions off the model."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error) -> None:
        self.remove()


def register(model: nn.Module, interventions: Sequence[Intervention]) -> Registration:
    """Put interventions on `model`: patches first, then the others, each in the order given.

    ValueError or UnknownSite before anything is attached if one does not fit, or if its `tokens` need a conversation
    (phase, message, special, branch).
    """
    taps: dict[tuple[int, str], list[Intervention]] = {}
    for intervention in sorted(interventions, key=lambda i: i.rank):
        _check_tokens(intervention.tokens)
        for layer in resolve_layers(model, intervention.layers, intervention.site):
            intervention.check(num_layers(model), site_width(model, intervention.site, layer))
            if not intervention.is_noop():
                taps.setdefault((layer, intervention.site), []).append(intervention)
    positions = _Positions(_relative([edit for edits in taps.values() for edit in edits]))
    undo = [attach(model, {key: _tap(key[0], edits, positions) for key, edits in taps.items()})]
    undo.append(_watch_generate(model, positions))
    undo.append(text_decoder(model).register_forward_pre_hook(positions.note, with_kwargs=True).remove)
    mark_registered(model, 1)
    undo.append(lambda: mark_registered(model, -1))
    return Registration(undo)


def _check_tokens(tokens: Select) -> None:
    if tokens.op in ("or", "minus"):
        for part in tokens.args:
            _check_tokens(part)
    elif tokens.op in _NEEDS_CONVERSATION and tokens != Select.phase("prompt"):
        raise ValueError(
            f"{tokens} needs a conversation; on a bare model possible: all, prompt, generated, positions, window"
        )


def _relative(interventions: Sequence[Intervention]) -> str | None:
    """The first selection that needs to know where the prompt ends."""
    return next((str(edit.tokens) for edit in interventions if _needs_prompt(edit.tokens)), None)


def _needs_prompt(tokens: Select) -> bool:
    if tokens.op in ("or", "minus"):
        return any(_needs_prompt(part) for part in tokens.args)
    if tokens.op == "positions":
        return min(tokens.args) < 0
    return tokens.op != "all"


def _watch_generate(model: nn.Module, positions: _Positions) -> Callable[[], None]:
    """Have `positions` know when `generate` runs, and refuse a prefill in pieces before it begins. Returns the undo."""
    base = unwrap(model)
    original, before = getattr(base, "generate", None), base.__dict__.get("generate")
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def generate(*args, **kwargs):
        config = kwargs.get("generation_config") or getattr(base, "generation_config", None)
        piece = kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
        if piece is not None and positions.relative is not None:
            raise positions.refusal(f"prefill_chunk_size={piece} feeds the prompt in pieces")
        outside, positions.generating = positions.generating, True
        positions.last, positions.num_prompt = [], []  # another call, another prompt
        try:
            return original(*args, **kwargs)
        finally:
            positions.generating = outside

    def undo() -> None:
        if before is None:
            base.__dict__.pop("generate", None)
        else:
            base.__dict__["generate"] = before

    base.__dict__["generate"] = generate
    return undo


def _tap(layer: int, edits: list[Intervention], positions: _Positions):
    def tap(value: Tensor) -> Tensor | None:
        flat, changed = value.reshape(-1, value.shape[-1]), False
        for edit in edits:
            for row, columns, absolute in positions.selected(edit.tokens, *value.shape[:2]):
                index = torch.as_tensor(row * value.shape[1] + columns, device=value.device)
                parameters = edit.parameters(layer, absolute, positions.num_prompt[row])
                parameters = {name: tensor.to(value.device) for name, tensor in parameters.items()}
                flat = flat.index_copy(0, index, edit.edit(flat[index], parameters))
                changed = True
        return flat.view(value.shape) if changed else None

    return tap


class _Positions:
    """Absolute position of every column of the forward in progress, from its cache and attention mask."""

    def __init__(self, relative: str | None = None):
        self.relative = relative
        """A selection in force that needs to know where the prompt ends."""
        self.generating = False
        """`model.generate` is running: several tokens after a past are candidates, not a piece of the prompt."""
        self.num_prompt: list[int] = []
        self.last: list[Tensor] = []
        """The real tokens of each row, as the last forward without a past was given them."""
        self.absolute: np.ndarray = np.zeros((0, 0), dtype=int)

    def note(self, module, args, kwargs) -> None:
        given = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        fed = next(tensor for tensor in given if isinstance(tensor, Tensor))
        rows, columns = fed.shape[:2]
        cache = kwargs.get("cache")
        cache = cache if cache is not None else kwargs.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            real = mask.bool().cpu().numpy()[:, -(past + columns) :]
            counted = np.cumsum(real, axis=1) - 1
            self.absolute = np.where(real, counted, -1)[:, -columns:]
        else:
            self.absolute = np.broadcast_to(np.arange(past, past + columns), (rows, columns))
        if past == 0:
            self._begin(fed)
        elif len(self.num_prompt) != rows:
            if self.relative is not None:
                raise self.refusal("the cache of this forward was filled before, or for other rows")
            self.num_prompt = [past] * rows
        elif columns > 1 and not self.generating and self.relative is not None:
            raise self.refusal(
                f"{columns} tokens after a past of {past} may be more of the prompt or of what follows it"
            )

    def _begin(self, fed: Tensor) -> None:
        """A forward without a past: another prompt, or without a cache the last one with what followed it."""
        real = [fed[row][torch.as_tensor(self.absolute[row] >= 0, device=fed.device)] for row in range(len(fed))]
        lengths = [len(row) for row in real]
        before, self.last = self.last, real
        grown = [new - len(old) for new, old in zip(lengths, before, strict=False)]
        alike = len(before) == len(real) and all(
            step >= 0 and new.shape[1:] == old.shape[1:] and torch.equal(new[: len(old)], old.to(new.device))
            for step, new, old in zip(grown, real, before, strict=True)
        )
        if not alike:
            self.num_prompt = lengths
        elif self.relative is not None and max(grown, default=0) > 1 and not self.generating:
            self.last = []
            raise self.refusal(f"this forward has {max(grown)} tokens more than the last one, and begins as that did")

    def refusal(self, why: str) -> ValueError:
        return ValueError(
            f"where the prompt ends is not known: {why}. {self.relative} counts from there; use all, or positions from "
            "the start, or register anew for each prompt"
        )

    def selected(self, tokens: Select, rows: int, columns: int):
        """(row, its selected columns, their absolute positions), rows without any left out."""
        for row in range(rows):
            absolute = self.absolute[row, -columns:]
            if not (absolute >= 0).any():
                continue
            sequence = TokenSequence([0] * self.num_prompt[row])
            sequence.ids += [0] * max(int(absolute.max()) + 1 - sequence.num_prompt, 0)
            mask = (absolute >= 0) & tokens.mask(sequence)[np.maximum(absolute, 0)]
            if mask.any():
                chosen = np.flatnonzero(mask)
                yield row, chosen, absolute[chosen]
