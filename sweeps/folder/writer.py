"""Writes one unit: its files under attempt-unique names, then the one commit that makes them exist for readers.

Invariants: a cell is added or failed once, and a failed one leaves nothing but its row in `failures`; before `commit`
returns "won", no reader sees anything of this attempt; no file is written twice or changed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..failpoints import reach
from ..redact import redact
from . import commits, names, rows, schemas, tensors
from .cells import Cell, Unit
from .store import Where, open_store

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.message import Message


_TABLES = ("messages", "outcomes", "failures", "routing")

FILE_BYTES = 512_000_000
"""An activation file is closed at about this size."""


class UnitWriter:
    """Streams a unit's trunks and cells to files; `commit` closes the unit."""

    def __init__(self, root: Where, unit: Unit, models: Mapping[str, str], attempt: str | None = None):
        """`models`: participant -> model name, the partition of its records; set `models` anew for a cell whose condition
        deals the same models to others. `attempt`: 8 hex digits, None: random."""
        self.store, self.unit, self.models = open_store(root), unit, dict(models)
        self.attempt = attempt or secrets.token_hex(4)
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}
        self._records: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._shards: dict[str, _Shard] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._files: list[dict[str, Any]] = []
        self._state: dict[str, str] = {}
        """Cell or trunk id -> held | failed."""
        self._trunks: dict[str, str] = {}
        reach("writer.opened")

    def add_trunk(self, trunk: str, messages: Sequence[Message], records: Sequence[ActivationRecord] = (),
                  routing: Iterable[Mapping[str, Any]] = ()) -> None:  # fmt: skip
        """The trunk's own messages, indices from 0 (the opening, where there is one, included)."""
        who = {"trunk": trunk, "cell": None}
        self._add(self._trunks, trunk, who, messages, records, 0)
        self._add_routing(who, routing)

    def add_cell(self, cell: Cell, messages: Sequence[Message], records: Sequence[ActivationRecord] = (),
                 outcomes: Mapping[str, Any] | None = None, *, start: int = 0) -> None:  # fmt: skip
        """A finished cell: its messages after the trunk; `start` is the transcript index of the first of them.

        `outcomes`: numbers and strings by name. ValueError for anything else, before anything of the cell is kept.
        """
        who = {"trunk": cell.trunk, "cell": cell.id}
        row = outcome_row(outcomes or {}) if outcomes is not None else None
        self._add(self._state, cell.id, who, messages, records, start)
        if row is not None:
            self._rows["outcomes"].append({**self._who(who), **row})

    def fail_cell(self, cell: Cell, error: str, traceback: str, attempts: int = 1) -> None:
        """The cell failed: its row in `failures`, and nothing else of it."""
        self._fail(self._state, cell.id, {"trunk": cell.trunk, "cell": cell.id}, error, traceback, attempts)

    def fail_trunk(self, trunk: str, error: str, traceback: str, attempts: int = 1) -> None:
        """The trunk failed; its cells are failed by the caller with its error."""
        self._fail(self._trunks, trunk, {"trunk": trunk, "cell": None}, error, traceback, attempts)

    def add_routing(self, cell: Cell, found: Iterable[Mapping[str, Any]]) -> None:
        """Routing of a finished cell: rows with participant, message_idx (None: all), phase, layer, tokens, top_k,
        counts [E] and mass [E] or None."""
        self._add_routing({"trunk": cell.trunk, "cell": cell.id}, found)

    def _add_routing(self, who: Mapping[str, Any], found: Iterable[Mapping[str, Any]]) -> None:
        who = self._who(who)
        for row in found:
            mass = None if row.get("mass") is None else np.asarray(row["mass"], np.float16).tolist()
            counts = np.asarray(row["counts"], np.int64).tolist()
            model = self.models[row["participant"]]
            self._rows["routing"].append({**who, "model": model, **row, "counts": counts, "mass": mass})

    def add_sums(self, name: str, state: Mapping[str, np.ndarray]) -> None:
        """A sum's state over this unit's finished cells (float64 arrays)."""
        for key, value in state.items():
            self._sums[f"{name}/{key}"] = np.ascontiguousarray(value, dtype=np.float64)

    def finished(self, id: str) -> bool:
        """True if this cell or trunk was added or failed."""
        return id in self._state or id in self._trunks

    def commit(self, children: Sequence[Unit] = (), counters: Mapping[str, Any] | None = None) -> str:
        """Flush everything and close the unit: "won", or "lost" where another attempt had closed it."""
        for shard in self._shards.values():
            self._flush(shard)
        for name in _TABLES:
            if self._rows[name]:
                schema = getattr(schemas, name.upper())
                self._write_table(name, names.table(name, self._name), self._rows[name], schema)
        for (model, site), found in self._records.items():
            path = names.records(partition(model), partition(site), self._name)
            self._write_table("records", path, found, schemas.RECORDS)
        if self._sums:
            sums = {key: [torch.from_numpy(value)] for key, value in self._sums.items()}
            self._write_bytes("stats", names.sums(self._name), tensors.encode(sums), len(sums))
        reach("writer.before_commit")
        won = commits.write_commit(self.store, commits.Commit(
            unit=self.unit.id, attempt=self.attempt, cells=self._ids(self._state, "held"),
            failed=self._ids(self._state, "failed"), trunks=self._ids(self._trunks, "held"),
            failed_trunks=self._ids(self._trunks, "failed"), files=tuple(self._files),
            children=tuple(child.to_dict() for child in children), counters=dict(counters or {}),
        ))  # fmt: skip
        reach("writer.committed")
        return won

    def abandon(self) -> None:
        """Give up: delete what this attempt has written (it was never committed)."""
        for file in self._files:
            self.store.delete(file["path"])
        self._files = []

    @property
    def num_bytes(self) -> int:
        """Bytes of this attempt's files so far, and of the tensors that wait to be written."""
        return sum(f["bytes"] for f in self._files) + sum(shard.bytes for shard in self._shards.values())

    @property
    def _name(self) -> str:
        return f"{self.unit.id}-{self.attempt}"

    @staticmethod
    def _ids(states: Mapping[str, str], wanted: str) -> tuple[str, ...]:
        return tuple(id for id, state in states.items() if state == wanted)

    def _who(self, who: Mapping[str, Any]) -> dict[str, Any]:
        return {"unit": self.unit.id, "attempt": self.attempt, **who}

    def _add(self, states: dict[str, str], id: str, who: dict[str, Any], messages: Sequence[Message],
             records: Sequence[ActivationRecord], start: int) -> None:  # fmt: skip
        self._check_open(states, id)
        who = self._who(who)
        said = [{**who, **rows.message_row(m, start + i)} for i, m in enumerate(messages)]
        described = [(self.models[r.participant], r, {**who, **rows.record_row(r)}) for r in records]
        self._rows["messages"] += said
        for model, record, row in described:
            shard = self._shards.setdefault(model, _Shard(model))
            row |= shard.add(record, f"{self._name}-{shard.number}")
            self._records.setdefault((model, record.site), []).append(row)
            if shard.bytes >= FILE_BYTES:
                self._flush(shard)
        states[id] = "held"

    def _fail(self, states: dict[str, str], id: str, who: dict[str, Any], error: str, traceback: str,
              attempts: int) -> None:  # fmt: skip
        self._check_open(states, id)
        said = {"error": redact(error), "traceback": redact(traceback)}
        row = {**self._who(who), **said, "attempts": attempts}
        self._rows["failures"].append(row)
        states[id] = "failed"

    def _check_open(self, states: Mapping[str, str], id: str) -> None:
        if id in states:
            raise ValueError(f"{id} was already {states[id]} in unit {self.unit.id}; each is added or failed once")

    def _flush(self, shard: _Shard) -> None:
        if shard.parts:
            path = shard.path(f"{self._name}-{shard.number}")
            count = sum(p.shape[0] for parts in shard.parts.values() for p in parts)
            self._write_bytes("activations", path, tensors.encode(shard.parts), count)
            shard.next()

    def _write_table(self, table: str, path: str, found: list[dict[str, Any]], schema: pa.Schema) -> None:
        parts: dict[Any, list[dict[str, Any]]] = {}
        for row in found:
            parts.setdefault(row["pool"] if table == "records" else None, []).append(row)
        sink = pa.BufferOutputStream()
        layout = schemas.RECORDS_LAYOUT if table == "records" else schemas.LAYOUT
        with pq.ParquetWriter(sink, schema, **layout) as out:
            for rows_of_pool in parts.values():  # a row group each, so that readers of one pool skip the others
                out.write_table(pa.Table.from_pylist(rows_of_pool, schema=schema))
        self._write_bytes(table, path, [memoryview(sink.getvalue())], len(found))

    def _write_bytes(self, table: str, path: str, pieces: Iterable[Any], num_rows: int) -> None:
        digest, size = hashlib.sha256(), 0
        with self.store.create(path) as out:
            for piece in pieces:
                out.write(piece)
                digest.update(piece)
                size += len(piece)
                reach("writer.in_file")
        reach("writer.linked")
        self._files.append(
            {"path": path, "table": table, "rows": num_rows, "bytes": size, "sha256": digest.hexdigest()}
        )


