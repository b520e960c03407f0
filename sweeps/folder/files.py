"""JSON and YAML in a run folder: read with bounds, written as plain values."""

from __future__ import annotations

import json
from typing import Any

from ..errors import Damaged
from .store import Store, Where, open_store

MOST_BYTES = 1 << 30
"""Of a JSON or YAML file: no real one comes near."""
MOST_NODES = 10_000_000
"""Of a YAML file, each alias counted as often as it stands there."""


def parsed(data: bytes | str) -> Any:
    """JSON. ValueError: it is none, or nested too deeply to be ours."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(at: Where, name: str) -> Any:
    """The mapping in a file of a run folder. FileNotFoundError: it is missing. Damaged: it holds no JSON mapping."""
    store = open_store(at)
    try:
        found = parsed(_bounded(store, name))
    except ValueError as error:
        raise damaged(store, name, error) from None
    return _mapping(store, name, found)


def read_yaml(at: Where, name: str) -> Any:
    """As `read_json`, of YAML with plain values only."""
    import yaml

    store = open_store(at)
    try:
        found = yaml.load(_bounded(store, name), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        _count(found, {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise damaged(store, name, error) from None
    return _mapping(store, name, found)


def _bounded(store: Store, name: str) -> bytes:
    if (size := store.size(name)) > MOST_BYTES:
        raise Damaged(f"{name} of {str(store)!r} has {size} bytes; no run writes more than {MOST_BYTES} there")
    return store.read(name)


def _count(value: Any, known: dict[int, int]) -> int:
    """How many values there are, aliases counted again. ValueError: too many, or one that holds itself."""
    if not isinstance(value, (dict, list)):
        return 1
    if (count := known.get(id(value))) is None:
        known[id(value)] = 0
        inner = value if isinstance(value, list) else [part for pair in value.items() for part in pair]
        count = known[id(value)] = 1 + sum(_count(part, known) for part in inner)
    if not count or count > MOST_NODES:
        raise ValueError("its aliases make more of it than any run writes")
    return count


def _mapping(store: Store, name: str, found: Any) -> Any:
    if not isinstance(found, dict):
        raise damaged(store, name, TypeError("it holds no mapping"))
    return found


def damaged(at: Where, name: str, error: Exception) -> Damaged:
    """What to raise for a file of a run folder which holds something else than was written there."""
    why = " ".join(str(error).split())
    return Damaged(f"{name} of {str(at)!r} cannot be read ({why}); restore it from a copy of the run")


def dump_yaml(value: Any) -> bytes:
    """YAML bytes of plain values, keys in the order given."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120).encode()


def dump_json(value: Any) -> bytes:
    """JSON bytes, keys in the order given, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
