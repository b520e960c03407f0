"""Who speaks in which turn of a trunk or a branch, and whether an intervention or a capture acts there."""

from __future__ import annotations

from typing import Literal

from .schema import CaptureConfig, InterventionConfig, SweepConfig


def speakers(config: SweepConfig, part: str) -> list[str]:
    """Who speaks in each turn of the trunk or the branch: participants in order, the branch going on where it ends."""
    order = list(config.scenario.participants)
    before = config.scenario.trunk.turns if part == "branch" else 0
    return [order[(before + turn) % len(order)] for turn in range(getattr(config.scenario, part).turns)]


def budget(config: SweepConfig, name: str, part: str) -> int:
    """Tokens that one turn of a participant may generate in the trunk or the branch."""
    participant = config.scenario.participants[name]
    if participant.kind == "scripted":
        return 0
    return getattr(config.scenario, part).max_new_tokens or participant.max_new_tokens


def captures_turn(capture: CaptureConfig, part: str, turn: int) -> bool:
    """True if `turns:` names this turn of the trunk or branch; numbers count the branch's turns."""
    if isinstance(capture.turns, str):
        return capture.turns in (part, "all")
    return part == "branch" and turn in capture.turns


Part = Literal["trunk", "branch"]


def acts(edit: InterventionConfig, part: Part, turn: int) -> bool:
    """True if `turns:` names this turn of the trunk or branch; numbers count the branch's turns."""
    if isinstance(edit.turns, str):
        return edit.turns in (part, "all")
    return part == "branch" and turn in edit.turns
