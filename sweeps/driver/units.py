"""Units by name: from the plan, from a parent's commit, or derived; and what commits say of them as bitmaps.

The driver keeps no cells. Units of the plan are read when they are dispatched; a child's unit stands in its parent's
commit; `<unit>.r` follows from what `<unit>` failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from ..folder.cells import Cell, Unit, part_of
from ..folder.commits import Commit
from .parts import Closed, LedgerError, Needs, Part


class Units:
    """Looks up units. `plan`: reads a unit of the plan by name; `commit`: reads a unit's commit, if it stands."""

    def __init__(
        self, plan: Callable[[str], Unit], commit: Callable[[str], Commit | None], kept: int = 8,
        locate: Callable[[set[str]], Mapping[str, tuple[str, int]]] = lambda cells: {},
    ):  # fmt: skip
        """`locate`: where the plan has cells: id -> (unit, position)."""
        self._commit, self._locate = commit, locate
        self._root = lru_cache(maxsize=kept)(plan)

    def get(self, name: str) -> Unit:
        """The unit of this name. LedgerError where neither the plan nor a commit has it."""
        parent, dot, suffix = name.rpartition(".")
        if not dot:
            return self._root(name)
        commit = self._commit(parent)
        if commit and suffix == "r":
            return part_of(self.get(parent), name, set(commit.failed))
        for child in commit.children if commit else ():
            if child["id"] == name:
                return Unit.from_dict(child)
        raise LedgerError(f"no commit of {parent!r} names {name!r}")

    def bits(self, root: str, cells: Iterable[str]) -> int:
        """Bitmap of some cells (ids) of a root."""
        wanted = set(cells)
        if not wanted:
            return 0
        found = 0
        for position, cell in enumerate(self._root(root).cells):
            found |= (cell.id in wanted) << position
        if found.bit_count() != len(wanted):
            raise LedgerError(f"a commit of {root!r} names cells that the plan does not have")
        return found

    def cells(self, root: str, bits: int) -> dict[int, Cell]:
        """Position -> cell, in plan order."""
        return {p: cell for p, cell in enumerate(self._root(root).cells) if bits >> p & 1}

    def needs(self, root: str, bits: int) -> Needs:
        """Every trunk and donor that these cells need; donors may be among these cells."""
        unit = self._root(root)
        sampled = {trunk.id for trunk in unit.trunks}
        trunks = dict.fromkeys(c.trunk for p, c in enumerate(unit.cells) if bits >> p & 1 and c.trunk in sampled)
        return Needs(trunks=tuple(trunks), donors=self._donors(root, bits))

    def _donors(self, root: str, bits: int) -> dict[str, int]:
        unit = self._root(root)
        wanted = {d for p, c in enumerate(unit.cells) if bits >> p & 1 for d in c.donors if d and d != c.id}
        found: dict[str, int] = {}
        if here := {cell.id for cell in unit.cells} & wanted:
            found[root] = self.bits(root, here)
        for other, position in self._locate(wanted - here).values() if wanted - here else ():
            found[other] = found.get(other, 0) | 1 << position
        return found

    def donor_positions(self, root: str, bits: int) -> dict[int, tuple[int, ...]]:
        """Position -> positions, among these cells, of the donors it waits for."""
        cells = self.cells(root, bits)
        at = {cell.id: position for position, cell in cells.items()}
        found = {p: tuple(at[d] for d in cell.donors if d != cell.id and d in at) for p, cell in cells.items()}
        return {position: given for position, given in found.items() if given}

    def part(self, root: str, name: str, part: Part) -> Unit:
        """A unit with these cells of a root, the trunks they need, and the trunks it shall sample besides."""
        cells = {cell.id for cell in self.cells(root, part.cells).values()}
        return part_of(self._root(root), name, cells, part.trunks)

    def closed(self, commit: Commit, expected: int, root: str) -> Closed:
        """A commit as the ledger hears it. `expected`: the bitmap of its unit's cells, if the unit is known."""
        trunks, failed_trunks = tuple(commit.trunks), tuple(commit.failed_trunks)
        if not commit.failed and not commit.children and len(commit.cells) == expected.bit_count():
            return Closed(unit=commit.unit, held=expected, trunks=trunks, failed_trunks=failed_trunks)
        children = {}
        for child in commit.children:
            cells = self.bits(root, (entry[0] for entry in child["cells"]))
            children[child["id"]] = Part(cells=cells, trunks=tuple(trunk[0] for trunk in child["trunks"]))
        return Closed(
            unit=commit.unit, held=self.bits(root, commit.cells), failed=self.bits(root, commit.failed),
            trunks=trunks, failed_trunks=failed_trunks, children=children,
        )  # fmt: skip
