"""What a sweep reads besides items: directions and adapters, known by content. Directions are copied into the run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import anatomy, donors, store
from .config import ConfigError, ParticipantConfig, SweepConfig
from .grid import applied, full_path
from .places import Remote, place

if TYPE_CHECKING:
    from torch import Tensor

DIRECTIONS = (
    "possible: run:<run folder>:<site>:<layer>, file:<safetensors file>:<layer>, random:<seed>, or "
    "random:<seed>:<one of the first two>, orthogonal:<seed>:<one of the first two>"
)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A direction's source, taken apart. kind "random" has no file; its tensor follows from the seed and the width.

    `instead`: a drawn direction of equal norm in place of the file's, "random" or "orthogonal" to it.
    """

    kind: str
    path: str = ""
    site: str = "residual"
    layer: int = 0
    seed: int = 0
    instead: str = ""

    @property
    def file(self) -> Path | Remote:
        """The file that holds it: of a run, what its aggregate wrote."""
        path = _place(self.path)
        return path / "aggregates" / "directions.safetensors" if self.kind == "run" else path


def parse_direction(text: str, where: str = "direction") -> Direction:
    """The source that `text` names. ConfigError says what is possible."""
    if match := re.fullmatch(r"random:(\d+)", text):
        return Direction(kind="random", seed=int(match[1]))
    if match := re.fullmatch(r"(random|orthogonal):(\d+):((?:run|file):.+)", text):
        return replace(parse_direction(match[3], where), instead=match[1], seed=int(match[2]))
    if match := re.fullmatch(r"run:(.+):([\w.]+):(\d+)", text):
        return Direction(kind="run", path=match[1], site=match[2], layer=int(match[3]))
    if match := re.fullmatch(r"file:(.+):(\d+)", text):
        return Direction(kind="file", path=match[1], layer=int(match[2]))
    raise ConfigError(f"{where}: cannot read {text!r}; {DIRECTIONS}")


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
    for name, value in donors.values(config):
        found[name] = _digest(value)
    for path in donors.runs(config):
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
            sizes = {anatomy.width(config, model, edit.site, edit.layers[0]) for model in models}
            widths = {size for size in sizes if size is not None}
            if source.kind == "random" or not widths or (edit.direction, *widths) in checked:
                continue
            checked.add((edit.direction, *widths))
            if not source.file.is_file():
                continue
            found = _read(source, edit.direction or "").numel()
            if widths != {found}:
                given = " and ".join(map(str, sorted(widths)))
                raise ConfigError(f"direction {edit.direction!r} has {found} values, {edit.site} there has {given}")


def _kept(config: SweepConfig, text: str) -> str:
    """The hash under which the run folder has its own copy of a source, or nothing."""
    root = place(config.run.dir)
    known = [store.read_yaml(root, path.name).get("inputs", {}) for path in sorted(root.glob("config-*.yaml"))]
    digest = next((inputs[text] for inputs in reversed(known) if text in inputs), "")
    return digest if digest and (root / f"inputs/{digest}.safetensors").exists() else ""


