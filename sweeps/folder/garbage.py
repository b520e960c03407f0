"""`sweeps gc`: files that no commit names and none ever will."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from . import files
from .commits import Commit, list_commits
from .lease import exclusively
from .place import Remote
from .reader import RunFolder

TABLES = ("messages", "records", "activations", "stats", "routing", "outcomes", "failures")
"""Folders of data files."""

_SHARD = re.compile(r"(?P<unit>u\d+(?:\.(?:\d+|r))*)-(?P<attempt>[0-9a-f]{8})(?:-\d+)?\.(?:parquet|safetensors)")


def uncommitted(run: RunFolder, commits: list[Commit] | None = None) -> Iterator[str]:
    """Files of units whose commit stands and does not name them, relative to the folder. Files of open units never."""
    standing = list(run.commits()) if commits is None else commits
    closed = {c.unit for c in standing}
    named = {f["path"] for c in standing for f in c.files}
    for path in _data_files(run.root):
        match = _SHARD.fullmatch(path.rpartition("/")[2])
        if match and match["unit"] in closed and path not in named:
            yield path


def foreign(run: RunFolder) -> Iterator[str]:
    """Files among the data that no run writes."""
    return (path for path in _data_files(run.root) if not _SHARD.fullmatch(path.rpartition("/")[2]))


def _data_files(root: Path | Remote) -> Iterator[str]:
    for table in TABLES:
        for path in sorted((root / table).rglob("*")):
            if isinstance(path, Remote) or path.is_file():
                yield str(path)[len(str(root)) + 1 :]


def collect(root: files.Root, *, dry_run: bool = False, leased: bool = False) -> list[str]:
    """Delete what `uncommitted` lists, and return it. Takes the folder's lease unless the caller holds it (`leased`).

    RunRefused where another driver holds it.
    """
    run = RunFolder(root)
    if not (leased or dry_run):
        with exclusively(root):
            return collect(root, leased=True)
    light = [replace(c, cells=(), failed=(), children=()) for c in list_commits(root)]
    found = list(uncommitted(run, light))
    for path in () if dry_run else found:
        files.delete(run.root, path)
    return found
