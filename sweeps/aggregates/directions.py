"""Directions in files: how an aggregate saves them, and how `direction:` in a configuration finds them again.

A file is safetensors: one tensor `<site>.<layer>` [D] float32 of unit norm per direction, and where it came from as
JSON under the metadata key `provenance`. References: `run:<run folder>:<site>:<layer>`, `file:<path>:<layer>` (or
`file:<path>:<site>:<layer>`), `random:<seed>`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DIRECTIONS_FILE = "aggregates/directions.safetensors"
"""Where `run:<folder>` looks inside a run folder."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A parsed `direction:`. `path` is the safetensors file; None for `random`, which has a `seed` instead."""

    text: str
    path: Path | None = None
    site: str = "residual"
    layer: int | None = None
    seed: int | None = None

    @property
    def key(self) -> str:
        """The tensor's name in the file."""
        return f"{self.site}.{self.layer}"


def parse_reference(text: str) -> Reference:
    """Parse a direction reference. ValueError with the three forms for anything else."""
    kind, _, rest = str(text).partition(":")
    parts = rest.rsplit(":", 2)
    try:
        if kind == "random":
            return Reference(text=text, seed=int(rest))
        if kind == "run" and len(parts) == 3 and parts[0]:
            return Reference(text=text, path=Path(parts[0]) / DIRECTIONS_FILE, site=parts[1], layer=int(parts[2]))
        if kind == "file" and len(parts) == 3 and parts[0] and parts[1].isidentifier():
            return Reference(text=text, path=Path(parts[0]), site=parts[1], layer=int(parts[2]))
        if kind == "file" and ":" in rest:
            path, _, layer = rest.rpartition(":")
            return Reference(text=text, path=Path(path), layer=int(layer))
    except ValueError:
        pass
    raise ValueError(
        f"cannot read direction {text!r}; possible: run:<run folder>:<site>:<layer>, file:<path>:<layer>, random:<seed>"
    )


def load_direction(text: str, *, file: str | Path | None = None, width: int | None = None) -> np.ndarray:
    """The direction a reference names: [D] float32, of unit norm when an aggregate saved it.

    `file`: read this copy instead of the path in the reference. `width`: D, needed for `random:<seed>` (a seeded
    standard normal vector scaled to unit norm), checked for the others. ValueError saying what the file has.
    """
    reference = parse_reference(text)
    if reference.seed is not None:
        if width is None:
            raise ValueError(f"{text!r} needs a width")
        vector = np.random.default_rng(reference.seed).standard_normal(width)
        return (vector / np.linalg.norm(vector)).astype(np.float32)
    path = Path(file) if file is not None else reference.path
    tensors, _ = read_directions(path)
    if reference.key not in tensors:
        raise ValueError(f"no direction {reference.key!r} in {path}; it has: {', '.join(sorted(tensors)) or 'none'}")
    vector = tensors[reference.key]
    if width is not None and vector.shape != (width,):
        raise ValueError(f"direction {text!r} has shape {vector.shape}, the model's width is {width}")
    return vector


def input_file(run: Any, text: str) -> Path | None:
    """The run folder's own copy of a direction, if it has one: what its cells were really steered with."""
    digest = run.config.inputs.get(text)
    copy = Path(run.root) / "inputs" / digest if digest else None
    return copy if copy is not None and copy.is_file() else None


def read_directions(path: str | Path | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All directions of a file and their provenance. ValueError where there is no such file."""
    from safetensors import safe_open

    if path is None or not Path(path).is_file():
        raise ValueError(f"no directions at {path}; a run with an aggregate `directions` writes {DIRECTIONS_FILE}")
    with safe_open(str(path), framework="np") as opened:
        tensors = {key: np.array(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata() or {}
    return tensors, json.loads(metadata.get("provenance", "{}"))


def save_directions(path: str | Path, tensors: Mapping[str, np.ndarray], provenance: Mapping[str, Any]) -> None:
    """Write directions [D], scaled to unit norm, with their provenance; the file appears whole or not at all."""
    from safetensors.numpy import save

    unit = {key: (np.asarray(v) / np.linalg.norm(v)).astype(np.float32) for key, v in tensors.items()}
    write_whole(Path(path), save(unit, metadata={"provenance": json.dumps(provenance, sort_keys=True)}))


def write_whole(path: Path, data: bytes) -> None:
    """Replace a derived file: written beside it, fsynced, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
