"""`sweeps status`: how far a run is, from its folder alone. Loads no torch."""

from __future__ import annotations

import contextlib
from typing import Any

from .. import errors
from . import commits, files, lease, names
from .plan_reader import PlanFile
from .store import Store, Where, open_store, within


def event_files(store: Store) -> list[str]:
    """Oldest first: `events.jsonl`, or on object stores `events-<k>.jsonl`."""
    return [*([names.EVENTS] if store.exists(names.EVENTS) else []),
            *map(names.events, within(store.entries(), "events-", ".jsonl"))]  # fmt: skip


def events(root: Where) -> list[dict[str, Any]]:
    """Everything that drivers of this folder have noted, oldest first; a line cut off by a crash is left out."""
    store, found = open_store(root), []
    for name in event_files(store):
        for line in store.read(name).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(event := files.parsed(line), dict) and isinstance(event.get("event"), str):
                    found.append(event)
    return found


def status(root: Where) -> list[str]:
    """Where a run stands, from its folder alone, in a few lines. FileNotFoundError where there is no run."""
    root = open_store(root)
    if not root.exists(names.RUN) and not root.has_folder(names.PLAN):
        raise FileNotFoundError(f"no run in {root}: it has neither run.json nor plan/; give a run folder")
    planned, held, failed, units = _planned(root), 0, 0, 0
    failed_by: dict[str, int] = {}
    for commit in commits.list_commits(root):
        units += 1
        held += len(commit.cells)
        failed_by[commit.unit] = len(commit.failed)
    failed = sum(n for unit, n in failed_by.items() if f"{unit}.r" not in failed_by)
    if (pending := planned - held - failed) < 0:
        raise errors.Damaged(f"{root} has {held + failed} cells in commits and {planned} in its plan: a part of plan/ is "
                            "missing; restore it from a copy of the run")  # fmt: skip
    shown = "complete" if planned and not pending else f"{pending} pending"
    lines = [f"{root}: {held} of {planned} cells committed in {units} units, {failed} failed, {shown}"]
    holder = lease.latest(root)
    if holder:
        who = f"pid {holder.get('pid')} on {holder.get('host')}"
        ended = (
            "it ended cleanly" if holder.get("released") else "it is dead" if holder["over"] else "it may be running"
        )
        lines.append(f"last driver: {who}; {ended}")
    try:
        last = files.read_json(root, names.PROGRESS)
        lines.append(
            f"last progress, {last['time']}: {last['state']}{': ' + last['reason'] if last['reason'] else ''}, "
            f"{last['tokens']} tokens generated, {last['bytes'] / 1e6:.1f} MB committed, "
            f"{last['replica_deaths']} replicas lost"
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    return [*lines, *_recent_failures(root)]


def _recent_failures(root: Store, count: int = 3) -> list[str]:
    found = []
    for event in reversed(events(root)):
        if event["event"] in ("failed", "lost", "stopped"):
            what = event.get("error") or event.get("reason") or ""
            found.append(
                f"  {event.get('time')} {event['event']} {event.get('unit') or event.get('replica') or ''}: "
                f"{str(what)[:200]}"
            )
        if len(found) == count:
            break
    return ["latest events:", *reversed(found)] if found else []


def _planned(root: Store) -> int:
    plan = PlanFile(root)
    if not plan.parts and root.exists(names.RUN):
        raise errors.Damaged(f"{str(root)!r} has lost its plan/; restore it from a copy of the run")
    return plan.num_cells if plan.parts else 0
