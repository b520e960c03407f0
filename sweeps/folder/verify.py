"""`sweeps verify`: a run folder against its commits. What they name must be there, whole and consistent."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from .. import errors
from . import names, schemas, tensors
from . import rows as rows_module
from .commits import Commit, committed_units, read_commit
from .copies import copied_direction
from .garbage import TABLES, foreign, uncommitted
from .lease import exclusively
from .reader import RunFolder
from .store import Store, Where


@dataclass(kw_only=True)
class Verdict:
    """What `verify` found."""

    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Units whose files are not what their commits say, or that stand on what is gone."""
    captures: dict[str, Verdict] = field(default_factory=dict)
    """Of each folder that `sweeps capture` added."""
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; notes are not wrong."""
        return not self.problems

    @property
    def lines(self) -> list[str]:
        """For people: problems, notes, and what was looked at."""
        looked = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        end = f"{'ok' if self.ok else f'{len(self.problems)} problems'}: {looked}"
        return [*self.problems, *self.notes, end]


def verify(root: Where, *, deep: bool = False) -> Verdict:
    """Check that every planned cell is in exactly one state and every committed file is there with its size and rows.

    `deep` also rehashes every file and what cells are made from (settings, items, directions), and reads every row:
    tokens of records against those of their messages, spans against rows, addresses against tensors. What `sweeps
    capture` added is looked at too. Reads only; a unit at a time.
    """
    run = RunFolder(root)
    found = Verdict()
    for unit in committed_units(run.store):
        try:
            read_commit(run.store, unit)
        except errors.Damaged as error:
            found.problems.append(str(error))
            found.damaged.append(unit)
    if found.damaged:  # which cells there are in what state is known only when all can be read
        return found
    commits = list(run.commits())
    _check_cells(run, commits, found)
    found.problems += _input_problems(run, deep)
    for commit in commits:
        before = len(found.problems)
        broken = {file["path"] for file in commit.files if not _check_file(run, file, deep, found)}
        if deep:
            _check_rows(run, commit, broken, found)
        if len(found.problems) > before:
            found.damaged.append(commit.unit)
    garbage = list(uncommitted(run, commits))
    if garbage:
        found.notes.append(f"{len(garbage)} files that no commit names, such as {garbage[0]} (sweeps gc deletes them)")
    strange = sorted(foreign(run))
    if strange:
        found.notes.append(f"{len(strange)} files that no run writes, such as {strange[0]} (left alone)")
    for added in run.captures:
        inside = found.captures[str(added.store)] = verify(added.store, deep=deep)
        where = names.capture(added.store.name)
        found.problems += [f"{where}: {problem}" for problem in inside.problems]
        found.notes += [f"{where}: {note}" for note in inside.notes]
    found.counts = {
        "commits": len(commits), "files": sum(len(c.files) for c in commits), **found.counts,
        **{f"cells {state}": count for state, count in run.counts.items()},
    }  # fmt: skip
    return found


def reopen(root: Where, found: Verdict) -> list[str]:
    """Delete the commits of damaged units, so that the command that started the run runs them again.

    With a unit go its children and retries, and the units whose cells continue its trunks or are patched from its
    cells: they must stand on what is sampled again. Returns all of them. The damaged ones go last, so that a reopening
    that is cut off can be repeated. In folders that `sweeps capture` added, the same units go, and those that are damaged
    there. Takes the folder's lease; RunRefused where a driver holds it.
    """
    run, damaged = RunFolder(root), [*dict.fromkeys(found.damaged)]
    store = run.store
    with exclusively(store):
        commits: dict[str, Commit | None] = dict.fromkeys(committed_units(store))
        commits |= {unit: read_commit(store, unit) for unit in commits if unit not in damaged}
        table = run.plan.table()
        plan = table.select([n for n in ("unit", "cell", "trunk", "donors") if n in table.column_names]).to_pylist()
        unit_of = {cell: c.unit for c in commits.values() if c for cell in (*c.failed, *c.cells)}
        standing_on: dict[str, dict[str, None]] = {}
        for row in plan:
            if row["cell"] in unit_of:
                for ground in (row["trunk"], *(row.get("donors") or ())):
                    standing_on.setdefault(ground, {})[unit_of[row["cell"]]] = None
        order = [unit for unit in damaged if unit in commits]
        for unit in order:  # grows
            commit = _read_if_sound(store, unit)
            grounds = (*commit.trunks, *commit.cells) if commit else (  # unknown: what its root may have held
                ground for row in plan if row["unit"] == unit.split(".")[0] for ground in (row["trunk"], row["cell"])
            )  # fmt: skip
            above = [other for other in commits if other.startswith(f"{unit}.")]
            for ground in grounds:
                above += standing_on.get(ground, ())
            order += [other for other in dict.fromkeys(above) if other not in order]
        for added in run.captures:
            inside = found.captures.get(str(added.store), Verdict())
            roots = {unit.split(".")[0] for unit in order}
            again = [u for u in committed_units(added.store) if u.split(".")[0] in roots]
            reopen(added.store, Verdict(damaged=[*again, *inside.damaged]))
        for unit in reversed(order):
            store.delete(names.commit(unit))
    return order


def _read_if_sound(store: Store, unit: str) -> Commit | None:
    try:
        return read_commit(store, unit)
    except errors.Damaged:
        return None


def _check_cells(run: RunFolder, commits: list[Commit], found: Verdict) -> None:
    planned = set(run.cells["cell"].to_pylist())
    held: dict[str, str] = {}
    failed: dict[str, str] = {}
    trunks: dict[str, str] = {}
    for commit in commits:
        for trunk in commit.trunks:
            if trunk in trunks:
                found.problems.append(f"trunk {trunk} is held by two commits: {trunks[trunk]} and {commit.unit}")
            trunks[trunk] = commit.unit
        for cell in commit.cells:
            if cell in held:
                found.problems.append(f"cell {cell} is held by two commits: {held[cell]} and {commit.unit}")
            held[cell] = commit.unit
        for cell in commit.failed:
            failed[cell] = commit.unit
        parent = commit.unit.rpartition(".")[0]
        if parent and not any(c.unit == parent for c in commits):
            found.problems.append(f"commit {commit.unit} stands without its parent's, {parent}")
            found.damaged.append(commit.unit)
    with contextlib.suppress(errors.Damaged):  # settings that cannot be read are told below
        _check_ground(run, held, trunks, found)
    found.problems += _miscounted(run, commits)
    for cell, unit in {**held, **failed}.items():
        if cell not in planned:
            found.problems.append(f"cell {cell} of commit {unit} is not in the plan")
    for cell in failed.keys() & held.keys():
        if not held[cell].startswith(f"{failed[cell]}.r"):
            found.problems.append(f"cell {cell} is held by {held[cell]} and failed by {failed[cell]}")


def _check_ground(run: RunFolder, held: Mapping[str, str], trunks: Mapping[str, str], found: Verdict) -> None:
    """Finished cells whose trunk, or a donor, no commit holds."""
    lost: dict[str, str] = {}
    for unit in run.plan.unit_names:
        for cell, trunk in run.plan.on_trunks(unit):
            if cell in held and trunk not in trunks:
                lost.setdefault(held[cell], f"trunk {trunk}")
    if "donors" in run.cells.column_names:
        rows = run.cells.select(["cell", "donors"]).to_pylist()
        planned = {row["cell"] for row in rows}  # a donor may be of another run
        for row in rows:
            for donor in row["donors"] or ():
                if row["cell"] in held and donor in planned and donor not in held:
                    lost.setdefault(held[row["cell"]], f"donor {donor}")
    for unit, ground in lost.items():
        found.problems.append(f"cells of {unit} stand on {ground}, which no commit holds")
        found.damaged.append(unit)


def _miscounted(run: RunFolder, commits: list[Commit]) -> Iterator[str]:
    """A commit holds, failed or handed to its children exactly the cells that its unit was given: by the plan, by its
    parent, or (a retry) those that its parent failed."""
    given: dict[str, set[str]] = {name: set() for name in run.plan.unit_names}
    for unit, cell in zip(*(run.cells[column].to_pylist() for column in ("unit", "cell")), strict=True):
        given[unit].add(cell)
    for commit in commits:
        given |= {child["id"]: {row[0] for row in child["cells"]} for child in commit.children}
        given[f"{commit.unit}.r"] = set(commit.failed)
    for commit in commits:
        handed = [row[0] for child in commit.children for row in child["cells"]]
        accounted = [*commit.cells, *commit.failed, *handed]
        if commit.unit not in given:
            yield f"commit {commit.unit} is of a unit that neither the plan nor a parent's commit names"
        elif given[commit.unit] != set(accounted) or len(accounted) > len(set(accounted)):
            wanted = len(given[commit.unit])
            yield f"commit {commit.unit} accounts for {len(accounted)} cells, of the {wanted} that it was given"
        if strange := [c["id"] for c in commit.children if c["id"].rpartition(".")[0] != commit.unit]:
            yield f"commit {commit.unit} names {strange[0]!r} as its child"


def _input_problems(run: RunFolder, deep: bool) -> Iterator[str]:
    """What cells are made from: settings and items of every part, and copies of directions and of donors' runs."""
    checks: list[Callable[[], Any]] = []
    for part in range(len(run.plan.parts)):
        checks.append(functools.partial(run.plan.config, part))
        if deep:
            checks.append(functools.partial(run.plan.check_items, part))
        elif not run.store.exists(names.items(part)):
            yield f"{names.items(part)} is missing"
    if deep:
        copies = [name for name in run.store.entries(names.INPUTS) if name.endswith(".safetensors")]
        checks += [functools.partial(copied_direction, run.store, name.split(".")[0]) for name in copies]
    for check in checks:
        try:
            check()
        except (OSError, ValueError) as error:
            yield str(error)
    for folder in map(names.other_run, run.store.entries(names.INPUTS)):
        if run.store.exists(f"{folder}/{names.RUN}"):
            donor, inner = Verdict(), RunFolder(run.store.sub(folder))
            for file in (file for commit in inner.commits() for file in commit.files):
                if file["table"] == "messages":
                    _check_file(inner, file, deep, donor)
            yield from (f"{folder}: {problem}" for problem in donor.problems)