class _Shard:
    """Tensors of one model that wait for their file."""

    def __init__(self, model: str):
        self.model, self.number = model, 0
        self.next(first=True)

    def next(self, first: bool = False) -> None:
        self.number += not first
        self.parts: dict[str, list[torch.Tensor]] = {}
        self.sizes: dict[str, int] = {}
        self.bytes = 0

    def path(self, name: str) -> str:
        return names.activations(partition(self.model), name)

    def add(self, record: ActivationRecord, name: str) -> dict[str, Any]:
        """Keep a record's tensor; its address: file, key, rows."""
        key = f"{record.site}.{record.layer}" + (f".{record.pool}" if record.pool else "")
        start = self.sizes.get(key, 0)
        self.sizes[key] = start + record.tensor.shape[0]
        self.parts.setdefault(key, []).append(record.tensor)
        self.bytes += record.tensor.numel() * record.tensor.element_size()
        return {"file": self.path(name), "key": key, "row_start": start, "row_end": self.sizes[key]}


def partition(value: str) -> str:
    """A partition value as part of a path: percent-encoded, so that no name can leave its folder."""
    return quote(value, safe="").replace(".", "%2E") if set(value) <= {"."} else quote(value, safe="")


def outcome_row(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `outcomes`: numbers and texts apart. ValueError for a value that is neither, or a name that is no text."""
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, value in outcomes.items():
        if not isinstance(name, str):
            raise ValueError(f"an outcome is named {name!r}; names are texts")
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, (bool, int, float, np.number)):
            numbers[name] = float(value)
        else:
            raise ValueError(f"outcome {name!r} is a {type(value).__name__}; possible: numbers and strings")
    return {"numbers": list(numbers.items()), "texts": list(texts.items())}
