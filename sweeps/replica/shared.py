"""What the units of one replica share: models, resolved conditions, and what moves (steps, cells, tokens, seconds)."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from ..config.schema import SweepConfig
from ..folder import names
from ..folder.plan_reader import PlanFile
from ..folder.store import Store, open_store
from ..plan import replay
from ..plan.normal import resolved
from ..redact import redact
from .analysis import Analyzers
from .models import Models
from .setting import Setting

ERROR_CHARS = 1500


@dataclass
class Turns:
    """How far a unit is, in turns: cells come last, long after the first tokens."""

    planned: int
    cells: int
    taken: int = 0

    @property
    def cells_worth(self) -> float:
        """The unit's cells times the share of its turns that are taken."""
        return self.cells * min(self.taken / max(self.planned, 1), 1.0)


class Shared:
    """The state of one replica that its units read and count in. Several threads may run units at once."""

    def __init__(self, config: SweepConfig, store: Store):
        self.config, self.store = config, store
        self.stopping = threading.Event()
        self.models = Models(self.config)
        self.analyzers: Analyzers = {}
        """Of the user's own configuration; imported at load."""
        self.ticks: dict[str, int] = {}
        """Unit -> steps it has seen; a unit whose number stands still has stalled."""
        self.cells: dict[str, int] = {}
        """Unit in flight -> its finished cells."""
        self.turns: dict[str, Turns] = {}
        """Unit in flight -> how many of its turns are taken."""
        self.tokens = 0
        self.seconds: dict[str, float] = defaultdict(float)
        """By activity, summed over units: forward (turns, with what waits for the engine's lock) and writing."""
        self.recorded = replay.Recorded(self._outer()) if self.config.scenario.replay == replay.RECORDED else None
        """What is captured again, in a folder that `sweeps capture` made."""
        self._settings: dict[tuple, Setting] = {}
        self._lock = threading.Lock()
        self._configs: dict[int, SweepConfig] = {}

    def _outer(self) -> Store:
        """The run in which this folder lies, as RUN/captures/<hash>."""
        return open_store(str(self.store).rsplit(f"/{names.CAPTURES}/", 1)[0])

    def setting(self, part: int, condition: dict[str, Any]) -> Setting:
        """A condition resolved, once."""
        key = (part, *sorted(condition.items()))
        with self._lock:
            if key not in self._settings:
                config = resolved(self._config(part), condition)
                self._settings[key] = Setting(config, self.models, self.store)
            return self._settings[key]

    def _config(self, part: int) -> SweepConfig:
        """The configuration with which a part of the plan entered the run; whom it calls is the user's own."""
        if part not in self._configs:
            entered, own = PlanFile(self.store).config(part), self.config.scenario
            scenario = replace(entered.scenario, analyzers=own.analyzers, judges=own.judges)
            self._configs[part] = replace(entered, scenario=scenario)
        return self._configs[part]


def short_error(error: BaseException) -> str:
    """The type and text of an error, without secrets and at most `ERROR_CHARS` long."""
    return redact(f"{type(error).__name__}: {error}")[:ERROR_CHARS]
