"""The cast of a condition: which models a replica must have loaded to run it."""

from __future__ import annotations

from typing import Any

from ..config.digest import digest
from ..config.schema import SweepConfig
from . import model_sizes


def cast_of(config: SweepConfig) -> str:
    """Equal for configurations that the same set of loaded models can run."""
    return digest(_models(config))[:8]


def _models(config: SweepConfig) -> dict[str, Any]:
    used = {p.model for p in config.scenario.participants.values() if p.is_local and p.model}
    found = {}
    for name in used:
        entry = model_sizes.model(config, name)
        found[model_sizes.model_name(config, name)] = {"revision": entry.revision, "dtype": entry.dtype}
    return found
