"""References to directions (`run:...`, `file:...`, `random:...`): parsed, checked by shape, and read."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..config.schema import SweepConfig
from ..errors import ConfigError
from ..folder import names
from ..folder.copies import copied_direction
from ..folder.store import Store, Where, open_store

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
    def file(self) -> str:
        """The file that holds it: of a run, what its aggregate wrote."""
        return f"{self.path}/{names.directions()}" if self.kind == "run" else self.path

    def is_there(self) -> bool:
        """True if that file is there."""
        store, name = self._place()
        return store.exists(name)

    def read(self) -> bytes:
        """That file's content."""
        store, name = self._place()
        return store.read(name)

    def _place(self) -> tuple[Store, str]:
        if self.kind == "run":
            return open_store(self.path), names.directions()
        folder, _, name = self.path.rpartition("/")
        if "://" in self.path:
            return open_store(folder), name
        path = Path(self.path).expanduser().resolve()  # named by the user, who may name a link
        return open_store(path.parent), path.name


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


def load_direction(config: SweepConfig, text: str, width: int, root: Where) -> Tensor:
    """The direction [width] float32 that `text` names, from the run folder's copy.

    ValueError for another width; Damaged where the copy is not what was copied.
    """

    source = parse_direction(text)
    if source.kind == "random":
        draw = torch.randn(width, generator=torch.Generator().manual_seed(source.seed), dtype=torch.float64)
        return (draw / draw.norm()).float()
    tensor = copied_direction(root, config.inputs[text])
    if tensor.numel() != width:
        raise ValueError(f"direction {text!r} has {tensor.numel()} values, the model's site has {width}")
    return tensor


def read_direction(text: str) -> Tensor:
    """The direction [width] that `run:` or `file:` names, from its source. ConfigError where it is not there."""
    return _read(parse_direction(text), text)


def _read(source: Direction, text: str) -> Any:

    if source.kind == "run" and not open_store(source.path).has_folder():
        raise ConfigError(f"direction {text!r}: no run folder {source.path!r}; run that sweep first, or name another")
    if not source.is_there():
        todo = "does that run have a directions aggregate?" if source.kind == "run" else "give the path of a file"
        raise ConfigError(f"direction {text!r}: there is no {source.file!r}; {todo}")
    wanted = [f"{source.site}.{source.layer}", str(source.layer), "direction"]
    try:
        known = load(source.read())
        for name in wanted if source.kind == "file" else wanted[:1]:
            if name in known:
                return _instead(_usable(known[name].reshape(-1), text), source)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"direction {text!r}: cannot read {source.file!r}: {error}") from None
    raise ConfigError(f"direction {text!r}: no {wanted[0]!r} in {source.file!r}; it has: {', '.join(sorted(known))}")


def _instead(tensor: Tensor, source: Direction) -> Tensor:
    """The direction itself, or one of equal norm drawn in its place."""

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
