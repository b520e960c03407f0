"""Rows of the table `routing`: what routers decided, counted per participant, phase and layer of one cell.

Picks are the router's own (never a softmax-top-k of its logits), read while the model is at hand. Mass is rounded to
float16 here, once, so that whoever sums these rows, live or from the table, sums the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from interlens.interp.expert_load import expert_scores

from ..config.limits import PHASES

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.interp.routing import RoutingCapture


def routing_rows(
    records: Iterable[ActivationRecord], routed: Callable[[ActivationRecord], RoutingCapture], per_message: bool = False
) -> list[dict[str, Any]]:
    """Rows for `UnitWriter.add_routing` from records of one cell. Only unpooled ones of site `router` count.

    A token that two captures kept counts once. `per_message`: a row per message; else `message_idx` is None and a row
    stands for all of the cell's messages.
    """

    found: dict[tuple, dict[str, Any]] = {}
    seen: dict[tuple, set[int]] = {}
    for record in records:
        if record.site != "router" or record.pool is not None:
            continue
        known = seen.setdefault((record.participant, record.message_idx, record.layer), set())
        fresh = np.array([p not in known for p in record.positions or range(len(record.tensor))], dtype=bool)
        known.update(record.positions)
        if not fresh.any():
            continue
        capture = routed(record)
        experts = capture.topk_experts.long().cpu().numpy()
        scores = expert_scores(capture).cpu().numpy()
        for phase in PHASES:
            first, last = record.phases.get(phase, (0, 0))
            rows = first + np.flatnonzero(fresh[first:last])
            if len(rows):
                key = (record.participant, record.message_idx if per_message else None, phase, record.layer)
                picks = np.bincount(experts[rows].reshape(-1), minlength=scores.shape[1])
                row = found.setdefault(key, {"tokens": 0, "top_k": experts.shape[1], "counts": 0, "mass": 0.0})
                row["tokens"] += len(rows)
                row["counts"] = row["counts"] + picks
                row["mass"] = row["mass"] + scores[rows].sum(0)
    names = ("participant", "message_idx", "phase", "layer")
    return [
        {**dict(zip(names, key, strict=True)), **row, "mass": (row["mass"] / row["tokens"]).astype(np.float16)}
        for key, row in found.items()
    ]
