"""Commits: `_commits/<unit>.json`, created if absent, the only thing that readers trust."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import Damaged
from . import names
from .files import dump_json, parsed
from .store import Store, Where, open_store

_COMMIT = re.compile(r"u\d+(\.(\d+|r))*\.json")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What `_commits/<unit>.json` says: the one truth about a unit."""

    unit: str
    attempt: str
    cells: tuple[str, ...] = ()
    """Ids of the cells it holds."""
    failed: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    failed_trunks: tuple[str, ...] = ()
    files: tuple[dict[str, Any], ...] = ()
    """Each {path, table, rows, bytes, sha256}; path relative to the run folder."""
    children: tuple[dict[str, Any], ...] = ()
    """`Unit.to_dict()` of each child."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Totals for status: tokens generated, seconds, ..."""

    @property
    def num_cells(self) -> int:
        return len(self.cells)


def read_commit(root: Where, unit: str) -> Commit | None:
    """The commit of a unit, or None."""
    store, name = open_store(root), names.commit(unit)
    try:
        return _parse(store, name, store.read(name))
    except FileNotFoundError:
        return None


def committed_units(root: Where) -> list[str]:
    """The units that have a commit, a unit before its children. Other names in the folder are ignored."""
    found = open_store(root).entries(names.COMMITS)
    return sorted((n.removesuffix(".json") for n in found if _COMMIT.fullmatch(n)), key=unit_order)


def list_commits(root: Where) -> Iterator[Commit]:
    """Every commit of the folder, in order of unit id: a unit before its children."""
    store = open_store(root)
    units = committed_units(store)
    for first in range(0, len(units), _AT_ONCE):
        asked = [names.commit(unit) for unit in units[first : first + _AT_ONCE]]
        for name, data in zip(asked, store.read_all(asked), strict=True):
            yield _parse(store, name, data)


_AT_ONCE = 256


def unit_order(unit: str) -> tuple:
    """Sorts unit ids: a unit, then its children `.0`, `.1`, then its retry `.r`."""
    return tuple(
        (1, int(step)) if step.isdigit() else (0 if i == 0 else 2, step) for i, step in enumerate(unit.split("."))
    )


def write_commit(root: Where, commit: Commit) -> str:
    """Create the unit's commit: "won", or "lost" where another attempt's stands.

    An error may hide a success (a lost reply): what stands then decides.
    """
    store, data = open_store(root), dump_json(asdict(commit))
    for last in (False, False, True):
        try:
            store.write_new(names.commit(commit.unit), data)
            return "won"
        except FileExistsError:
            pass
        except OSError:
            if not store.reply_may_be_lost or (last and read_commit(store, commit.unit) is None):
                raise
        standing = read_commit(store, commit.unit)
        if standing is not None:
            return "won" if standing.attempt == commit.attempt else "lost"
    raise AssertionError("unreachable")


def _parse(store: Store, name: str, data: bytes) -> Commit:
    try:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in parsed(data).items()}
        return _checked(Commit(**fields), name.rpartition("/")[2])
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(
            f"the commit '{store}/{name}' cannot be read ({error}); restore it from a copy of the run, or let its unit and "
            "what stands on it run again: `sweeps verify RUN --reopen`"
        ) from None


def _checked(commit: Commit, name: str) -> Commit:
    """The commit, of the unit that its file's name says and made of what a commit is made of; else ValueError."""
    if name != f"{commit.unit}.json":
        raise ValueError(f"it says it is of {commit.unit!r}")
    texts = (commit.attempt, *commit.cells, *commit.failed, *commit.trunks, *commit.failed_trunks)
    texts += tuple(file[key] for file in commit.files for key in ("path", "table", "sha256"))
    texts += tuple(child["id"] for child in commit.children)
    lists = (commit.cells, commit.failed, commit.trunks, commit.failed_trunks, commit.files, commit.children)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, tuple) for one in lists):
        raise ValueError("it is not made as commits are")
    return commit