def _check_file(run: RunFolder, file: Mapping[str, Any], deep: bool, found: Verdict) -> bool:
    """True if a committed file is what its commit says; else the problem is noted."""
    before = len(found.problems)
    found.problems += _file_problems(run, file, deep)
    return len(found.problems) == before


def _file_problems(run: RunFolder, file: Mapping[str, Any], deep: bool) -> Iterator[str]:
    path, store = file["path"], run.store
    try:
        if not store.exists(path):
            yield f"{path} is missing"
            return
    except errors.Damaged as error:
        yield str(error)
        return
    if (size := store.size(path)) != file["bytes"]:
        yield f"{path} has {size} bytes, its commit says {file['bytes']}"
        return
    if deep and _sha256(store, path) != file["sha256"]:
        yield f"{path} has another sha256 than its commit says: its content was changed"
        return
    if path.endswith(".parquet"):
        try:
            with pq.ParquetFile(store.arrow(path), filesystem=store.arrow_fs) as opened:
                count = opened.metadata.num_rows
                version = (opened.schema_arrow.metadata or {}).get(b"schema_version")
        except (OSError, ValueError) as error:
            yield f"{path} cannot be read: {error}"
            return
        if count != file["rows"]:
            yield f"{file['path']} has {count} rows, its commit says {file['rows']}"
        if version is None or int(version) not in schemas.READABLE:
            yield f"{file['path']} has schema version {version!r}"


