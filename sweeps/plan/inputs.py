"""What a sweep reads besides items: directions and adapters, known by content. Directions are copied into the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..config.digest import digest
from ..config.grid import applied, full_path
from ..config.schema import ParticipantConfig, SweepConfig
from ..errors import ConfigError
from ..folder import files, names
from ..folder.commits import list_commits
from ..folder.copies import content_hash
from ..folder.store import Store, open_store, within
from . import model_sites, patches
from .directions import _read, parse_direction


def points(
    config: SweepConfig, of: tuple[str, ...] = ("intervention", "scenario.participants", "models")
) -> Iterator[SweepConfig]:
    """The base, and the configuration under every value of the axes whose path begins with one of `of`."""
    yield config
    for axis in config.grid:
        if full_path(axis.path).startswith(of):
            for label in axis.labels:
                yield applied(config, {axis.path: label})


def used(config: SweepConfig, get: Callable[[SweepConfig], Iterable[str | None]]) -> list[str]:
    """What `get` finds at all `points`, without repeats."""
    return [text for text in dict.fromkeys(text for point in points(config) for text in get(point)) if text]


def directions(config: SweepConfig) -> list[str]:
    """Every direction that some condition uses, as written."""
    return used(config, lambda c: [e.direction for e in c.intervention])


def adapters(config: SweepConfig) -> list[str]:
    """The folder of every adapter that some condition uses."""
    return used(config, lambda c: [adapter_source(c, p) for p in c.scenario.participants.values()])


def adapter_source(config: SweepConfig, participant: ParticipantConfig) -> str | None:
    """Folder of a participant's adapter: an entry of its model's `adapters`, else the name itself."""
    if participant.adapter is None:
        return None
    entry = config.models.get(participant.model or "")
    return (entry.adapters if entry else {}).get(participant.adapter, participant.adapter)


def hashes(config: SweepConfig) -> dict[str, str]:
    """Source as written -> hash of its content: of a direction's tensor, of an adapter folder's files.

    A direction whose source is gone keeps the hash under which the run folder has a copy. `random:<seed>` is its
    own content and has no entry.
    """
    found = {}
    for text in directions(config):
        source = parse_direction(text)
        if source.kind != "random":
            try:
                found[text] = content_hash(_read(source, text))
            except ConfigError:
                found[text] = _kept(config, text)
                if not found[text]:
                    raise
    for name, value in patches.values(config):
        found[name] = _digest(value)
    for path in patches.runs(config):
        found[f"run:{path}"] = _run_hash(config, path)
    for text in adapters(config):
        if (folder := Path(text).expanduser()).is_dir():
            found[text] = _folder_hash(folder)
    return found


def check_widths(configs: Iterable[SweepConfig]) -> None:
    """ConfigError for a direction that exists but has another width than the site it is put into."""
    checked = set()
    for config in configs:
        for edit in config.intervention:
            if not edit.direction:
                continue
            source = parse_direction(edit.direction)
            models = {config.scenario.participants[name].model for name in edit.participants}
            sizes = {model_sites.width(config, model, edit.site, edit.layers[0]) for model in models}
            widths = {size for size in sizes if size is not None}
            if source.kind == "random" or not widths or (edit.direction, *widths) in checked:
                continue
            checked.add((edit.direction, *widths))
            if not source.is_there():
                continue
            found = _read(source, edit.direction or "").numel()
            if widths != {found}:
                given = " and ".join(map(str, sorted(widths)))
                raise ConfigError(f"direction {edit.direction!r} has {found} values, {edit.site} there has {given}")


def _kept(config: SweepConfig, text: str) -> str:
    """The hash under which the run folder has its own copy of a source, or nothing."""
    store = open_store(config.run.dir)
    digest = _known(store, text)
    return digest if digest and store.exists(names.direction(digest)) else ""


def _known(store: Store, text: str) -> str:
    """The hash of a source in the folder's latest settings that name it, or nothing."""
    parts = within(store.entries(), "config-", ".yaml")
    known = [files.read_yaml(store, names.config(part)).get("inputs", {}) for part in parts]
    return next((inputs[text] for inputs in reversed(known) if text in inputs), "")


def _folder_hash(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(p for p in folder.iterdir() if p.name.startswith("adapter_") and p.is_file()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _digest(value: Any) -> str:

    return digest(value)


def _run_hash(config: SweepConfig, path: str) -> str:
    """Of what patches read of another run: its conversations. Where that run is gone, of the run folder's copy."""
    source = open_store(path)
    if source.exists(names.RUN):
        commits = [(c.unit, f["path"], f["sha256"]) for c in list_commits(source) for f in c.files]
        return _digest(["run", *(list(c) for c in commits if c[1].startswith("messages/"))])
    store = open_store(config.run.dir)
    digest = _known(store, f"run:{path}")
    if not digest or not store.exists(f"{names.other_run(digest)}/{names.RUN}"):
        raise ConfigError(f"intervention.from: no run folder {path!r}; run that sweep first, or name another")
    return digest


def _copy_run(source: Store, target: Store) -> None:
    """What patches need of another run: plan, configurations, inputs, commits and messages, `run.json` last."""
    wanted = [names.config(part) for part in within(source.entries(), "config-", ".yaml")]
    for folder in (names.PLAN, names.COMMITS, names.INPUTS, "messages", "failures"):
        wanted += source.walk(folder)
    for name in (*wanted, names.RUN):
        if not target.exists(name):
            target.write_new(name, source.read(name))


def copy_into(config: SweepConfig, store: Store) -> None:
    """Copy every direction to `inputs/<hash>.safetensors` of the run folder, unless it is there; so other runs that
    patches read from, to `inputs/<hash>/`."""

    for path in patches.runs(config):
        target = store.sub(names.other_run(config.inputs[f"run:{path}"]))
        if not target.exists(names.RUN):
            _copy_run(open_store(path), target)
    for text in directions(config):
        if text not in config.inputs:
            continue
        name = names.direction(config.inputs[text])
        if not store.exists(name):
            tensor = _read(parse_direction(text), text).float().contiguous()
            store.write_new(name, save({"direction": tensor}, metadata={"source": text}))
