"""What captures keep while rows live, and how it becomes records.

Unpooled rows are kept as they were gathered, a lane's rows of all sequences in one tensor, until `flush` moves them to
their place in one transfer per lane. Pooled rows are reduced on the device into one float32 table per lane and never
stored. Nothing here aliases a live activation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..interp.activation_cache import ActivationRecord, offload_to_cpu
from .offload import Claim, Mover
from .rows import Row, Take
from .taps import Gathered, Lane


@dataclass(eq=False)
class Kept:
    """What is held for one row: its positions and rows of what was moved, and pool slots."""

    pieces: dict[tuple[Take, int, str], list[tuple[np.ndarray, Claim]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    slots: dict[tuple[Take, int, str], int] = field(default_factory=dict)
    pooled: dict[tuple[Take, int, str], list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    removed: dict[tuple[Take, int, str], int] = field(default_factory=lambda: defaultdict(int))
    """Rows above `max_norm`."""


class PoolTable:
    """Running pools of one lane: `[slots, W]` float32 on the device."""

    def __init__(self, pool: str):
        self.pool = pool
        self.values: Tensor | None = None
        self.free: list[int] = []

    def slot(self, like: Tensor) -> int:
        """A free slot, set to what its pool begins with."""
        if not self.free:
            old = 0 if self.values is None else len(self.values)
            new = max(32, old)
            fresh = torch.empty((new, like.shape[-1]), dtype=torch.float32, device=like.device)
            self.values = fresh if self.values is None else torch.cat([self.values, fresh])
            self.free = list(range(old, old + new))
        slot = self.free.pop()
        assert self.values is not None
        self.values[slot] = float("-inf") if self.pool == "max" else 0
        return slot

    def add(self, slots: list[int], counts: list[int], values: Tensor) -> None:
        """Fold in `counts[i]` consecutive rows of `values` for each slot."""
        assert self.values is not None
        if self.pool == "last":
            ends = torch.tensor(np.cumsum(counts) - 1, device=values.device)
            self.values[torch.tensor(slots, device=values.device)] = values[ends].float()
            return
        index = torch.tensor(np.repeat(slots, counts), device=values.device)
        if self.pool == "mean":
            self.values.index_add_(0, index, values.float())
        else:
            self.values.scatter_reduce_(0, index[:, None].expand_as(values), values.float(), "amax")


class Collector:
    """Keeps the captures of all rows of one engine."""

    def __init__(self, mover: Mover, flush_bytes: int = 16 << 20):
        self._mover = mover
        self._flush_bytes = flush_bytes
        self._staged: dict[Lane, list[Gathered]] = defaultdict(list)
        self._staged_bytes = 0
        self._pools: dict[Lane, PoolTable] = {}
        self.bytes_held = 0
        """Bytes of unpooled activations held for unfinished rows."""

    def commit(self, lanes: dict[Lane, Gathered]) -> None:
        """Take over what a forward that succeeded has gathered."""
        for lane, gathered in lanes.items():
            if lane[4] is not None:
                gathered = _within(gathered, lane)
            assert gathered.values is not None
            if not gathered.owners:
                continue
            if lane[2] is None:
                self._staged[lane].append(gathered)
                self._staged_bytes += gathered.values.nbytes
                self.bytes_held += gathered.values.nbytes
            else:
                self._pool(lane, gathered)
        if self._staged_bytes > self._flush_bytes:
            self.flush()

    def _pool(self, lane: Lane, gathered: Gathered) -> None:
        layer, site, pool, *_ = lane
        assert pool is not None and gathered.values is not None
        table = self._pools.setdefault(lane, PoolTable(pool))
        slots = []
        for row, take, positions in gathered.owners:
            assert row is not None
            kept = _kept(row)
            address = (take, layer, site)
            if address not in kept.slots:
                kept.slots[address] = table.slot(gathered.values)
            kept.pooled[address].append(positions)
            slots.append(kept.slots[address])
        table.add(slots, [len(positions) for _, _, positions in gathered.owners], gathered.values)

    def flush(self) -> None:
        """Move everything staged to its place, one transfer per lane."""
        for lane in list(self._staged):
            layer, site, _, offload, _ = lane
            parts = self._staged[lane]
            offset, shares = 0, defaultdict(list)
            for part in parts:
                for row, take, positions in part.owners:
                    if row is not None:
                        shares[row, take].append((positions, np.arange(offset, offset + len(positions))))
                    offset += len(positions)
            values = [part.values for part in parts if part.values is not None]
            indices = [np.concatenate([index for _, index in share]) for share in shares.values()]
            claims = self._mover.move(values, offload, indices)
            del self._staged[lane]
            for ((row, take), share), claim in zip(shares.items(), claims, strict=True):
                positions = np.concatenate([at for at, _ in share])
                _kept(row).pieces[take, layer, site].append((positions, claim))
        self._staged_bytes = 0

    def drop(self, row: Row) -> None:
        """Forget what is held for a row (it failed, or starts over). Takes no memory: it may be what ran out."""
        for parts in self._staged.values() if row.takes else ():
            for part in parts:
                for i, (owner, take, positions) in enumerate(part.owners):
                    if owner is row and part.values is not None:
                        part.owners[i] = None, take, positions
                        self.bytes_held -= part.values[0].nbytes * len(positions)
        self._free(row)

    def _free(self, row: Row) -> None:
        if row.kept is None:
            return
        for (take, layer, site), slot in row.kept.slots.items():
            self._pools[(layer, site, *take.kind)].free.append(slot)
        for pieces in row.kept.pieces.values():
            self.bytes_held -= sum(claim.num_bytes for _, claim in pieces)
        row.kept = None

    def records(self, row: Row) -> list[tuple[int, ActivationRecord]]:
        """(number of the spec, record) of the finished row, by spec, then layer, then site. Waits for its transfers."""
        if row.takes:
            self.flush()
        if row.kept is None:
            return []
        found = []
        for take in row.takes:
            for layer, site in take.lanes:
                value, positions = (
                    self._pooled(row, take, layer, site) if take.pool else self._rows(row, take, layer, site)
                )
                if value is not None:
                    found.append((take, layer, site, value, positions))
        pooled = [i for i, (take, *_) in enumerate(found) if take.pool and take.offload == "cpu"]
        moved = dict(zip(pooled, offload_to_cpu([found[i][3] for i in pooled]), strict=True))
        fingerprint = "+".join(edit.fingerprint for edit in row.edits)
        records = []
        for i, (take, layer, site, value, positions) in enumerate(found):
            record = make_record(row, take, layer, site, moved.get(i, value), positions)
            record.fingerprint, record.removed = fingerprint, row.kept.removed.get((take, layer, site), 0)
            records.append((take.order, record))
        self._free(row)
        return records

    def _pooled(self, row: Row, take: Take, layer: int, site: str) -> tuple[Tensor | None, np.ndarray]:
        """The pool of a row `[1, W]` float32, still on the device, and the positions in it."""
        slot = row.kept.slots.get((take, layer, site))
        if slot is None:
            return None, np.empty(0)
        positions = np.concatenate(row.kept.pooled[take, layer, site])
        table = self._pools[(layer, site, *take.kind)]
        assert table.values is not None
        value = table.values[slot][None]
        return value / len(positions) if take.pool == "mean" else value.clone(), positions

    def _rows(self, row: Row, take: Take, layer: int, site: str) -> tuple[Tensor | None, np.ndarray]:
        """The kept rows `[S, W]` in compact storage where they belong, and their positions."""
        pieces = row.kept.pieces.get((take, layer, site))
        if not pieces:
            return None, np.empty(0)
        parts = [claim.rows() for _, claim in pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0], np.concatenate([at for at, _ in pieces])


def _within(gathered: Gathered, lane: Lane) -> Gathered:
    """The rows that are not above the lane's `max_norm`; what is left out is counted. Waits for the device."""
    values, (layer, site, *_, max_norm) = gathered.values, lane
    assert values is not None
    keep = (~(values.float().norm(dim=-1) > max_norm)).cpu().numpy()
    if keep.all():
        return gathered
    owners, at = [], 0
    for row, take, positions in gathered.owners:
        assert row is not None
        mine = keep[at : at + len(positions)]
        at += len(positions)
        assert row is not None
        _kept(row).removed[take, layer, site] += int((~mine).sum())
        if mine.any():
            owners.append((row, take, positions[mine]))
    index = torch.from_numpy(keep.nonzero()[0]).to(values.device)
    return Gathered(values=values[index], owners=owners)


