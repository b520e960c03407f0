"""`sweeps export DIR OUT ...`: some vectors of a run as one file for another tool, or directions for llama.cpp."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from interlens.interp.control_vectors import export_control_vector
from interlens.interp.steering import SteeringSpec

from ..aggregates.columns import columns, evaluated
from ..aggregates.expressions import parse
from ..errors import ConfigError, did_you_mean
from ..folder.blame import blaming
from ..folder.local import whole_file
from ..folder.records import FILTERS
from ..plan import model_sizes
from ..run import Run
from .parsing import Done, Parser

FORMATS = ("parquet", "npz")

HELP = """Pooled vectors as one .parquet or .npz file, or directions as a control vector for llama.cpp (.gguf).

  sweeps export RUN x.parquet framing=warm --layers 8,16 --where "message.finish_reason == 'stop'"
  sweeps export RUN warm.gguf --layers 16 --direction lda
"""


def command(arguments: Sequence[str]) -> str:
    """Export what the command's arguments name; what was written, in a line. Done: help was asked for."""
    parser = Parser(prog="sweeps export", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir")
    parser.add_argument("out")
    parser.add_argument("conditions", nargs="*", metavar="key=value")
    parser.add_argument("--where", metavar="EXPRESSION")
    parser.add_argument("--layers", metavar="8,16")
    parser.add_argument("--format", choices=(*FORMATS, "gguf"))
    parser.add_argument("--direction", metavar="AGGREGATE", default="directions")
    parser.add_argument("--hint", metavar="ARCHITECTURE")
    try:
        given = parser.parse_intermixed_args(arguments)
    except SystemExit:
        raise Done from None
    try:
        layers = None if given.layers is None else [int(layer) for layer in given.layers.strip("[]").split(",")]
    except ValueError:
        raise ConfigError(f"--layers: cannot read {given.layers!r}; write 8,16") from None
    run, directions = Run(given.dir), given.format == "gguf" or (given.format is None and given.out.endswith(".gguf"))
    with blaming(run):
        if directions:
            count, width = export_directions(run, given.out, name=given.direction, layers=layers, hint=given.hint)
        else:
            count, width = export(
                run, given.out, given.conditions, where=given.where, layers=layers, format=given.format
            )
    return f"{count} {'directions' if directions else 'vectors'} of {width} values in {given.out}"


def export(
    run: Run, out: str | Path, conditions: Sequence[str] = (), *, where: str | None = None,
    layers: Sequence[int] | None = None, format: str | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Write the pooled records that match as [N, D] float32 with their addresses, items, seeds and axes; returns (N, D).

    conditions: `key=value` or `key=[v, w]`, over record columns (layer, site, pool, participant, ...) and axes; pool is
    mean and site residual where they are not named. `where`: an expression, as aggregates have it. `format`: parquet
    (a row per vector) or npz (an array `vectors` and one per column); None: by the ending of `out`. ConfigError for
    another one, an unknown key, or where nothing matches.
    """
    path = Path(out)
    kind = path.suffix[1:] if format is None else format
    if kind not in FORMATS:
        wrong = (
            f"cannot export to {str(out)!r}; possible endings: "
            if format is None
            else f"no format {format!r}; there are: "
        )
        raise ConfigError(wrong + ", ".join(f".{f}" if format is None else f for f in FORMATS))
    given = dict(_condition(text) for text in conditions)
    if layers is not None:
        given["layer"] = list(layers)
    known = (*FILTERS, "item", "trunk_seed", "branch_seed", *run.axes)
    for key in given:
        if key not in known:
            raise ConfigError(f"no column {key!r} to choose by{did_you_mean(key, known)}")
    chosen = None
    for key in (k for k in given if k in FILTERS and k not in ("site", "pool")):
        part = pc.field(key).isin(given[key])
        chosen = part if chosen is None else chosen & part
    site, pool = (given.get(key, [default])[0] for key, default in (("site", "residual"), ("pool", "mean")))
    try:
        vectors, rows = run.vectors(site=site, pool=pool, where=chosen)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None
    keep = np.ones(rows.num_rows, bool)
    for key in (k for k in given if k not in FILTERS):
        keep &= np.isin(np.array(rows[key].to_pylist(), object), np.array(given[key], object))
    if where is not None:
        keep &= _meets(run, rows, where)
    vectors, rows = vectors[keep], rows.filter(pa.array(keep))
    if not len(vectors):
        asked = ", ".join([*conditions, *([where] if where else []), *([f"layers {layers}"] if layers else [])])
        raise ConfigError(f"nothing matches {asked or 'a mean of residual'}; see records of this run")
    _write(path, kind, vectors, rows.drop_columns(["file", "key", "row_start", "row_end", "phases", "token_span"]))
    return vectors.shape


def _meets(run: Run, rows: pa.Table, where: str) -> np.ndarray:
    try:
        expression = parse(where)
        return evaluated(columns(run, rows, expression.names), expression).astype(bool)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--where: {error.args[0]}") from None


def export_directions(
    run: Run, out: str | Path, *, name: str = "directions", layers: Sequence[int] | None = None, hint: str | None = None
) -> tuple[int, int]:
    """Write directions of an aggregate as a GGUF control vector for llama.cpp; returns (how many, width).

    `hint`: llama.cpp's name of the architecture; None: the model's own. ConfigError where there are none, or several
    for one layer (aggregate with `participant:` or `tokens:` first).
    """

    try:
        found = run.directions(name)
    except KeyError as error:
        raise ConfigError(error.args[0]) from None
    plain = {int(key.split(".")[1]): v for key, v in found.items() if key.startswith("residual.") and "@" not in key}
    at = sorted(plain) if layers is None else list(layers)
    missing = [layer for layer in at if layer not in plain]
    if missing or not at:
        raise ConfigError(
            f"no residual.{missing[0] if missing else 'N'} in {name!r}; it has: {', '.join(found) or 'none'}"
        )
    spec = SteeringSpec({layer: plain[layer] for layer in at}, tuple(at))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "directions.gguf"
            export_control_vector(spec, made, model_hint=hint or _architecture(run))
            with whole_file(out) as file:
                file.write(made.read_bytes())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return len(at), len(plain[at[0]])


def _architecture(run: Run) -> str | None:
    """The `model_type` of the run's only model."""
    types = {
        model_sizes.model_type(run.config, p.model) for p in run.config.scenario.participants.values() if p.is_local
    }
    return types.pop() if len(types) == 1 else None


def _condition(text: str) -> tuple[str, list[Any]]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"cannot read {text!r}; write key=value or key=[v, w]")
    parsed = yaml.safe_load(value)
    return key, parsed if isinstance(parsed, list) else [parsed]


def _write(path: Path, kind: str, vectors: np.ndarray, rows: pa.Table) -> None:
    with whole_file(path) as file:
        _fill(file, kind, vectors, rows)


def _fill(file: IO[bytes], kind: str, vectors: np.ndarray, rows: pa.Table) -> None:
    if kind == "parquet":
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        pq.write_table(rows.append_column("vector", column), file)
    else:
        flat = {n: rows[n].to_pandas().to_numpy() for n in rows.column_names if n not in ("tokens", "positions")}
        plain: dict[str, Any] = {n: v.astype(str) if v.dtype == object else v for n, v in flat.items()}
        np.savez(file, vectors=vectors, **plain)
