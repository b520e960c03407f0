"""How large a sweep will be, from its configuration alone: no model is loaded, no cell is listed.

Every reply is taken to use its whole budget, which small models nearly do; `measure` runs one unit instead. What
Parquet needs per row and file is measured (bytes after compression) and is little beside the tensors.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens.interp.select import Select

from . import items, replay, shapes
from .config import CaptureConfig, SweepConfig
from .grid import applied, conditions
from .places import Remote, place
from .selection import parse_tokens

if TYPE_CHECKING:
    from .plan import Unit

UNIT_BYTES = 512_000_000
MAX_UNIT_CELLS = 2048
UNKNOWN_LAYERS, UNKNOWN_WIDTH = 32, 4096
"""Assumed where a model's sizes cannot be read."""
FILE_BYTES = {"messages": 6_000, "records": 10_000, "outcomes": 3_000}
ROW_BYTES = {"messages": 40, "records": 25, "outcomes": 70, "plan": 25}
GENERATED_BYTES, PROMPT_BYTES, RECORD_TOKEN_BYTES = 4.5, 1.0, 0.5
"""Per token of a message's reply, of its prompt, of a record."""
CHARS_PER_TOKEN, MESSAGE_MARKUP, SYSTEM_TOKENS = 4.5, 5, 25
"""Of text; around a message; of the system prompt that a template adds where a participant has none."""
COMMIT_CELL_BYTES, KEY_BYTES = 25, 300
RESERVE_BYTES = 500_000_000
"""What a run leaves free on its disk."""


def speakers(config: SweepConfig, part: str) -> list[str]:
    """Who speaks in each turn of the trunk or the branch: participants in order, the branch going on where it ends."""
    order = list(config.scenario.participants)
    before = config.scenario.trunk.turns if part == "branch" else 0
    return [order[(before + turn) % len(order)] for turn in range(getattr(config.scenario, part).turns)]


def budget(config: SweepConfig, name: str, part: str) -> int:
    """Tokens that one turn of a participant may generate in the trunk or the branch."""
    participant = config.scenario.participants[name]
    if participant.kind == "scripted":
        return 0
    return getattr(config.scenario, part).max_new_tokens or participant.max_new_tokens


def captures_turn(capture: CaptureConfig, part: str, turn: int) -> bool:
    """True if `turns:` names this turn of the trunk or branch; numbers count the branch's turns."""
    if isinstance(capture.turns, str):
        return capture.turns in (part, "all")
    return part == "branch" and turn in capture.turns


