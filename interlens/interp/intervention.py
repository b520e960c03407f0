"""The protocol of an intervention: what the engine needs to know of an edit to batch it with others.

An intervention is one site, some layers, a selection of tokens, per-row parameters, and an edit that works on many
tokens of many rows at once. Implement it anywhere; the engine never looks at the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from .select import Select


@runtime_checkable
class Intervention(Protocol):
    """One edit of a model's hidden state. All attributes are plain values; nothing here holds a model."""

    @property
    def site(self) -> str:
        """Canonical site name."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers, 0-based; negatives count from the end."""
        ...

    @property
    def tokens(self) -> Select:
        """Which positions are edited."""
        ...

    @property
    def rank(self) -> int:
        """Order at one (layer, site): lower first, ties in the order given. Patches 0, steering 1."""
        ...

    @property
    def per_position(self) -> bool:
        """True if `parameters` differ from position to position (patches); False: one `[1, ...]` value serves all."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of everything that changes the edit (also of `tokens`); equal fingerprints share parked KV."""
        ...

    @property
    def edit_key(self) -> Hashable:
        """Interventions with equal keys at one (layer, site) are edited in one call of `edit`."""
        ...

    def is_noop(self) -> bool:
        """True if this edit provably changes nothing (coef 0 of an additive mode): it is then never applied."""
        ...

    def check(self, num_layers: int, width: int) -> None:
        """Raise ValueError if the parameters do not fit a site of this width."""
        ...

    def required_positions(self, num_prompt: int) -> tuple[int, ...]:
        """Absolute positions that must be reached, else the reply is an error (patches); usually ()."""
        ...

    def parameters(self, layer: int, positions: np.ndarray, num_prompt: int | None = None) -> Mapping[str, Tensor]:
        """Parameters at absolute layer `layer`: each `[1, ...]`, or `[len(positions), ...]` if `per_position`.

        `num_prompt` is the request's prompt length, which negative positions count from. Tensors are on the CPU.
        """
        ...

    def edit(self, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """`hidden` [N, W] -> [N, W], a new tensor. Row n of every parameter belongs to row n of `hidden`."""
        ...

    def summary(self) -> dict[str, Any]:
        """Plain values for a message's metadata (mode, layers, coef, ...)."""
        ...
