"""Which KV exists and who may use it: parked columns, prefixes of live rows, a budget. No model, no tensors of its own.

Two requests share KV up to the first position at which their adapter, token ids or edits differ. A `Prefix` is a
sequence of (id, edit signature) whose KV stands somewhere: in a parked copy, in a live row, or soon in a row that is
being prefilled. `find` gives the longest verified one; hashes of whole blocks only narrow the search.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK = 16
"""Prefixes shorter than this are computed again."""


@dataclass(eq=False, kw_only=True)
class Prefix:
    """Positions whose KV stands in `source` (parked columns, or a row). `ready`: it can be copied now."""

    adapter: str | None
    ids: np.ndarray
    signature: np.ndarray
    source: Any
    parked: bool
    ready: bool = True
    name: str | None = None
    hashes: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


class Memory:
    """The prefixes of one engine, and the parked ones' share of its budget."""

    def __init__(self):
        self._blocks: dict[bytes, OrderedDict[int, Prefix]] = defaultdict(OrderedDict)
        self._parked: OrderedDict[int, Prefix] = OrderedDict()
        self.parked_columns = 0
        self.evictions = 0

    def add(self, prefix: Prefix) -> None:
        """Make a prefix known. A parked one replaces those parked before that it extends."""
        prefix.hashes = _hashes(prefix.adapter, prefix.ids, prefix.signature)
        if not prefix.hashes:
            return
        if prefix.parked:
            for other in [p for p in self._blocks.get(prefix.hashes[0], {}).values() if p.parked]:
                if len(other) <= len(prefix) and _common(other, prefix.ids, prefix.signature) == len(other):
                    self.remove(other)
            self._parked[id(prefix)] = prefix
            self.parked_columns += len(prefix)
        for digest in prefix.hashes:
            self._blocks[digest][id(prefix)] = prefix

    def remove(self, prefix: Prefix) -> None:
        """Forget one parked prefix."""
        for digest in prefix.hashes:
            entries = self._blocks.get(digest)
            if entries is not None:
                entries.pop(id(prefix), None)
                if not entries:
                    del self._blocks[digest]
        if self._parked.pop(id(prefix), None) is not None:
            self.parked_columns -= len(prefix)

    def find(self, adapter: str | None, ids: np.ndarray, signature: np.ndarray) -> tuple[Prefix | None, int, int]:
        """The ready prefix that shares most positions, how many, and how many one that is not ready yet would share."""
        best, shared, promised = None, 0, 0
        seen: set[int] = set()
        for digest in reversed(_hashes(adapter, ids, signature)):
            for prefix in self._blocks.get(digest, {}).values():
                if id(prefix) in seen:
                    continue
                seen.add(id(prefix))
                common = _common(prefix, ids, signature)
                if not prefix.ready:
                    promised = max(promised, common)
                elif common > shared:
                    best, shared = prefix, common
            if shared:
                break  # every other ready prefix departs within an earlier block
        if best is not None and best.parked:
            self._parked.move_to_end(id(best))
        return best, shared, promised

    def evict(self, columns: int) -> int:
        """Drop parked prefixes, least recently used first, until at most `columns` are parked; columns freed."""
        freed = 0
        while self._parked and self.parked_columns > columns:
            prefix = next(iter(self._parked.values()))
            freed += len(prefix)
            self.remove(prefix)
            self.evictions += 1
        return freed

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drop everything parked, or only what was parked under these names."""
        wanted = None if names is None else set(names)
        for prefix in list(self._parked.values()):
            if wanted is None or prefix.name in wanted:
                self.remove(prefix)

    def __len__(self) -> int:
        return len(self._parked)


def _hashes(adapter: str | None, ids: np.ndarray, signature: np.ndarray) -> list[bytes]:
    """One running hash at the end of each whole block."""
    running = hashlib.blake2b(repr(adapter).encode(), digest_size=16)
    hashes = []
    for start, stop in itertools.pairwise(range(0, len(ids) + 1, BLOCK)):
        running.update(ids[start:stop].tobytes())
        running.update(signature[start:stop].tobytes())
        hashes.append(running.digest())
    return hashes


def _common(prefix: Prefix, ids: np.ndarray, signature: np.ndarray) -> int:
    n = min(len(prefix), len(ids))
    differ = (prefix.ids[:n] != ids[:n]) | (prefix.signature[:n] != signature[:n])
    return int(differ.argmax()) if differ.any() else n
