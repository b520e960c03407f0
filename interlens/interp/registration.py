"""Interventions on a bare model, outside any engine: `spec.register(model)`.

While a registration is in force the model is marked (`hooks.registered`), and an engine refuses to run on it.
Positions count the real tokens of each row: an attention mask is respected, and with a cache, decoding goes on where
the prompt ended. The prompt is what the first forward without a past is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from .attach import mark_registered
from .hooks import attach
from .intervention import Intervention
from .locate import num_layers, resolve_layers, site_width
from .select import Select, TokenSequence
from .sites import text_decoder

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
    positions = _Positions()
    undo = [attach(model, {key: _tap(key[0], edits, positions) for key, edits in taps.items()})]
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

    def __init__(self):
        self.num_prompt: list[int] = []
        self.absolute: np.ndarray = np.zeros((0, 0), dtype=int)

    def note(self, module, args, kwargs) -> None:
        given = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        rows, columns = next(tensor for tensor in given if isinstance(tensor, Tensor)).shape[:2]
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
            self.num_prompt = [int((row >= 0).sum()) for row in self.absolute]

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
