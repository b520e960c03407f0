"""Reads what aggregates have written: results as JSON, directions as safetensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import Damaged
from . import files, names
from .store import Store, Where, open_store


def read_results(at: Where) -> dict[str, dict[str, Any]]:
    """Name -> result of every aggregate a run folder holds: directions first, `control...` last, by name between."""
    store = open_store(at)
    found = [name.removesuffix(".json") for name in store.entries(names.AGGREGATES) if name.endswith(".json")]
    found.sort(key=lambda name: (name != "directions", name.startswith("control"), name))
    return {name: _read(store, name) for name in found}


@contextlib.contextmanager
def reading(at: Where, aggregate: str) -> Iterator[None]:
    """Inside, a result is told: what it lacks, or holds instead, is Damaged and says how it is made again."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        why = f"{names.result(aggregate)} of {str(at)!r} holds something else than is written there ({error!r})"
        raise Damaged(f"{why}; delete it, and make it again: sweeps aggregate {at} name={aggregate}") from error


def _read(store: Store, aggregate: str) -> dict[str, Any]:
    name = names.result(aggregate)
    try:
        return files.read_json(store, name)
    except Damaged as error:
        how = f"sweeps aggregate {store} name={aggregate}"
        raise Damaged(
            f"{str(error).partition('; restore')[0]}; it is derived: delete it, and make it again: {how}"
        ) from None


def direction_names(at: Where) -> list[str]:
    """The aggregates that have written directions, by name."""
    found = [
        n.removesuffix(".safetensors") for n in open_store(at).entries(names.AGGREGATES) if n.endswith(".safetensors")
    ]
    return sorted(name for name in found if not name.endswith(".arrays"))


def read_directions(at: Where, aggregate: str = "directions") -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All directions of an aggregate, name -> [D], and their provenance. ValueError: it has none. Damaged: unreadable."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    store, name = open_store(at), names.directions(aggregate)
    if not store.exists(name):
        raise ValueError(f"no directions at {store}/{name}; a run with an aggregate `directions` writes them")
    data = store.read(name)
    try:
        header = files.parsed(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return dict(sorted(load(data).items())), files.parsed(header.get("__metadata__", {}).get("provenance", "{}"))
    except (SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise files.damaged(store, name, error) from None
