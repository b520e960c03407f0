"""What was captured: records with addresses, and a cache that finds them.

Invariants: `token_span`, `phases`, `tokens` and `positions` describe the rows of `tensor`, never the uncut sequence.
Tensors in a cache own compact storage: no alias of a live activation, no slice that keeps a bigger storage alive, no
inference-mode tensor. A record's address does not change after it was added.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..given import Given, real, whole, wholes
from .counted import CountedList
from .select import Select
from .sites import PATTERN, Site, canonical_site

__all__ = [
    "ANY", "ActivationCache", "ActivationRecord", "CaptureSpec", "OffloadLocation", "Phase", "Site", "offload_to_cpu",
]  # fmt: skip

Phase = Literal["prompt", "reasoning", "answer"]
OffloadLocation = Literal["cpu"] | None
Pool = Literal["mean", "last", "max"] | None
_ALL = Select.all()
POOLS = (None, "mean", "last", "max")


class _Any:
    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Any()
"""Matches every value of a filter for which None is a value of its own."""


@dataclass
class ActivationRecord:
    """One tensor of one site of one layer, for the selected tokens of one message."""

    participant: str
    message_idx: int
    layer: int
    site: Site
    tensor: Tensor
    """[S, W] in the model's dtype; a pooled record is [1, W] float32."""
    token_span: tuple[int, int]
    """(prompt rows, rows) of `tensor`."""
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Phase -> half-open rows of `tensor`; a phase with no kept row has no key."""
    tokens: tuple[int, ...] = ()
    """Token id of each row; of a pooled record, of the rows that were pooled."""
    positions: tuple[int, ...] = ()
    """Absolute position of each row, likewise."""
    pool: Pool = None
    num_pooled: int | None = None
    """How many rows were pooled."""
    selection: str = "all()"
    sample: int | None = None
    """Number of the ephemeral `sample` this belongs to; None for a committed message."""
    fingerprint: str = ""
    """Of the interventions in force."""
    removed: int = 0
    """Selected rows above the capture's `max_norm`: they are in neither `tensor` nor `tokens`."""


@dataclass(frozen=True, init=False)
class CaptureSpec:
    """What to capture: sites, layers (None: all that have the site), tokens, pooling, and from which forward.

    `source`: "run" takes the generation itself, interventions included; "clean" a fresh forward of the finished
    sequence without any. `offload`: "cpu", or None to stay on the device. `max_norm`: selected rows of a larger norm
    (attention sinks) are left out before pooling, and counted in the record.
    The site "pattern" is for `capture_activations` alone: engines and conversations refuse it.
    """

    sites: tuple[str, ...] = ("residual",)
    layers: tuple[int, ...] | None = None
    offload: OffloadLocation = "cpu"
    tokens: Select = field(default_factory=Select.all)
    pool: Pool = None
    source: Literal["run", "clean"] = "run"
    max_norm: float | None = None

    def __init__(
        self, sites: str | Sequence[str] = ("residual",), layers: Given = None, offload: Any = "cpu",
        tokens: Select | str | Any = _ALL, pool: str | None = None, source: str = "run", max_norm: Given = None,
    ):  # fmt: skip
        sites = tuple(dict.fromkeys((sites,) if isinstance(sites, str) else sites))
        layers = None if layers is None else wholes(layers, "layers (None: all)")
        max_norm = None if max_norm is None else real(max_norm, "max_norm (None: no limit)")
        if not sites:
            raise ValueError("CaptureSpec names no site; give at least one")
        for site in sites:
            if site != PATTERN:
                canonical_site(site)
        if pool not in POOLS:
            raise ValueError(f"no pool {pool!r}; possible: None, 'mean', 'last', 'max'")
        if source not in ("run", "clean"):
            raise ValueError(f"no source {source!r}; possible: 'run', 'clean'")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, or None for no limit; got {max_norm!r}")
        given = dict(
            sites=sites, layers=layers, offload=_offload(offload), tokens=Select.of(tokens), pool=pool, source=source,
            max_norm=max_norm,
        )  # fmt: skip
        for name, value in given.items():
            object.__setattr__(self, name, value)


