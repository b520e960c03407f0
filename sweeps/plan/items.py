"""The scenario's rows: read from YAML, JSONL or Parquet, or given in the configuration itself."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from ..config.shipped import conf_dir
from ..errors import ConfigError
from .replay import rows_of_run

KINDS = (".yaml", ".yml", ".jsonl", ".ndjson", ".parquet")


def find(source: str) -> Path:
    """The file of an items source: as given, from the working directory, else among the shipped items."""

    for path in (Path(source).expanduser(), conf_dir() / "items" / source):
        if path.exists():
            if path.is_file() and path.suffix in KINDS:
                return path
            raise ConfigError(f"scenario.items: cannot read {str(path)!r}; possible: a {', '.join(KINDS)} file")
    shipped = sorted(p.name for p in (conf_dir() / "items").glob("*"))
    raise ConfigError(f"scenario.items: no file {source!r} here; shipped: {', '.join(shipped)}; or give a path")


def check(source: Any, texts: Iterable[tuple[str, str]] = ()) -> None:
    """ConfigError unless there are rows, each can be read, and each has the columns of `texts` (where, text)."""
    used = [(where, text) for where, text in texts if "{" in text or "}" in text]
    empty = True
    for row in read(source):
        empty = False
        for where, text in used:
            fill(text, row, where)
    if empty:
        raise ConfigError(f"scenario.items: {source!r} holds no rows; a sweep needs at least one item")


def read(source: Any) -> Iterator[dict[str, Any]]:
    """The rows, streamed, each with an `id` (its own, or its number). ConfigError names both rows that share one."""
    seen: dict[int, int] = {}
    for number, row in enumerate(_rows(source)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"scenario.items: row {number} of {_name(source)} is no mapping: {row!r}")
        row = {str(key): plain(value, f"scenario.items, row {number}, {key}") for key, value in row.items()}
        row = {
            "id": str(row["id"]) if row.get("id") is not None else str(number),
            **{k: v for k, v in row.items() if k != "id"},
        }
        first = seen.setdefault(hash(row["id"]), number)
        if first != number:
            raise ConfigError(
                f"scenario.items: rows {first} and {number} of {_name(source)} share the id {row['id']!r}"
            )
        yield row


def _name(source: Any) -> str:
    return repr(source) if isinstance(source, str) else "the configuration"


def _rows(source: Any) -> Iterator[Any]:
    if not isinstance(source, str):
        yield from source
        return
    if source.startswith("run:"):
        yield from rows_of_run(source.removeprefix("run:"))
        return
    path = find(source)
    read_file = _FILES.get(path.suffix, _lines)
    try:
        yield from read_file(path)
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # pyarrow's and decoding's are ValueErrors
        raise ConfigError(f"scenario.items: cannot read {str(path)!r} ({' '.join(str(error).split())})") from None


def _parquet(path: Path) -> Iterator[Any]:

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(4096):
            yield from batch.to_pylist()


def _yaml(path: Path) -> Iterator[Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    if not isinstance(loaded, list):
        raise ConfigError(f"scenario.items: {str(path)!r} must hold a list of rows")
    yield from loaded


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, path, number)


_FILES = {".parquet": _parquet, ".yaml": _yaml, ".yml": _yaml}


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"scenario.items: line {number} of {str(path)!r} is no JSON ({error})") from None


def plain(value: Any, where: str) -> Any:
    """JSON-able values only: what enters ids must be the same tomorrow and elsewhere."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}; items hold no NaN or infinity")
    if isinstance(value, str) and (broken := re.search("[\ud800-\udfff]", value)):
        raise ConfigError(
            f"{where} holds {broken[0]!a}, half of a character, which no file can keep; write the whole one"
        )
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ConfigError(f"{where} is a {type(value).__name__}; items hold texts, numbers, lists and mappings")


def fill(text: str | None, row: Mapping[str, Any], where: str) -> str | None:
    """`text` with every `{column}` replaced by the row's value. ConfigError names the columns there are.

    Only plain columns: `{a.b}` or `{a[0]}` reach into nothing. `{{` and `}}` are braces.
    """

    def value(match: re.Match) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None or match[1] not in row:
            raise ConfigError(f"{where}: no column {match[0]} in item {row.get('id')!r}; it has: {', '.join(row)}")
        if row[match[1]] is None:
            raise ConfigError(
                f"{where}: {match[0]} is null in item {row.get('id')!r}; give it a value, an empty text for nothing, "
                "or leave the item out"
            )
        return str(row[match[1]])

    return None if text is None else re.sub(r"\{\{|\}\}|\{([^{}]*)\}|[{}]", value, text)
