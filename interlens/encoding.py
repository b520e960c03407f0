"""Messages, transcripts and whatever hangs on a conversation as JSON, and back.

Values are plain JSON or tagged: {"$": kind, ...}. Objects of this package are written as the names of their classes and
their fields. Everything else, functions included, is written as an import path, and a reader must allow that path:
nothing in a file is executed, and nothing is imported that the caller has not named.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

from .message import Fed, Message

SCHEMA_VERSION = 1

_CLASSES = {
    "message": ("Message", "Fed"),
    "transcript": ("Transcript",),
    "reasoning": ("Markers",),
    "interp.select": ("Select", "Layout"),
    "interp.steering": ("SteeringSpec",),
    "interp.patching": ("Patch",),
    "interp.routing": ("RouterSteeringSpec",),
    "templating": ("ContextItem", "DatasetField"),
    "visibility": ("ReasoningVisibility",),
    "policies.context": ("ErrorPolicy", "DropOldestPolicy", "SlidingWindowPolicy", "SummarizePolicy"),
    "policies.communication": ("RoundRobinPolicy", "DirectPipingPolicy", "MessagingPolicy"),
    "policies.stopping": (
        "TurnStopCondition", "TokenStopCondition", "ElapsedTimeStopCondition", "StopStringCondition",
        "AnyStopCondition", "TokenBudget",
    ),
    "participants.model": ("ModelParticipant",),
    "participants.weights": ("Weights",),
    "participants.scripted": ("ScriptedParticipant", "HumanParticipant"),
    "participants.api": ("APIParticipant", "Usage", "Prices"),
    "tools": ("Tool",),
}  # fmt: skip
_HOME = {name: module for module, names in _CLASSES.items() for name in names}


# -- files ------------------------------------------------------------------------------------------------------------


def save_transcript(transcript: Sequence[Message], path: Path) -> None:
    """See `Transcript.save`."""
    body = {"schema_version": SCHEMA_VERSION, "transcript": Writer().encode(transcript, "transcript")}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump(body))


def load_transcript(path: Path) -> Any:
    """See `Transcript.load`."""
    return Reader({}, frozenset()).decode(read(path)["transcript"])


def dump(body: Any) -> bytes:
    """`body` as the bytes of a JSON file."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False, indent=1).encode()


def read(path: Path) -> dict[str, Any]:
    """The body of a JSON file that `dump` made; ValueError for one of another schema version."""
    body = json.loads(path.read_bytes())
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {version!r}; this version reads {SCHEMA_VERSION}: load it with the version of "
            "interlens that wrote it"
        )
    return body


def write_atomically(path: Path, data: bytes) -> None:
    """`path` holds its old content or `data`, whatever happens; its mode is what the umask leaves."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# -- values -----------------------------------------------------------------------------------------------------------
_NEW = object().__reduce_ex__(2)[0]
"""How plain objects are made again: empty, before they get their attributes."""


def _fields(value: Any, where: str) -> dict[str, Any]:
    """What makes up an object: the fields of a dataclass, else what it pickles. ValueError if it is made of more."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    try:
        make, given, state, *items = (*value.__reduce_ex__(2), None)[:5]
        whole = make is _NEW and given == (type(value),) and not any(items)  # else it comes back empty
    except TypeError:
        whole = False
    if not whole:
        raise ValueError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which does not come back from its "
            "attributes alone; use numbers, texts, lists, dicts, tensors, or functions at the top level of a module"
        )
    state = value.__getstate__()
    return dict(state or {}) if isinstance(state, dict) or state is None else {"$state": state}


