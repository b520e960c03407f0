"""Patches while cells run: what a donor leaves for its recipients, and what they make of it.

A donor of the same unit captures for its recipients in its own turns, and its activations stay on the device. What
another unit or another run has committed is read back: its prompt is fed once more, under its own interventions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import torch

from interlens.capturing import by_spec
from interlens.engine.request import Request
from interlens.errors import InterlensError
from interlens.interp.activation_cache import CaptureSpec
from interlens.interp.patching import AlignedPatch, bound
from interlens.interp.select import Layout, Select
from interlens.work import Generate

from ..config.schema import InterventionConfig, SweepConfig
from ..config.tokens import parse_tokens
from ..config.turns import acts
from ..folder import names
from ..folder.cells import Cell
from ..folder.reader import RunFolder
from ..folder.store import Where
from ..plan.normal import resolved
from ..plan.patches import From, parse_from
from .setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from interlens.interp.activation_cache import ActivationRecord
    from interlens.work import Turn

    from .models import Models


Given = Mapping[tuple, "Tensor"]
"""(turn of the branch, site, layer, tokens) -> the selected rows of the donor's prompt [n, D]."""


class DonorFailed(InterlensError):
    """A patch has no source."""


def spec_of(edit: InterventionConfig) -> CaptureSpec:
    """What a donor keeps for a patch: on its device, the prompt's rows only."""

    tokens = parse_tokens(edit.tokens) - Select.generated()
    return CaptureSpec(sites=(edit.site,), layers=edit.layers, offload=None, tokens=tokens)


def patch(given: Given, turn: int, edit: InterventionConfig) -> list[Any]:
    """The patches of one turn, one per layer. A selection that found nothing in the donor has no rows.

    They act after steering at their place: what stands there is what stood there in the donor, its steering included.
    """

    none = torch.zeros(0, 1)
    rows = {layer: given.get(_key(turn, edit, layer), none) for layer in edit.layers}
    return [AlignedPatch(found, layer, parse_tokens(edit.tokens), edit.site, rank=2) for layer, found in rows.items()]


@dataclass
class Source:
    """One finished cell of a run folder, to be fed again."""

    archive: Archive
    cell: Cell
    setting: Setting
    row: Mapping[str, Any]


class Archive:
    """Finished cells of one run folder as donors. `models`: those of the replica, which must be the folder's own."""

    def __init__(self, root: Where, models: Models):
        self.run = RunFolder(root)
        self.models = models
        self._settings: dict[tuple, Setting] = {}
        self._others: dict[str, Archive] = {}
        self._checked: set[tuple[str, str]] = set()

    def source(self, cell: str) -> Source:
        """A finished cell. DonorFailed, with its error, where it is not."""

        planned = self.run.plan_row(cell)
        if planned["state"] != "done":
            raise DonorFailed(f"its donor {cell} is {planned['state']}{self._why(cell)}")
        unit = self.run.plan.unit(planned["unit"])
        found = next(c for c in unit.cells if c.id == cell)
        key = (unit.part, *sorted(found.condition.items()))
        if key not in self._settings:
            config = resolved(self.run.config_of(unit.part), found.condition)
            self._settings[key] = Setting(config, self.models, self.run.store)
        return Source(self, found, self._settings[key], unit.items[found.item])

    def _why(self, cell: str) -> str:
        table = self.run.table("failures")
        errors = table.filter(pc.equal(table["cell"], cell))["error"].to_pylist()
        return f": {errors[-1]}" if errors else ""

    def other(self, config: SweepConfig, path: str) -> Archive:
        """The copy of another run that a patch of this one reads from."""
        digest = config.inputs[f"run:{path}"]
        if digest not in self._others:
            self._others[digest] = Archive(self.run.store.sub(names.other_run(digest)), self.models)
        return self._others[digest]

    def same(self, cell: Cell, given: From) -> str:
        """The cell here of the same item and seeds, at the labels of `given` and, where both have an axis, of `cell`."""
        wanted = {"item": cell.item, "trunk_seed": cell.trunk_seed, "branch_seed": cell.branch_seed}
        wanted |= {axis: cell.condition[axis] for axis in self.run.axes if axis in cell.condition} | dict(given.labels)
        table = self.run.cells
        if unknown := [name for name in wanted if name not in table.column_names]:
            raise DonorFailed(
                f"run {given.run} has no axis {unknown[0]!r}; it has: {', '.join(self.run.axes) or 'none'}"
            )
        for name, value in wanted.items():
            kind = table.schema.field(name).type
            table = table.filter(pc.equal(table[name], str(value) if str(kind) == "string" else value))
        if table.num_rows != 1:
            sought = ", ".join(f"{name}={value}" for name, value in wanted.items())
            raise DonorFailed(
                f"run {given.run} has {table.num_rows} cells with {sought}; "
                f"one is needed: name its axes in from ({', '.join(self.run.axes) or 'it has none'})"
            )
        return table["cell"][0].as_py()

    def check_model(self, theirs: str, mine: str) -> None:
        """DonorFailed where a model of this run has other weights than the one of the replica that is to take its place."""
        if (theirs, mine) not in self._checked:
            recorded = self.run.about["models"].get(theirs, {}).get("weights")
            if recorded != self.models.facts()[mine]["weights"]:
                raise DonorFailed(
                    f"model {theirs!r} of {str(self.run.root)!r} has other weights than {mine!r} here; "
                    "donor and recipient must be the same model"
                )
            self._checked.add((theirs, mine))


