"""Messages and records as table rows, and back: what was written is what is read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from interlens.interp.activation_cache import ActivationRecord
from interlens.interp.select import Layout
from interlens.message import Fed, Message
from interlens.reasoning import Markers

from ..errors import Damaged
from . import files

_LISTS = ("logprobs", "entropy", "sampling_logprobs")

_COLUMNS = (*_LISTS, "surprisal", "finish_reason", "steering", "patch")


def message_row(message: Message, index: int) -> dict[str, Any]:
    """A row of `messages`, without unit, attempt, trunk and cell. `surprisal` is -logprobs and not stored."""
    fed, metadata = message.fed, message.metadata
    edits = {key: metadata[key] for key in ("steering", "patch") if key in metadata}
    return {
        "message_idx": index,
        "author": message.author,
        "content": message.content,
        "prompt_tokens": list(fed.prompt) if fed else None,
        "tokens": list(fed.generated) if fed else None,
        "phases": runs(fed.phases) if fed else None,
        "layout": _layout_json(fed) if fed else None,
        **{key: metadata.get(key) for key in _LISTS},
        "finish_reason": metadata.get("finish_reason"),
        "interventions": _json(edits) if edits else None,
        "metadata": _json({key: value for key, value in metadata.items() if key not in _COLUMNS}),
    }


def message(row: Mapping[str, Any]) -> Message:
    """The message of a row, with `fed` as it was."""

    metadata = dict(files.parsed(row["metadata"]))
    for key in _LISTS:
        if row[key] is not None:
            metadata[key] = row[key]
    if row["logprobs"] is not None:
        metadata["surprisal"] = [-value for value in row["logprobs"]]
    if row["finish_reason"] is not None:
        metadata["finish_reason"] = row["finish_reason"]
    metadata |= files.parsed(row["interventions"] or "{}")
    fed = None
    if row["tokens"] is not None:
        layout, template = _layout(row["layout"])
        sizes = [run["end"] - run["start"] for run in row["phases"]]
        if min(sizes, default=0) < 0 or sum(sizes) > len(row["tokens"]):
            raise Damaged(f"phases of more tokens than the {len(row['tokens'])} of a message by {row['author']!r}")
        phases = [run["phase"] for run in row["phases"] for _ in range(run["start"], run["end"])]
        fed = Fed(prompt=tuple(row["prompt_tokens"]), generated=tuple(row["tokens"]), phases=tuple(phases),
                  layout=layout, template_hash=template)  # fmt: skip
    return Message(row["author"], row["content"], metadata, fed=fed)


def runs(phases: Sequence[str]) -> list[dict[str, Any]]:
    """Half-open runs of equal phases."""
    found, at = [], 0
    for phase, group in itertools.groupby(phases):
        length = sum(1 for _ in group)
        found.append({"phase": phase, "start": at, "end": at + length})
        at += length
    return found


def record_row(record: ActivationRecord) -> dict[str, Any]:
    """A row of `records`, without address in files, unit, attempt, trunk, cell, model and site."""
    return {
        "participant": record.participant,
        "message_idx": record.message_idx,
        "layer": record.layer,
        "token_span": {"prompt": record.token_span[0], "rows": record.token_span[1]},
        "phases": [{"phase": p, "start": span[0], "end": span[1]} for p, span in record.phases.items()],
        "tokens": list(record.tokens),
        "positions": list(record.positions),
        "selection": record.selection,
        "fingerprint": record.fingerprint,
        "source": getattr(record, "source", "run"),
        "pool": record.pool,
        "num_pooled": record.num_pooled,
        "removed": record.removed,
        "dtype": str(record.tensor.dtype).removeprefix("torch."),
    }


def record(row: Mapping[str, Any], tensor: Any) -> ActivationRecord:
    """The record of a row and its tensor."""

    return ActivationRecord(
        row["participant"], row["message_idx"], row["layer"], row["site"], tensor,
        (row["token_span"]["prompt"], row["token_span"]["rows"]),
        {span["phase"]: (span["start"], span["end"]) for span in row["phases"]},
        tokens=tuple(row["tokens"]), positions=tuple(row["positions"]), pool=row["pool"],
        num_pooled=row["num_pooled"], selection=row["selection"], fingerprint=row["fingerprint"],
        removed=row.get("removed") or 0,
    )  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _layout_json(fed: Any) -> str | None:
    layout = fed.layout
    if layout is None:
        return _json({"template": fed.template_hash}) if fed.template_hash else None
    markers = layout.markers
    return _json({
        "messages": [[index, *span] for index, span in layout.message_spans.items()],
        "special": [list(span) for span in layout.special_spans],
        "special_ids": sorted(layout.special_ids),
        "markers": markers and {"open": markers.open, "close": markers.close, "opened": markers.opened},
        "branch_start": layout.branch_start,
        "template": fed.template_hash,
    })  # fmt: skip


def _layout(text: str | None) -> tuple[Layout | None, str]:
    plain = files.parsed(text) if text else {}
    if "messages" not in plain:
        return None, plain.get("template", "")
    m = plain["markers"]
    markers = m and Markers(open=_tuples(m["open"]), close=_tuples(m["close"]), opened=m["opened"])
    layout = Layout(
        message_spans={index: (start, end) for index, start, end in plain["messages"]},
        special_spans=_tuples(plain["special"]), special_ids=frozenset(plain["special_ids"]), markers=markers,
        branch_start=plain["branch_start"],
    )  # fmt: skip
    return layout, plain["template"]


def _tuples(lists: Sequence[Sequence[int]]) -> tuple:
    return tuple(map(tuple, lists))
