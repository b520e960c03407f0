"""Hashes of values: blake2b of canonical JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, numbers by value (6 == 6.0), no NaN."""
    plain = _canonical(value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """20 hex digits of blake2b over canonical JSON."""
    return hashlib.blake2b(canonical(value), digest_size=10).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def identity(value: Any) -> Any:
    """The plain values of a configuration object that enter ids: all of its fields, but neutral later ones."""
    if dataclasses.is_dataclass(value):
        return {
            f.name.rstrip("_"): identity(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.metadata.get("identity", True)
            and not (f.metadata.get("later") and getattr(value, f.name) == f.default)
        }
    if isinstance(value, Mapping):
        return {str(key): identity(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [identity(item) for item in value]
    return value


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
