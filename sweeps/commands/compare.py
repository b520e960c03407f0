"""`sweeps compare A B`: the same cells in two runs, under another model, adapter, dtype or library version.

Cells are matched by item, seeds and the axes that both runs have, never by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from interlens.interp.expert_load import js_divergence

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..run import Run


@dataclass(kw_only=True)
class Comparison:
    """What two runs have in common and where they part."""

    matched: int = 0
    """Cells that both have finished."""
    only: tuple[int, int] = (0, 0)
    """Finished cells that only A, only B has."""
    same_cells: int = 0
    """Matched cells all of whose generated tokens are equal."""
    replies: int = 0
    same_replies: int = 0
    first_differences: list[int] = field(default_factory=list)
    """Per reply that differs: how many of its first tokens are equal."""
    logprob_changes: list[float] = field(default_factory=list)
    """Log-probability in A less that in B, of every token that both drew after equal tokens (nats). Their mean estimates
    KL(A || B) per token at temperature 1, from the tokens on which the two agree: from below, where they part often."""
    routing: dict[int, float] = field(default_factory=dict)
    """Layer -> Jensen-Shannon divergence of expert load (nats)."""

    @property
    def lines(self) -> list[str]:
        """For people."""
        found = [
            f"{self.matched} cells matched; {self.only[0]} finished only in A, {self.only[1]} only in B",
            f"{self.same_cells} of {self.matched} cells and {self.same_replies} of {self.replies} replies have equal tokens",
        ]
        if self.first_differences:
            found.append(f"replies that differ part after {np.median(self.first_differences):.0f} tokens (median)")
        if self.logprob_changes:
            x = np.asarray(self.logprob_changes)
            found.append(
                f"{len(x)} tokens drawn by both after equal tokens: log-probability in A less in B "
                f"{x.mean():+.4f} on average (an estimate of the KL divergence per token), {np.abs(x).mean():.4f} in size, "
                f"at most {np.abs(x).max():.4f}"
            )
        if self.routing:
            worst = max(self.routing, key=lambda layer: self.routing[layer])
            found.append(f"expert load differs most at layer {worst}: {self.routing[worst]:.4f} nats of JS divergence")
        return found


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs. ConfigError where the axes that only one of them has make a match ambiguous."""
    axes = [axis for axis in a.axes if axis in b.axes]
    one, two = (_by_key(run, axes, other.axes) for run, other in ((a, b), (b, a)))
    found = Comparison(matched=len(one.keys() & two.keys()))
    found.only = (len(one) - found.matched, len(two) - found.matched)
    for key in one.keys() & two.keys():
        _compare_cell(a.messages(one[key]), b.messages(two[key]), found)
    if a.files("routing") and b.files("routing"):
        x, y = a.routing_stats(), b.routing_stats()
        if x.layers == y.layers and x.expert_load.shape == y.expert_load.shape:
            found.routing = dict(zip(x.layers, js_divergence(x.expert_load, y.expert_load).tolist(), strict=True))
    return found


def _by_key(run: Run, axes: Sequence[str], other: Sequence[str]) -> dict[tuple, str]:
    found: dict[tuple, str] = {}
    for row in run.cells.to_pylist():
        if row["state"] != "done":
            continue
        key = (row["item"], row["trunk_seed"], row["branch_seed"], *(row[axis] for axis in axes))
        if key in found:
            mine = ", ".join(axis for axis in run.axes if axis not in other)
            raise ConfigError(
                f"{str(run.root)!r} has several cells of one item and seeds; only it has the axes: {mine}"
            )
        found[key] = row["cell"]
    return found


def _compare_cell(one: list[Any], two: list[Any], found: Comparison) -> None:
    """Reply by reply, as long as what was said before is the same."""
    same = True
    for x, y in zip((m for m in one if m.fed), (m for m in two if m.fed), strict=False):
        found.replies += 1
        shared = _shared(x.fed.generated, y.fed.generated)
        equal = x.fed.generated == y.fed.generated
        if x.fed.prompt == y.fed.prompt:
            ours, theirs = x.metadata.get("logprobs"), y.metadata.get("logprobs")
            if ours and theirs:
                found.logprob_changes += [p - q for p, q in zip(ours[:shared], theirs[:shared], strict=True)]
        found.same_replies += equal
        if not equal:
            found.first_differences.append(shared)
        same &= equal
    found.same_cells += same


def _shared(x: Sequence[int], y: Sequence[int]) -> int:
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
