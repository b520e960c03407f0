"""One replica: the models of one cast, loaded once, and the units it runs.

A unit's trunks come first (sampled here if the unit owns them, else read back from the shard that holds them, token by
token), each followed by its cells; all conversations of a unit are in flight together, so they are decoded in the same
batches. What fails inside a cell fails that cell; what fails outside any cell is told to the driver. Asked to stop, a
unit commits what is complete and hands the rest to its child.
"""

from __future__ import annotations

import errno
import importlib
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import aggregates, donation, replay
from .aggregates import CellResult
from .casting import Models, Part, Setting, acts
from .config import SweepConfig
from .failpoints import reach
from .grid import conditions
from .identity import cast_of
from .places import place
from .plan import Cell, Trunk, Unit, applied
from .planfile import PlanFile
from .redact import redact
from .routing import routing_rows
from .units import part_of, unpack
from .writer import UnitWriter

if TYPE_CHECKING:
    from interlens.interp.activation_cache import CaptureSpec
    from interlens.work import Steps

    from .config import InterventionConfig

ERROR_CHARS = 1500


class Stopped(Exception):
    """Raised between two steps of the engine when the driver has asked to stop."""


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


class Replica:
    """Runs units. Several threads may run units at once: they share models and engines."""

    def __init__(self, config: dict[str, Any], run_dir: str, cast: str, threads: int = 1):
        self.config = SweepConfig.from_dict(config)
        self.root, self._cast, self._threads = place(run_dir), cast, threads
        self.stopping = threading.Event()
        self.models = Models(self.config)
        self.ticks: dict[str, int] = {}
        """Unit -> steps it has seen; a unit whose number stands still has stalled."""
        self.cells: dict[str, int] = {}
        """Unit in flight -> its finished cells."""
        self.turns: dict[str, Turns] = {}
        """Unit in flight -> how many of its turns are taken."""
        self.tokens = 0
        self.seconds: dict[str, float] = defaultdict(float)
        """By activity, summed over units: forward (turns, with what waits for the engine's lock) and writing."""
        self._busy = _Busy()
        self.recorded = replay.Recorded(self._outer()) if self.config.scenario.replay == replay.RECORDED else None
        """What is captured again, in a folder that `sweeps capture` made."""
        self._settings: dict[tuple, Setting] = {}
        self._lock = threading.Lock()
        self._configs: dict[int, SweepConfig] = {}

    def _outer(self) -> Any:
        """The run in which this folder lies, as RUN/captures/<hash>."""
        return place(str(self.root).rsplit("/captures/", 1)[0])

    def load(self) -> dict[str, Any]:
        """Load the models; returns their hashes and how long it took."""
        import torch

        begun = time.monotonic()
        torch.set_num_threads(self._threads)
        self.models.load(next(self._of_my_cast(), self.config))
        self._busy.begin()
        reach("replica.loaded")
        return {"models": self.models.facts(), "load_s": round(time.monotonic() - begun, 3)}

    def _of_my_cast(self) -> Iterator[SweepConfig]:
        """The configuration under each condition that needs exactly this replica's models."""
        for condition in conditions(self.config.grid):
            under = applied(self.config, condition)
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
                "unit": unit.id, "outcome": "error", "no_space": full, "folder": folder, "error": _short(error),
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

    def setting(self, part: int, condition: dict[str, Any]) -> Setting:
        """A condition resolved, once."""
        key = (part, *sorted(condition.items()))
        with self._lock:
            if key not in self._settings:
                config = applied(self._config(part), condition)
                self._settings[key] = Setting(config, self.models, self.root)
            return self._settings[key]

    def _config(self, part: int) -> SweepConfig:
        """The configuration with which a part of the plan entered the run; whom it calls is the user's own."""
        if part not in self._configs:
            entered, own = PlanFile(self.root).config(part), self.config.scenario
            scenario = replace(entered.scenario, analyzers=own.analyzers, judges=own.judges)
            self._configs[part] = replace(entered, scenario=scenario)
        return self._configs[part]


