"""Steering: move the hidden state along a direction, at some layers, for some tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..given import Given, real, whole, wholes
from .registration import Registration, register
from .select import Select
from .sites import site_at

MODES = ("add", "ablate", "norm_add", "replace")
Direction = Tensor | Mapping[int, Tensor]
_ALL = Select.all()


@dataclass(frozen=True, eq=False, init=False)
class SteeringSpec:
    """Edit `site` of `layers` along `direction`, [D] or {layer: [D]} (any device or dtype; copied).

    Modes, with d the direction and d^ its unit vector: `add` h + coef d; `ablate` removes coef times the component
    along d^ (other tools remove all of it: coef 1; see docs/departures.md); `norm_add` h + coef |h| d^; `replace` sets the
    component along d^ to coef. Negative layers count from the
    end (with one direction for all layers). ValueError for a direction that is zero, not finite or of the wrong size.
    """

    direction: Direction
    layers: tuple[int, ...]
    coef: float = 1.0
    mode: str = "add"
    site: str = "residual"
    tokens: Select = field(default_factory=Select.all)

    rank = 1
    per_position = False

    def __init__(
        self, direction: Given, layers: Given, coef: Given = 1.0, mode: str = "add", site: str = "residual",
        tokens: Select | str | Any = _ALL,
    ):  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"no steering mode {mode!r}; possible: {', '.join(MODES)}")
        tokens, coef, names = Select.of(tokens), real(coef, "coef"), wholes(layers, "layers")
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layers must name each layer once and at least one, got {layers!r}")
        values = dict(
            direction=_directions(direction, names), layers=names, coef=coef, mode=mode,
            site=site_at(site, names), tokens=tokens,
        )  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def difference_of_means(
        cls,
        pos: Tensor | Mapping[int, Tensor],
        neg: Tensor | Mapping[int, Tensor],
        layers: Given,
        coef: Given = 1.0,
        mode: str = "add",
        **options: Any,
    ) -> SteeringSpec:
        """Steer along the unit vector from the mean of `neg` [M, D] to the mean of `pos` [N, D].

        Both may be {layer: rows} instead. Means are taken in float64. ValueError without rows on both sides, or when
        the means are equal.
        """
        names = wholes(layers, "layers")
        if isinstance(pos, Mapping) and isinstance(neg, Mapping):
            direction: Direction = {layer: _mean_difference(pos[layer], neg[layer]) for layer in names}
        elif isinstance(pos, Tensor) and isinstance(neg, Tensor):
            direction = _mean_difference(pos, neg)
        else:
            raise ValueError("give pos and neg both as tensors, or both as {layer: tensor}")
        return cls(direction, names, coef, mode, **options)

    def vector(self, layer: int) -> Tensor:
        """The direction [D] at this layer, on the CPU, at least float32."""
        direction = self.direction if isinstance(self.direction, Tensor) else self.direction[layer]
        return direction.to(torch.promote_types(direction.dtype, torch.float32))

    # -- the protocol of interventions ------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Hash of mode, site, layers, coef, tokens and the directions' values."""
        digest = hashlib.blake2b(digest_size=16)
        facts = ["steer", self.mode, self.site, self.layers, self.coef + 0.0, str(self.tokens)]
        digest.update(json.dumps(facts).encode())
        for layer in self.layers:
            digest.update(self.vector(layer).double().numpy().tobytes())
        return digest.hexdigest()

    @property
    def edit_key(self) -> Hashable:
        """Specs of one mode are applied together."""
        return (type(self), self.mode)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def is_noop(self) -> bool:
        """Whether it changes nothing: coef 0 in every mode but `replace`."""
        return self.coef == 0 and self.mode != "replace"

    def check(self, num_layers: int, width: int) -> None:
        """ValueError where width or layers do not fit the model."""
        given = self.vector(self.layers[0]).shape[0]
        if given != width:
            raise ValueError(f"a direction of {given} values does not fit {self.site!r}, which is {width} wide here")
        for layer in self.layers:
            if not -num_layers <= layer < num_layers:
                raise ValueError(f"no layer {layer}: this model has layers 0 to {num_layers - 1}")

    def required_positions(self, num_prompt: int) -> tuple[int, ...]:
        """None: it acts wherever it selects."""
        return ()

    def parameters(self, layer: int, positions: np.ndarray, num_prompt: int | None = None) -> Mapping[str, Tensor]:
        """The shift, or the unit vector and the coefficient, of a layer: [1, D]."""
        vector = self.vector(layer)
        if self.mode == "add":
            return {"shift": (self.coef * vector)[None]}
        return {"unit": (vector / vector.norm())[None], "coef": torch.tensor([[self.coef]], dtype=vector.dtype)}

    def edit(self, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Hidden states moved along each row's direction."""
        if self.mode == "add":
            return hidden + parameters["shift"].to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        h, unit, coef = hidden.to(wide), parameters["unit"].to(wide), parameters["coef"].to(wide)
        if self.mode == "norm_add":
            return (h + coef * h.norm(dim=-1, keepdim=True) * unit).to(hidden.dtype)
        along = (h * unit).sum(-1, keepdim=True)
        change = -coef * along if self.mode == "ablate" else coef - along
        return (h + change * unit).to(hidden.dtype)

    def summary(self) -> dict[str, Any]:
        """Plain values for a message's metadata."""
        norms = [float(self.vector(layer).norm()) for layer in self.layers]
        return {
            "mode": self.mode,
            "site": self.site,
            "layers": list(self.layers),
            "coef": self.coef,
            "direction_norm": norms[0] if len(set(norms)) == 1 else norms,
            "tokens": str(self.tokens),
            "fingerprint": self.fingerprint,
        }

    # -- use outside a conversation, and files -----------------------------------------------------

    def register(self, model: torch.nn.Module) -> Registration:
        """Put this edit on `model` until `.remove()` or the end of a with-block. See `registration`."""
        return register(model, [self])

    def save(self, path: str | Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write one safetensors file: tensor `<site>.<layer>` per layer, settings and provenance as JSON metadata."""
        from safetensors.torch import save_file

        direction = self.direction
        if isinstance(direction, Tensor):
            tensors = {self.site: direction}
        else:
            tensors = {f"{self.site}.{layer}": vector.clone() for layer, vector in direction.items()}
        facts = {
            "schema_version": 1,
            "layers": self.layers,
            "coef": self.coef,
            "mode": self.mode,
            "site": self.site,
            "tokens": str(self.tokens),
            "provenance": dict(provenance or {}),
        }
        save_file(tensors, str(path), metadata={"steering": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> SteeringSpec:
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("steering", "null"))
            if facts is None or facts["schema_version"] != 1:
                raise ValueError(f"{path} holds no steering spec of schema 1; was it written by SteeringSpec.save?")
            site = facts["site"]
            if site in file.keys():  # noqa: SIM118 - a safetensors handle is no dict
                direction: Direction = file.get_tensor(site)
            else:
                direction = {layer: file.get_tensor(f"{site}.{layer}") for layer in facts["layers"]}
        return cls(direction, facts["layers"], facts["coef"], facts["mode"], site, Select.parse(facts["tokens"]))


def _directions(direction: Direction, layers: tuple[int, ...]) -> Direction:
    """Checked copies: one vector, or one of each of `layers`."""
    if not isinstance(direction, Mapping):
        return _checked(direction, "")
    direction = {whole(layer, "a layer of the directions"): vector for layer, vector in direction.items()}
    missing = [layer for layer in layers if layer not in direction]
    if missing or min(layers) < 0:
        raise ValueError(
            f"directions are given for layers {sorted(direction)}, but layers={list(layers)}; "
            "name true (non-negative) layers that have a direction"
        )
    found = {layer: _checked(direction[layer], f" of layer {layer}") for layer in layers}
    widths = {value.shape[0] for value in found.values()}
    if len(widths) > 1:
        raise ValueError(f"directions of different widths {sorted(widths)} in one spec")
    return found


def _checked(direction: Any, where: str) -> Tensor:
    direction = torch.as_tensor(direction).detach()
    if not direction.is_floating_point():
        direction = direction.float()
    if direction.dim() != 1:
        raise ValueError(f"the direction{where} has shape {tuple(direction.shape)}; it must be [D]")
    with torch.inference_mode(False):
        direction = torch.empty(direction.shape, dtype=direction.dtype).copy_(direction)
    if not bool(direction.isfinite().all()):
        raise ValueError(f"the direction{where} has values that are not finite")
    if not bool(direction.any()):
        raise ValueError(f"the direction{where} is zero")
    return direction


def _mean_difference(pos: Tensor, neg: Tensor) -> Tensor:
    for name, rows in (("pos", pos), ("neg", neg)):
        if rows.dim() != 2 or not len(rows):
            raise ValueError(f"{name} has shape {tuple(rows.shape)}; it must be [N, D] with at least one row")
    if pos.shape[1] != neg.shape[1]:
        raise ValueError(f"pos is {pos.shape[1]} wide and neg {neg.shape[1]}")
    difference = pos.detach().double().mean(0) - neg.detach().double().mean(0).to(pos.device)
    return (difference / difference.norm()).float() if bool(difference.any()) else difference
