"""Named points at which a test can kill, stop, hang or break a process, to show that nothing is lost there.

`SWEEPS_FAILPOINTS="writer.before_commit=kill,driver.planned=raise@2"`: at the named point, on its n-th passing (first,
if not said) in this process, do it. Actions: kill (SIGKILL), stop (SIGSTOP), hang, raise. With
`SWEEPS_FAILPOINTS_ONCE=DIR` each happens once in all processes together. Unset, a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

POINTS = (
    "driver.leased", "driver.planned", "driver.reopened", "driver.connected", "driver.dispatched", "driver.acked",
    "driver.split", "driver.complete", "driver.aggregated",
    "writer.opened", "writer.in_file", "writer.linked", "writer.before_commit", "writer.committed",
    "replica.loaded", "replica.started", "replica.in_forward", "replica.finished",
)  # fmt: skip

_ACTIONS = ("kill", "stop", "hang", "raise")

_passed: Counter[str] = Counter()


class Failpoint(RuntimeError):
    """What the action `raise` raises."""


def _armed() -> dict[str, tuple[str, int]]:
    armed = {}
    for entry in filter(None, os.environ.get("SWEEPS_FAILPOINTS", "").split(",")):
        name, _, action = entry.partition("=")
        action, _, nth = action.partition("@")
        if name not in POINTS or action not in _ACTIONS:
            raise ValueError(f"no failpoint {entry!r}; points: {', '.join(POINTS)}; actions: {', '.join(_ACTIONS)}")
        armed[name] = (action, int(nth or 1))
    return armed


_ARMED = _armed()


def reach(name: str) -> None:
    """This point was reached. Does nothing unless the environment armed it."""
    if not _ARMED or name not in _ARMED:
        return
    action, nth = _ARMED[name]
    _passed[name] += 1
    if _passed[name] != nth or not _first(name):
        return
    if action == "raise":
        raise Failpoint(f"failpoint {name}")
    while action == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _first(name: str) -> bool:
    folder = os.environ.get("SWEEPS_FAILPOINTS_ONCE")
    if not folder:
        return True
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
