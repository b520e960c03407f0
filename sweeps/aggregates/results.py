"""After the data is in: merge the committed sums, run the fits, write `RUN/aggregates/`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from .. import store
from . import Fit, Sum, build
from .directions import save_directions


def finalize(run: Any, aggregates: Iterable[Any] | None = None) -> dict[str, dict[str, Any]]:
    """See `sweeps.aggregates.finalize`."""
    entries = run.config.aggregate if aggregates is None else tuple(aggregates)
    results = {}
    for made, entry in zip(build(entries, run.config), entries, strict=True):
        finished = _merged(run, made) if isinstance(made, Sum) and aggregates is None else None
        result = made.fit(run, finished) if isinstance(made, Fit) else finished
        results[made.name] = _write(Path(run.root), made.name, dict(result or {}), dict(entry.options or {}))
    return results


def _merged(run: Any, made: Sum) -> dict[str, Any] | None:
    """The finished sum over all committed units, in unit order; None where no unit has recorded this sum."""
    states = [dict(state) for state in run.sums(made.name)]
    return made.finish(reduce(made.merge, states, made.zero())) if states else None


def _write(root: Path, name: str, result: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    tensors = result.pop("tensors", {})
    result = {"name": name, "options": options, **result}
    if tensors:
        described = {key: value for key, value in result.items() if key not in ("cosines", "means")}
        provenance = {"run": str(root), "aggregate": name, **_plain(described)}
        save_directions(root, f"aggregates/{name}.safetensors", tensors, provenance)
    result = _plain(result)
    text = json.dumps(result, indent=1, sort_keys=False, allow_nan=False)
    store.replace(root, f"aggregates/{name}.json", text.encode())
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


def read_results(root: str | Path) -> dict[str, dict[str, Any]]:
    """Name -> result of every aggregate a run folder holds, in order of name."""
    files = sorted((Path(root) / "aggregates").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files}
