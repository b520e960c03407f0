"""`sweeps export DIR OUT key=value ...`: some vectors of a run as one file for another tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from .config import ConfigError, did_you_mean
from .records import FILTERS

if TYPE_CHECKING:
    from .run import Run

FORMATS = (".parquet", ".npz")


def export(run: Run, out: str | Path, conditions: Sequence[str] = ()) -> tuple[int, int]:
    """Write the pooled records that match as [N, D] float32 with their addresses, items, seeds and axes; returns (N, D).

    conditions: `key=value` or `key=[v, w]`, over record columns (layer, site, pool, participant, ...) and axes; pool is
    mean and site residual where they are not named. OUT ends in .parquet (a row per vector) or .npz (an array `vectors`
    and one per column). ConfigError for another ending, an unknown key, or where nothing matches.
    """
    path = Path(out)
    if path.suffix not in FORMATS:
        raise ConfigError(f"cannot export to {str(out)!r}; possible endings: {', '.join(FORMATS)}")
    given = dict(_condition(text) for text in conditions)
    known = (*FILTERS, "item", "trunk_seed", "branch_seed", *run.axes)
    for key in given:
        if key not in known:
            raise ConfigError(f"no column {key!r} to choose by{did_you_mean(key, known)}")
    where = None
    for key in (k for k in given if k in FILTERS and k not in ("site", "pool")):
        part = pc.field(key).isin(given[key])
        where = part if where is None else where & part
    site, pool = (given.get(key, [default])[0] for key, default in (("site", "residual"), ("pool", "mean")))
    vectors, rows = run.vectors(site=site, pool=pool, where=where)
    keep = np.ones(rows.num_rows, bool)
    for key in (k for k in given if k not in FILTERS):
        keep &= np.isin(np.array(rows[key].to_pylist(), object), np.array(given[key], object))
    vectors, rows = vectors[keep], rows.filter(pa.array(keep))
    if not len(vectors):
        raise ConfigError(f"nothing matches {', '.join(conditions) or 'a mean of residual'}; see records of this run")
    _write(path, vectors, rows.drop_columns(["file", "key", "row_start", "row_end", "phases", "token_span"]))
    return vectors.shape


def _condition(text: str) -> tuple[str, list[Any]]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"cannot read {text!r}; write key=value or key=[v, w]")
    parsed = yaml.safe_load(value)
    return key, parsed if isinstance(parsed, list) else [parsed]


def _write(path: Path, vectors: np.ndarray, rows: pa.Table) -> None:
    part = path.with_name(f".{path.name}.part")
    if path.suffix == ".parquet":
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        pq.write_table(rows.append_column("vector", column), part)
    else:
        flat = {n: rows[n].to_pandas().to_numpy() for n in rows.column_names if n not in ("tokens", "positions")}
        plain: dict[str, Any] = {n: v.astype(str) if v.dtype == object else v for n, v in flat.items()}
        with part.open("wb") as file:
            np.savez(file, vectors=vectors, **plain)
    part.replace(path)
