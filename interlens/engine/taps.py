"""From the rows of one forward to one function per touched (layer, site), which serves all of them at once.

At a (layer, site) every row's edits apply in order: patches, then steering, each as given. The k-th edits of all rows
are one slot; in a slot, edits of one kind are one gather, one call of `edit`, one scatter. Rows without an edit are
never read or written, so they stay bit for bit what they would be. Captures read what the edits leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .forward import Batch, is_out_of_memory
from .rows import Edit, Row, Take

Key = tuple[int, str]


class EditFailed(Exception):
    """An intervention's own code raised; `failures` maps rows to what they raised."""

    def __init__(self, failures: dict[Row, BaseException]):
        super().__init__("an intervention raised")
        self.failures = failures


@dataclass(kw_only=True, eq=False)
class Gathered:
    """What one lane kept in one forward: `values[i]` is the site's state of `owners` in order, positions ascending."""

    values: Tensor | None = None
    owners: list[tuple[Row | None, Take, np.ndarray]] = field(default_factory=list)
    """None: its row failed or starts over, and nobody wants these."""
    index: list[np.ndarray] = field(default_factory=list)


Lane = tuple[int, str, str | None, str | None, float | None]
"""(layer, site, pool, offload, max_norm)."""


class Tables:
    """Stacked parameters of the edits of one slot, remembered while the same rows stay together."""

    def __init__(self):
        self._kept: dict[tuple, tuple[tuple, dict[str, Tensor]]] = {}

    def parameters(self, where: tuple, layer: int, members: list[tuple[Row, Edit, np.ndarray]], like: Tensor):
        """The stacked parameters of these edits, kept from step to step."""
        if any(edit.intervention.per_position for _, edit, _ in members):
            return _stack([_parameters(layer, *member) for member in members], members, like, True)
        identity = tuple((edit, len(at)) for _, edit, at in members)
        kept = self._kept.get(where)
        if kept is None or kept[0] != identity:
            if len(self._kept) >= 4096:  # edits with keys of their own come and go
                self._kept.clear()
            each = [_parameters(layer, *member) for member in members]
            kept = self._kept[where] = (identity, _stack(each, members, like, False))
        return kept[1]


def _parameters(layer: int, row: Row, edit: Edit, positions: np.ndarray):
    return edit.intervention.parameters(layer, positions, row.sequence.num_prompt)


def _stack(each, members, like: Tensor, per_position: bool) -> dict[str, Tensor]:
    stacked = {}
    for name in each[0]:
        parts = [values[name].to(like.device, non_blocking=True) for values in each]
        if not per_position:
            counts = [len(at) for _, _, at in members]
            if max(counts) > 1:
                parts = [part.expand(n, *part.shape[1:]) for part, n in zip(parts, counts, strict=True)]
        stacked[name] = torch.cat(parts)
    return stacked


def build(rows: Sequence[Row], batch: Batch, tables: Tables) -> tuple[dict[Key, Callable], dict[Lane, Gathered]]:
    """The taps of one forward, and the lanes they fill."""
    slots = _slots(rows, batch)
    lanes = _lanes(rows, batch)
    by_site: dict[Key, list[tuple[Lane, Gathered]]] = defaultdict(list)
    for lane, gathered in lanes.items():
        by_site[lane[:2]].append((lane, gathered))
    taps = {}
    for key in {*slots, *by_site}:
        taps[key] = _tap(key, slots.get(key, []), by_site.get(key, []), batch, tables)
    return taps, lanes


def _slots(rows: Sequence[Row], batch: Batch) -> dict[Key, list[dict]]:
    """(layer, site) -> slots in order; a slot maps an edit key to its (batch row, row, edit, positions)."""
    slots: dict[Key, list[dict]] = defaultdict(list)
    for b, row in enumerate(rows):
        if not row.edits:
            continue
        start, stop = batch.starts[b], batch.stops[b]
        depth: dict[Key, int] = defaultdict(int)
        for edit in row.edits:
            if edit.steady and start >= row.sequence.num_prompt:
                at = np.arange(start, stop)
            else:
                at = edit.intervention.tokens.mask(row.sequence, start, stop).nonzero()[0] + start
            if not len(at):
                continue
            for layer in edit.layers:
                key = (layer, edit.site)
                while len(slots[key]) <= depth[key]:
                    slots[key].append(defaultdict(list))
                slots[key][depth[key]][edit.intervention.edit_key].append((b, row, edit, at))
                depth[key] += 1
    return slots


def _lanes(rows: Sequence[Row], batch: Batch) -> dict[Lane, Gathered]:
    lanes: dict[Lane, Gathered] = defaultdict(Gathered)
    for b, row in enumerate(rows):
        start, stop = batch.starts[b], batch.stops[b]
        for take in row.takes:
            at = take.tokens.mask(row.sequence, start, stop).nonzero()[0] + start
            if not len(at):
                continue
            flat = batch.flat(b, at)
            for layer, site in take.lanes:
                gathered = lanes[(layer, site, *take.kind)]
                gathered.owners.append((row, take, at))
                gathered.index.append(flat)
    return lanes


def _tap(key: Key, slots: list[dict], lanes: list[tuple[Lane, Gathered]], batch: Batch, tables: Tables) -> Callable:
    layer, site = key

    def tap(value: Tensor) -> Tensor | None:
        flat = value.reshape(-1, value.shape[-1])
        for depth, slot in enumerate(slots):
            for edit_key, members in slot.items():
                flat = _edited(flat, (layer, site, depth, edit_key), members, batch, tables)
        for _, gathered in lanes:
            index = torch.from_numpy(np.concatenate(gathered.index)).to(flat.device, non_blocking=True)
            gathered.values = flat[index]
        return flat.reshape(value.shape) if slots else None

    return tap


def _edited(flat: Tensor, where: tuple, members: list, batch: Batch, tables: Tables) -> Tensor:
    index = np.concatenate([batch.flat(b, at) for b, _, _, at in members])
    everything = len(index) == len(flat) and bool((index == np.arange(len(flat))).all())
    at = torch.from_numpy(index).to(flat.device, non_blocking=True)
    hidden = flat if everything else flat[at]
    plain = [(row, edit, positions) for _, row, edit, positions in members]
    try:
        parameters = tables.parameters(where, where[0], plain, flat)
        edited = members[0][2].intervention.edit(hidden, parameters)
        if edited.shape != hidden.shape:
            raise ValueError(f"an edit of shape {tuple(edited.shape)} for states of shape {tuple(hidden.shape)}")
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise EditFailed(_culprits(flat, where[0], members, batch) or {row: error for row, _, _ in plain}) from error
    edited = edited.to(flat.dtype)
    return edited if everything else flat.index_copy(0, at, edited)


def _culprits(flat: Tensor, layer: int, members: list, batch: Batch) -> dict[Row, BaseException]:
    """Which rows' edits raise when each is run by itself."""
    failures = {}
    for b, row, edit, positions in members:
        try:
            at = torch.from_numpy(batch.flat(b, positions)).to(flat.device)
            each = _parameters(layer, row, edit, positions)
            parameters = _stack([each], [(row, edit, positions)], flat, edit.intervention.per_position)
            if edit.intervention.edit(flat[at], parameters).shape != flat[at].shape:
                raise ValueError("an edit changed the shape of the states it was given")
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures[row] = error
    return failures