def offload_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors` in ordinary CPU memory, order kept; each owns exactly its own storage.

    Tensors of one device, shape and dtype move in one non-blocking copy through a pinned buffer.
    """
    results: list[Any] = [None] * len(tensors)
    groups: dict[tuple, list[int]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for index, tensor in enumerate(tensors):
            if tensor.device.type == "cpu":
                results[index] = _own(tensor)
            else:
                groups.setdefault((tensor.device, tensor.shape, tensor.dtype), []).append(index)
        moved = []
        for (device, shape, dtype), indices in groups.items():
            stacked = torch.stack([tensors[i].detach() for i in indices])
            buffer = torch.empty((len(indices), *shape), dtype=dtype, pin_memory=device.type == "cuda")
            buffer.copy_(stacked, non_blocking=True)
            moved.append((indices, buffer, stacked))
        for device in {key[0] for key in groups}:
            torch.accelerator.synchronize(device)
        for indices, buffer, _ in moved:
            for row, index in enumerate(indices):
                results[index] = _own(buffer[row])
    return results


def _own(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


class ActivationCache:
    """Records in insertion order, found by participant, message, layer, site, pool and sample through indexes.

    `records` is an ordinary list: what is appended to it, put in it or taken out of it counts at the next query.
    """

    def __init__(self, offload: OffloadLocation = "cpu"):
        self.offload = _offload(offload)
        self.records: list[ActivationRecord] = CountedList()
        self.skipped: list[str] = []
        """Participants that could not be captured."""
        self._indexes: dict[tuple[str, ...], dict[tuple, list[ActivationRecord]]] = {}
        self._indexed: tuple[int, int] = (0, 0)
        """Which list the indexes are over, and its changes then."""

    def add(self, record: ActivationRecord) -> None:
        """Add one record; moved as `offload` says."""
        self.add_batch([record])

    def add_batch(self, records: Iterable[ActivationRecord]) -> None:
        """Add copies of records; with `offload="cpu"` their tensors move in one batched transfer."""
        records = list(records)
        if self.offload == "cpu":
            tensors = offload_to_cpu([record.tensor for record in records])
        else:
            with torch.inference_mode(False), torch.no_grad():
                tensors = [_own(record.tensor) for record in records]
        for record, tensor in zip(records, tensors, strict=True):
            self._append(dataclasses.replace(record, tensor=tensor))

    def _append(self, record: ActivationRecord) -> None:
        self._check_indexes()
        self.records.append(record)
        self._indexed = self._state()
        for names, index in self._indexes.items():
            index.setdefault(tuple(getattr(record, name) for name in names), []).append(record)

    def _state(self) -> tuple[int, int]:
        if not isinstance(self.records, CountedList):
            self.records = CountedList(self.records)
        return id(self.records), self.records.changes

    def _check_indexes(self) -> None:
        """Forget the indexes if somebody else has changed `records`."""
        if self._indexed != self._state():
            self._indexes.clear()
            self._indexed = self._state()

    def query(
        self,
        *,
        participant: str | None = None,
        message_idx: Given = None,
        layer: Given = None,
        site: str | None = None,
        pool: Any = ANY,
        sample: Any = ANY,
    ) -> list[ActivationRecord]:
        """Records that match, in insertion order. None does not filter, except for `pool` (None: unpooled) and
        `sample` (None: committed), where `ANY` does not."""
        filters = {
            "participant": participant,
            "message_idx": None if message_idx is None else whole(message_idx, "message_idx"),
            "layer": None if layer is None else whole(layer, "layer"),
        }
        if pool is not ANY and pool not in POOLS:
            raise ValueError(f"no pool {pool!r}; possible: None (unpooled), 'mean', 'last', 'max', ANY")
        sample = sample if sample is ANY or sample is None else whole(sample, "sample")
        given = {name: value for name, value in filters.items() if value is not None}
        if site is not None:
            given["site"] = canonical_site(site)
        given |= {name: value for name, value in (("pool", pool), ("sample", sample)) if value is not ANY}
        if not given:
            return list(self.records)
        names = tuple(given)
        self._check_indexes()
        if names not in self._indexes:
            index = self._indexes[names] = {}
            for record in self.records:
                index.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
        return list(self._indexes[names].get(tuple(given.values()), ()))

    def at(
        self,
        *,
        participant: str | None = None,
        message_idx: Given = None,
        layer: Given = None,
        site: str = "residual",
        pool: Any = None,
        sample: Any = ANY,
    ) -> Tensor:
        """The tensor of the one record that matches; KeyError says how many do, and what tells them apart."""
        filters: dict[str, Any] = dict(
            participant=participant, message_idx=message_idx, layer=layer, site=site, pool=pool, sample=sample
        )
        found = self.query(**filters)
        if len(found) == 1:
            return found[0].tensor
        filters = {k: v for k, v in filters.items() if v is not ANY and (v is not None or k in ("pool", "sample"))}
        shown = ", ".join(f"{k}={v!r}" for k, v in filters.items())
        raise KeyError(f"{len(found)} records match {shown}; {_why(found, self.records, filters)}")

    def stack(self, **filters: Any) -> tuple[Tensor, list[ActivationRecord]]:
        """Rows of all records that match `query(**filters)` as one tensor [N, W], and the records, in insertion order.

        Record i owns the next `len(record.tensor)` rows (one, if pooled). KeyError if none match, ValueError if widths
        differ.
        """
        records = self.query(**filters)
        if not records:
            raise KeyError(f"no records match {filters}; {_why((), self.records, filters)}")
        widths = {record.tensor.shape[-1] for record in records}
        if len(widths) > 1:
            raise ValueError(f"records of widths {sorted(widths)} do not stack; {_differences(records)}")
        return torch.cat([record.tensor for record in records]), records

    def groups(self, *names: str) -> Iterator[tuple[tuple, list[ActivationRecord]]]:
        """Records grouped by attributes (`participant`, `layer`, ...): (values, records), in order of appearance."""
        grouped: dict[tuple, list[ActivationRecord]] = {}
        for record in self.records:
            grouped.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
        yield from grouped.items()

    def _summary(self) -> dict[tuple, int]:
        """(participant, layer, site, pool) -> how many records."""
        return dict(Counter((r.participant, r.layer, r.site, r.pool) for r in self.records))

    def __repr__(self) -> str:
        who, layers, sites = (list(dict.fromkeys(key[n] for key in self._summary())) for n in range(3))
        return f"<ActivationCache: {len(self)} records; participants {who}, layers {layers[:12]}, sites {sites}>"

    def _repr_html_(self) -> str:
        rows = [
            "".join(f"<td>{html.escape(str(cell))}</td>" for cell in (*key, count))
            for key, count in list(self._summary().items())[:50]
        ]
        head = "".join(f"<th>{name}</th>" for name in ("participant", "layer", "site", "pool", "records"))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{html.escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>"

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[ActivationRecord]:
        return iter(self.records)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file whose metadata is the index."""
        from safetensors.torch import save_file

        rows = [
            {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "tensor"}
            for record in self.records
        ]
        index = {"schema_version": 1, "offload": self.offload, "skipped": self.skipped, "records": rows}
        tensors = {str(number): record.tensor.contiguous() for number, record in enumerate(self.records)}
        save_file(tensors, str(path), metadata={"activation_cache": json.dumps(index)})

    @classmethod
    def load(cls, path: str | Path) -> ActivationCache:
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if "activation_cache" not in metadata:
                raise ValueError(
                    f"{path} is a safetensors file without an activation index; was it written by ActivationCache.save?"
                )
            index = json.loads(metadata["activation_cache"])
            if index["schema_version"] != 1:
                raise ValueError(f"{path} has activation schema {index['schema_version']}; this version reads 1")
            cache = cls(offload=index["offload"])
            cache.skipped = index["skipped"]
            for number, row in enumerate(index["records"]):
                for name in ("token_span", "tokens", "positions"):
                    row[name] = tuple(row[name])
                row["phases"] = {phase: tuple(span) for phase, span in row["phases"].items()}
                cache._append(ActivationRecord(tensor=file.get_tensor(str(number)), **row))
        return cache


def _why(found: Sequence[ActivationRecord], records: Sequence[ActivationRecord], filters: Mapping[str, Any]) -> str:
    """What to ask for instead: where several records match, what tells them apart; where none does, what there is."""
    if found or not records:
        return _differences(found)
    missing = []
    for name, value in filters.items():
        have = list(dict.fromkeys(getattr(record, name) for record in records))
        wanted = canonical_site(value) if name == "site" and value is not None else value
        if (value is not None or name in ("pool", "sample")) and value is not ANY and wanted not in have:
            shown = f"every one has {name}={have[0]!r}" if len(have) == 1 else f"{name} in {have[:8]}"
            missing.append(f"no record has {name}={value!r}: {shown}{'...' if len(have) > 8 else ''}")
    return "; ".join(missing) or _differences(records)


def _offload(offload: Any) -> OffloadLocation:
    if offload not in ("cpu", None):
        raise ValueError(
            f"cannot offload to {offload!r}; possible: 'cpu', or None to leave captures on the model's device"
        )
    return offload


def _differences(records: Sequence[ActivationRecord]) -> str:
    """What tells these records apart, in words."""
    if not records:
        return "the cache is empty"
    parts = []
    for name in ("participant", "message_idx", "layer", "site", "pool", "sample"):
        values = list(dict.fromkeys(getattr(record, name) for record in records))
        if len(values) > 1:
            parts.append(f"{name} in {values[:8]}{'...' if len(values) > 8 else ''}")
    return (
        "they differ in " + "; ".join(parts)
        if parts
        else "they agree in every filter (see their selection and fingerprint)"
    )


def as_tuple(value: Any) -> tuple:
    """One spec or a sequence of them, as a tuple; None is ()."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