def make_record(row: Row, take: Take, layer: int, site: str, value: Tensor, positions: np.ndarray) -> ActivationRecord:
    """A record whose spans, phases, tokens and positions describe its rows."""
    sequence = row.sequence
    num_prompt = int((positions < sequence.num_prompt).sum())
    pooled = take.pool is not None
    where, pool = cast(Any, site), cast(Any, take.pool)
    return ActivationRecord(
        "",
        -1,
        layer,
        where,
        value,
        (num_prompt, len(positions)) if not pooled else (min(num_prompt, 1) if num_prompt == len(positions) else 0, 1),
        phase_spans([sequence.phase_at(int(p)) for p in positions], pooled),
        tokens=tuple(sequence.ids[p] for p in positions),
        positions=tuple(int(p) for p in positions),
        pool=pool,
        num_pooled=len(positions) if pooled else None,
        selection=str(take.tokens),
    )


def phase_spans(phases: list[str], pooled: bool = False) -> dict:
    """Half-open row spans of each phase present, disjoint.

    Reasoning that resumes after an answer began counts the answer from its last stretch on. A pooled record has one
    row; it has a phase only if all its tokens share it.
    """
    if pooled:
        return {phases[0]: (0, 1)} if len(set(phases)) == 1 else {}
    spans = {}
    stop = phases.count("prompt")
    if stop:
        spans["prompt"] = (0, stop)
    thinking = [i for i, phase in enumerate(phases) if phase == "reasoning"]
    if thinking:
        spans["reasoning"] = (thinking[0], thinking[-1] + 1)
        stop = thinking[-1] + 1
    if stop < len(phases):
        spans["answer"] = (stop, len(phases))
    return spans


def _kept(row: Row) -> Kept:
    if row.kept is None:
        row.kept = Kept()
    return row.kept