def give(source: Source, turn: int, edits: Sequence[InterventionConfig]) -> Generator[Any, Any, Given]:
    """What a finished cell computed at the prompt of one turn of its branch, for these patches."""

    archive, setting, cell = source.archive, source.setting, source.cell
    start = archive.run.num_trunk_messages(cell.id)
    said = [m for m in archive.run.messages(cell.id)[start:] if m.author in setting.config.scenario.participants]
    fed = said[turn].fed if turn < len(said) else None
    if fed is None:
        raise DonorFailed(f"its donor {cell.id} has no turn {turn} of a local model")
    prompt, layout, speaker = fed.prompt, fed.layout or Layout(), said[turn].author
    participant: Any = setting.conversation("branch", source.row).participant(speaker)
    steering = setting.options("branch", turn, speaker).get("steering", ())

    def feed(wanted: Sequence[InterventionConfig], patches: Sequence[Any]) -> Generator[Any, Any, Given]:
        specs = tuple(dict.fromkeys(map(spec_of, wanted)))
        request = Request(
            tokens=prompt, forced=(), layout=layout, capture=specs,
            adapter=participant.weights.get(participant.adapter).adapter,
            interventions=(*(bound(each, prompt, layout) for each in patches), *steering),
        )  # fmt: skip
        reply = yield Generate(participant=participant, request=request)
        if reply.error is not None:
            raise reply.error
        return kept(turn, wanted, specs, reply.records, participant.num_layers)

    patches = yield from patches_of(cell, setting, turn, speaker, lambda: archive, own=feed)
    return (yield from feed(edits, patches))


def parted(turn: int, asked: Mapping[CaptureSpec, InterventionConfig], specs: Sequence[CaptureSpec], taken: Turn,
           participant: Any) -> tuple[Given, list[ActivationRecord]]:  # fmt: skip
    """A donor's turn that ran with `specs`, those of `asked` last: what recipients need, and its own records."""

    parts = by_spec(taken.records, specs, participant.num_layers)
    own = [record for part in parts[: len(specs) - len(asked)] for record in part]
    return kept(turn, list(asked.values()), specs, taken.records, participant.num_layers), own


def kept(turn: int, edits: Sequence[InterventionConfig], specs: Sequence[CaptureSpec],
         records: list[ActivationRecord], num_layers: int | None) -> Given:  # fmt: skip
    """What `specs`, those of `edits` among them, recorded in a turn, as recipients look for it."""

    parts = dict(zip(specs, by_spec(records, specs, num_layers), strict=True))
    return {_key(turn, edit, record.layer): record.tensor for edit in edits for record in parts[spec_of(edit)]}


def _key(turn: int, edit: InterventionConfig, layer: int) -> tuple:
    return turn, edit.site, layer, str(parse_tokens(edit.tokens))


def patches_of(
    cell: Cell, setting: Setting, turn: int, speaker: str, archive: Callable[[], Archive], *,
    own: Callable[..., Generator[Any, Any, Given]], here: Mapping[str, Given] | None = None,
) -> Generator[Any, Any, list[Any]]:  # fmt: skip
    """The patches that act in one turn of a cell's branch, in order.

    own(edits, patches): what the cell itself computes at this turn's prompt under the patches that come from others.
    here: donor -> what it left in this unit; other donors are read back from `archive`.
    """
    edits = [(edit, donor) for edit, donor in zip(setting.patches, cell.donors, strict=True)
             if speaker in edit.participants and acts(edit, "branch", turn)]  # fmt: skip
    found: dict[int, list[Any]] = {}
    for i, (edit, donor) in enumerate(edits):
        if donor == cell.id:
            continue
        given = (here or {}).get(donor)
        if given is None:
            home = archive()
            other = parse_from(edit.from_)
            if other.run is not None:
                home = home.other(setting.config, other.run)
            source = home.source(donor or home.same(cell, other))
            if other.run is not None:
                home.check_model(source.setting.names[speaker], setting.names[speaker])
            given = yield from give(source, turn, [edit])
        found[i] = patch(given, turn, edit)
    if mine := [edit for edit, donor in edits if donor == cell.id]:
        given = yield from own(mine, [p for each in found.values() for p in each])
        found |= {i: patch(given, turn, edit) for i, (edit, donor) in enumerate(edits) if donor == cell.id}
    return [p for i in sorted(found) for p in found[i]]
