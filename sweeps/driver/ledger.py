"""The state machine of units: which unit may run now, and to which unit every cell belongs.

Pure: no clock, no files, no Ray. The driver tells it what it saw (a commit, a lost replica) and asks what to run next.
Invariants, at every moment and in any order of events:

* Every cell of the plan belongs to exactly one unit: the open unit that would close it, or the closed unit that
  committed or failed it. A commit splits the cells of its unit into held, failed and children without remainder.
* A unit is handed out only if it is open, runs nowhere, and all trunks and donors outside it are settled.
* Of the open units that need a trunk nobody holds, the one opened first owns it (units of the plan in plan order, a
  child in its parent's place, retries and extensions behind all that was there); the others wait. If the owner closes
  without holding it, ownership passes on; it never does otherwise. So whoever was handed a trunk to sample, by this
  driver or one before it, commits it or finds its own unit closed, and no trunk is committed twice.
* A replica's death counts against a unit only if that unit was alone on it.

A unit's cells are a bitmap (an int) over the cells of its root, the unit as it stands in the plan; a unit that was
closed in full keeps nothing else. Children are `<unit>.0`, `<unit>.1`; `<unit>.r`, once reopened, holds what `<unit>`
failed. Which units are open is a function of the folder alone (plan, commits, reopened units), never of who asks.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .parts import Closed, LedgerError, Needs

Verdict = Literal["again", "split", "fail"]


@dataclass(slots=True)
class _Unit:
    name: str
    root: str
    order: tuple
    cast: str
    cells: int
    needs: Needs | None
    state: Literal["waiting", "ready", "running", "closing", "closed"] = "waiting"
    alone: bool = False
    deaths: int = 0
    closed: Closed | None = None
    """Kept only if something was failed or handed on."""


class Ledger:
    """All units of a run. `needs(root, cells)` looks up what some cells of a root need (used for children)."""

    def __init__(self, needs: Callable[[str, int], Needs] = lambda root, cells: Needs(), tries: int = 3):
        self._needs, self._tries = needs, tries
        self._units: dict[str, _Unit] = {}
        self._holder: dict[str, str] = {}
        self._waiters: dict[str, set[str]] = defaultdict(set)
        """Trunk -> open units that need it."""
        self._donor_waiters: dict[str, set[str]] = defaultdict(set)
        self._ready: dict[tuple[str, bool], list[tuple[tuple, str]]] = defaultdict(list)
        self._running: dict[str, list[str]] = {}
        """Replica -> units in flight on it."""
        self._draining: dict[str, set[str]] = defaultdict(set)
        """Cast -> replicas that finish what they have and then take a unit that must be alone."""
        self._orphans: list[tuple[str, str, str]] = []
        self._open_by_cast: dict[str, int] = defaultdict(int)
        self._open_donors: dict[str, int] = {}
        self._num_roots = self._last_part = 0
        self._reopened: dict[str, tuple] = {}
        """Retry -> where in the order of opening."""
        self._rounds = 0
        self.num_cells = self.num_held = self.num_failed = 0

    # ---- what happened

    def add(self, name: str, num_cells: int, *, cast: str = "", needs: Needs | None = None, part: int = 0) -> None:
        """Append a unit of the plan, which entered it with `part`, in order.

        `needs.trunks` may leave out trunks that no other unit of the plan needs.
        """
        if name in self._units or "." in name:
            raise LedgerError(f"unit {name!r} of the plan is there twice or has a dot in its name")
        self.num_cells += num_cells
        self._num_roots += 1
        self._last_part = part
        order = (part, 0, self._num_roots)
        self._open(_Unit(name, name, order, cast, (1 << num_cells) - 1, needs or Needs()))

    def close(self, commit: Closed) -> None:
        """A commit of `commit.unit` stands in the folder. Parents come before children; reading it twice is fine."""
        self.expects(commit.unit)
        unit = self._units[commit.unit]
        if unit.state == "closed":
            return
        self._check(unit, commit)
        self._forget_running(unit)
        self._open_by_cast[unit.cast] -= 1
        needs, unit.needs, unit.state = unit.needs, None, "closed"
        self.num_held += commit.held.bit_count()
        self.num_failed += commit.failed.bit_count()
        self._open_donors[unit.root] &= ~(commit.held | commit.failed)
        partial = commit.failed or commit.children or commit.failed_trunks
        unit.closed = commit if partial else None
        for trunk in commit.trunks:
            if trunk in self._waiters or partial:
                self._holder.setdefault(trunk, unit.name)
        for name, part in commit.children.items():
            needed = self._needs(unit.root, part.cells)
            trunks = tuple(dict.fromkeys((*part.trunks, *needed.trunks)))
            order = (*unit.order, name.rsplit(".", 1)[1])
            self._open(_Unit(name, unit.root, order, unit.cast, part.cells, Needs(trunks=trunks, donors=needed.donors)))
        woken = set(self._donor_waiters.get(unit.root, ()))
        for trunk in needs.trunks if needs else ():
            self._waiters[trunk].discard(unit.name)
            woken |= self._waiters[trunk]
            if trunk not in self._holder and not self._waiters[trunk]:
                del self._waiters[trunk]
        for name in woken:
            self._consider(self._units[name])
        if f"{unit.name}.r" in self._reopened:
            self._open_retry(f"{unit.name}.r")

    def lost(self, replica: str, *, counts: bool, commits: tuple[Closed, ...] = ()) -> dict[str, Verdict]:
        """A replica is gone. `commits`: what its units committed before that. Returns a verdict for each of the others.

        `counts`: its node survived and nobody asked it to go. "again": it is queued. "split" or "fail": the unit waits
        for a commit that the driver writes, dividing it (`split`) or failing all it has.
        """
        names = self._running.get(replica, [])
        alone = len(names) == 1
        for commit in commits:
            self.close(commit)
        verdicts: dict[str, Verdict] = {}
        for name in list(self._running.pop(replica, [])):
            unit = self._units[name]
            unit.deaths += counts and alone
            unit.alone = unit.alone or (counts and not alone)
            verdicts[name] = self._verdict(unit) if counts and alone else "again"
            unit.state = "closing"
            if verdicts[name] == "again":
                self._requeue(unit)
        for draining in self._draining.values():
            draining.discard(replica)
        return verdicts

    def give_back(self, name: str) -> None:
        """A unit in flight was returned without a commit; it is queued again, and nothing counts against it."""
        unit = self._units[name]
        if unit.state == "running":
            self._forget_running(unit)
            self._requeue(unit)

    def count_failure(self, name: str) -> Verdict:
        """A unit as a whole raised on a replica that lives on: counted like a death it caused alone."""
        unit = self._units[name]
        self._forget_running(unit)
        unit.deaths += 1
        verdict = self._verdict(unit)
        unit.state = "closing"
        if verdict == "again":
            self._requeue(unit)
        return verdict

    def reopen(self, names: Iterable[str], part: int | None = None) -> None:
        """Open these retries, one round of them, behind all units that entered the plan with `part` (None: the last).

        The folder must say so first: every later driver has to read the same rounds. A retry whose parent is not closed
        yet opens when it is.
        """
        self._rounds += 1
        order = (self._last_part if part is None else part, self._rounds)
        self._reopened |= dict.fromkeys(names, order)
        for name in self._reopened:
            if name not in self._units:
                self._open_retry(name)

    # ---- what to do

    def take(self, replica: str, cast: str = "") -> str | None:
        """The next unit for this replica, now in flight on it; None if there is none it may have."""
        busy = self._running.get(replica, [])
        if any(self._units[name].alone for name in busy):
            return None
        alone = self._ready[cast, True]
        while alone and not self._is_queued(alone[0][1], alone=True):
            heapq.heappop(alone)
        draining = self._draining[cast]
        if alone and len(draining) < len(alone):
            draining.add(replica)
        if replica in draining:
            if busy and alone:
                return None
            draining.discard(replica)
        queue = alone if alone and not busy else self._ready[cast, False]
        while queue:
            _, name = heapq.heappop(queue)
            if self._is_queued(name, alone=queue is alone):
                self._units[name].state = "running"
                self._running.setdefault(replica, []).append(name)
                return name
        return None

    def orphans(self) -> list[tuple[str, str, str]]:
        """(unit, trunk, unit that failed it), each told once: the driver must fail all cells of these.

        They were parted from their trunk by a split, and the trunk alone was then failed.
        """
        orphans, self._orphans = self._orphans, []
        return orphans

    # ---- what is so

    def retriable(self) -> list[str]:
        """`<unit>.r` for every unit with failed cells that were not reopened."""
        names = [f"{u.name}.r" for u in self._units.values() if u.closed and u.closed.failed]
        return [name for name in names if name not in self._units]

    @property
    def complete(self) -> bool:
        return not any(self._open_by_cast.values())

    @property
    def stuck(self) -> bool:
        """Units are open, none runs and none can: they wait for each other."""
        running = any(u for units in self._running.values() for u in units)
        return (
            not self.complete and not running and not any(u.state in ("ready", "closing") for u in self._open_units())
        )

    def open_by_cast(self) -> dict[str, int]:
        """Cast -> number of its open units, for casts that have some."""
        return {cast: count for cast, count in self._open_by_cast.items() if count}

    def expects(self, name: str) -> int:
        """Bitmap of the cells that a commit of this unit must account for. Opens a retry that a commit speaks of."""
        unit = self._units.get(name) or self._open_retry(name)
        if unit is None:
            raise LedgerError(f"a commit of unit {name!r}, which neither the plan nor a parent's commit names")
        return unit.cells

    def running(self, replica: str) -> tuple[str, ...]:
        return tuple(self._running.get(replica, ()))

    def is_open(self, name: str) -> bool:
        return name in self._units and self._units[name].state != "closed"

    def waiting(self) -> list[str]:
        """Open units that wait for a trunk or a donor."""
        return [unit.name for unit in self._open_units() if unit.state == "waiting"]

    def cells_of(self, name: str) -> int:
        """Bitmap of the cells that this unit closes or closed."""
        return self._units[name].cells

    def root_of(self, name: str) -> str:
        return self._units[name].root

    def holder(self, trunk: str) -> str | None:
        """The unit whose shard holds this trunk, if the ledger was told that others need it."""
        return self._holder.get(trunk)

    def unheld_trunks(self, name: str) -> tuple[str, ...]:
        """Trunks this open unit samples itself if it runs now: those it needs and nobody holds."""
        return self._unheld(self._units[name])

    def deaths(self, name: str) -> int:
        return self._units[name].deaths

    def owner(self, root: str, cell: int) -> str:
        """The one unit to which this cell of this root belongs."""
        unit, bit = self._units[root], 1 << cell
        while unit.state == "closed" and unit.closed:
            if unit.closed.failed & bit and f"{unit.name}.r" in self._units:
                unit = self._units[f"{unit.name}.r"]
            elif child := next((n for n, part in unit.closed.children.items() if part.cells & bit), None):
                unit = self._units[child]
            else:
                break
        return unit.name

    # ---- inside

    def _open_units(self) -> Iterator[_Unit]:
        return (unit for unit in self._units.values() if unit.state != "closed")

    def _open(self, unit: _Unit) -> None:
        self._units[unit.name] = unit
        self._open_by_cast[unit.cast] += 1
        self._open_donors[unit.root] = self._open_donors.get(unit.root, 0) | unit.cells
        for trunk in unit.needs.trunks if unit.needs else ():
            self._waiters[trunk].add(unit.name)
        for root in unit.needs.donors if unit.needs else ():
            self._donor_waiters[root].add(unit.name)
        self._consider(unit)

    def _open_retry(self, name: str) -> _Unit | None:
        parent = self._units.get(name.removesuffix(".r")) if name.endswith(".r") else None
        if not parent or not parent.closed or not parent.closed.failed:
            return None
        cells = parent.closed.failed
        self.num_failed -= cells.bit_count()
        needs = self._needs(parent.root, cells)
        order = (*self._reopened.get(name, (math.inf, 0)), *parent.order)
        self._open(_Unit(name, parent.root, order, parent.cast, cells, needs))
        for waiter in {w for t in needs.trunks for w in self._waiters[t]} | self._donor_waiters.get(parent.root, set()):
            self._consider(self._units[waiter])
        return self._units[name]

    def _unheld(self, unit: _Unit) -> tuple[str, ...]:
        """Trunks that this open unit would sample."""
        needed = dict.fromkeys((*(unit.needs.trunks if unit.needs else ()), *self._needs(unit.root, unit.cells).trunks))
        return tuple(trunk for trunk in needed if trunk not in self._holder)

    def _consider(self, unit: _Unit) -> None:
        """Move a unit between waiting and ready, as its trunks and donors allow."""
        if unit.state not in ("waiting", "ready"):
            return
        needs = unit.needs or Needs()
        for trunk in needs.trunks:
            if failer := self._failed_alone(unit, trunk):
                unit.state = "closing"
                self._orphans.append((unit.name, trunk, failer))
                return
        blocked = any(t not in self._holder and self._trunk_owner(t) != unit.name for t in needs.trunks) or any(
            self._open_donors.get(root, 0) & cells & ~(unit.cells if root == unit.root else 0)
            for root, cells in needs.donors.items()
        )
        if not blocked and unit.state == "waiting":
            heapq.heappush(self._ready[unit.cast, unit.alone], (unit.order, unit.name))
        unit.state = "waiting" if blocked else "ready"

    def _trunk_owner(self, trunk: str) -> str:
        return min(self._waiters[trunk], key=lambda name: self._units[name].order)

    def _requeue(self, unit: _Unit) -> None:
        unit.state = "waiting"
        self._consider(unit)

    def _is_queued(self, name: str, *, alone: bool) -> bool:
        unit = self._units[name]
        return unit.state == "ready" and unit.alone == alone

    def _forget_running(self, unit: _Unit) -> None:
        for names in self._running.values():
            if unit.name in names:
                names.remove(unit.name)

    def _verdict(self, unit: _Unit) -> Verdict:
        pieces = unit.cells.bit_count() + len(self._unheld(unit))
        if pieces > 1:
            return "split"
        return "fail" if unit.deaths >= self._tries else "again"

    def _failed_alone(self, unit: _Unit, trunk: str) -> str | None:
        """The sibling without cells to which a split gave this trunk and which failed it."""
        sibling = self._units.get(unit.name[:-2] + ".0") if unit.name.endswith(".1") else None
        alone = sibling is not None and sibling.closed is not None and not sibling.cells
        return sibling.name if alone and trunk in sibling.closed.failed_trunks and trunk not in self._holder else None

    def _check(self, unit: _Unit, commit: Closed) -> None:
        parts = [commit.held, commit.failed, *(part.cells for part in commit.children.values())]
        union = 0
        for part in parts:
            if union & part:
                raise LedgerError(f"the commit of {unit.name} lists a cell twice")
            union |= part
        if union != unit.cells:
            raise LedgerError(
                f"the commit of {unit.name} accounts for {union.bit_count()} cells where the plan gives it "
                f"{unit.cells.bit_count()}; the folder holds another plan or was edited"
            )
        for name in commit.children:
            if name.rpartition(".")[0] != unit.name or not name.rsplit(".", 1)[1].isdigit():
                raise LedgerError(f"the commit of {unit.name} names {name!r} as its child")
