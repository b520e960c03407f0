"""`run.json`: versions, models and settings of a run, and where they differ from what is asked now."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from ..config.schema import SweepConfig
from ..errors import RunRefused
from . import files, names, schemas
from .store import Where, open_store

MATTERS = ("torch", "transformers")
"""Packages whose change of version can change what a cell says."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def differing(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value in a, value in b) wherever two plain values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            yield from differing(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differing(x, y, f"{path}.{i}" if path else str(i))
    elif a != b:
        yield path, a, b


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in (*MATTERS, "interlens-sweeps", "ray", "pyarrow", "safetensors", "hydra-core", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def changed_versions(root: Where) -> list[str]:
    """Packages that matter whose version (major.minor) is not the one the run began with, as `name: old -> new`."""
    then, now = files.read_json(root, names.RUN)["versions"], versions()
    return [f"{p}: {then.get(p)} -> {now[p]}" for p in MATTERS if _minor(then.get(p)) != _minor(now[p])]


def _minor(version: str | None) -> list[str]:
    return str(version).split("+")[0].split(".")[:2]


def record_models(root: Where, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep what is known of each loaded model (`weights`, `template`, ... hashes) in `run.json`.

    Raises RunRefused where a model of that name was recorded with other hashes: its text could not continue the run's.
    """
    about = files.read_json(root, names.RUN)
    known = about["models"]
    for name, facts in models.items():
        for path, old, given in differing(known.get(name, dict(facts)), dict(facts)):
            raise RunRefused(
                f"model {name!r} is not the one this run began with ({path}: {_short(old)} -> {_short(given)}); "
                "restore it, or name another run.dir"
            )
    if any(name not in known for name in models):
        about["models"] = {**known, **{name: dict(facts) for name, facts in models.items()}}
        open_store(root).replace(names.RUN, files.dump_json(about))


def about(config: SweepConfig) -> dict[str, Any]:
    """What `run.json` says at the beginning."""
    return {
        "schema_version": schemas.SCHEMA_VERSION,
        "experiment": config.experiment,
        "date": date.today().isoformat(),  # that prompts of templates with a date show, on resume and capture too
        "versions": versions(),
        "git": _git(),
        "models": {},
        "site_semantics": "residual at layer i is the output of decoder layer i, before any final norm; layers from 0",
    }


def _git() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
