"""Directions in files: what an aggregate writes, and what `direction: run:<run folder>:<site>:<layer>` reads.

A file is safetensors: one tensor `<site>.<layer>` [D] float32 of unit norm per direction; under the metadata key
`provenance` where they came from, as JSON; under `steering` what `SteeringSpec.load` needs to take the file as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save

from ..folder import names
from ..folder.reader import RunFolder
from ..folder.store import Store
from ..plan import directions


def save_directions(
    store: Store, aggregate: str, tensors: Mapping[str, np.ndarray], provenance: Mapping[str, Any]
) -> None:
    """Write directions [D], scaled to unit norm, to the file of an aggregate; it appears whole or not at all.

    `SteeringSpec.load` reads those named `<site>.<layer>` of the first one's site, as an addition with coef 1.
    """

    unit = {key: (np.asarray(v) / np.linalg.norm(v)).astype(np.float32) for key, v in tensors.items()}
    site = next(iter(unit)).partition(".")[0]
    layers = [int(key[len(site) + 1 :]) for key in unit if key[: len(site) + 1] == f"{site}." and "@" not in key]
    steering = {"schema_version": 1, "layers": layers, "coef": 1.0, "mode": "add", "site": site, "tokens": "all()"}
    metadata = {"provenance": json.dumps(provenance, sort_keys=True)}
    if layers:
        metadata["steering"] = json.dumps({**steering, "provenance": dict(provenance)})
    store.replace(names.directions(aggregate), save(unit, metadata=metadata))


def direction_of(run: RunFolder, text: str, width: int) -> np.ndarray:
    """The direction [width] a reference names: the run folder's own copy where it has one, else the source itself."""
    if text in run.config.inputs or directions.parse_direction(text).kind == "random":
        return directions.load_direction(run.config, text, width, run.store).double().numpy()
    found = directions.read_direction(text).double().numpy()
    if found.shape != (width,):
        raise ValueError(f"direction {text!r} has shape {found.shape}, the model's site has {width}")
    return found