class Writer:
    """Encodes values; `tensors` holds those that it met, by the names that the JSON has for them."""

    def __init__(self):
        self.tensors: dict[str, Any] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def encode(self, value: Any, where: str) -> Any:
        """`value` as JSON. Raises ValueError, saying where, for what cannot be written."""
        if value is None or isinstance(value, (bool, int)) or type(value) is str:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if type(value) is list:
            return [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) in (tuple, set, frozenset):
            items = sorted(value, key=repr) if not isinstance(value, tuple) else value
            return {"$": type(value).__name__, "items": [self.encode(v, f"{where}[{i}]") for i, v in enumerate(items)]}
        if type(value) in (dict, MappingProxyType):
            return self._mapping(value, where)
        if type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
            name = f"t{len(self.tensors)}"
            self.tensors[name] = value.detach().cpu().clone().contiguous()
            return {"$": "tensor", "name": name}
        if isinstance(value, (FunctionType, type)):
            return {"$": "import", "path": self._path(value, where)}
        return self._object(value, where)

    def _mapping(self, value: Mapping, where: str) -> Any:
        pairs = [(k, self.encode(v, f"{where}[{k!r}]")) for k, v in value.items()]
        if type(value) is dict and all(type(k) is str for k in value) and "$" not in value:
            return dict(pairs)
        kind = "dict" if type(value) is dict else "frozen"
        return {"$": kind, "items": [[self.encode(k, where), v] for k, v in pairs]}

    def _object(self, value: Any, where: str) -> Any:
        if id(value) in self._seen:  # shared objects stay shared: two participants of one model
            return {"$": "ref", "id": self._seen[id(value)]}
        self._seen[id(value)] = number = len(self._seen)
        self._kept.append(value)
        cls = type(value)
        known = cls.__module__ == f"{__package__}.{_HOME.get(cls.__name__)}"
        tag = {"$": cls.__name__} if known else {"$": "custom", "path": self._path(cls, where)}
        if cls.__name__ == "Transcript" and known:
            return {**tag, "id": number, "fields": {"messages": self.encode(list(value), where)}}
        if cls.__name__ == "ReasoningVisibility" and known:
            return {**tag, "id": number, "fields": {"value": str(value)}}
        fields = _fields(value, where)
        if isinstance(value, Message):
            fields.pop("records")
        if isinstance(value, Fed):
            fields["phases"] = _runs(value.phases)
        return {**tag, "id": number, "fields": {k: self.encode(v, f"{where}.{k}") for k, v in fields.items()}}

    def _path(self, value: Any, where: str) -> str:
        path = f"{value.__module__}:{value.__qualname__}"
        if "<" in path or value.__module__ == "__main__":
            raise ValueError(
                f"{where} is {path}, which cannot be imported again; define it at the top level of a module"
            )
        return path


class Reader:
    """Decodes values. tensors: those that the JSON names. allow: import paths that may be imported."""

    def __init__(self, tensors: Mapping[str, Any], allow: frozenset[str]):
        self.tensors, self.allow = tensors, allow
        self._made: dict[int, Any] = {}

    def decode(self, value: Any) -> Any:
        """The value that was encoded. Raises ValueError for an import path that is not allowed."""
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "$" not in value:
            return {k: self.decode(v) for k, v in value.items()}
        kind = value["$"]
        if kind in ("tuple", "set", "frozenset"):
            made = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return made(self.decode(v) for v in value["items"])
        if kind in ("dict", "frozen"):
            pairs = {self.decode(k): self.decode(v) for k, v in value["items"]}
            return pairs if kind == "dict" else MappingProxyType(pairs)
        if kind == "float":
            return float(value["value"])
        if kind == "tensor":
            return self.tensors[value["name"]]
        if kind == "ref":
            return self._made[value["id"]]
        if kind == "import":
            return self._imported(value["path"])
        return self._object(kind, value)

    def _object(self, kind: str, value: dict) -> Any:
        if kind == "custom":
            cls = self._imported(value["path"])
            if not isinstance(cls, type):
                raise ValueError(f"{value['path']} is not a class, so the folder cannot hold one of its objects")
        elif kind in _HOME:
            cls = getattr(importlib.import_module(f".{_HOME[kind]}", __package__), kind)
        else:
            raise ValueError(f"the folder holds an object of unknown kind {kind!r}; known: {', '.join(sorted(_HOME))}")
        fields = value["fields"]
        if kind == "ReasoningVisibility":
            made = cls(fields["value"])
        elif kind == "Transcript":
            made = cls(self.decode(fields["messages"]))
        else:
            made = cls.__new__(cls)
            self._made[value["id"]] = made
            self._fill(made, {k: self.decode(v) for k, v in fields.items()})
        self._made[value["id"]] = made
        return made

    def _fill(self, made: Any, fields: dict[str, Any]) -> None:
        if isinstance(made, Fed):
            fields["phases"] = tuple(phase for phase, n in fields["phases"] for _ in range(n))
        if isinstance(made, Message):
            fields["records"] = ()
        slots = fields.pop("$state", None)
        if hasattr(made, "__setstate__"):
            made.__setstate__(fields if slots is None else slots)
        else:
            for part in slots or ():
                fields |= part or {}
            for name, field in fields.items():
                object.__setattr__(made, name, field)

    def _imported(self, path: str) -> Any:
        if path not in self.allow:
            raise ValueError(f"the conversation uses {path}; if you trust it, load with allow=[{path!r}]")
        module, _, name = path.partition(":")
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found


def _runs(phases: tuple[str, ...]) -> list:
    """(phase, how many) of every run, as lists."""
    runs: list[list] = []
    for phase in phases:
        if runs and runs[-1][0] == phase:
            runs[-1][1] += 1
        else:
            runs.append([phase, 1])
    return runs