def _folder_hash(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(p for p in folder.iterdir() if p.name.startswith("adapter_") and p.is_file()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def content_hash(tensor: Tensor) -> str:
    """20 hex digits over a tensor's shape and float32 values."""
    values = tensor.detach().float().contiguous().cpu().numpy()
    return hashlib.blake2b(repr(values.shape).encode() + values.tobytes(), digest_size=10).hexdigest()


def _digest(value: Any) -> str:
    from .identity import digest

    return digest(value)


def _run_hash(config: SweepConfig, path: str) -> str:
    """Of what patches read of another run: its conversations. Where that run is gone, of the run folder's copy."""
    source = _place(path)
    if (source / "run.json").is_file():
        commits = [(c.unit, f["path"], f["sha256"]) for c in store.list_commits(source) for f in c.files]
        return _digest(["run", *(list(c) for c in commits if c[1].startswith("messages/"))])
    root = place(config.run.dir)
    known = [store.read_yaml(root, p.name).get("inputs", {}) for p in sorted(root.glob("config-*.yaml"))]
    digest = next((inputs[f"run:{path}"] for inputs in reversed(known) if f"run:{path}" in inputs), "")
    if not digest or not (root / f"inputs/{digest}/run.json").exists():
        raise ConfigError(f"intervention.from: no run folder {path!r}; run that sweep first, or name another")
    return digest


def _copy_run(source: Path | Remote, root: Any, name: str) -> None:
    """What patches need of another run: plan, configurations, inputs, commits and messages, `run.json` last."""
    wanted = [*source.glob("config-*.yaml"), *(source / "plan").glob("*"), *(source / "_commits").glob("*.json")]
    wanted += [path for path in (source / "inputs").rglob("*") if path.is_file()]
    wanted += list((source / "messages").glob("*.parquet")) + list((source / "failures").glob("*.parquet"))
    for path in (*wanted, source / "run.json"):
        target = f"{name}/{str(path)[len(str(source)) + 1 :]}"
        if not (place(root) / target).exists():
            store.write_new(root, target, path.read_bytes())


def copy_into(config: SweepConfig, root: Any) -> None:
    """Copy every direction to `inputs/<hash>.safetensors` of the run folder, unless it is there; so other runs that
    patches read from, to `inputs/<hash>/`."""
    from safetensors.torch import save

    for path in donors.runs(config):
        name = f"inputs/{config.inputs[f'run:{path}']}"
        if not (place(root) / name / "run.json").exists():
            _copy_run(_place(path), root, name)
    for text in directions(config):
        if text not in config.inputs:
            continue
        digest = config.inputs[text]
        name = f"inputs/{digest}.safetensors"
        if not (place(root) / name).exists():
            tensor = _read(parse_direction(text), text).float().contiguous()
            store.write_new(root, name, save({"direction": tensor}, metadata={"source": text}))


def load_direction(config: SweepConfig, text: str, width: int, root: Any) -> Tensor:
    """The direction [width] float32 that `text` names, from the run folder's copy.

    ValueError for another width; Damaged where the copy is not what was copied.
    """
    import torch

    source = parse_direction(text)
    if source.kind == "random":
        draw = torch.randn(width, generator=torch.Generator().manual_seed(source.seed), dtype=torch.float64)
        return (draw / draw.norm()).float()
    tensor = copied_direction(root, config.inputs[text])
    if tensor.numel() != width:
        raise ValueError(f"direction {text!r} has {tensor.numel()} values, the model's site has {width}")
    return tensor


def copied_direction(root: Any, digest: str) -> Tensor:
    """A run folder's copy of a direction. Damaged: its content is not what its name says."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = f"inputs/{digest}.safetensors"
    try:
        tensor = load((place(root) / name).read_bytes())["direction"]
    except (SafetensorError, KeyError) as error:
        raise store.damaged(root, name, error) from None
    if content_hash(tensor) != digest:
        raise store.Damaged(f"{name} of {str(root)!r} was changed; restore it from a copy of the run")
    return tensor


def read_direction(text: str) -> Tensor:
    """The direction [width] that `run:` or `file:` names, from its source. ConfigError where it is not there."""
    return _read(parse_direction(text), text)


def _place(path: str) -> Path | Remote:
    found = place(path)
    return found.expanduser() if isinstance(found, Path) else found


def _read(source: Direction, text: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    if source.kind == "run" and not _place(source.path).is_dir():
        raise ConfigError(f"direction {text!r}: no run folder {source.path!r}; run that sweep first, or name another")
    if not source.file.is_file():
        todo = "does that run have a directions aggregate?" if source.kind == "run" else "give the path of a file"
        raise ConfigError(f"direction {text!r}: there is no {str(source.file)!r}; {todo}")
    wanted = [f"{source.site}.{source.layer}", str(source.layer), "direction"]
    try:
        known = load(source.file.read_bytes())
        for name in wanted if source.kind == "file" else wanted[:1]:
            if name in known:
                return _instead(_usable(known[name].reshape(-1), text), source)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"direction {text!r}: cannot read {str(source.file)!r}: {error}") from None
    raise ConfigError(
        f"direction {text!r}: no {wanted[0]!r} in {str(source.file)!r}; it has: {', '.join(sorted(known))}"
    )


def _instead(tensor: Tensor, source: Direction) -> Tensor:
    """The direction itself, or one of equal norm drawn in its place."""
    import torch

    if not source.instead:
        return tensor
    found = tensor.double()
    draw = torch.randn(len(found), generator=torch.Generator().manual_seed(source.seed), dtype=torch.float64)
    if source.instead == "orthogonal":
        draw = draw - (draw @ found) / (found @ found) * found
    return (draw * found.norm() / draw.norm()).float()


def _usable(tensor: Tensor, text: str) -> Tensor:
    if not bool(tensor.isfinite().all()) or not bool(tensor.any()):
        raise ConfigError(f"direction {text!r} is zero or has values that are not finite; it cannot steer")
    return tensor
