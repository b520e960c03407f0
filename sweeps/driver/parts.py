"""What a unit needs, what a commit says of it, and how one that kills its replica is divided; cells are bitmaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class LedgerError(ValueError):
    """A commit contradicts the plan or another commit."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a set of cells needs from outside its unit or samples itself."""

    trunks: tuple[str, ...] = ()
    donors: Mapping[str, int] = field(default_factory=dict)
    """Root unit -> bitmap of its cells that must be settled first."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a commit hands to one child: cells, and trunks to sample even if no cell of the child needs them."""

    cells: int = 0
    trunks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What one commit says about its unit, as bitmaps over the root's cells."""

    unit: str
    held: int = 0
    failed: int = 0
    trunks: tuple[str, ...] = ()
    failed_trunks: tuple[str, ...] = ()
    children: Mapping[str, Part] = field(default_factory=dict)


def split(
    cells: Mapping[int, str | None],
    unheld: tuple[str, ...] = (),
    donors: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Part, Part]:
    """Divide what a unit has left in two, so that the part that kills its replica can be found.

    `cells`: position -> trunk, in plan order. `unheld`: the trunks that this unit would sample. `donors`: position ->
    positions that must run before it. Several trunks: half of them each. One trunk not sampled yet: the trunk alone,
    then its cells. Else half of the cells, donors in the first half or with their recipients.
    """
    trunks = list(dict.fromkeys((*(t for t in cells.values() if t is not None), *unheld)))
    first: set[int] = set()
    if len(trunks) > 1:
        early = trunks[: len(trunks) // 2]
        first = {p for p, trunk in cells.items() if trunk in early}
        if not _needs_later(first, donors):
            rest, late = set(cells) - first, trunks[len(early) :]
            return (
                Part(cells=_bits(first), trunks=tuple(t for t in early if t in unheld)),
                Part(cells=_bits(rest), trunks=tuple(t for t in late if t in unheld)),
            )
    if len(trunks) == 1 and unheld:
        return Part(trunks=tuple(trunks)), Part(cells=_bits(cells))
    order = _donors_first(list(cells), donors or {})
    half = len(order) // 2
    return Part(cells=_bits(order[:half])), Part(cells=_bits(order[half:]))


def _bits(positions: Iterable[int]) -> int:
    return sum(1 << p for p in positions)


def _needs_later(first: set[int], donors: Mapping[int, tuple[int, ...]] | None) -> bool:
    return any(d not in first for p in first for d in (donors or {}).get(p, ()))


def _donors_first(positions: list[int], donors: Mapping[int, tuple[int, ...]]) -> list[int]:
    order: dict[int, None] = {}

    def visit(position: int) -> None:
        if position not in order:
            for donor in donors.get(position, ()):
                if donor in donors or donor in positions:
                    visit(donor)
            order[position] = None

    for position in positions:
        visit(position)
    return [p for p in order if p in set(positions)]