def _sha256(store: Store, name: str) -> str:
    digest = hashlib.sha256()
    with store.open(name) as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def _check_rows(run: RunFolder, commit: Commit, broken: set[str], found: Verdict) -> None:
    """Every row of one unit: addressed rightly, and consistent with what was said."""
    files = {t: [f["path"] for f in commit.files if f["table"] == t and f["path"] not in broken] for t in TABLES}
    said: dict[tuple[Any, ...], dict[str, Any]] = {}
    ids = {*commit.cells, *commit.failed}
    for row in _rows(run, "messages", files):
        found.counts["messages"] = found.counts.get("messages", 0) + 1
        key = (row["trunk"], row["cell"], row["message_idx"])
        if key in said:
            found.problems.append(f"{commit.unit}: message {key} is there twice")
        said[key] = row
        _check_owner(row, "messages", commit, found)
        _check_message(row, commit, found)
    mapped: dict[str, tensors.TensorFile] = {}
    used: dict[tuple[str, str], list[tuple[int, int]]] = {}
    unsaid = any(f["table"] == "messages" and f["path"] in broken for f in commit.files)
    for row in _rows(run, "records", files):
        found.counts["records"] = found.counts.get("records", 0) + 1
        _check_owner(row, "records", commit, found)
        message = said.get((row["trunk"], row["cell"], row["message_idx"]))
        if unsaid or row["file"] in broken:  # said already
            continue
        for problem in _record_problems(run, row, message, files["activations"], mapped):
            found.problems.append(f"{commit.unit}: record {_name(row)}: {problem}")
        used.setdefault((row["file"], row["key"]), []).append((row["row_start"], row["row_end"]))
    for (file, key), spans in used.items():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                found.problems.append(f"{file}: rows {start} to {end} of {key} belong to two records")
    for table in ("outcomes", "failures", "routing"):
        for row in _rows(run, table, files):
            _check_owner(row, table, commit, found)
    if commit.cells and files["messages"] and (silent := ids - {k[1] for k in said} - set(commit.failed)):
        found.problems.append(f"{commit.unit}: {len(silent)} cells without a message, such as {min(silent)}")


