"""After the data is in: merge the committed sums, run the fits, write `RUN/aggregates/`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from safetensors.numpy import save

from ..config.schema import AggregateConfig
from ..errors import ConfigError
from ..folder import names
from ..folder.store import Store
from .base import Spread, State, Sum
from .direction_files import save_directions
from .fit import Fit
from .recompute import recompute, recompute_apart
from .registry import build
from .shards import ShardedRun


def finalize(
    run: ShardedRun,
    aggregates: Iterable[AggregateConfig] | None = None,
    spread: Spread | None = None,
    own: bool = False,
) -> dict[str, dict[str, Any]]:
    """Merge a run's committed sums in unit order, run its fits, and write `RUN/aggregates/`. Returns name -> result.

    `aggregates` replaces the `aggregate:` section of the run's own configuration. With `spread`, sums are recomputed in
    other processes, unit by unit. Safe to repeat: everything written is derived, and is written to a temporary name and
    renamed. Aggregates at an import path must be given, never read from the folder; `own`: the run's configuration is
    the caller's, so that it may name code.
    """
    entries = list(run.config.aggregate if aggregates is None else aggregates)
    if aggregates is None and not own:
        for entry in entries:
            refuse_code(run.store, entry.name, entry.options)
    made = list(zip(build(entries, run.config), entries, strict=True))
    results = {}
    for aggregate, entry in sorted(made, key=lambda pair: getattr(pair[0], "is_last", False)):
        finished = None
        if spread is not None and hasattr(aggregate, "each_place"):
            cast(Any, aggregate).spread = (dict(entry.options or {}), spread)
        if isinstance(aggregate, Sum) and aggregates is not None and spread is not None:
            finished = aggregate.finish(recompute_apart(run, aggregate, dict(entry.options), spread))
        elif isinstance(aggregate, Sum):
            finished = _finished(run, aggregate, stored=aggregates is None)
        result = aggregate.fit(run, finished) if isinstance(aggregate, Fit) else finished
        results[aggregate.name] = _write(run.store, aggregate.name, dict(result or {}), dict(entry.options or {}))
    return results


def refuse_code(store: Store, name: str, options: Any) -> None:
    """ConfigError where a run folder names code: a folder is data, and may come from anybody."""
    if ":" in (kind := str(dict(options or {}).get("kind", name))):
        raise ConfigError(
            f"aggregate {name!r} of {str(store)!r} is code at {kind!r}, and nothing that a run folder names is imported; "
            f"if you trust it, name it yourself: sweeps aggregate {store} name={name} kind={kind}"
        )


def _finished(run: ShardedRun, aggregate: Sum, stored: bool) -> dict[str, Any]:
    """The finished sum: of the states that units recorded, or recomputed from what they stored."""
    streams, readable = getattr(aggregate, "streams", True), getattr(aggregate, "reads_state", lambda state: True)
    streams &= not (hasattr(aggregate, "add_shard") and run.captures) and not run.analysed
    merged: State | None = None
    for state in map(dict, run.sums(aggregate.name)) if stored and streams else ():
        if not readable(state):
            merged = None
            break
        merged = aggregate.merge(merged or aggregate.zero(), state)
    return aggregate.finish(recompute(run, aggregate) if merged is None else merged)


def _write(store: Store, name: str, result: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    tensors, arrays = result.pop("tensors", {}), result.pop("arrays", {})
    result = {"name": name, "options": options, **result}
    for written, file in ((tensors, names.directions(name)), (arrays, names.arrays(name))):
        if not written:
            store.delete(file)  # of an earlier question
    if tensors:
        described = {key: value for key, value in result.items() if key not in ("cosines", "means")}
        provenance = {"run": str(store), "aggregate": name, **_plain(described)}
        save_directions(store, name, tensors, provenance)
    if arrays:
        found = {key: np.ascontiguousarray(value, dtype=np.float64) for key, value in arrays.items()}
        store.replace(names.arrays(name), save(found))
    result = _plain(result)
    text = json.dumps(result, indent=1, sort_keys=False, allow_nan=False)
    store.replace(names.result(name), text.encode())
    return result


def _plain(value: Any) -> Any:
    """JSON values: arrays as lists, NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
