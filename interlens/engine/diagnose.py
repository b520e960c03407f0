"""What to say when a forward goes wrong."""

from __future__ import annotations

import torch

from ..errors import NonFinite, UnknownSite
from ..interp import hooks
from ..interp.locate import layers_with
from . import taps
from .forward import Batch, Forward, is_out_of_memory
from .rows import Row
from .slabs import Slabs


def not_finite(forward: Forward, row: Row) -> NonFinite:
    """Run a row with bad logits alone, from its start, and name the first layer whose output is not finite."""
    bad: list[int] = []
    batch = Batch(
        first=0,
        ids=[row.sequence.ids],
        starts=[0],
        stops=[len(row.sequence)],
        floors=[0],
        adapters=[row.request.adapter],
        all_logits=row.needs_all_logits,
        least=forward.least_queries,
    )
    row_alone = row.alone()
    edits, _ = taps.build([row_alone], batch, taps.Tables())

    def watch(layer: int):
        edit = edits.get((layer, "residual"))

        def tap(value):
            edited = edit(value) if edit else None
            if not torch.isfinite(value if edited is None else edited).all():
                bad.append(layer)
            return edited

        return tap

    try:
        layers = layers_with(forward.model, "residual")
    except UnknownSite:
        layers = ()
    functions = {**edits, **{(layer, "residual"): watch(layer) for layer in layers}}
    slabs = Slabs()
    slabs.resize(1, len(row.sequence))
    where = f"with {len(row.sequence)} tokens"
    try:
        with hooks.attached(forward.model, functions):
            logits = forward(batch, slabs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return NonFinite(f"logits are not finite {where}; running the request alone failed: {error}")
    if bad:
        return NonFinite(f"logits are not finite {where}; run alone, layer {min(bad)} is the first that is not")
    if not torch.isfinite(logits.amax(-1)).all():
        return NonFinite(f"logits are not finite {where}; run alone, every layer is finite but the head is not")
    return NonFinite(f"logits are not finite {where} in its batch, but are when the request runs alone")
