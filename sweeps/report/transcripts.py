"""Conversations as a tree: item, trunk, then one branch per condition and seed."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.compute as pc

from ..aggregates.shards import ShardedRun
from . import surprisal
from .markup import Markup, join, number, tag

COLUMNS = ["trunk", "cell", "message_idx", "author", "content", "finish_reason"]


def tree(run: ShardedRun, limit: int) -> Markup:
    """The first `limit` finished conversations in plan order, grouped by their trunks."""
    axes = [axis.path for axis in run.config.grid]
    wanted = ["cell", "item", "trunk", "trunk_seed", "branch_seed", *axes]
    done = run.cells.filter(pc.equal(run.cells.column("state"), "done"))
    cells = done.select(wanted).slice(0, limit).to_pylist()
    if not cells:
        return tag("p", "No conversation is finished yet.", class_="quiet")
    trunk_messages, cell_messages = _messages(run, cells)
    people = _People(run)
    parts = []
    for item, of_item in _grouped(cells, "item"):
        trunks = [
            _trunk(t, of_trunk, axes, trunk_messages, cell_messages, people)
            for t, of_trunk in _grouped(of_item, "trunk")
        ]
        head = tag("summary", tag("b", item), tag("span", f" {len(of_item)} conversations", class_="quiet"))
        parts.append(tag("details", head, *trunks, class_="item", open="open" if not parts else None))
    note = None
    if done.num_rows > len(cells):
        counted = f"The first {number(len(cells))} of {number(done.num_rows)} conversations"
        note = tag("p", f"{counted}; the others are in the run folder (sweeps show).", class_="quiet")
    return join([note, surprisal.legend() if people.decoders else None, *parts])


def _messages(run: ShardedRun, cells: list[dict]) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    trunks = {cell["trunk"] for cell in cells if cell["trunk"]}
    field = pc.field("cell").isin([cell["cell"] for cell in cells])
    if trunks:
        field = field | (pc.field("cell").is_null() & pc.field("trunk").isin(sorted(trunks)))
    names = COLUMNS + surprisal.COLUMNS if run.config.scenario.logprobs else COLUMNS
    of_trunk: dict[str, list[dict]] = {}
    of_cell: dict[str, list[dict]] = {}
    for row in run.table("messages", columns=names, filter=field).sort_by("message_idx").to_pylist():
        target, key = (of_trunk, row["trunk"]) if row["cell"] is None else (of_cell, row["cell"])
        target.setdefault(key, []).append(row)
    return of_trunk, of_cell


def _grouped(cells: list[dict], key: str) -> Iterator[tuple[str, list[dict]]]:
    groups: dict[str, list[dict]] = {}
    for cell in cells:
        groups.setdefault(cell[key], []).append(cell)
    yield from groups.items()


def _trunk(trunk: str, cells: list[dict], axes: list[str], trunk_messages, cell_messages, people) -> Markup:
    branches = [_branch(cell, axes, cell_messages.get(cell["cell"], []), people) for cell in cells]
    shared = [_message(row, people) for row in trunk_messages.get(trunk, [])]
    head = tag("p", f"trunk seed {cells[0]['trunk_seed']}", class_="seed") if shared else None
    return tag("div", head, *shared, tag("div", *branches, class_="branches"), class_="trunk")


def _branch(cell: dict, axes: list[str], rows: list[dict], people) -> Markup:
    chips = [tag("span", f"{axis.rsplit('.', 1)[-1]} = {number(cell[axis])}", class_="chip") for axis in axes]
    chips.append(tag("span", f"seed {cell['branch_seed']}", class_="quiet"))
    last = next((row["content"] for row in reversed(rows)), "")
    preview = tag("span", last[:90] + ("…" if len(last) > 90 else ""), class_="preview", dir="auto")
    head = tag("summary", *chips, preview)
    foot = tag("p", tag("code", cell["cell"]), class_="quiet")
    return tag("details", head, *[_message(row, people) for row in rows], foot)


def _message(row: dict, people: _People) -> Markup:
    cut = tag("span", " (cut at the length limit)", class_="quiet") if row["finish_reason"] == "length" else None
    who = tag("b", row["author"], class_=people.style(row["author"]))
    decode = people.decoders.get(row["author"])
    said = decode and surprisal.coloured(row, decode)
    return tag("div", who, tag("p", row["content"] if said is None else said, cut, dir="auto"), class_="message")


class _People:
    """How each speaker is shown."""

    def __init__(self, run: ShardedRun):
        self.decoders = surprisal.decoders(run)
        self._numbers = {name: i % 4 for i, name in enumerate(run.config.scenario.participants)}

    def style(self, author: str) -> str:
        return f"who p{self._numbers[author]}" if author in self._numbers else "who moderator"
