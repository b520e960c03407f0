"""Commits: `_commits/<unit>.json`, created if absent, the only thing that readers trust."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Damaged
from .files import Root, dump_json, write_new
from .place import Remote, place

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


def read_commit(root: Root, unit: str) -> Commit | None:
    """The commit of a unit, or None."""
    path = place(root) / f"_commits/{unit}.json"
    try:
        return _parse(path, path.read_bytes())
    except FileNotFoundError:
        return None


def committed_units(root: Root) -> list[str]:
    """The units that have a commit, a unit before its children. Other names in the folder are ignored."""
    folder = place(root) / "_commits"
    names = os.listdir(folder) if isinstance(folder, Path) and folder.is_dir() else []
    if isinstance(folder, Remote):
        names = [entry.name for entry in folder.iterdir()]
    return sorted((n.removesuffix(".json") for n in names if _COMMIT.fullmatch(n)), key=unit_order)


def list_commits(root: Root) -> Iterator[Commit]:
    """Every commit of the folder, in order of unit id: a unit before its children."""
    folder, units = place(root) / "_commits", committed_units(root)
    for first in range(0, len(units), _AT_ONCE):
        paths = [folder / f"{unit}.json" for unit in units[first : first + _AT_ONCE]]
        for path, data in zip(paths, _read_all(paths), strict=True):
            yield _parse(path, data)


_AT_ONCE = 256


def _read_all(paths: list[Any]) -> Iterable[bytes]:
    if paths and isinstance(paths[0], Remote):
        return paths[0].read_all(paths)
    return (path.read_bytes() for path in paths)


def unit_order(unit: str) -> tuple:
    """Sorts unit ids: a unit, then its children `.0`, `.1`, then its retry `.r`."""
    return tuple(
        (1, int(step)) if step.isdigit() else (0 if i == 0 else 2, step) for i, step in enumerate(unit.split("."))
    )


def write_commit(root: Root, commit: Commit) -> str:
    """Create the unit's commit: "won", or "lost" where another attempt's stands.

    An error may hide a success (a lost reply): what stands then decides.
    """
    data = dump_json(asdict(commit))
    for last in (False, False, True):
        try:
            write_new(root, f"_commits/{commit.unit}.json", data)
            return "won"
        except FileExistsError:
            pass
        except OSError:
            if isinstance(place(root), Path) or (last and read_commit(root, commit.unit) is None):
                raise
        standing = read_commit(root, commit.unit)
        if standing is not None:
            return "won" if standing.attempt == commit.attempt else "lost"
    raise AssertionError("unreachable")


def _parse(path: Path | Remote, data: bytes) -> Commit:
    try:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(data).items()}
        return _checked(Commit(**fields), path.name)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(
            f"the commit {str(path)!r} cannot be read ({error}); restore it from a copy of the run, or let its unit and "
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
