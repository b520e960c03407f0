"""Reads what aggregates have written: results as JSON, directions as safetensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .files import Root
from .place import place


def read_results(root: Root) -> dict[str, dict[str, Any]]:
    """Name -> result of every aggregate a run folder holds: directions first, `control...` last, by name between."""
    files = (place(root) / "aggregates").glob("*.json")
    files = sorted(files, key=lambda path: (path.stem != "directions", path.stem.startswith("control"), path.stem))
    return {path.stem: json.loads(path.read_text()) for path in files}


def read_directions(path: Root) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All directions of a file, name -> [D], and their provenance. ValueError where there is no such file."""
    from safetensors.numpy import load

    file = place(path)
    if not file.exists():
        raise ValueError(f"no directions at {path}; a run with an aggregate `directions` writes them")
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(sorted(load(data).items())), json.loads(header.get("__metadata__", {}).get("provenance", "{}"))
