"""Opening a run folder: begin it, continue it, or refuse it with the difference.

Order of a beginning: inputs, run.json, config-0.yaml, and the plan last; a folder without a plan has run nothing and is
begun again. Ids in the plan decide whether a configuration belongs to a folder; how it is run (cluster, run, report,
aggregates) never does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from . import inputs, items, plan, store
from .config import ConfigError, SweepConfig
from .identity import digest
from .tables import SCHEMA_VERSION

FREE = ("cluster", "run", "report", "aggregate", "experiment", "plan")
"""Sections that no cell's id depends on."""
_LIBRARIES = ("torch", "transformers", "peft", "ray", "pyarrow", "safetensors", "numpy", "interlens-sweeps")


class Refused(ConfigError):
    """This folder holds something else; nothing was changed."""


def open_run(config: SweepConfig, root: Path) -> str:
    """Make `root` a run of this configuration: "begun" or "continued". Refused names the difference."""
    mark = fingerprint(config)
    if not has_plan(root):
        _refuse_foreign(root)
        inputs.copy_into(config, root)
        _write_once(root, "run.json", store.dump_json(_run_facts(config, mark)))
        _write_once(root, "config-0.yaml", _as_yaml(config))
        plan.write_plan(config, str(root))
        return "begun"
    facts = store.read_json(root, "run.json")
    if facts["schema_version"] != SCHEMA_VERSION:
        raise Refused(
            f"{root} was written with schema version {facts['schema_version']}, this is {SCHEMA_VERSION}; "
            "continue it with the version of sweeps that began it, or give another run.dir"
        )
    if mark not in {facts["fingerprint"], *_fingerprints(root)}:
        raise Refused(_difference(config, root))
    return "continued"


def has_plan(root: Path) -> bool:
    """True if the folder's plan is complete, so that units may have run."""
    return (root / "plan").is_dir() and any((root / "plan").glob("part-*.parquet"))


def fingerprint(config: SweepConfig) -> str:
    """Hash of everything that decides which cells there are and what they hold."""
    plain = {key: value for key, value in config.to_dict().items() if key not in FREE}
    source = config.scenario.items
    if isinstance(source, str) and source:
        plain["scenario"] = {**plain["scenario"], "items": hashlib.sha256(items.find(source).read_bytes()).hexdigest()}
    return digest(plain)


def remember_models(root: Path, models: Mapping[str, Any]) -> None:
    """Keep the hashes of weights and templates of the first replica; Refused where a later one has others."""
    for name, found in models.items():
        try:
            store.write_new(root, f"models/{_file_name(name)}.json", store.dump_json({"model": name, **found}))
        except FileExistsError:
            known = store.read_json(root, f"models/{_file_name(name)}.json")
            changed = [key for key, value in found.items() if known.get(key) != value]
            if changed:
                raise Refused(
                    f"model {name!r} is not the one this run began with: {', '.join(changed)} differ "
                    f"({', '.join(f'{known.get(k)} then, {found[k]} now' for k in changed)}); "
                    "restore it, or give another run.dir"
                ) from None


@contextlib.contextmanager
def with_folder(root: Path) -> Iterator[None]:
    """Create the folder for the block; if the block is refused and the folder holds nothing but a lease, remove it."""
    new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except ConfigError:
        if new and not has_plan(root):
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            root.rmdir()
        raise


def _refuse_foreign(root: Path) -> None:
    known = {"run.json", "config-0.yaml", "inputs", "plan", "_lease", "_tmp", "events.jsonl", "progress.json"}
    foreign = sorted(path.name for path in root.iterdir() if path.name not in known)
    if foreign:
        raise Refused(f"{root} is no run folder: it holds {', '.join(foreign[:5])}; give another run.dir")


def _write_once(root: Path, name: str, data: bytes) -> None:
    if not (root / name).exists():
        store.write_new(root, name, data)


def _run_facts(config: SweepConfig, mark: str) -> dict[str, Any]:
    versions = {}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {
        "schema_version": SCHEMA_VERSION, "experiment": config.experiment, "fingerprint": mark,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "python": platform.python_version(),
        "versions": versions, "git": _git(),
        "sites": "residual is the output of a decoder layer, before any final norm; layers are 0-based",
    }  # fmt: skip


def _git() -> str | None:
    """The commit of this package's source, with a + if it has changes; None outside a checkout."""
    where = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=where, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "") if commit.returncode == 0 else None


def _as_yaml(config: SweepConfig) -> bytes:
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True).encode()


def _configs(root: Path) -> list[Path]:
    return sorted(root.glob("config-*.yaml"), key=lambda path: int(path.stem.split("-")[1]))


def _fingerprints(root: Path) -> list[str]:
    marks = sorted((root / "plan").glob("part-*.json"))
    return [store.read_json(root, f"plan/{path.name}")["fingerprint"] for path in marks]


def _difference(config: SweepConfig, root: Path) -> str:
    """Where a configuration differs from the one in the folder, in one line."""
    old = yaml.safe_load(_configs(root)[-1].read_bytes())
    paths = [path for path in _changed(old, config.to_dict()) if path.split(".")[0] not in FREE]
    shown = "; ".join(f"{path}: {_at(old, path)!r} there, {_at(config.to_dict(), path)!r} now" for path in paths[:4])
    more = f"; and {len(paths) - 4} more" if len(paths) > 4 else ""
    return (
        f"{root} is a run of another configuration ({shown or 'the items file has changed'}{more}); "
        "give another run.dir, or the configuration it was begun with"
    )


def _changed(old: Any, new: Any, prefix: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys([*old, *new])
        return [p for key in keys for p in _changed(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)]
    return [] if old == new else [prefix]


def _at(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _file_name(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
