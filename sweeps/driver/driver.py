"""Runs the units of a plan until each is closed by its commit.

Law. *Every cell of the plan is committed once, or failed with its traceback, or still pending and run by the same
command.*

Why it holds. A unit is closed by one commit, created if absent; the ledger makes each cell belong to one unit at every
moment; the driver believes commits and nothing else: an ack is only a hint to look, and a replica that is gone may have
executed everything it was sent. So what the driver forgets (it may be killed at any line) is read back from the folder,
and whoever writes late finds the unit closed.

Exit codes: 0 complete; 1 error; 3 complete with failed cells; 4 stopped, resumable; 5 refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .. import errors
from ..aggregates.results import finalize
from ..aggregates.shards import ShardedRun
from ..config.schema import SweepConfig
from ..failpoints import reach
from ..folder import about, garbage, names, space
from ..folder.cells import pack
from ..folder.commits import Commit, list_commits, read_commit
from ..folder.lease import Lease
from ..folder.plan_reader import PlanFile
from ..folder.store import Store
from ..folder.writer import UnitWriter
from ..report.findings import sentences
from .executors import pool
from .executors.address import wait_for
from .executors.base import Event
from .ledger import Ledger, Verdict
from .measures import Measures
from .parts import Closed, LedgerError, Needs, split
from .progress import Progress
from .stops import Stop, command, signals
from .supervisor import Crew, last_line
from .units import Units

STOP_S = 20.0
"""How long replicas have to hand over after a signal; what they do not commit by then stays open."""

MIN_FREE_BYTES = 50_000_000
"""Below this a run stops while what is complete can still be committed."""

MAX_FOLDER_ERRORS = 6
"""After so many units in a row that could not read or write the run folder, the run ends."""


class Driver:
    """One run of one folder. Everything it knows is in the folder, or can be lost."""

    def __init__(self, config: SweepConfig, root: Store, progress: Progress, lease: Lease, replica: str):
        self.config, self.root, self.progress, self.lease, self._replica = config, root, progress, lease, replica
        self.plan = PlanFile(root)
        self.units = Units(self.plan.unit, lambda name: read_commit(root, name), locate=self.plan.locate)
        self.ledger = Ledger(self.units.needs)
        self.measures = Measures(config)
        self._signal: str | None = None
        self._failed_before = 0
        self._counted = 0.0
        self._space: str | None = None
        self._folder_errors = 0
        """Units in a row that could not use the folder."""
        self._not_before = 0.0

    # ---- the run

    def run(self) -> int:
        """Close what is open, then finish. Returns the exit code."""
        self._load()
        if self.config.run.retry_failed and (again := self.ledger.retriable()):
            self.lease.confirm()
            self.plan.reopen(again)
            reach("driver.reopened")
            self.ledger.reopen(again)
            self.progress.log(f"trying the failed cells of {len(again)} units again")
        self.measures.held_before, self._failed_before = self.ledger.num_held, self.ledger.num_failed
        fresh = not self.ledger.complete
        if fresh:
            self._check_versions()
            wait_for(self.config.cluster)  # a signal still ends the run at once here
            with signals(self._on_signal):
                try:
                    self._run_units()
                except Stop as stop:
                    return self._stopped(stop)
        reach("driver.complete")
        if fresh:
            garbage.collect(self.root, leased=True)
        return self._finish(fresh)

    def _check_versions(self) -> None:
        """Refuse to continue with libraries that may change what cells say."""
        if changed := about.changed_versions(self.root):
            raise errors.RunRefused(
                f"{self.root} was begun with other versions ({', '.join(changed)}), which may change what cells say; "
                "install those, or give another run.dir"
            )

    def _run_units(self) -> None:
        config, cluster = _for_actors(self.config), self.config.cluster
        with (
            pool.opened(config, self.root.address, cluster, self._replica) as executor,
            signals(self._on_signal),  # once more: connecting to Ray installs handlers of its own
        ):
            reach("driver.connected")
            crew = Crew(executor, cluster)
            try:
                while not self.ledger.complete:
                    self._check_stops(crew)
                    crew.tend(self.ledger.open_by_cast())
                    self._dispatch(crew)
                    for event in executor.events(0.5):
                        self._on_event(event, crew)
                    self._look_around(crew)
                    self._check_stops(crew)
            except Stop as stop:
                if stop.code == 4:
                    self._hand_over(crew)
                raise

    def _load(self) -> None:
        """The ledger, from the plan and the commits."""
        shared: dict[str, tuple[str, ...]] = {}
        for info in self.plan.infos():
            if info.outside:
                shared[info.id] = info.outside
            self.ledger.add(info.id, info.num_cells, cast=info.cast, needs=Needs(trunks=info.shared, donors=info.donors),
                            part=info.part)  # fmt: skip
        for part, units in self.plan.retries():
            self.ledger.reopen(units, part)
        for commit in list_commits(self.root):
            self.measures.found(commit)
            if commit.cells and "." in commit.unit:
                shared.setdefault(self.ledger.root_of(commit.unit), ())
            self._close(commit)
        self._check_ground(shared)

    def _check_ground(self, shared: Mapping[str, tuple[str, ...]]) -> None:
        """Refuse to sample a trunk again on which cells stand already: the commit that held it is gone.

        shared: trunks that units need from others, and units that are in pieces.
        """
        wanted = {trunk for trunks in shared.values() for trunk in trunks}
        lost = {trunk for trunk in wanted if self.ledger.holder(trunk) is None}
        suspects = {root for root, trunks in shared.items() if not trunks or lost & {*trunks}}
        if not suspects:
            return
        commits = list(list_commits(self.root))
        held = {cell for commit in commits if commit.unit.split(".")[0] in suspects for cell in commit.cells}
        trunks = {trunk for commit in commits for trunk in commit.trunks}
        for root in suspects:
            for cell, trunk in self.plan.on_trunks(root):
                if cell in held and trunk not in trunks:
                    raise LedgerError(f"cell {cell} stands on trunk {trunk}, whose commit is gone from {self.root}")

    def _dispatch(self, crew: Crew) -> None:
        sent = time.monotonic() >= self._not_before
        while sent:
            sent = False
            for member in crew.free():
                name = self.ledger.take(member.name, member.cast)
                if name is None:
                    continue
                unit = self.units.get(name)
                held = {t.id: self.ledger.holder(t.id) for t in unit.trunks}
                packed = pack(unit, {t: u for t, u in held.items() if u}, self.ledger.deaths(name))
                crew.executor.submit(member.name, packed)
                crew.sent(member.name, name)
                self.progress.event("dispatched", unit=name, replica=member.name, cells=len(unit.cells))
                reach("driver.dispatched")
                sent = True

    # ---- what happened

    def _on_event(self, event: Event, crew: Crew) -> None:
        crew.on_event(event)
        if event.kind == "ready":
            about.record_models(self.root, event.ack.get("models", {}))
            self.progress.event("ready", replica=event.replica, load_s=event.ack.get("load_s"))
        elif event.kind == "placed":
            self.progress.event("placed", replica=event.replica, **event.ack)
        elif event.kind == "done":
            self._acked(event, crew)
        elif event.kind == "lost":
            self.progress.event("lost", replica=event.replica, error=event.error, counts=event.counts)
            self.progress.log(f"replica {event.replica} is lost: {last_line(event.error)}")
            self._lost(event.replica, event.error, counts=event.counts, crew=crew)

    def _acked(self, event: Event, crew: Crew) -> None:
        ack, name = event.ack, event.unit or ""
        reach("driver.acked")
        if ack["outcome"] == "error":
            if ack.get("no_space"):
                self._space = ack["error"]
                self.ledger.give_back(name)
                return
            if ack.get("folder"):
                self._folder_failed(name, ack["error"])
                return
            self.progress.event("failed", unit=name, error=ack["error"])
            self._carry_out({name: self.ledger.count_failure(name)}, ack["error"], ack.get("traceback", ""))
        elif commit := read_commit(self.root, name):
            if self.ledger.is_open(name):
                self.measures.committed(commit)
            self._close(commit)
            crew.progress_made()
            self._folder_errors = 0
            if commit.failed:
                self.progress.event("failed", unit=name, cells=len(commit.failed), error=ack.get("first_error", ""))
                self.progress.log(f"{len(commit.failed)} cells of {name} failed: {ack.get('first_error', '')}")
        else:
            self.ledger.give_back(name)

    def _folder_failed(self, name: str, error: str) -> None:
        """A unit could not read or write the folder: no fault of its cells. Wait a little and try again, a few times."""
        self.ledger.give_back(name)
        self._folder_errors += 1
        self._not_before = time.monotonic() + min(2.0 ** (self._folder_errors - 3), 30.0)
        self.progress.event("failed", unit=name, error=error)
        self.progress.log(f"{name} could not use the run folder: {error}")
        if self._folder_errors >= MAX_FOLDER_ERRORS:
            raise Stop(1, f"the run folder failed {self._folder_errors} times without a commit between; last: {error}")

    def _lost(self, replica: str, error: str, *, counts: bool, crew: Crew) -> None:
        running = self.ledger.running(replica)
        standing = [c for name in running if (c := read_commit(self.root, name))]
        closed = tuple(self._as_closed(commit) for commit in standing)
        verdicts = self.ledger.lost(replica, counts=counts, commits=closed)
        if standing or "split" in verdicts.values() or "fail" in verdicts.values():
            crew.progress_made()
        self._carry_out(verdicts, f"the replica died: {last_line(error)}", error)
        self._fail_orphans()

    def _carry_out(self, verdicts: Mapping[str, Verdict], error: str, details: str) -> None:
        """Write the commits that close units which killed their replicas: divided in two, or failed."""
        for name, verdict in verdicts.items():
            if verdict == "split":
                self._split(name)
            elif verdict == "fail":
                self._fail(name, error, details)

    def _split(self, name: str) -> None:
        root = self.ledger.root_of(name)
        cells = self.units.cells(root, self.ledger.cells_of(name))
        sampled = {t.id for t in self.units.get(name).trunks}
        trunk_of = {p: cell.trunk if cell.trunk in sampled else None for p, cell in cells.items()}
        donors = self.units.donor_positions(root, self.ledger.cells_of(name))
        parts = split(trunk_of, self.ledger.unheld_trunks(name), donors)
        children = [self.units.part(root, f"{name}.{i}", part) for i, part in enumerate(parts)]
        UnitWriter(self.root, self.units.get(name), {}).commit(children=children)
        reach("driver.split")
        self.progress.event("split", unit=name, cells=[len(child.cells) for child in children])
        self._close_standing(name)

    def _fail(self, name: str, error: str, details: str, trunks: tuple[str, ...] | None = None) -> None:
        unit, tries = self.units.get(name), max(self.ledger.deaths(name), 1)
        writer = UnitWriter(self.root, unit, {})
        for trunk in self.ledger.unheld_trunks(name) if trunks is None else trunks:
            writer.fail_trunk(trunk, error, details, tries)
        for cell in unit.cells:
            writer.fail_cell(cell, error, details, tries)
        writer.commit()
        self.progress.event("failed", unit=name, cells=len(unit.cells), error=error)
        self.progress.log(f"{name} failed after {tries} tries ({len(unit.cells)} cells): {error}")
        self._close_standing(name)

    def _fail_orphans(self) -> None:
        while orphans := self.ledger.orphans():
            for name, trunk, failer in orphans:
                self._fail(name, f"trunk {trunk} failed in unit {failer}", "", trunks=())

    def _close_standing(self, name: str) -> None:
        commit = read_commit(self.root, name)
        if commit is None:
            raise OSError(f"the commit of {name} was written and cannot be read back from {self.root}")
        self._close(commit)

    def _close(self, commit: Commit) -> None:
        self.ledger.close(self._as_closed(commit))
        self._fail_orphans()

    def _as_closed(self, commit: Commit) -> Closed:
        expected = self.ledger.expects(commit.unit)
        return self.units.closed(commit, expected, self.ledger.root_of(commit.unit))

    # ---- looking around

    def _look_around(self, crew: Crew) -> None:
        now = time.monotonic()
        if now - self._counted >= 1.0:
            self._counted = now
            counters = crew.executor.counters()
            self.measures.count(counters)
            for member in crew.watch(counters):
                self._stalled(member.name, crew)
            self.measures.measure(now, crew, counters, self.ledger)
            crew.executor.publish(self.measures.metrics())
            if (free := space.free_bytes(self.root)) is not None and free < MIN_FREE_BYTES:
                self._space = f"{space.human(free)} are left at {self.root}"
        self.progress.update(self.measures.snapshot)

    def _stalled(self, name: str, crew: Crew) -> None:
        error = f"no movement for {self.config.cluster.stall_s:.0f} s (cluster.stall_s)"
        if crew.members[name].state == "loading":
            error = f"still loading after {self.config.cluster.load_s:.0f} s (cluster.load_s)"
        self.progress.event("lost", replica=name, error=error, counts=True)
        self.progress.log(f"replica {name} is lost: {error}")
        crew.dismiss(name, error)
        self._lost(name, error, counts=True, crew=crew)

    # ---- ends

    def _check_stops(self, crew: Crew) -> None:
        settings, new_failures = self.config.run, self.ledger.num_failed - self._failed_before
        if self.lease.lost:
            raise Stop(5, self.lease.lost)
        if self._signal:
            raise Stop(4, self._signal)
        if self._space:
            raise Stop(4, f"the disk is full: {self._space}")
        if settings.on_error == "fail_fast" and new_failures > 0:
            raise Stop(4, f"{new_failures} cells failed and run.on_error is fail_fast")
        if settings.max_failures is not None and new_failures > settings.max_failures:
            raise Stop(4, f"{new_failures} cells failed, more than run.max_failures={settings.max_failures}")
        if settings.max_hours is not None and time.monotonic() - self.measures.started > settings.max_hours * 3600:
            raise Stop(4, f"run.max_hours={settings.max_hours:g} is over")
        spent = self.measures.spent
        if settings.max_cost is not None and spent >= settings.max_cost:
            raise Stop(4, f"${spent:.2f} of run.max_cost=${settings.max_cost:g} are spent; raise it to go on")
        if reason := crew.hopeless():
            raise Stop(1, reason)
        if self.ledger.stuck:
            raise Stop(1, f"units wait for each other: {', '.join(self.ledger.waiting()[:5])}")

    def _on_signal(self, name: str) -> None:
        self._signal = f"received {name}"

    def _hand_over(self, crew: Crew) -> None:
        """Let replicas commit what is complete; what they cannot in time stays open."""
        self.measures.snapshot.state = "stopping"
        self.progress.log("stopping: replicas finish their step and commit what is complete")
        crew.executor.stop()
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(member.moved for member in crew.members.values()):
            for event in crew.executor.events(0.2):
                if event.kind in ("done", "lost"):
                    self._on_event(event, crew)

    def _stopped(self, stop: Stop) -> int:
        snapshot = self.measures.snapshot
        snapshot.state, snapshot.reason = ("stopped" if stop.code == 4 else "failed"), stop.reason
        self.measures.total(self.ledger)
        self.progress.update(snapshot, now=True)
        self.progress.event("stopped", reason=stop.reason, code=stop.code)
        self.progress.error(f"stopped: {stop.reason}")
        pending = f"{snapshot.pending} of {snapshot.cells} cells are pending"
        self.progress.log(f"{pending}; continue with: {command()}")
        return stop.code

    def _finish(self, fresh: bool) -> int:
        """Aggregate, and say where the results are and what they say."""
        self.measures.total(self.ledger)
        asked = [entry.name for entry in self.config.aggregate]
        missing = [name for name in asked if not self.root.exists(names.result(name))]
        finished = ShardedRun(self.root)
        if asked and (fresh or missing):
            changed = finished.config.aggregate != self.config.aggregate
            finalize(finished, self.config.aggregate if changed else None, own=True)
        reach("driver.aggregated")
        self.measures.snapshot.state = "complete"
        self.progress.update(self.measures.snapshot, now=fresh)
        self.progress.event("complete", held=self.ledger.num_held, failed=self.ledger.num_failed)
        if not fresh and not missing:
            self.progress.log("nothing to do: this run is complete")
        self.progress.log(f"{self.ledger.num_held} cells committed, {self.ledger.num_failed} failed, in {self.root}")
        for sentence in sentences(finished) if asked else ():
            self.progress.log(f"  {sentence}")
        if failed := finished.analyses_failed:
            self.progress.error(f"{failed} analyses failed: outcomes named failed.<analyzer or judge> say why; "
                                   "means are over the cells that have a value")  # fmt: skip
        return 3 if self.ledger.num_failed or failed else 0


def _for_actors(config: SweepConfig) -> dict[str, Any]:
    """The configuration as plain values, without the items: units carry their rows."""
    plain = config.to_dict()
    return {**plain, "scenario": {**plain["scenario"], "items": ""}}
