"""What a sweep reads besides items: directions. Known by content, copied into the run folder before anything runs."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ConfigError, SweepConfig
from .grid import applied, full_path
from .places import Remote, place

if TYPE_CHECKING:
    from torch import Tensor

DIRECTIONS = "possible: run:<run folder>:<site>:<layer>, file:<safetensors file>:<layer>, random:<seed>"


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A direction's source, taken apart. kind "random" has no file; its tensor follows from the seed and the width."""

    kind: str
    path: str = ""
    site: str = "residual"
    layer: int = 0
    seed: int = 0

    @property
    def file(self) -> Path | Remote:
        """The file that holds it: of a run, what its aggregate wrote."""
        path = _place(self.path)
        return path / "aggregates" / "directions.safetensors" if self.kind == "run" else path


def parse_direction(text: str, where: str = "direction") -> Direction:
    """The source that `text` names. ConfigError says what is possible."""
    if match := re.fullmatch(r"random:(\d+)", text):
        return Direction(kind="random", seed=int(match[1]))
    if match := re.fullmatch(r"run:(.+):([\w.]+):(\d+)", text):
        return Direction(kind="run", path=match[1], site=match[2], layer=int(match[3]))
    if match := re.fullmatch(r"file:(.+):(\d+)", text):
        return Direction(kind="file", path=match[1], layer=int(match[2]))
    raise ConfigError(f"{where}: cannot read {text!r}; {DIRECTIONS}")


def directions(config: SweepConfig) -> list[str]:
    """Every direction that some condition uses, as written, without repeats."""
    found = [e.direction for e in config.intervention]
    for axis in config.grid:
        if full_path(axis.path).startswith("intervention"):
            for label in axis.labels:
                found += [e.direction for e in applied(config, {axis.path: label}).intervention]
    return [d for d in dict.fromkeys(found) if d]


def hashes(config: SweepConfig, root: Any | None = None) -> dict[str, str]:
    """Source as written -> hash of its tensor. A source that is gone keeps the hash and copy that `root` has of it."""
    found = {}
    for text in directions(config):
        source = parse_direction(text)
        if source.kind != "random":
            found[text] = content_hash(_read(source, text))
    return found


def content_hash(tensor: Tensor) -> str:
    """20 hex digits over a tensor's shape and float32 values."""
    values = tensor.detach().float().contiguous().cpu().numpy()
    return hashlib.blake2b(repr(values.shape).encode() + values.tobytes(), digest_size=10).hexdigest()


def copy_into(config: SweepConfig, root: Any) -> None:
    """Copy every input to `inputs/<hash>.safetensors` of the run folder, unless it is there."""
    from safetensors.torch import save

    from . import store

    for text, digest in config.inputs.items():
        name = f"inputs/{digest}.safetensors"
        if not (place(root) / name).exists():
            tensor = _read(parse_direction(text), text).float().contiguous()
            store.write_new(root, name, save({"direction": tensor}, metadata={"source": text}))


def load_direction(config: SweepConfig, text: str, width: int, root: Any) -> Tensor:
    """The direction [width] float32 that `text` names, from the run folder's copy; ValueError for another width."""
    import torch
    from safetensors.torch import load

    source = parse_direction(text)
    if source.kind == "random":
        draw = torch.randn(width, generator=torch.Generator().manual_seed(source.seed), dtype=torch.float64)
        return (draw / draw.norm()).float()
    tensor = load((place(root) / f"inputs/{config.inputs[text]}.safetensors").read_bytes())["direction"]
    if tensor.numel() != width:
        raise ValueError(f"direction {text!r} has {tensor.numel()} values, the model's site has {width}")
    return tensor


def _place(path: str) -> Path | Remote:
    found = place(path)
    return found.expanduser() if isinstance(found, Path) else found


def _read(source: Direction, text: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    if source.kind == "run" and not _place(source.path).is_dir():
        raise ConfigError(f"direction {text!r}: no run folder {source.path!r}; run that sweep first, or name another")
    if not source.file.is_file():
        raise ConfigError(
            f"direction {text!r}: there is no {str(source.file)!r}; does that run have a directions aggregate?"
        )
    wanted = [f"{source.site}.{source.layer}", str(source.layer), "direction"]
    try:
        known = load(source.file.read_bytes())
        for name in wanted if source.kind == "file" else wanted[:1]:
            if name in known:
                return known[name].reshape(-1)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"direction {text!r}: cannot read {str(source.file)!r}: {error}") from None
    raise ConfigError(
        f"direction {text!r}: no {wanted[0]!r} in {str(source.file)!r}; it has: {', '.join(sorted(known))}"
    )
