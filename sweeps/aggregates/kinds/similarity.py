"""Similarity: cosines between the directions of this run's aggregates, and of other runs.

similarity: {of: [directions, lda], also: ["run:runs/other:residual:16"]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interlens.probes import cosine_map

from ...folder.results import direction_names, read_directions
from ...plan.directions import parse_direction
from ..direction_files import direction_of
from ..shards import ShardedRun


class Similarity:
    """A Fit over directions. It is finished after all other aggregates. `of`: which of them (None: all)."""

    is_last = True

    def __init__(self, name: str, *, of: Sequence[str] | None = None, also: Sequence[str] = ()):
        self.name, self.of, self.also = name, None if of is None else tuple(of), tuple(also)
        for reference in self.also:
            parse_direction(reference)

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Cosines of all pairs of one width; beside them what random directions of that width would give."""
        found: dict[str, np.ndarray] = {}
        for aggregate in direction_names(run.store):
            if self.of is not None and aggregate not in self.of:
                continue
            tensors, _ = read_directions(run.store, aggregate)
            found.update({f"{aggregate}: {name}": tensors[name] for name in sorted(tensors, key=_by_layer)})
        widths = {len(vector) for vector in found.values()}
        for reference in self.also:
            found[reference] = direction_of(run, reference, *(widths if len(widths) == 1 else [0]))
        maps = []
        for width in sorted({len(vector) for vector in found.values()}):
            names, cosines = cosine_map({name: v for name, v in found.items() if len(v) == width})
            chance = float(np.sqrt(2 / (np.pi * width)))
            maps.append({"width": width, "names": names, "values": cosines.tolist(), "random_mean_abs": chance})
        return {"kind": "similarity", "maps": maps}


def _by_layer(name: str) -> tuple[str, int, str]:
    """`residual.8` before `residual.16`."""
    site, _, rest = name.partition(".")
    layer, _, who = rest.partition("@")
    return site, int(layer) if layer.isdigit() else 0, who


AGGREGATE = Similarity
