"""A run folder's beginning and its growth: one folder is one run.

`enter` starts a folder, finds it unchanged, extends its plan, or refuses it with the difference. It must be called by
whoever holds the folder. `run.json` is written last, so that a folder without it holds nothing worth keeping.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .. import errors
from ..config.schema import SweepConfig
from ..errors import RunRefused
from ..folder import commits, copies, files, names, plan_reader, plan_writer, schemas, space
from ..folder.about import _short, about, differing
from ..folder.cells import Unit
from ..folder.store import Store, Where, open_store
from ..plan import inputs
from ..plan.expand import Branches, expand, pack, trunks
from ..plan.patches import has_patches
from ..plan.replay import date_of_run
from . import size as size_module
from .size import missing_bytes


@dataclass(frozen=True, kw_only=True)
class Entered:
    """What `enter` found or did."""

    state: str
    """new | same | extended."""
    num_cells: int
    """Of the whole plan."""
    new_cells: int


def enter(
    config: SweepConfig, root: Where, confirm: Callable[[], None] = lambda: None,
    units: Iterable[Unit] | None = None,
) -> Entered:  # fmt: skip
    """Start the run folder `root` for this configuration, or continue it. `units`: the plan, if it was begun before.

    Raises RunRefused, naming the difference, where the plan there has cells that this configuration does not, or the
    folder is no run folder. Streams the plan; writes `run.json` last. `confirm` raises where the folder has another
    holder by now; it is asked before leftovers of a start that was cut off are deleted.
    """
    store = open_store(root)
    if store.exists(names.RUN):
        return _continue(config, store, confirm)
    check_place(store)
    if units is None:
        check_space(config, store)
    try:
        store.probe()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunRefused(f"{error.strerror or error}; name another run.dir") from None
    confirm()
    for leftover in (*store.walk(names.PLAN), *store.walk(names.INPUTS), names.config(0)):
        store.delete(leftover)
    inputs.copy_into(config, store)
    store.write_new(names.config(0), files.dump_yaml(config.to_dict()))
    plan = expand(config) if units is None else units
    count = plan_writer.write(store, 0, config.grid, plan, patched=has_patches(config))
    begun, source = about(config), config.scenario.replay or ""
    if source.startswith("run:"):
        begun["date"] = date_of_run(source.removeprefix("run:")) or begun["date"]
    store.write_new(names.RUN, files.dump_json(begun))
    return Entered(state="new", num_cells=count, new_cells=count)


def other_aggregates(config: SweepConfig, root: Store) -> list[str]:
    """Names of the aggregates that are not, or not so, in the configuration the folder was begun with."""
    begun = files.read_yaml(root, names.config(0)).get("aggregate") or []
    return [entry["name"] for entry in config.to_dict()["aggregate"] if entry not in begun]


def other_analyzers(config: SweepConfig, root: Store) -> bool:
    """Whether the folder was begun with other analyzers or judges: they are in no cell's id."""
    begun, now = files.read_yaml(root, names.config(0)).get("scenario") or {}, config.to_dict()["scenario"]
    return any((begun.get(name) or None) != (now[name] or None) for name in ("analyzers", "judges"))


def check_space(config: SweepConfig, root: Store) -> None:
    """RunRefused where a run would not fit its disk, unless `run.force`."""
    missing, free = missing_bytes(config, root), space.free_bytes(root)
    if missing and free is not None and not config.run.force:
        raise RunRefused(
            f"{str(root)!r} needs about {space.human(size_module.size(config).bytes)} and its disk has "
            f"{space.human(free)} free, of which {space.human(space.RESERVE_BYTES)} "
            "stay free; name another run.dir, capture less (pool: mean), or force it (run.force=true)"
        )


OURS = {names.PLAN, names.INPUTS, names.config(0), "_tmp", names.LEASE, names.PROGRESS}

EVENTS = re.compile(r"events(-\d+)?\.jsonl")


def check_place(root: Store) -> None:
    """RunRefused for a file, and for a folder that holds anything but a run."""
    if file := root.file_above():
        under = "is" if file == str(root) else f"lies under {file!r}, which is"
        raise RunRefused(f"run.dir {str(root)!r} {under} a file; name a folder")
    if root.exists(names.RUN):
        return
    foreign = sorted(name for name in root.entries() if name not in OURS and not EVENTS.fullmatch(name))
    if foreign:
        raise RunRefused(
            f"run.dir {str(root)!r} is no run folder and not empty (it holds {', '.join(foreign[:5])}); name another"
        )