class UnitRun:
    """One unit on one replica, from its first turn to its commit."""

    def __init__(self, replica: Replica, unit: Unit, trunk_units: dict[str, str], attempts: int):
        self.replica, self.unit, self.trunk_units, self.attempts = replica, unit, trunk_units, attempts
        base = replica.setting(unit.part, dict(unit.cells[0].condition) if unit.cells else {})
        self.writer = UnitWriter(replica.root, unit, base.names)
        self.by_trunk: dict[str, list[Cell]] = defaultdict(list)
        for cell in unit.cells:
            self.by_trunk[cell.trunk].append(cell)
        self.sums = aggregates.sums(aggregates.build(replica.config.aggregate))
        self.states = {aggregate.name: aggregate.zero() for aggregate in self.sums}
        self.left = {cell.id: cell for cell in unit.cells}
        self.recipients: dict[str, list[Cell]] = defaultdict(list)
        """Cell -> cells of this unit that it gives activations to."""
        for cell in unit.cells:
            for donor in {*cell.donors} & set(self.left) - {cell.id}:
                self.recipients[donor].append(cell)
        self.blocked: dict[str, tuple[Cell, Any]] = {}
        """Cells whose trunk is there and that wait for a donor, with that trunk."""
        self._read: donation.Archive | None = None
        self.given: dict[str, dict[tuple, Any]] = {}
        """Donor -> what it left for its recipients, until all of them are done."""
        self.left_trunks = {trunk.id: trunk for trunk in unit.trunks if trunk.id not in trunk_units}
        self.tokens = self.num_held = self.num_failed = 0
        self.first_error = ""
        scenario = base.config.scenario
        planned = len(self.left_trunks) * scenario.trunk.turns + len(self.left) * scenario.branch.turns
        self.turns = replica.turns[unit.id] = Turns(planned=planned, cells=len(unit.cells))

    def run(self) -> dict[str, Any]:
        from interlens.scheduler import Scheduler

        rows = self.replica.config.cluster.rows
        self.scheduler = Scheduler(max_live=max(2 * rows, 64), tick=self._tick)
        begun, written = time.monotonic(), self.replica.seconds["writing"]
        try:
            self._start()
            for done in self.scheduler:
                self._finished(done)
        except Stopped:
            pass
        except BaseException:
            self.writer.abandon()
            raise
        finally:
            self.scheduler.close()
            written = self.replica.seconds["writing"] - written
            self.replica.seconds["forward"] += max(time.monotonic() - begun - written, 0.0)
        return self._close()

    # ---- trunks

    def _start(self) -> None:
        for trunk in self.unit.trunks:
            if trunk.id in self.trunk_units:
                messages = self._read_back(trunk.id)
                self._branch(self.by_trunk[trunk.id], messages)
            else:
                self.scheduler.add(self._play_trunk(trunk), tag=trunk)
        if not self.unit.trunks:
            self._branch(self._by_length() if self.replica.config.scenario.replay else list(self.unit.cells), ())

    def _play_trunk(self, trunk: Trunk) -> Steps:
        setting = self.replica.setting(self.unit.part, dict(trunk.condition))
        conversation = setting.conversation("trunk", self.unit.items[trunk.item])
        conversation.key = (trunk.item, trunk.seed)
        if (recorded := self.replica.recorded) is not None:
            said = recorded.trunk(trunk.id)[len(conversation.transcript) :]
            records = yield from self._replay(conversation, setting, "trunk", said)
        else:
            records = yield from self._play(conversation, setting, "trunk")
        return list(conversation.transcript), records, _routing(conversation, setting, records)

    def _read_back(self, trunk: str) -> list[Any]:
        from . import run

        return run.open(self.replica.root).trunk(trunk)

    # ---- cells

    def _branch(self, cells: list[Cell], trunk: Any) -> None:
        for cell in cells:
            if cell.id not in self.left:  # its donor failed
                continue
            if self._waits(cell):
                self.blocked[cell.id] = (cell, trunk)
            else:
                self.scheduler.add(self._play_cell(cell, trunk), tag=cell)

    def _waits(self, cell: Cell) -> bool:
        return any(donor in self.left for donor in cell.donors if donor != cell.id)

    def _play_cell(self, cell: Cell, trunk: Any) -> Steps:
        setting = self.replica.setting(self.unit.part, dict(cell.condition))
        row = self.unit.items[cell.item]
        conversation = setting.conversation("branch", row, trunk)
        conversation.key = (cell.item, cell.trunk_seed, cell.branch_seed)
        if trunk:
            conversation.branch_start = len(trunk)
        outcomes: dict[str, Any] = {}
        if (recorded := self.replica.recorded) is not None:
            said, outcomes = recorded.cell(self.unit, cell.id)
            said = said[len(conversation.transcript) - len(trunk) :]  # without the opening
            records = yield from self._replay(conversation, setting, "branch", said, cell)
        elif setting.config.scenario.replay:
            said = replay.conversation(row, setting.config.scenario)
            records = yield from self._replay(conversation, setting, "branch", said, cell)
        else:
            if framing := setting.framing(row):
                conversation.transcript.append(conversation.moderator_name, framing)
            records = yield from self._play(conversation, setting, "branch", cell)
        for analyze in _analyzers(setting.config.scenario.analyzers):
            outcomes.update(analyze(conversation))
        for judge in setting.judges:
            outcomes.update((yield from judge.steps(conversation)))
        return conversation, records, outcomes, len(trunk), _routing(conversation, setting, records)

    def _play(self, conversation: Any, setting: Setting, part: Part, cell: Cell | None = None) -> Steps:
        records: list[Any] = []
        for number, speaker in enumerate(setting.speakers(part)):
            records += yield from self._turn(conversation, setting, part, number, speaker, cell)
        return records

    def _turn(self, conversation: Any, setting: Setting, part: Part, number: int, speaker: str,
              cell: Cell | None = None, forced: tuple[int, ...] | None = None) -> Steps:  # fmt: skip
        """One turn with all that acts in it; its records. A donor's turn also leaves what its recipients need."""
        options = setting.options(part, number, speaker)
        if cell is not None and cell.donors:
            options["patch"] = yield from self._patches(conversation, setting, cell, number, speaker)
        asked = self._asked_of(cell, number, speaker) if cell is not None else {}
        specs = (*options.pop("capture", ()), *asked)
        turn = yield from conversation.turn(speaker, **options, capture=specs, forced=forced)
        self.turns.taken += 1
        if turn.message is not None:
            generated = int(turn.message.metadata.get("n_tokens", 0))
            self.tokens += generated
            self.replica.tokens += generated
        if not asked or cell is None:
            return turn.records
        given, own = donation.parted(number, asked, specs, turn, conversation.participant(speaker))
        self.given.setdefault(cell.id, {}).update(given)
        return own

    def _replay(self, conversation: Any, setting: Setting, part: Part, said: Sequence[Any],
                cell: Cell | None = None) -> Steps:  # fmt: skip
        """What was said, said again: a local participant's messages are fed as if they had been drawn."""
        records: list[Any] = []
        people, number, local = setting.config.scenario.participants, 0, None
        for message in said:
            local = setting.names.get(message.author)
            if local is None or not self._looked_at(setting, part, number, message.author, cell):
                conversation.transcript.append(message.copy())
                conversation.turns_taken += message.author in people
            else:
                speaker = conversation.participant(message.author)
                given = speaker.reply_ids(message.content) if message.content else ()
                tokens = message.fed.generated if _is_of(message.fed, speaker) else given
                records += yield from self._turn(conversation, setting, part, number, message.author, cell, tokens)
                if self.replica.recorded is not None:
                    replay.check_same(message, conversation.transcript[-1])
                    conversation.transcript[-1] = message.copy()
            number += message.author in people
        if local is None and self.replica.recorded is None:
            for reader in setting.names:  # the last word was somebody else's: it is read
                records += yield from self._turn(conversation, setting, part, number, reader, cell, ())
                number += 1
        return records

    def _looked_at(self, setting: Setting, part: Part, number: int, speaker: str, cell: Cell | None) -> bool:
        """True if a turn has to be run again: something of it is kept."""
        options = setting.options(part, number, speaker)
        asked = cell is not None and self._asked_of(cell, number, speaker)
        return bool(options.get("capture") or options.get("return_logprobs") or asked)

    def _by_length(self) -> list[Cell]:
        """Given conversations of similar length side by side, so that they share batches without padding."""
        rows = {name: len(str(row)) for name, row in self.unit.items.items()}
        return sorted(self.unit.cells, key=lambda cell: rows[cell.item])

    # ---- patches

    def _asked_of(self, cell: Cell, turn: int, speaker: str) -> dict[CaptureSpec, InterventionConfig]:
        """What a donor keeps in one of its turns for the cells of this unit that are patched from it."""
        found = {}
        for recipient in self.recipients.get(cell.id, ()):
            setting = self.replica.setting(self.unit.part, dict(recipient.condition))
            for edit, donor in zip(setting.patches, recipient.donors, strict=True):
                if donor == cell.id and speaker in edit.participants and acts(edit, "branch", turn):
                    found[donation.spec_of(edit)] = edit
        return found

    def _patches(self, conversation: Any, setting: Setting, cell: Cell, turn: int, speaker: str) -> Steps:
        """The patches of one turn; a patch from the cell itself puts back what the prompt gives without it."""

        def own(edits: list[InterventionConfig], patches: list[Any]) -> Steps:
            specs = tuple(dict.fromkeys(map(donation.spec_of, edits)))
            steering = setting.options("branch", turn, speaker).get("steering")
            sample = yield from conversation.turn(
                speaker, commit=False, forced=(), capture=specs, patch=patches, steering=steering
            )
            layers = conversation.participant(speaker).num_layers
            return donation.kept(turn, edits, specs, sample.records, layers)

        return (yield from donation.patches_of(
            cell, setting, turn, speaker, self._archive, own=own, here=self.given
        ))  # fmt: skip

    def _archive(self) -> donation.Archive:
        """What was committed before this unit was dispatched."""
        if self._read is None:
            self._read = donation.Archive(self.replica.root, self.replica.models)
        return self._read

    def _settled(self, cell: Cell) -> None:
        """Cells that waited for this one go on; what is needed no more is let go."""
        for recipient in self.recipients.get(cell.id, ()):
            if recipient.id in self.blocked and not self._waits(recipient):
                self.scheduler.add(self._play_cell(*self.blocked.pop(recipient.id)), tag=recipient)
        for donor in cell.donors:
            if not any(other.id in self.left for other in self.recipients.get(donor, ())):
                self.given.pop(donor, None)

    # ---- outcomes

    def _finished(self, done: Any) -> None:
        if done.error is not None and self.replica.stopping.is_set():
            raise Stopped  # a stop cuts requests short; no cell fails by it
        begun = time.monotonic()
        if isinstance(done.tag, Trunk):
            self._trunk_done(done)
        else:
            self._cell_done(done)
        self.replica.seconds["writing"] += time.monotonic() - begun

    def _trunk_done(self, done: Any) -> None:
        trunk, cells = done.tag, self.by_trunk[done.tag.id]
        self.left_trunks.pop(trunk.id)
        if done.error is None:
            messages, records, routing = done.value
            self.writer.models = self.replica.setting(self.unit.part, dict(trunk.condition)).names
            self.writer.add_trunk(trunk.id, messages, records, routing)
            self._branch(cells, messages)
            return
        error = f"trunk {trunk.id} failed: {_short(done.error)}"
        self.writer.fail_trunk(trunk.id, _short(done.error), done.traceback or "", self.attempts + 1)
        for cell in cells:
            if cell.id in self.left:  # not with its donor
                self._fail(cell, error, done.traceback or "")

    def _cell_done(self, done: Any) -> None:
        cell = done.tag
        if done.error is not None:
            self._fail(cell, _short(done.error), done.traceback or "")
            return
        conversation, records, outcomes, start, routing = done.value
        messages = list(conversation.transcript)
        result = CellResult(
            cell=cell, item_row=self.unit.items[cell.item], messages=messages, records=records, outcomes=outcomes,
            num_trunk_messages=start, routing=routing,
        )  # fmt: skip
        try:
            added = self._add_to_sums(result)
            self.writer.models = self.replica.setting(self.unit.part, dict(cell.condition)).names
            self.writer.add_cell(cell, messages[start:], records, outcomes, start=start)
            self.writer.add_routing(cell, routing)
        except OSError:
            raise
        except Exception as error:
            self._fail(cell, _short(error), traceback.format_exc())
            return
        self.states = added
        self.left.pop(cell.id)
        self.num_held += 1
        self.replica.cells[self.unit.id] = self.num_held
        self._settled(cell)

    def _add_to_sums(self, result: CellResult) -> dict[str, Any]:
        """The states with this cell in all of them, or an exception and no state changed."""
        changed = {}
        for aggregate in self.sums:
            one = aggregate.zero()
            aggregate.add(one, result)
            changed[aggregate.name] = aggregate.merge(self.states[aggregate.name], one)
        return changed

    def _fail(self, cell: Cell, error: str, details: str) -> None:
        self.writer.fail_cell(cell, error, details, self.attempts + 1)
        self.left.pop(cell.id)
        self.num_failed += 1
        self.first_error = self.first_error or error
        self.blocked.pop(cell.id, None)
        for recipient in self.recipients.get(cell.id, ()):
            if recipient.id in self.left:
                self._fail(recipient, f"its donor {cell.id} failed: {error}"[:ERROR_CHARS], details)
        self._settled(cell)

    # ---- the end

    def _close(self) -> dict[str, Any]:
        unit, ack = self.unit, {"unit": self.unit.id, "held": self.num_held, "failed": self.num_failed}
        done_trunks = len(unit.trunks) - len(self.trunk_units) - len(self.left_trunks)
        if (self.left or self.left_trunks) and not (self.num_held or self.num_failed or done_trunks):
            self.writer.abandon()
            return {**ack, "outcome": "returned"}
        children = []
        if self.left or self.left_trunks:
            children = [part_of(unit, f"{unit.id}.0", set(self.left), self.left_trunks)]
        for name, state in self.states.items():
            self.writer.add_sums(name, state)
        begun = time.monotonic()
        outcome = self.writer.commit(
            children=children, counters={"tokens": self.tokens, "cost": round(self.replica.models.newly_spent(), 6)}
        )
        self.replica.seconds["writing"] += time.monotonic() - begun
        reach("replica.finished")
        return {**ack, "outcome": outcome, "children": len(children), "first_error": self.first_error[:300]}

    def _tick(self) -> None:
        self.replica.ticks[self.unit.id] += 1
        reach("replica.in_forward")
        if self.replica.stopping.is_set():
            raise Stopped


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


def _is_of(fed: Any, speaker: Any) -> bool:
    """True if recorded tokens are of this participant's own tokenizer and template."""
    return fed is not None and fed.template_hash in ("", speaker.template.hash)


def _analyzers(paths: tuple[str, ...]) -> Iterator[Any]:
    """Functions at import paths from the user's own configuration."""
    for path in paths:
        module, _, name = path.partition(":")
        yield getattr(importlib.import_module(module), name)


def _routing(conversation: Any, setting: Setting, records: list[Any]) -> list[dict[str, Any]]:
    """Rows of `routing` for the records of site `router`."""
    from interlens.interp.routing import routing_of

    def routed(record: Any) -> Any:
        return routing_of(conversation.participant(record.participant).model, [record])[0]

    per_message = any(capture.routing == "message" for capture in setting.config.capture)
    return routing_rows(records, routed, per_message)


def _short(error: BaseException) -> str:
    return redact(f"{type(error).__name__}: {error}")[:ERROR_CHARS]
