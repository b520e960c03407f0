"""One replica: the models of one cast, loaded once, and the units it runs.

A unit's trunks come first (sampled here if the unit owns them, else read back from the shard that holds them, token by
token), each followed by its cells; all conversations of a unit are in flight together, so they are decoded in the same
batches. What fails inside a cell fails that cell; what fails outside any cell is told to the driver. Asked to stop, a
unit commits what is complete and hands the rest to its child.
"""

from __future__ import annotations

import errno
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ..config.grid import conditions
from ..config.schema import SweepConfig
from ..failpoints import reach
from ..folder.cells import unpack
from ..folder.store import open_store
from ..plan.casts import cast_of
from ..plan.normal import resolved
from ..redact import redact
from .analysis import imported
from .setting import load_models
from .shared import ERROR_CHARS, Shared, short_error
from .unit_run import UnitRun


class Replica(Shared):
    """Runs units. Several threads may run units at once: they share models and engines."""

    def __init__(self, config: dict[str, Any], run_dir: str, cast: str, threads: int = 1):
        super().__init__(SweepConfig.from_dict(config), open_store(run_dir))
        self._cast, self._threads = cast, threads
        self._busy = _Busy()

    def load(self) -> dict[str, Any]:
        """Load the models; returns their hashes and how long it took."""

        begun = time.monotonic()
        torch.set_num_threads(self._threads)
        self.analyzers = imported(self.config.scenario.analyzers)
        load_models(next(self._of_my_cast(), self.config), self.models)
        self._busy.begin()
        reach("replica.loaded")
        return {"models": self.models.facts(), "load_s": round(time.monotonic() - begun, 3)}

    def _of_my_cast(self) -> Iterator[SweepConfig]:
        """The configuration under each condition that needs exactly this replica's models."""
        for condition in conditions(self.config.grid):
            under = resolved(self.config, condition)
            if cast_of(under) == self._cast:
                yield under

    def run(self, packed: bytes) -> dict[str, Any]:
        """Run a packed unit to its commit. The ack says how it ended: won, lost, returned or error."""
        unit, trunk_units, attempts = unpack(packed)
        self.ticks[unit.id] = 0
        reach("replica.started")
        self._busy.enter()
        try:
            return UnitRun(self, unit, trunk_units, attempts).run()
        except Exception as error:
            folder = isinstance(error, OSError)  # outside any cell: the run folder cannot be read or written
            full = folder and error.errno in (errno.ENOSPC, errno.EDQUOT)
            return {
                "unit": unit.id, "outcome": "error", "no_space": full, "folder": folder, "error": short_error(error),
                "traceback": redact(traceback.format_exc())[-ERROR_CHARS:],
            }  # fmt: skip
        finally:
            self._busy.leave()
            self.ticks.pop(unit.id, None)
            self.cells.pop(unit.id, None)
            self.turns.pop(unit.id, None)

    def counters(self) -> dict[str, Any]:
        """What moves: steps, finished cells and cells' worth of turns of each unit in flight, tokens, seconds."""
        seconds = {activity: round(spent, 2) for activity, spent in self.seconds.items()}
        seconds["waiting"] = round(self._busy.idle_s(), 2)
        turns = {unit: round(taken.cells_worth, 2) for unit, taken in list(self.turns.items())}
        return {
            "units": dict(self.ticks), "cells": dict(self.cells), "turns": turns, "tokens": self.tokens,
            "seconds": seconds, "cost": self.models.cost,
        }  # fmt: skip

    def stop(self) -> None:
        """Let every unit in flight commit what is complete and hand over the rest."""
        self.stopping.set()
        self.models.stop()


class _Busy:
    """How long no unit was in flight."""

    def __init__(self):
        self._lock = threading.Lock()
        self._units, self._since, self._idle = 0, None, 0.0

    def begin(self) -> None:
        self._since = time.monotonic()

    def enter(self) -> None:
        with self._lock:
            self._idle = self.idle_s()
            self._units, self._since = self._units + 1, None

    def leave(self) -> None:
        with self._lock:
            self._units -= 1
            self._since = None if self._units else time.monotonic()

    def idle_s(self) -> float:
        return self._idle + (time.monotonic() - self._since if self._since is not None else 0.0)