@contextlib.contextmanager
def usable(root: Store) -> Iterator[None]:
    """RunRefused for a run folder in which nothing can be made, read or written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = f"{error.strerror or error} at {str(error.filename2 or error.filename or root)!r}"
        todo = "name a folder that can be written (run.dir=...)"
        raise RunRefused(f"run.dir {str(root)!r} cannot be used ({why}); {todo}") from None


def _continue(config: SweepConfig, root: Store, confirm: Callable[[], None]) -> Entered:
    version = files.read_json(root, names.RUN).get("schema_version")
    if version != schemas.SCHEMA_VERSION:
        raise RunRefused(
            f"{str(root)!r} was written with schema version {version}, this is {schemas.SCHEMA_VERSION}; "
            "continue it with the version that began it, or name another run.dir"
        )
    plan = plan_reader.PlanFile(root)
    if not plan.parts:
        raise errors.Damaged(f"{str(root)!r} has lost its plan/; restore it from a copy, or name another run.dir")
    _check_sources(root, plan)
    known = plan.cell_ids()
    known.sort()
    new, still = 0, np.zeros(len(known), bool)
    for ids in _batches(c.id for entry in trunks(config) for cells in entry.cells.values() for c in cells):
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        hit = known[at] == ids
        still[at[hit]] = True
        new += int((~hit).sum())
    if not still.all():
        raise RunRefused(_difference(config, root, plan, int((~still).sum()), new))
    if new:
        check_space(config, root)
        confirm()
        _extend(config, root, plan, known, plan.trunk_ids())
    return Entered(state="extended" if new else "same", num_cells=len(known) + new, new_cells=new)


def _check_sources(root: Store, plan: plan_reader.PlanFile) -> None:
    """Damaged where settings or directions are not those that the cells' ids were made of; items are as they are read."""
    for part in range(len(plan.parts)):
        for digest in plan.config(part).inputs.values():
            if root.exists(names.direction(digest)):
                copies.copied_direction(root, digest)


def _batches(ids: Iterator[str], size: int = 65_536) -> Iterator[np.ndarray]:
    while batch := list(itertools.islice(ids, size)):
        yield plan_reader.packed(np.array(batch, "S20"))


def _extend(config: SweepConfig, root: Store, plan: plan_reader.PlanFile, known: np.ndarray, held: set[str]) -> None:
    part, planned = len(plan.parts), {*plan.unit_names}
    if lost := next((unit for unit in commits.committed_units(root) if unit.split(".")[0] not in planned), None):
        raise errors.Damaged(f"{str(root)!r} has a commit of {lost} and no plan of it: {names.part(part)} is missing; "
                            "restore it from a copy of the run")  # fmt: skip
    for leftover in (names.config(part), names.items(part)):
        root.delete(leftover)
    inputs.copy_into(config, root)
    root.write_new(names.config(part), files.dump_yaml(config.to_dict()))
    first = sum(1 for _ in plan.infos())
    new = pack(config, _only_new(config, known), first, held)
    plan_writer.write(root, part, config.grid, new, patched=has_patches(config))


def _only_new(config: SweepConfig, known: np.ndarray) -> Iterator[Branches]:
    for entry in trunks(config):
        cells = {}
        for cast, candidates in entry.cells.items():
            ids = plan_reader.packed(np.array([c.id for c in candidates], "S20"))
            hit = known[np.minimum(np.searchsorted(known, ids), len(known) - 1)] == ids
            if not hit.all():
                cells[cast] = [c for c, old in zip(candidates, hit, strict=True) if not old]
        if cells:
            yield Branches(trunk=entry.trunk, row=entry.row, cells=cells)


def _difference(config: SweepConfig, root: Store, plan: plan_reader.PlanFile, dropped: int, new: int) -> str:
    before = files.read_yaml(root, names.config(len(plan.parts) - 1))
    changes = [
        f"{path}: {_short(old)} -> {_short(given)}"
        for path, old, given in differing(before, config.to_dict())
        if path.split(".")[0] not in ("run", "cluster", "report", "aggregate", "plan", "experiment")
    ]
    shown = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
    return (
        f"{str(root)!r} holds another run: {dropped} of its cells are not in this configuration, "
        f"which has {new} others ({shown or 'the items differ'}); undo the change, or name another run.dir"
    )
