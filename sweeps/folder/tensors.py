"""Safetensors files written in one pass and read as memory-mapped slices.

A key's value is the concatenation of many tensors; they are streamed to the file one after the other, never joined in
memory, and hashed on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import Damaged
from . import files
from .store import Store

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}

_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}

ALIGN = 64

MOST_HEADER = 1 << 28
"""Bytes of a header: no real one comes near."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor stands in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""


def encode(tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The bytes of a safetensors file, piece by piece. Each value: tensors [rows, W] of one width and dtype."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, parts in tensors.items():
        first = parts[0]
        if any(p.dtype != first.dtype or p.shape[1:] != first.shape[1:] for p in parts):
            found = sorted({f"{p.dtype} {list(p.shape[1:])}" for p in parts})
            raise ValueError(f"tensors under {key!r} differ: {', '.join(found)}; one key has one width and dtype")
        shape = [sum(p.shape[0] for p in parts), *first.shape[1:]]
        size = math.prod(shape) * first.element_size()
        header[key] = {"dtype": DTYPES[first.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % ALIGN)
    yield len(head).to_bytes(8, "little") + head
    for parts in tensors.values():
        for part in parts:
            flat = part.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                yield memoryview(flat.view(torch.uint8).numpy())


def read_header(head: bytes) -> dict[str, Entry]:
    """Name -> entry, from the first bytes of a file (at least its whole header)."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 + length:
        raise ValueError("the file ends within its header; it is truncated")
    found = files.parsed(head[8 : 8 + length])
    return {key: _entry(e, 8 + length) for key, e in found.items() if key != "__metadata__"}


def _entry(given: Any, start: int) -> Entry:
    """An entry of a header. ValueError, TypeError, KeyError: it is made otherwise than safetensors are."""
    dtype, shape = _BY_CODE[given["dtype"]], tuple(given["shape"])
    first, last = given["data_offsets"]
    if not shape or not all(isinstance(n, int) and 0 <= n < 1 << 48 for n in (*shape, first, last)):
        raise ValueError("its header has sizes that no tensor has")
    if math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError("its header has a tensor of another size than its values")
    return Entry(dtype=dtype, shape=shape, offset=start + first)


def open_file(store: Store, name: str) -> TensorFile:
    """A safetensors file: memory-mapped, or read by ranges where it lies on an object store. Damaged: it is none."""
    try:
        mapped = store.mapped(name)
        return RangedFile(store, name) if mapped is None else MappedFile(mapped, f"{store}/{name}")
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"'{store}/{name}' cannot be read ({error}); restore it from a copy of the run") from None


class TensorFile(Protocol):
    """Tensors by name, read by rows."""

    entries: dict[str, Entry]

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor. KeyError where the file has no such tensor or rows."""
        ...


def _span(entry: Entry, key: str, start: int, stop: int) -> tuple[int, int, tuple[int, ...]]:
    """Offset of rows [start, stop), how many values they have, and their shape."""
    if not 0 <= start <= stop <= entry.shape[0]:
        raise KeyError(f"rows {start} to {stop} of {key!r}, which has {entry.shape[0]}")
    width = math.prod(entry.shape[1:])
    at = entry.offset + start * width * entry.dtype.itemsize
    return at, (stop - start) * width, (stop - start, *entry.shape[1:])


class RangedFile:
    """A safetensors file on an object store; a slice is one request."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        length = int.from_bytes(store.read_range(name, 0, 8), "little")
        if length > MOST_HEADER:
            raise ValueError("its header is larger than any")
        self.entries = read_header(store.read_range(name, 0, 8 + length))

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        entry = self.entries[key]
        at, count, shape = _span(entry, key, start, stop)
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        data = bytearray(self._store.read_range(self._name, at, at + count * entry.dtype.itemsize))
        return torch.frombuffer(data, dtype=entry.dtype).reshape(shape)


class MappedFile:
    """A safetensors file, memory-mapped: nothing is read before it is used, and tensors may be written to privately."""

    def __init__(self, mapped: mmap, path: str):
        self._path, self._map = path, mapped
        self.entries = read_header(self._map[: 8 + int.from_bytes(self._map[:8], "little")])

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, without a copy. KeyError where the file has no such tensor or rows."""
        entry = self.entries[key]
        at, count, shape = _span(entry, key, start, stop)
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        if at + count * entry.dtype.itemsize > len(self._map):
            raise Damaged(f"{self._path!r} ends within {key!r}; it is truncated")
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=at).reshape(shape)
