"""Which slab row belongs to whom, and which KV each row starts from.

Live rows stand in slab rows `[0, len(live))`; groups being prefilled stand behind them in the order in which they will
join. A row that leaves is replaced by the last live row; a group that joins moves down to the live rows' end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .memory import Memory, Prefix
from .rows import Row, prefill_groups
from .slabs import Slabs

WORTH_WAITING = 32
"""A request waits for another's prefill if that will share this many positions more than what stands already."""


class Table:
    """The rows of one engine and the memory they stand in. `budget`: allocated KV columns, live and parked."""

    def __init__(self, slabs: Slabs, memory: Memory, budget: int, reuse: bool):
        self.slabs = slabs
        self.memory = memory
        self.budget = budget
        self.reuse = reuse
        self.live: list[Row] = []
        self.groups: deque[list[Row]] = deque()
        self._prefixes: dict[Row, Prefix] = {}

    @property
    def prefilling(self) -> list[Row]:
        """Rows whose prompt is being computed."""
        return [row for group in self.groups for row in group]

    @property
    def end(self) -> int:
        """The first slab row that nobody has."""
        return self.groups[-1][-1].index + 1 if self.groups else len(self.live)

    # Entering

    def choose(self, waiting: deque[Row], free: int) -> list[Row]:
        """Take up to `free` rows out of `waiting`, in order; those that had better wait for a prefix stay."""
        chosen: list[Row] = []
        width = max((len(row.sequence) + 1 for row in (*self.live, *self.prefilling)), default=0)
        for row in list(waiting):
            if len(chosen) == free:
                break
            wider = max(width, row.target + 1)
            if (self.end + len(chosen) + 1) * wider > self.budget and (chosen or self.end):
                break
            if not self._start(row):
                continue
            width = wider
            chosen.append(row)
            waiting.remove(row)
        return chosen

    def _start(self, row: Row) -> bool:
        """Find the KV a row starts from. False if it should wait for one that is being computed."""
        row.prefix, row.written, row.fed = None, 0, 0
        if not self.reuse:
            return True
        if row.known is None:
            row.known = np.array(row.sequence.ids[: row.target]), row.signature(row.target)
        ids, signature = row.known
        if not row.fresh:
            prefix, shared, promised = self.memory.find(row.request.adapter, ids, signature)
            last = min(row.target, row.sequence.num_prompt if row.wants_forced_logprobs else row.target) - 1
            if min(promised, last) >= min(shared, last) + WORTH_WAITING:
                return False
            row.prefix, row.written = prefix, min(shared, last)
            row.fed = row.first_taken(row.written)
        own = Prefix(adapter=row.request.adapter, ids=ids, signature=signature, source=row, parked=False, ready=False)
        self._prefixes[row] = own
        self.memory.add(own)
        return True

    def place(self, rows: Sequence[Row]) -> None:
        """Give chosen rows their slab rows, copy the KV they start from, and queue them in groups for prefill."""
        if not self.end and self.allocated > 4 * len(rows) * max(row.target for row in rows):
            self.slabs.resize(0, 0)
        groups = [[rows[i] for i in group] for group in prefill_groups([row.target - row.fed for row in rows])]
        self.reserve(self.end + len(rows), max(row.target for row in rows))
        for group in groups:
            for offset, row in enumerate(group, start=self.end):
                row.index = offset
                if row.prefix is not None and row.written:
                    self._copy(row.prefix, row)
                row.counters["reused_tokens"] += row.written
                row.prefix = row.known = None
            self.groups.append(group)

    def _copy(self, prefix: Prefix, row: Row) -> None:
        if prefix.parked:
            self.slabs.put(row.index, prefix.source, row.written)
        else:
            self.slabs.move(prefix.source.index, row.index, row.written)

    def join(self) -> list[Row]:
        """The first group has been prefilled: its rows become live."""
        group = self.groups.popleft()
        for row in group:
            target = len(self.live)
            if row.index != target:
                self.slabs.move(row.index, target, row.written)
                row.index = target
            self.live.append(row)
            if row in self._prefixes:
                self._prefixes[row].ready = row.error is None
        return group

    # Leaving

    def leave(self, row: Row, keep: str | None = None) -> None:
        """Remove a live row; the last one takes its place. `keep`: park its KV under this name."""
        self._forget_prefix(row)
        if row.error is not None:
            self.slabs.clear(row.index)  # the row that moves here may be shorter
        elif keep is not None and self.reuse and row.written:
            self._park(row, keep)
        last = self.live.pop()
        if last is not row:
            self.slabs.move(last.index, row.index, last.written)
            last.index = row.index
            self.live[row.index] = last

    def scrub(self) -> None:
        """Zero the rows that nobody has. What a failed row left, here and where it stood before it was moved, may be
        NaN, and a masked NaN still spoils a weighted sum."""
        taken = {row.index for row in (*self.live, *self.prefilling)}
        for index in range(self.slabs.num_rows):
            if index not in taken:
                self.slabs.clear(index)

    def _park(self, row: Row, name: str) -> None:
        n = row.written
        self.memory.add(
            Prefix(
                adapter=row.request.adapter,
                ids=np.array(row.sequence.ids[:n]),
                signature=row.signature(n),
                source=self.slabs.take(row.index, n),
                parked=True,
                name=name,
            )
        )
        self.memory.evict(max(0, self.budget - self.allocated))

    def _forget_prefix(self, row: Row) -> None:
        prefix = self._prefixes.pop(row, None)
        if prefix is not None:
            self.memory.remove(prefix)

    def put_back(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the chosen rows that were not placed, as if they had never been chosen."""
        lost = [row for row in rows if row not in self.prefilling]
        for row in lost:
            self._forget_prefix(row)
        return lost

    def evacuate(self, keep: int) -> list[Row]:
        """Take all but the first `keep` rows out of the slabs, to be started over; shrink the slabs to what stays."""
        removed = self.live[keep:] + self.prefilling
        if keep < len(self.live):
            self.live = self.live[:keep]
        self.groups.clear()
        for row in removed:
            self._forget_prefix(row)
            row.start_over()
        if self.live:
            self.slabs.resize(keep, max(row.written for row in self.live))
        else:
            self.slabs.resize(0, 0)
        return removed

    # Room

    @property
    def allocated(self) -> int:
        """Columns the slabs take."""
        return self.slabs.num_rows * self.slabs.num_columns

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Grow the slabs with some slack, inside the budget; parked KV makes room, oldest first."""
        slabs = self.slabs
        if num_rows <= slabs.num_rows and num_columns <= slabs.num_columns:
            return
        if num_columns > slabs.num_columns:
            roomy = -(-max(num_columns + 32, int(num_columns * 1.25)) // 64) * 64
        else:
            roomy = slabs.num_columns
        rows = max(num_rows, slabs.num_rows)
        if rows * roomy > self.budget:
            rows, roomy = num_rows, max(num_columns, self.budget // num_rows if num_rows else 0)
            roomy = min(roomy, max(num_columns, slabs.num_columns))
        self.memory.evict(max(0, self.budget - rows * roomy))
        slabs.resize(rows, roomy)

    def overflow(self) -> int | None:
        """How many live rows may stay if the next decode step would not fit the budget; None if it fits."""
        width = max((len(row.sequence) for row in self.live), default=0)
        if self.end * width <= self.budget:
            return None
        return max(1, self.budget // width)