def default_unit_cells(config: SweepConfig) -> int:
    """Cells of a unit: about 512 MB of tensors, at most 2 048."""
    per_cell = tensor_bytes(config)
    return max(1, min(MAX_UNIT_CELLS, UNIT_BYTES // per_cell if per_cell else MAX_UNIT_CELLS))


def tensor_bytes(config: SweepConfig, part: str = "branch") -> int:
    """Bytes of activations that one cell (one trunk) keeps, every reply at its budget; of a replay's first rows the
    average."""
    if config.scenario.replay:
        rows = list(itertools.islice(items.read(config.scenario.source), 64))
        config = applied(config, next(conditions(config.grid)))
        return sum(load.tensors for row in rows for load in _replayed(config, row)) // max(1, len(rows))
    return sum(load.tensors for load in _turns(config, part))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one turn costs."""

    generated: int = 0
    prompt: int = 0
    tensors: int = 0
    records: int = 0
    record_tokens: int = 0
    recomputed: int = 0
    """Prompt positions that a capture selects: they are run through the model again where their KV is reused."""


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """What a turn is fed, in tokens."""

    tokens: int
    markup: int = 0
    """Of these, role markup and what the template adds: left out by captures unless `special: keep`."""
    shared: int = 0
    """Of these, before the branch point."""


def _turns(config: SweepConfig, part: str) -> Iterator[Load]:
    scenario = config.scenario
    said, messages = _text_tokens(scenario.first_message), int(bool(scenario.first_message))
    before = said
    if part == "branch":
        earlier = speakers(config, "trunk")
        said += sum(budget(config, n, "trunk") + MESSAGE_MARKUP for n in earlier)
        before = said
        said += _text_tokens(scenario.framing)
        messages += len(earlier) + bool(scenario.framing)
    for turn, name in enumerate(speakers(config, part)):
        own = scenario.participants[name].system_prompt
        system, added = (_text_tokens(own), MESSAGE_MARKUP) if own else (SYSTEM_TOKENS, SYSTEM_TOKENS)
        generated = budget(config, name, part)
        tokens = said + MESSAGE_MARKUP + system
        shared = before + system if part == "branch" else tokens + generated
        prompt = _Prompt(
            tokens=tokens if generated else 0, markup=added + (messages + 1) * MESSAGE_MARKUP,
            shared=shared if scenario.trunk.turns else 0,
        )  # fmt: skip
        yield _load(config, name, part, turn, prompt, generated)
        said, messages = said + MESSAGE_MARKUP + generated, messages + 1


def _replayed(config: SweepConfig, row: dict[str, Any]) -> Iterator[Load]:
    """The turns of a given conversation: what is said is fed, nothing is generated."""
    prompt, number, last = SYSTEM_TOKENS, 0, None
    said = replay.conversation(row, config.scenario)
    for message in said:
        last = config.scenario.participants.get(message.author)
        length = len(message.fed.generated) if message.fed else round(len(message.content) / CHARS_PER_TOKEN)
        prompt += MESSAGE_MARKUP
        if last is not None and last.is_local:
            yield _load(config, message.author, "branch", number, _Prompt(tokens=prompt), length)
        number += last is not None
        prompt += length
    if last is None or not last.is_local:
        for name, participant in config.scenario.participants.items():
            if participant.is_local:
                yield _load(config, name, "branch", number, _Prompt(tokens=prompt), 0)
                number += 1


def _load(config: SweepConfig, name: str, part: str, turn: int, prompt: _Prompt, generated: int) -> Load:
    caught = [c for c in config.capture if name in c.participants and captures_turn(c, part, turn)]
    kept = [_kept(config, c, name, prompt, generated) for c in caught]
    return Load(
        generated=generated, prompt=prompt.tokens, tensors=sum(k.tensors for k in kept),
        records=sum(k.records for k in kept),
        record_tokens=sum(k.record_tokens for k in kept), recomputed=max((k.recomputed for k in kept), default=0),
    )  # fmt: skip


def _text_tokens(text: str | None) -> int:
    return round(len(text) / CHARS_PER_TOKEN) + MESSAGE_MARKUP if text else 0


def _kept(config: SweepConfig, capture: CaptureConfig, name: str, prompt: _Prompt, generated: int) -> Load:
    shape = shapes.of(config, config.scenario.participants[name].model)
    from_prompt, from_reply = _selected(parse_tokens(capture.tokens), prompt, generated)
    if capture.special == "drop":
        from_prompt -= round(prompt.markup * from_prompt / max(prompt.tokens, 1))
    rows = min(from_prompt + from_reply, prompt.tokens + generated)
    values = [layers * width for layers, width in _vectors(config, capture, name)]
    records = sum(layers for layers, _ in _vectors(config, capture, name))
    tensors = sum(values) * (4 if capture.pool else rows * (shape.item_bytes if shape else 2))
    return Load(tensors=tensors, records=records, record_tokens=records * rows, recomputed=from_prompt)


def _vectors(config: SweepConfig, capture: CaptureConfig, name: str) -> Iterator[tuple[int, int]]:
    """(layers, width) of each captured site of a participant."""
    shape = shapes.of(config, config.scenario.participants[name].model)
    for site in capture.sites:
        every = 1 if site in ("embed", "final_norm", "logits") else shape.layers if shape else UNKNOWN_LAYERS
        layers = 1 if every == 1 else len(capture.layers) if capture.layers is not None else every
        yield layers, shape.site_width(site) if shape else UNKNOWN_WIDTH


def sums_bytes(config: SweepConfig) -> int:
    """Bytes at most that the sums over captured rows take in one unit: as many keys as its cells can have."""
    from .aggregates import build, sums
    from .aggregates.streaming import RecordSum

    found = 0
    for aggregate in sums(build(config.aggregate)):
        if isinstance(aggregate, RecordSum) and aggregate.streams:
            for capture, name in ((c, n) for c in config.capture for n in c.participants):
                if aggregate.source.pool == capture.pool and aggregate.source.participant in (None, name):
                    keys = len(_keys(config, aggregate, name))
                    for layers, width in _vectors(config, capture, name):
                        values = width + width * (width if aggregate.covariance else 1)
                        found += keys * layers * (8 * values + KEY_BYTES)
    return found


def _keys(config: SweepConfig, aggregate: Any, name: str) -> set[Any]:
    """The keys under which an aggregate may put one participant's rows of one place, by the first conditions and items."""
    from .aggregates.columns import with_short_names

    place = {"participant": name, "site": "residual", "layer": 0, "pool": aggregate.source.pool, "selection": ""}
    of_items = any(column.startswith("item") for column in aggregate.names())
    rows = list(itertools.islice(items.read(config.scenario.source), 64 if of_items else 1))
    found = set()
    for condition in itertools.islice(conditions(config.grid), 256):
        for item in rows:
            row = {
                **{f"item.{k}": v for k, v in item.items()},
                "item": item["id"],
                **with_short_names(condition),
                **place,
            }
            try:
                found.add(aggregate.key_of(row))
            except (KeyError, TypeError, ValueError):
                found.add("")  # by what is known only when it has been said
    return found - {None}


def _selected(select: Select, fed: _Prompt, generated: int) -> tuple[int, int]:
    """About how many prompt and reply positions a selection takes."""
    op, args, prompt = select.op, select.args, fed.tokens
    if op == "or":
        parts = [_selected(part, fed, generated) for part in args]
        return min(sum(p for p, _ in parts), prompt), min(sum(g for _, g in parts), generated)
    if op == "minus":
        return _selected(args[0], fed, generated)
    if op == "all":
        return prompt, generated
    if op == "branch":
        return max(0, prompt - fed.shared), max(0, prompt + generated - max(fed.shared, prompt))
    if op == "prompt" or (op == "phase" and args[0] == "prompt"):
        return prompt, 0
    if op in ("generated", "phase"):
        return 0, generated
    if op == "window":
        first, last, of = args
        size = prompt if of == "prompt" else generated
        count = max(0, min(last + size * (last < 0), size) - min(first + size * (first < 0), size))
        return (count, 0) if of == "prompt" else (0, count)
    if op == "positions":
        return min(len(args), prompt), 0
    return min(30, prompt), 0  # a message, or the special tokens


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a plan is."""

    items: int = 0
    trunks: int = 0
    cells: int = 0
    units: int = 0
    tokens: int = 0
    """Generated."""
    tensor_bytes: int = 0
    other_bytes: int = 0
    """Tables, sums and commits."""
    recomputed: int = 0
    """Prompt positions that captures run through the model again."""

    @property
    def bytes(self) -> int:
        return self.tensor_bytes + self.other_bytes


def size(config: SweepConfig) -> Size:
    """The whole plan's, from one pass over the items and one over the grid."""
    from .checks import applied_and_normalized
    from .identity import cast_of
    from .plan import seeds

    num_items = sum(1 for _ in items.read(config.scenario.source))
    trunk_seeds, branch_seeds = len(seeds(config.scenario.trunk.seeds)), len(seeds(config.scenario.branch.seeds))
    trunk_axes = tuple(axis for axis in config.grid if axis.is_trunk)
    after = tuple(axis for axis in config.grid if not axis.is_trunk)
    settings, casts, num_points = 0, {}, 0
    total: dict[str, float] = dict.fromkeys(("tokens", "tensors", "other", "recomputed"), 0)
    for shared in conditions(trunk_axes):
        settings += 1
        base = applied_and_normalized(config, shared)
        if base.scenario.trunk.turns:
            _add(total, base, "trunk", num_items * trunk_seeds)
        for point in conditions(after):
            num_points += 1
            under = applied_and_normalized(config, {**shared, **point})
            casts[cast_of(under)] = None
            if config.scenario.replay:
                for row in items.read(config.scenario.source):
                    _sum(total, under, _replayed(under, row), trunk_seeds * branch_seeds)
                total["recomputed"] = 0
            else:
                _add(total, under, "branch", num_items * trunk_seeds * branch_seeds)
    trunks = num_items * trunk_seeds * settings
    cells = num_items * trunk_seeds * branch_seeds * num_points
    limit = config.plan.unit_cells or default_unit_cells(config)
    whole = max(1, limit // max(1, branch_seeds * num_points // max(settings, 1)))
    has_trunk = config.scenario.trunk.turns > 0 or bool(trunk_axes)
    pieces = len({**casts, cast_of(config): None} if has_trunk else casts)
    units = math.ceil(trunks / whole) * pieces
    models = {name: p.model for name, p in config.scenario.participants.items()}
    indices = {(models[name], site) for c in config.capture for name in c.participants for site in c.sites}
    per_unit = FILE_BYTES["messages"] + len(indices) * FILE_BYTES["records"]
    per_unit += FILE_BYTES["outcomes"] * config.scenario.has_outcomes + sums_bytes(config)
    other = total["other"] + units * per_unit + cells * (COMMIT_CELL_BYTES + ROW_BYTES["plan"])
    return Size(
        items=num_items, trunks=trunks, cells=cells, units=units, tokens=round(total["tokens"]),
        tensor_bytes=round(total["tensors"]), other_bytes=round(other), recomputed=round(total["recomputed"]),
    )  # fmt: skip


def _add(total: dict[str, float], config: SweepConfig, part: str, times: int) -> None:
    scenario = config.scenario
    _sum(total, config, _turns(config, part), times)
    said = scenario.first_message if part == "trunk" or not scenario.trunk.turns else scenario.framing
    total["other"] += times * ROW_BYTES["messages"] * bool(said)
    if part == "branch" and scenario.has_outcomes:
        total["other"] += times * ROW_BYTES["outcomes"]
    if part == "branch":
        for judge in scenario.judges.values():
            total["tokens"] += times * judge.max_new_tokens * (judge.kind == "model")
            total["other"] += times * (len(judge.prompt) + CHARS_PER_TOKEN * judge.max_new_tokens)


def _sum(total: dict[str, float], config: SweepConfig, loads: Iterable[Load], times: int) -> None:
    for load in loads:
        total["tokens"] += times * load.generated
        total["tensors"] += times * load.tensors
        total["recomputed"] += times * load.recomputed
        total["other"] += times * (
            ROW_BYTES["messages"] + GENERATED_BYTES * load.generated + PROMPT_BYTES * load.prompt
            + ROW_BYTES["records"] * load.records + RECORD_TOKEN_BYTES * load.record_tokens
        )  # fmt: skip


def describe(config: SweepConfig) -> str:
    """The plan in a few lines, for people."""
    found = size(config)
    axes = [f"  {axis.path}: {', '.join(map(str, axis.labels))}" for axis in config.grid]
    trunk = f", {found.trunks} trunks of {config.scenario.trunk.turns} turns" if config.scenario.trunk.turns else ""
    notes = [
        f"{e.kind} on {', '.join(e.participants)} edits the trunk's positions too (tokens: {e.tokens}), "
        "so these rows share no KV with unsteered ones"
        for e in config.intervention
        if config.scenario.trunk.turns and _touches_trunk(parse_tokens(e.tokens))
    ]
    notes += [
        f"patch on {', '.join(e.participants)} from {_from(e.from_)}: a patched cell runs after its donor"
        for e in config.intervention if e.kind == "patch"
    ]  # fmt: skip
    if found.recomputed:
        notes.append(
            f"captures select about {found.recomputed} prompt positions, which are run through the model again"
        )
    return "\n".join([
        f"{config.experiment} -> {config.run.dir}",
        f"{found.cells} cells in {found.units} units: {found.items} items{trunk}, "
        + ("replayed" if config.scenario.replay else f"{config.scenario.branch.turns} turns a cell"),
        *axes,
        f"about {found.tokens} tokens to generate, if every reply uses its budget" if not config.scenario.replay
        else f"about {found.tokens} tokens of replies to feed, besides their prompts; none to generate",
        f"about {human(found.bytes)} to write: {human(found.tensor_bytes)} of activations, "
        f"{human(found.other_bytes)} of tables",
        *notes,
    ])  # fmt: skip


def _from(given: Any) -> str:
    return given if isinstance(given, str) else ", ".join(f"{k}={v}" for k, v in given.items()) or "the cell itself"


def _touches_trunk(select: Select) -> bool:
    if select.op in ("or", "minus"):
        return _touches_trunk(select.args[0]) or (select.op == "or" and _touches_trunk(select.args[1]))
    return select.op in ("all", "prompt") or (select.op == "phase" and select.args[0] == "prompt")


def human(size: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One unit, run."""

    cells: int
    seconds: float
    load_s: float
    tokens: int
    bytes: int
    budget: int = 0
    """Tokens that it might have generated: its cells', and those of the trunks it samples, which other units share."""


def measure(config: SweepConfig) -> Measured:
    """Run the plan's first unit on one replica in this process, in a folder that is deleted afterwards."""
    from . import folder, store
    from .planfile import PlanFile
    from .replica import Replica
    from .units import pack

    root = Path(tempfile.mkdtemp(prefix="sweeps-measure-"))
    try:
        folder.enter(replace(config, run=replace(config.run, dir=str(root), force=True)), root)
        plan = PlanFile(root)
        unit = next(plan.unit(info.id) for info in plan.infos() if info.num_cells)
        runner = Replica(config.to_dict(), str(root), unit.cast, config.cluster.threads)
        load_s = runner.load()["load_s"]
        begun = time.monotonic()
        ack = runner.run(pack(unit, {}, 0))
        seconds = time.monotonic() - begun
        commit = store.read_commit(root, unit.id)
        if commit is None or not commit.cells:
            raise RuntimeError(f"the measured unit did not finish: {ack.get('first_error') or ack.get('error')}")
        written = sum(file["bytes"] for file in commit.files)
        return Measured(cells=len(commit.cells), seconds=seconds, load_s=load_s, tokens=runner.tokens, bytes=written,
                        budget=unit_budget(config, unit))  # fmt: skip
    finally:
        shutil.rmtree(root, ignore_errors=True)


def unit_budget(config: SweepConfig, unit: Unit) -> int:
    """Tokens that a unit may generate, the trunks that it owns included; 0 for a replay."""
    if config.scenario.replay:
        return 0
    known: dict[tuple, int] = {}

    def budgeted(condition: Mapping[str, Any], part: str) -> int:
        key = (part, *condition.items())
        if key not in known:
            known[key] = sum(load.generated for load in _turns(applied(config, condition), part))
        return known[key]

    trunks = sum(budgeted(trunk.condition, "trunk") for trunk in unit.trunks if trunk.id in unit.owns)
    return trunks + sum(budgeted(cell.condition, "branch") for cell in unit.cells)


def extrapolate(config: SweepConfig, measured: Measured) -> str:
    """What one unit says of the whole plan, for people."""
    found, replicas = size(config), config.cluster.replicas
    times = found.cells / measured.cells
    work = found.tokens / measured.budget if measured.budget and found.tokens else times
    seconds = measured.load_s + measured.seconds * work / replicas
    return (
        f"measured: {measured.cells} cells in {measured.seconds:.1f} s, "
        f"{measured.tokens / measured.seconds:.0f} tokens/s, after {measured.load_s:.1f} s of loading\n"
        f"the whole plan, by that: {round(measured.tokens * work)} tokens, {human(measured.bytes * times)}, "
        f"about {seconds / 60:.1f} minutes on {replicas} replicas of this speed"
    )


def missing_bytes(config: SweepConfig, root: Any) -> int:
    """Bytes by which what is still to be written exceeds the free space, less a reserve; 0 where it fits."""
    if isinstance(place(root), Remote):
        return 0
    there = sum(f.stat().st_size for f in Path(root).rglob("*") if f.is_file()) if Path(root).is_dir() else 0
    return max(0, size(config).bytes - there - max(0, free_bytes(root) - RESERVE_BYTES))


def free_bytes(root: Any) -> int:
    """Free space of the disk on which a folder lies or will lie."""
    path = Path(root).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