def _rows(run: RunFolder, table: str, files: Mapping[str, list[str]]) -> Iterator[dict[str, Any]]:
    if files[table]:
        dataset = run.dataset(table, files[table])
        for batch in dataset.to_batches():
            yield from batch.to_pylist()


def _check_owner(row: Mapping[str, Any], table: str, commit: Commit, found: Verdict) -> None:
    if (row["unit"], row["attempt"]) != (commit.unit, commit.attempt):
        found.problems.append(f"{commit.unit}: a row of {table} says unit {row['unit']}, attempt {row['attempt']}")
    failing = table == "failures"
    listed = (commit.failed, commit.failed_trunks) if failing else (commit.cells, commit.trunks)
    if (row["cell"] or row["trunk"]) not in listed[row["cell"] is None]:
        found.problems.append(
            f"{commit.unit}: a row of {table} belongs to {row['cell'] or row['trunk']}, not listed there"
        )


def _check_message(row: Mapping[str, Any], commit: Commit, found: Verdict) -> None:
    where = f"{commit.unit}: message {row['message_idx']} of {row['cell'] or row['trunk']}"
    if row["tokens"] is None:
        return
    spans = [(run["start"], run["end"]) for run in row["phases"]]
    if [s for s, _ in spans] + [len(row["tokens"])] != [0] + [e for _, e in spans] and row["tokens"]:
        found.problems.append(f"{where}: phases {spans} do not tile its {len(row['tokens'])} tokens")
    for name in ("logprobs", "entropy", "sampling_logprobs"):
        if row[name] is not None and len(row[name]) != len(row["tokens"]):
            found.problems.append(f"{where}: {len(row[name])} {name} for {len(row['tokens'])} tokens")
    try:
        rows_module.message(row)
    except (ValueError, KeyError, TypeError) as error:
        found.problems.append(f"{where}: cannot be restored: {error!r}")


def _record_problems(run: RunFolder, row: Mapping[str, Any], message: Mapping[str, Any] | None, files: list[str],
                     mapped: dict[str, tensors.TensorFile]) -> Iterator[str]:  # fmt: skip
    count = row["row_end"] - row["row_start"]
    if row["token_span"]["rows"] != count:
        yield f"token_span says {row['token_span']['rows']} rows, the tensor has {count}"
    described = count if row["pool"] is None else row["num_pooled"]
    if len(row["tokens"]) != described or len(row["positions"]) != described:
        yield f"{len(row['tokens'])} tokens and {len(row['positions'])} positions for {described} rows"
    if any(not 0 <= span["start"] < span["end"] <= count for span in row["phases"]):
        yield f"phases {row['phases']} outside its {count} rows"
    yield from _address_problems(run, row, files, mapped)
    if message is None:
        yield f"no message {row['message_idx']} of {row['cell'] or row['trunk']} in this unit"
        return
    fed = [*(message["prompt_tokens"] or ()), *(message["tokens"] or ())]
    for token, position in zip(row["tokens"], row["positions"], strict=False):
        if position >= len(fed) or fed[position] != token:
            given = fed[position] if position < len(fed) else "nothing"
            yield f"token {token} at position {position}, where the message has {given}"
            return


def _address_problems(run: RunFolder, row: Mapping[str, Any], files: list[str],
                      mapped: dict[str, tensors.TensorFile]) -> Iterator[str]:  # fmt: skip
    if row["file"] not in files:
        yield f"its file {row['file']} is not among the unit's sound files"
        return
    try:
        if row["file"] not in mapped:
            mapped[row["file"]] = tensors.open_file(run.store, row["file"])
        tensor = mapped[row["file"]].rows(row["key"], row["row_start"], row["row_end"])
    except (KeyError, ValueError, OSError) as error:
        yield f"its tensor cannot be read: {error}"
        return
    if str(tensor.dtype).removeprefix("torch.") != row["dtype"]:
        yield f"dtype {row['dtype']}, the tensor is {tensor.dtype}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['cell'] or row['trunk']}/{row['participant']}/{row['message_idx']}/{row['site']}.{row['layer']}"
