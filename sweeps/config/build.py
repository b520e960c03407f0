"""From plain values to frozen dataclasses, strictly: an unknown key or a wrong type is a ConfigError that names it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, did_you_mean


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name.rstrip("_"): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def build(cls: Any, data: Any, where: str = "") -> Any:
    """A dataclass from plain values, strictly: unknown keys and wrong types are a ConfigError that says where."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping, got {data!r}; keys: {_names(cls)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name.rstrip("_"): f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        at = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise ConfigError(f"unknown key {at!r}{did_you_mean(key, fields)}")
        values[fields[key].name] = _convert(value, hints[fields[key].name], at)
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{where + '.' if where else ''}{name} is missing; give it a value")
    return cls(**values)


def _names(cls: Any) -> str:
    return ", ".join(f.name.rstrip("_") for f in dataclasses.fields(cls))


def _convert(value: Any, hint: Any, at: str) -> Any:
    """`value` as `hint` asks: int -> float widens, lists become tuples; everything else must already fit."""
    if hint is Any:
        return _frozen(value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, args, hint, at)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(typing.cast(type, hint), value, at)
    if origin is tuple and isinstance(value, (str, int)) and not isinstance(value, bool):
        value = (value,)  # one is a list of one
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(item, args[0], f"{at}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {str(key): _convert(item, args[1], f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{at} must be a finite number, got {value}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ConfigError(f"{at} must be {_describe(hint)}, got {value!r}")


def _convert_union(value: Any, args: tuple, hint: Any, at: str) -> Any:
    if value is None and type(None) in args:
        return None
    for option in sorted(args, key=lambda a: a is str or a is float):
        try:
            return _convert(value, option, at)
        except ConfigError:
            continue
    raise ConfigError(f"{at} must be {_describe(hint)}, got {value!r}")


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(a) for a in args)
    if origin is tuple:
        return f"a list of {_describe(args[0]).removeprefix('a ')}s"
    if hint is type(None):
        return "null"
    if origin is not None or dataclasses.is_dataclass(hint):
        return "a mapping"
    plain = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
