"""`sweeps gc`: files that no commit names and none ever will."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .commits import Commit, list_commits
from .lease import exclusively
from .reader import RunFolder
from .store import Store, Where

TABLES = ("messages", "records", "activations", "stats", "routing", "outcomes", "failures")
"""Folders of data files."""

_SHARD = re.compile(r"(?P<unit>u\d+(?:\.(?:\d+|r))*)-(?P<attempt>[0-9a-f]{8})(?:-\d+)?\.(?:parquet|safetensors)")


def uncommitted(run: RunFolder, commits: list[Commit] | None = None) -> Iterator[str]:
    """Files of units whose commit stands and does not name them, relative to the folder. Files of open units never."""
    standing = list(run.commits()) if commits is None else commits
    closed = {c.unit for c in standing}
    named = {f["path"] for c in standing for f in c.files}
    for path in _data_files(run.store):
        match = _SHARD.fullmatch(path.rpartition("/")[2])
        if match and match["unit"] in closed and path not in named:
            yield path


def foreign(run: RunFolder) -> Iterator[str]:
    """Files among the data that no run writes."""
    return (path for path in _data_files(run.store) if not _SHARD.fullmatch(path.rpartition("/")[2]))


def _data_files(store: Store) -> Iterator[str]:
    for table in TABLES:
        yield from sorted(store.walk(table))


def collect(root: Where, *, dry_run: bool = False, leased: bool = False) -> list[str]:
    """Delete what `uncommitted` lists, and return it. Takes the folder's lease unless the caller holds it (`leased`).

    RunRefused where another driver holds it.
    """
    run = RunFolder(root)
    if not (leased or dry_run):
        with exclusively(run.store):
            return collect(run.store, leased=True)
    light = [replace(c, cells=(), failed=(), children=()) for c in list_commits(run.store)]
    found = list(uncommitted(run, light))
    for path in () if dry_run else found:
        run.store.delete(path)
    return found
