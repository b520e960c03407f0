"""Replay: conversations that exist already, run through the models again to capture them. Nothing is sampled.

`scenario.replay` names where they come from: a JSONL (YAML, Parquet) file of rows whose column `scenario.side`
("messages" unless the grid says otherwise) holds a conversation, or `run:<path>`, the finished cells of another run.
What a local participant says there is fed to it as if it had just drawn it (teacher forcing).

    {"id": "1", "messages": [{"author": "moderator", "content": "Hi."}, {"author": "bob", "content": "Hello."}]}
    {"id": "2", "positive": "I loved every minute.", "negative": "I left early.", "topic": "film"}

A text is one message of the moderator. `role` may stand for `author`: user is the moderator, assistant the only
participant. After a last word by somebody else, each local participant reads it: a turn of no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from interlens.message import Fed, Message

from ..config.schema import ScenarioConfig
from ..errors import ConfigError, did_you_mean
from ..folder.reader import RunFolder
from ..folder.store import Where

if TYPE_CHECKING:
    from ..folder.cells import Unit


RECORDED = "recorded"
"""`scenario.replay` of a folder that `sweeps capture` made: the cells of the run in which it lies, under their ids."""

SHAPE = 'a text, or a list of {"author": ..., "content": ...}'


def conversation(row: Mapping[str, Any], scenario: ScenarioConfig) -> list[Message]:
    """The conversation that a row holds under `scenario.side`. ConfigError says what is wrong with it."""
    where = f"scenario.replay, row {row.get('id')!r}"
    if scenario.side not in row:
        raise ConfigError(f"{where}: no column {scenario.side!r} (scenario.side){did_you_mean(scenario.side, row)}")
    given = row[scenario.side]
    entries = [{"author": scenario.moderator, "content": given}] if isinstance(given, str) else given
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(f"{where}: {scenario.side} must be {SHAPE}, got {given!r}")
    return [_message(entry, scenario, where) for entry in entries]


def _message(entry: Any, scenario: ScenarioConfig, where: str) -> Message:

    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ConfigError(f"{where}: a message must be {SHAPE}, got {entry!r}")
    people = list(scenario.participants)
    roles = {"user": scenario.moderator, **({"assistant": people[0]} if len(people) == 1 else {})}
    author = entry.get("author") or roles.get(entry.get("role", ""))
    if author != scenario.moderator and author not in people:
        named = entry.get("author") or entry.get("role")
        known = (*people, scenario.moderator, *(f"role {role}" for role in roles))
        raise ConfigError(f"{where}: nobody is called {named!r}{did_you_mean(str(named), known)}")
    fed = None
    if entry.get("tokens"):
        fed = Fed(generated=tuple(entry["tokens"]), template_hash=entry.get("template") or "")
    return Message(author, entry["content"], fed=fed)


def rows_of_run(path: str) -> Iterator[dict[str, Any]]:
    """The finished cells of a run as rows: id (the cell's), item, seeds, axes, the item's columns, `messages`."""
    run = _open(path)
    for unit in run.plan.units():
        said = run.unit_messages(unit.id)
        for cell in unit.cells:
            if cell.id in said:
                before = run.trunk(cell.trunk) if cell.trunk in {trunk.id for trunk in unit.trunks} else []
                columns = {k: v for k, v in unit.items[cell.item].items() if k != "id"}
                yield {
                    **columns, **cell.condition, "id": cell.id, "item": cell.item, "trunk_seed": cell.trunk_seed,
                    "branch_seed": cell.branch_seed, "messages": [_entry(m) for m in (*before, *said[cell.id])],
                }  # fmt: skip


def _entry(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"author": message.author, "content": message.content}
    if message.fed is not None and message.fed.generated:
        entry |= {"tokens": list(message.fed.generated), "template": message.fed.template_hash}
    return entry


def scenario_of_run(path: str) -> dict[str, Any]:
    """Who spoke in a run, as its configuration has them: what a replay of it takes unless told otherwise."""
    plain = _open(path).config.to_dict()
    kept = ("participants", "moderator", "reasoning_visibility")
    return {"scenario": {key: plain["scenario"][key] for key in kept}, "models": plain["models"]}


def date_of_run(path: str) -> str | None:
    """The day that a run's prompts show; None: of a run from before days were kept."""
    return _open(path).about.get("date")


def _open(path: str) -> RunFolder:
    try:
        return RunFolder(path)
    except ConfigError as error:
        raise ConfigError(f"scenario.replay: {error}") from None


class Recorded:
    """What a run has committed, for the folder inside it that captures it again."""

    def __init__(self, root: Where):
        self._run = RunFolder(root)
        self._messages: dict[str, list[Message]] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._read: str | None = None

    def trunk(self, trunk: str) -> list[Message]:
        """Its messages."""
        return self._run.trunk(trunk)

    def cell(self, unit: Unit, cell: str) -> tuple[list[Message], dict[str, Any]]:
        """A finished cell's own messages, after its trunk, and its outcomes."""
        root = unit.id.split(".")[0]
        if root != self._read:
            self._messages, self._outcomes = self._run.unit_messages(root), self._run.unit_outcomes(root)
            self._read = root
        return self._messages[cell], self._outcomes.get(cell, {})


def check_same(recorded: Message, now: Message) -> None:
    """RuntimeError where a message was run otherwise than it was recorded: its activations would be another run's."""
    assert recorded.fed is not None and now.fed is not None
    if recorded.fed.prompt != now.fed.prompt:
        raise RuntimeError(
            f"the prompt of {recorded.author} has {len(now.fed.prompt)} tokens now, {len(recorded.fed.prompt)} when it "
            "was recorded, or other ones; was the tokenizer or its template changed?"
        )
    was, is_now = (_fingerprints(message.metadata.get("steering")) for message in (recorded, now))
    if was != is_now:
        raise RuntimeError(f"steering is not what it was when this was recorded: {is_now} instead of {was}")


def _fingerprints(steering: Any) -> list[str]:
    entries = [steering] if isinstance(steering, Mapping) else steering or []
    return [entry["fingerprint"] for entry in entries]
