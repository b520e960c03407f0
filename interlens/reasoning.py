"""Which generated tokens are reasoning and which are the answer.

The phase of a token is a function of the token ids up to and including it, so that steering while generating and
capture afterwards can never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Token id sequences that open and close reasoning. `opened`: the prompt itself ends inside reasoning."""

    open: tuple[tuple[int, ...], ...] = ()
    close: tuple[tuple[int, ...], ...] = ()
    opened: bool = False


class PhaseTracker:
    """Labels generated tokens one at a time as "reasoning" or "answer". Markers belong to reasoning."""

    def __init__(self, markers: Markers | None):
        self.markers = markers or Markers()
        self.inside = self.markers.opened
        self._recent: tuple[int, ...] = ()

    def feed(self, token: int) -> str:
        wanted = self.markers.close if self.inside else self.markers.open
        recent = (*self._recent, token)
        while recent and not any(marker[: len(recent)] == recent for marker in wanted):
            recent = recent[1:]
        phase = "reasoning" if self.inside or recent else "answer"
        if recent in wanted:
            self.inside, recent = not self.inside, ()
        self._recent = recent
        return phase
