"""Outcomes computed after a run (`sweeps analyze`): `analyses/<version>/<unit>.parquet`, beside `analyses/<version>.json`.

A version is a hash of what made the outcomes: an analyzer's import path and source, a judge's whole configuration. Files
are created once per unit, so that what was cut off goes on where it was; later versions stand over earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import files, names, schemas
from .store import Store

FAILED = "failed."
"""Begins the name of a text outcome that says why an analysis has no value."""


def begin(store: Store, version: str, about: Mapping[str, Any]) -> None:
    """Say what a version is, and give it the next number; nothing where it is there."""
    if store.exists(names.analysis(version)):
        return
    number = len(versions(store))
    store.replace(names.analysis(version), files.dump_json({"number": number, **about}))


def done(store: Store, version: str, unit: str) -> bool:
    """True if a unit's outcomes of this version are there."""
    return store.exists(names.analysed_unit(version, unit))


def any_failed(store: Store, version: str) -> bool:
    """True if some cell has no value by this version."""
    return any(name.startswith(FAILED) for _, values in _rows(store, version) for name in values)


def write(store: Store, version: str, unit: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Create a unit's rows (columns of `outcomes`). What another process has written meanwhile stands."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schemas.OUTCOMES)
    try:
        with store.create(names.analysed_unit(version, unit)) as out:
            pq.write_table(table, out, **schemas.LAYOUT)
    except FileExistsError:
        pass


def versions(store: Store) -> list[tuple[str, dict[str, Any]]]:
    """(version, what it is), earliest first."""
    known = [name.removesuffix(".json") for name in store.entries(names.ANALYSES) if name.endswith(".json")]
    found = [(version, files.read_json(store, names.analysis(version))) for version in known]
    return sorted(found, key=lambda pair: pair[1]["number"])


def outcomes(store: Store) -> dict[str, dict[str, Any]]:
    """Cell -> outcomes of all versions, later ones over earlier ones; a value takes the failure of its analysis away."""
    found: dict[str, dict[str, Any]] = {}
    for version, about in versions(store):
        for cell, values in _rows(store, version):
            own = found.setdefault(cell, {})
            own.update(values)
            if FAILED + about["name"] not in values:
                own[FAILED + about["name"]] = None
    return found


def together(
    cells: Sequence[str],
    born: Sequence[Mapping[str, Any]],
    later: Mapping[str, Mapping[str, Any]],
    order: Sequence[str],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Cells that have outcomes, in `order`, and these: what they were committed with, under what was computed later."""
    first = dict(zip(cells, born, strict=True))
    known = [cell for cell in order if cell in first or cell in later]
    merged = [{**first.get(cell, {}), **later.get(cell, {})} for cell in known]
    return known, [{name: value for name, value in row.items() if value is not None} for row in merged]


def _rows(store: Store, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = f"{names.ANALYSES}/{version}"
    for name in store.entries(folder):
        with store.open(f"{folder}/{name}") as file:
            for row in pq.read_table(file, page_checksum_verification=True).to_pylist():
                yield row["cell"], dict(row["numbers"]) | dict(row["texts"])
