"""One unit on one replica: trunks first, each followed by its cells, all in flight together, to one commit."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlens.interp.routing import routing_of
from interlens.scheduler import Scheduler

from ..aggregates import registry
from ..aggregates.base import CellResult
from ..config.turns import Part, acts
from ..failpoints import reach
from ..folder.cells import Cell, Trunk, Unit, part_of
from ..folder.reader import RunFolder
from ..folder.writer import UnitWriter
from ..plan import replay
from . import patching
from .analysis import analysed, num_failed
from .routing import routing_rows
from .setting import Setting
from .shared import ERROR_CHARS, Shared, Turns, short_error

if TYPE_CHECKING:
    from interlens.interp.activation_cache import CaptureSpec
    from interlens.work import Steps

    from ..config.schema import InterventionConfig


class Stopped(Exception):
    """Raised between two steps of the engine when the driver has asked to stop."""


class UnitRun:
    """One unit on one replica, from its first turn to its commit."""

    def __init__(self, shared: Shared, unit: Unit, trunk_units: dict[str, str], attempts: int):
        self.shared, self.unit, self.trunk_units, self.attempts = shared, unit, trunk_units, attempts
        base = shared.setting(unit.part, dict(unit.cells[0].condition) if unit.cells else {})
        self.writer = UnitWriter(shared.store, unit, base.names)
        self.by_trunk: dict[str, list[Cell]] = defaultdict(list)
        for cell in unit.cells:
            self.by_trunk[cell.trunk].append(cell)
        self.sums = registry.sums(registry.build(shared.config.aggregate))
        self.states = {aggregate.name: aggregate.zero() for aggregate in self.sums}
        self.left = {cell.id: cell for cell in unit.cells}
        self.recipients: dict[str, list[Cell]] = defaultdict(list)
        """Cell -> cells of this unit that it gives activations to."""
        for cell in unit.cells:
            for donor in {*cell.donors} & set(self.left) - {cell.id}:
                self.recipients[donor].append(cell)
        self.blocked: dict[str, tuple[Cell, Any]] = {}
        """Cells whose trunk is there and that wait for a donor, with that trunk."""
        self._read: patching.Archive | None = None
        self.given: dict[str, dict[tuple, Any]] = {}
        """Donor -> what it left for its recipients, until all of them are done."""
        self.left_trunks = {trunk.id: trunk for trunk in unit.trunks if trunk.id not in trunk_units}
        self.tokens = self.num_held = self.num_failed = 0
        self.first_error, self.analyses_failed = "", 0
        scenario = base.config.scenario
        planned = len(self.left_trunks) * scenario.trunk.turns + len(self.left) * scenario.branch.turns
        self.turns = shared.turns[unit.id] = Turns(planned=planned, cells=len(unit.cells))

    def run(self) -> dict[str, Any]:

        rows = self.shared.config.cluster.rows
        self.scheduler = Scheduler(max_live=max(2 * rows, 64), tick=self._tick)
        begun, written = time.monotonic(), self.shared.seconds["writing"]
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
            written = self.shared.seconds["writing"] - written
            self.shared.seconds["forward"] += max(time.monotonic() - begun - written, 0.0)
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
            self._branch(self._by_length() if self.shared.config.scenario.replay else list(self.unit.cells), ())

    def _play_trunk(self, trunk: Trunk) -> Steps:
        setting = self.shared.setting(self.unit.part, dict(trunk.condition))
        conversation = setting.conversation("trunk", self.unit.items[trunk.item])
        conversation.key = (trunk.item, trunk.seed)
        if (recorded := self.shared.recorded) is not None:
            said = recorded.trunk(trunk.id)[len(conversation.transcript) :]
            records = yield from self._replay(conversation, setting, "trunk", said)
        else:
            records = yield from self._play(conversation, setting, "trunk")
        return list(conversation.transcript), records, _routing(conversation, setting, records)

    def _read_back(self, trunk: str) -> list[Any]:

        return RunFolder(self.shared.store).trunk(trunk)

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
        setting = self.shared.setting(self.unit.part, dict(cell.condition))
        row = self.unit.items[cell.item]
        conversation = setting.conversation("branch", row, trunk)
        conversation.key = (cell.item, cell.trunk_seed, cell.branch_seed)
        if trunk:
            conversation.branch_start = len(trunk)
        outcomes: dict[str, Any] = {}
        if (recorded := self.shared.recorded) is not None:
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
        said = list(conversation.transcript)
        outcomes = {**outcomes, **(yield from analysed(conversation, self.shared.analyzers, setting.judges))}
        return said, records, outcomes, len(trunk), _routing(conversation, setting, records)

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
            self.shared.tokens += generated
        if not asked or cell is None:
            return turn.records
        given, own = patching.parted(number, asked, specs, turn, conversation.participant(speaker))
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
                if self.shared.recorded is not None:
                    replay.check_same(message, conversation.transcript[-1])
                    conversation.transcript[-1] = message.copy()
            number += message.author in people
        if local is None and self.shared.recorded is None:
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
            setting = self.shared.setting(self.unit.part, dict(recipient.condition))
            for edit, donor in zip(setting.patches, recipient.donors, strict=True):
                if donor == cell.id and speaker in edit.participants and acts(edit, "branch", turn):
                    found[patching.spec_of(edit)] = edit
        return found

    def _patches(self, conversation: Any, setting: Setting, cell: Cell, turn: int, speaker: str) -> Steps:
        """The patches of one turn; a patch from the cell itself puts back what the prompt gives without it."""

        def own(edits: list[InterventionConfig], patches: list[Any]) -> Steps:
            specs = tuple(dict.fromkeys(map(patching.spec_of, edits)))
            steering = setting.options("branch", turn, speaker).get("steering")
            sample = yield from conversation.turn(
                speaker, commit=False, forced=(), capture=specs, patch=patches, steering=steering
            )
            layers = conversation.participant(speaker).num_layers
            return patching.kept(turn, edits, specs, sample.records, layers)

        return (yield from patching.patches_of(
            cell, setting, turn, speaker, self._archive, own=own, here=self.given
        ))  # fmt: skip

    def _archive(self) -> patching.Archive:
        """What was committed before this unit was dispatched."""
        if self._read is None:
            self._read = patching.Archive(self.shared.store, self.shared.models)
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
        if done.error is not None and self.shared.stopping.is_set():
            raise Stopped  # a stop cuts requests short; no cell fails by it
        begun = time.monotonic()
        if isinstance(done.tag, Trunk):
            self._trunk_done(done)
        else:
            self._cell_done(done)
        self.shared.seconds["writing"] += time.monotonic() - begun

    def _trunk_done(self, done: Any) -> None:
        trunk, cells = done.tag, self.by_trunk[done.tag.id]
        self.left_trunks.pop(trunk.id)
        if done.error is None:
            messages, records, routing = done.value
            self.writer.models = self.shared.setting(self.unit.part, dict(trunk.condition)).names
            self.writer.add_trunk(trunk.id, messages, records, routing)
            self._branch(cells, messages)
            return
        error = f"trunk {trunk.id} failed: {short_error(done.error)}"
        self.writer.fail_trunk(trunk.id, short_error(done.error), done.traceback or "", self.attempts + 1)
        for cell in cells:
            if cell.id in self.left:  # not with its donor
                self._fail(cell, error, done.traceback or "")

    def _cell_done(self, done: Any) -> None:
        cell = done.tag
        if done.error is not None:
            self._fail(cell, short_error(done.error), done.traceback or "")
            return
        messages, records, outcomes, start, routing = done.value
        result = CellResult(
            cell=cell, item_row=self.unit.items[cell.item], messages=messages, records=records, outcomes=outcomes,
            num_trunk_messages=start, routing=routing,
        )  # fmt: skip
        try:
            added = self._add_to_sums(result)
            self.writer.models = self.shared.setting(self.unit.part, dict(cell.condition)).names
            self.writer.add_cell(cell, messages[start:], records, outcomes, start=start)
            self.writer.add_routing(cell, routing)
        except OSError:
            raise
        except Exception as error:
            self._fail(cell, short_error(error), traceback.format_exc())
            return
        self.states = added
        self.left.pop(cell.id)
        self.num_held += 1
        self.analyses_failed += num_failed(outcomes)
        self.shared.cells[self.unit.id] = self.num_held
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
            children=children,
            counters={
                "tokens": self.tokens,
                "cost": round(self.shared.models.newly_spent(), 6),
                "analyses_failed": self.analyses_failed,
            },
        )
        self.shared.seconds["writing"] += time.monotonic() - begun
        reach("replica.finished")
        return {**ack, "outcome": outcome, "children": len(children), "first_error": self.first_error[:300]}

    def _tick(self) -> None:
        self.shared.ticks[self.unit.id] += 1
        reach("replica.in_forward")
        if self.shared.stopping.is_set():
            raise Stopped


def _is_of(fed: Any, speaker: Any) -> bool:
    """True if recorded tokens are of this participant's own tokenizer and template."""
    return fed is not None and fed.template_hash in ("", speaker.template.hash)


def _routing(conversation: Any, setting: Setting, records: list[Any]) -> list[dict[str, Any]]:
    """Rows of `routing` for the records of site `router`."""

    def routed(record: Any) -> Any:
        return routing_of(conversation.participant(record.participant).model, [record])[0]

    per_message = any(capture.routing == "message" for capture in setting.config.capture)
    return routing_rows(records, routed, per_message)
