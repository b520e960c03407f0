"""How large a sweep will be, from its configuration alone: no model is loaded, no cell is listed.

Every reply is taken to use its whole budget, which small models nearly do; `measure` runs one unit instead. What
Parquet needs per row and file is measured (bytes after compression) and is little beside the tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..aggregates.columns import with_short_names
from ..aggregates.registry import build, sums
from ..aggregates.sums import RecordSum
from ..config.grid import conditions
from ..config.schema import SweepConfig
from ..folder import space
from ..folder.store import Where, open_store
from ..plan.casts import cast_of
from ..plan.expand import seeds
from ..plan.items import read
from ..plan.loads import CHARS_PER_TOKEN, Load, _replayed, _turns, _vectors, default_unit_cells
from ..plan.normal import resolved

FILE_BYTES = {"messages": 6_000, "records": 10_000, "outcomes": 3_000}

ROW_BYTES = {"messages": 40, "records": 25, "outcomes": 70, "plan": 25}

GENERATED_BYTES, PROMPT_BYTES, RECORD_TOKEN_BYTES = 4.5, 1.0, 0.5
"""Per token of a message's reply, of its prompt, of a record."""

COMMIT_CELL_BYTES, KEY_BYTES = 25, 300


def sums_bytes(config: SweepConfig) -> int:
    """Bytes at most that the sums over captured rows take in one unit: as many keys as its cells can have."""

    found = 0
    for aggregate in sums(build(config.aggregate)):
        if isinstance(aggregate, RecordSum) and aggregate.streams:
            for capture, name in ((c, n) for c in config.capture for n in c.participants):
                if aggregate.source.pool == capture.pool and aggregate.source.participant in (None, name):
                    keys = len(_keys(config, aggregate, name))
                    for layers, width in _vectors(config, capture, name):
                        values = width + width * (width if aggregate.covariance else 1)
                        found += keys * layers * (8 * values + KEY_BYTES)
    return found


def _keys(config: SweepConfig, aggregate: Any, name: str) -> set[Any]:
    """The keys under which an aggregate may put one participant's rows of one place, by the first conditions and items."""

    place = {"participant": name, "site": "residual", "layer": 0, "pool": aggregate.source.pool, "selection": ""}
    of_items = any(column.startswith("item") for column in aggregate.names())
    rows = list(itertools.islice(read(config.scenario.source), 64 if of_items else 1))
    found = set()
    for condition in itertools.islice(conditions(config.grid), 256):
        for item in rows:
            row = {
                **{f"item.{k}": v for k, v in item.items()},
                "item": item["id"],
                **with_short_names(condition),
                **place,
            }
            try:
                found.add(aggregate.key_of(row))
            except (KeyError, TypeError, ValueError):
                found.add("")  # by what is known only when it has been said
    return found - {None}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a plan is."""

    items: int = 0
    trunks: int = 0
    cells: int = 0
    units: int = 0
    tokens: int = 0
    """Generated."""
    tensor_bytes: int = 0
    other_bytes: int = 0
    """Tables, sums and commits."""
    recomputed: int = 0
    """Prompt positions that captures run through the model again."""

    @property
    def bytes(self) -> int:
        return self.tensor_bytes + self.other_bytes


def size(config: SweepConfig) -> Size:
    """The whole plan's, from one pass over the items and one over the grid."""

    num_items = sum(1 for _ in read(config.scenario.source))
    trunk_seeds, branch_seeds = len(seeds(config.scenario.trunk.seeds)), len(seeds(config.scenario.branch.seeds))
    trunk_axes = tuple(axis for axis in config.grid if axis.is_trunk)
    after = tuple(axis for axis in config.grid if not axis.is_trunk)
    settings, casts, num_points = 0, {}, 0
    total: dict[str, float] = dict.fromkeys(("tokens", "tensors", "other", "recomputed"), 0)
    for shared in conditions(trunk_axes):
        settings += 1
        base = resolved(config, shared)
        if base.scenario.trunk.turns:
            _add(total, base, "trunk", num_items * trunk_seeds)
        for point in conditions(after):
            num_points += 1
            under = resolved(config, {**shared, **point})
            casts[cast_of(under)] = None
            if config.scenario.replay:
                for row in read(config.scenario.source):
                    _sum(total, under, _replayed(under, row), trunk_seeds * branch_seeds)
                total["recomputed"] = 0
            else:
                _add(total, under, "branch", num_items * trunk_seeds * branch_seeds)
    trunks = num_items * trunk_seeds * settings
    cells = num_items * trunk_seeds * branch_seeds * num_points
    limit = config.plan.unit_cells or default_unit_cells(config)
    whole = max(1, limit // max(1, branch_seeds * num_points // max(settings, 1)))
    has_trunk = config.scenario.trunk.turns > 0 or bool(trunk_axes)
    pieces = len({**casts, cast_of(config): None} if has_trunk else casts)
    units = math.ceil(trunks / whole) * pieces
    models = {name: p.model for name, p in config.scenario.participants.items()}
    indices = {(models[name], site) for c in config.capture for name in c.participants for site in c.sites}
    per_unit = FILE_BYTES["messages"] + len(indices) * FILE_BYTES["records"]
    per_unit += FILE_BYTES["outcomes"] * config.scenario.has_outcomes + sums_bytes(config)
    other = total["other"] + units * per_unit + cells * (COMMIT_CELL_BYTES + ROW_BYTES["plan"])
    return Size(
        items=num_items, trunks=trunks, cells=cells, units=units, tokens=round(total["tokens"]),
        tensor_bytes=round(total["tensors"]), other_bytes=round(other), recomputed=round(total["recomputed"]),
    )  # fmt: skip


def _add(total: dict[str, float], config: SweepConfig, part: str, times: int) -> None:
    scenario = config.scenario
    _sum(total, config, _turns(config, part), times)
    said = scenario.first_message if part == "trunk" or not scenario.trunk.turns else scenario.framing
    total["other"] += times * ROW_BYTES["messages"] * bool(said)
    if part == "branch" and scenario.has_outcomes:
        total["other"] += times * ROW_BYTES["outcomes"]
    if part == "branch":
        for judge in scenario.judges.values():
            total["tokens"] += times * judge.max_new_tokens * (judge.kind == "model")
            total["other"] += times * (len(judge.prompt) + CHARS_PER_TOKEN * judge.max_new_tokens)


def _sum(total: dict[str, float], config: SweepConfig, loads: Iterable[Load], times: int) -> None:
    for load in loads:
        total["tokens"] += times * load.generated
        total["tensors"] += times * load.tensors
        total["recomputed"] += times * load.recomputed
        total["other"] += times * (
            ROW_BYTES["messages"] + GENERATED_BYTES * load.generated + PROMPT_BYTES * load.prompt
            + ROW_BYTES["records"] * load.records + RECORD_TOKEN_BYTES * load.record_tokens
        )  # fmt: skip


def missing_bytes(config: SweepConfig, root: Where) -> int:
    """Bytes by which what is still to be written exceeds the free space, less a reserve; 0 where it fits."""
    store = open_store(root)
    if (free := space.free_bytes(store)) is None:
        return 0
    return max(0, size(config).bytes - store.num_bytes() - max(0, free - space.RESERVE_BYTES))
