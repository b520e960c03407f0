"""Patching: overwrite the hidden state at given absolute positions with recorded values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..given import Given, whole, wholes
from .activation_cache import ActivationRecord
from .intervention import Intervention
from .registration import Registration, register
from .select import Layout, Select, TokenSequence
from .sites import site_at


@dataclass(frozen=True, eq=False, init=False)
class Patch:
    """Overwrite `site` of `layer` at absolute `positions` with `activations` [len(positions), D].

    It acts whenever such a position is computed, in prefill or at the decode step that reaches it. Negative positions
    count from the end of the prompt. A position that the run never reaches is an error on the reply.
    """

    activations: Tensor
    layer: int
    positions: tuple[int, ...]
    site: str = "residual"
    rank: int = 0
    """0: before any steering at its place; 2: after it, so that the state there is the given one."""

    per_position = True

    def __init__(self, activations: Tensor, layer: Given, positions: Given, site: str = "residual", rank: int = 0):
        positions, layer = wholes(positions, "positions"), whole(layer, "layer")
        activations = torch.as_tensor(activations).detach()
        if activations.dim() != 2 or len(activations) != len(positions) or not positions:
            raise ValueError(
                f"activations of shape {tuple(activations.shape)} for {len(positions)} positions; "
                "they must be [len(positions), D] with at least one position"
            )
        if len(set(positions)) != len(positions):
            raise ValueError(f"positions {list(positions)} name one position twice")
        with torch.inference_mode(False):
            activations = torch.empty(activations.shape, dtype=activations.dtype).copy_(activations)
        if not bool(activations.isfinite().all()):
            raise ValueError("the activations of a patch must be finite")
        values = dict(
            activations=activations, layer=layer, positions=positions, site=site_at(site, (layer,)), rank=rank
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_record(cls, record: ActivationRecord, tokens: Select | str | Any = None, shift: Given = 0) -> Patch:
        """A patch that puts a record's rows back at the positions they came from, moved by `shift`.

        `tokens` narrows to the rows it selects, of the record's own sequence (`prompt`, `generated`, `phase`,
        `positions`, `window`); negatives count from the record's prompt rows. ValueError for a pooled record,
        or if no row is left.
        """
        tokens, shift = None if tokens is None else Select.of(tokens), whole(shift, "shift")
        if record.pool is not None:
            raise ValueError(f"a record pooled by {record.pool!r} has no rows to put back; capture it without pool")
        if len(record.positions) != len(record.tensor):
            raise ValueError("this record does not say which positions its rows have")
        rows = [row for row in range(len(record.tensor)) if tokens is None or _selects(tokens, record, row)]
        if not rows:
            raise ValueError(
                f"{tokens} selects no row of this record (selection {record.selection}, phases {record.phases})"
            )
        positions = tuple(record.positions[row] + shift for row in rows)
        return cls(record.tensor[rows], record.layer, positions, record.site)

    @property
    def layers(self) -> tuple[int, ...]:
        """The one layer, as interventions have it."""
        return (self.layer,)

    @property
    def tokens(self) -> Select:
        """The patched positions as a selection."""
        return Select.positions(*self.positions)

    # -- the protocol of interventions ------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Hash of site, layer, positions and values."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(
            json.dumps(["patch", self.site, self.layer, self.positions, *([self.rank] if self.rank else [])]).encode()
        )
        digest.update(self.activations.double().numpy().tobytes())
        return digest.hexdigest()

    @property
    def edit_key(self) -> Hashable:
        """Patches of one rank are applied together."""
        return type(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def is_noop(self) -> bool:
        """Never: a patch overwrites."""
        return False

    def check(self, num_layers: int, width: int) -> None:
        """ValueError where width or layer do not fit the model."""
        if self.activations.shape[1] != width:
            raise ValueError(
                f"patch values of width {self.activations.shape[1]} do not fit {self.site!r}, which is {width} wide"
            )
        if not -num_layers <= self.layer < num_layers:
            raise ValueError(f"no layer {self.layer}: this model has layers 0 to {num_layers - 1}")

    def required_positions(self, num_prompt: int) -> tuple[int, ...]:
        """Absolute positions that must be reached. ValueError for one before the prompt's start."""
        absolute = tuple(p + num_prompt if p < 0 else p for p in self.positions)
        if min(absolute) < 0:
            raise ValueError(f"patch position {min(self.positions)} lies before a prompt of {num_prompt} tokens")
        if len(set(absolute)) != len(absolute):
            raise ValueError(
                f"patch positions {list(self.positions)} name one position of a prompt of {num_prompt} twice"
            )
        return absolute

    def parameters(self, layer: int, positions: np.ndarray, num_prompt: int | None = None) -> Mapping[str, Tensor]:
        """The values [n, D] for these absolute positions."""
        if num_prompt is None and min(self.positions) < 0:
            raise ValueError("a patch with negative positions needs num_prompt")
        row_of = {position: row for row, position in enumerate(self.required_positions(num_prompt or 0))}
        return {"values": self.activations[[row_of[int(position)] for position in positions]]}

    def edit(self, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The hidden states with the given activations in their place."""
        return parameters["values"].to(hidden.dtype).expand_as(hidden).clone()

    def summary(self) -> dict[str, Any]:
        """Plain values for a message's metadata."""
        return {
            "site": self.site,
            "layer": self.layer,
            "positions": list(self.positions),
            "fingerprint": self.fingerprint,
        }

    def register(self, model: torch.nn.Module) -> Registration:
        """Put this edit on `model` until `.remove()` or the end of a with-block. See `registration`."""
        return register(model, [self])


@dataclass(frozen=True, eq=False)
class AlignedPatch:
    """A patch whose positions are known once the prompt is: row i of `activations` [n, D] goes to the i-th position of
    the prompt that `tokens` selects.

    Give it as `patch=` of a turn; `bound` makes the `Patch` of it for one prompt.
    """

    activations: Tensor
    layer: int
    tokens: Select
    site: str = "residual"
    rank: int = 0

    def __init__(
        self, activations: Tensor, layer: Given, tokens: Select | str | Any, site: str = "residual", rank: int = 0
    ):
        layer = whole(layer, "layer")
        values = dict(
            activations=activations, layer=layer, tokens=Select.of(tokens), site=site_at(site, (layer,)), rank=rank
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def bound(self, ids: Sequence[int], layout: Layout) -> Patch:
        """The patch for this prompt. ValueError, with both lengths, unless as many positions are selected as rows."""
        sequence = TokenSequence(list(ids), layout)
        self.tokens.check(sequence)
        positions = self.tokens.mask(sequence).nonzero()[0].tolist()
        if len(positions) != len(self.activations) or not positions:
            raise ValueError(
                f"cannot patch {self.site!r} at layer {self.layer}: {self.tokens} selects {len(positions)} of the "
                f"{len(sequence)} prompt tokens here and {len(self.activations)} in the donor; they must be as many, "
                "at least one: choose tokens that both prompts have, such as message(0) or positions(-1)"
            )
        return Patch(self.activations, self.layer, tuple(positions), self.site, self.rank)


def bound(spec: Intervention | AlignedPatch, ids: Sequence[int], layout: Layout) -> Intervention:
    """An intervention as it stands for this prompt."""
    return spec.bound(ids, layout) if isinstance(spec, AlignedPatch) else spec


def _selects(tokens: Select, record: ActivationRecord, row: int) -> bool:
    """Whether `tokens` selects this row, from what the record says of its rows."""
    position, num_prompt = record.positions[row], record.token_span[0]
    first_generated = record.positions[num_prompt] if num_prompt < len(record.positions) else record.positions[-1] + 1
    match tokens.op:
        case "all":
            return True
        case "or":
            return any(_selects(part, record, row) for part in tokens.args)
        case "minus":
            return _selects(tokens.args[0], record, row) and not _selects(tokens.args[1], record, row)
        case "prompt":
            return row < num_prompt
        case "phase":
            start, end = record.phases.get(tokens.args[0], (0, 0))
            return start <= row < end
        case "positions":
            return position in {p + first_generated if p < 0 else p for p in tokens.args}
        case "generated":
            return position >= first_generated - tokens.args[0]
        case "window":
            first, last, of = tokens.args
            if of == "generated":
                return first_generated + first <= position < first_generated + last
            first, last = (p + first_generated if p < 0 else p for p in (first, last))
            return row < num_prompt and first <= position < last
    raise ValueError(f"a record does not know {tokens}; possible: prompt, generated, phase, positions, window")
