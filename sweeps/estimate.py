"""How large a sweep will be, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from . import shapes
from .config import CaptureConfig, SweepConfig

UNIT_BYTES = 512_000_000
MAX_UNIT_CELLS = 2048
UNKNOWN_WIDTH = 4096
"""Assumed where a model's sizes cannot be read."""


def speakers(config: SweepConfig, part: str) -> list[str]:
    """Who speaks in each turn of the trunk or the branch: participants in order, the branch going on where it ends."""
    order = list(config.scenario.participants)
    before = config.scenario.trunk.turns if part == "branch" else 0
    return [order[(before + turn) % len(order)] for turn in range(getattr(config.scenario, part).turns)]


def budget(config: SweepConfig, name: str, part: str) -> int:
    """Tokens that one turn of a participant may generate in the trunk or the branch."""
    return getattr(config.scenario, part).max_new_tokens or config.scenario.participants[name].max_new_tokens


def tensor_bytes(config: SweepConfig, part: str = "branch") -> int:
    """Bytes of activations that one cell (one trunk) keeps at most, tokens at their budget."""
    return sum(
        _capture_bytes(config, capture, name, budget(config, name, part))
        for capture in config.capture
        for turn, name in enumerate(speakers(config, part))
        if name in capture.participants and captures_turn(capture, part, turn)
    )


def captures_turn(capture: CaptureConfig, part: str, turn: int) -> bool:
    """True if `turns:` names this turn of the trunk or branch; numbers count the branch's turns."""
    if isinstance(capture.turns, str):
        return capture.turns in (part, "all")
    return part == "branch" and turn in capture.turns


def _capture_bytes(config: SweepConfig, capture: CaptureConfig, name: str, tokens: int) -> int:
    shape = shapes.of(config, config.scenario.participants[name].model)
    total = 0
    for site in capture.sites:
        layers = (
            1
            if site in ("embed", "final_norm", "logits")
            else len(capture.layers or range(shape.layers if shape else 32))
        )
        width = shape.site_width(site) if shape else UNKNOWN_WIDTH
        rows, size = (1, 4) if capture.pool else (tokens, shape.item_bytes if shape else 2)
        total += layers * rows * width * size
    return total


def default_unit_cells(config: SweepConfig) -> int:
    """Cells of a unit: about 512 MB of tensors, at most 2 048."""
    per_cell = tensor_bytes(config)
    return max(1, min(MAX_UNIT_CELLS, UNIT_BYTES // per_cell if per_cell else MAX_UNIT_CELLS))


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a plan is. Tokens and bytes are expected, not the most there can be."""

    items: int
    trunks: int
    cells: int
    units: int
    tokens: int
    """Generated, every turn at its budget."""
    tensor_bytes: int
    """Activations, likewise."""


def size(config: SweepConfig) -> Size:
    """Count the plan, streamed."""
    from .plan import expand

    items: set[str] = set()
    trunks = cells = units = 0
    for unit in expand(config):
        items |= unit.items.keys()
        trunks, cells, units = trunks + len(unit.owns), cells + len(unit.cells), units + 1
    tokens = {part: sum(budget(config, n, part) for n in speakers(config, part)) for part in ("trunk", "branch")}
    stored = {part: tensor_bytes(config, part) for part in ("trunk", "branch")}
    return Size(
        items=len(items), trunks=trunks, cells=cells, units=units,
        tokens=trunks * tokens["trunk"] + cells * tokens["branch"],
        tensor_bytes=trunks * stored["trunk"] + cells * stored["branch"],
    )  # fmt: skip


def describe(config: SweepConfig) -> str:
    """The plan in a few lines, for people."""
    found = size(config)
    axes = [f"  {axis.path}: {', '.join(map(str, axis.labels))}" for axis in config.grid]
    shared = [
        f"  {e.kind} on {', '.join(e.participants)} edits the trunk's positions too (tokens: {e.tokens}): "
        "these rows share no KV with others"
        for e in config.intervention
        if config.scenario.trunk.turns and e.tokens.strip() in ("all", "all()", "prompt", "prompt()")
    ]
    return "\n".join([
        f"{config.experiment} -> {config.run.dir}",
        f"{found.cells} cells in {found.units} units; {found.items} items, {found.trunks} trunks",
        *axes,
        f"at most {found.tokens} tokens to generate, {human(found.tensor_bytes)} of activations",
        *shared,
    ])  # fmt: skip


def human(size: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
