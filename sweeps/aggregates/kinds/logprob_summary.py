"""Logprob summary: surprisal and entropy of generated tokens, per speaker and per value of some columns.

    logprob_summary: {by: [framing]}

Every token counts once (token-weighted), in nats, from the model's raw logits under the interventions in force. Only
messages that were generated with `logprobs` count; how many had none is reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base import CellResult, State
from ..columns import cell_columns, check_known
from ..sums import Keyed, MomentsSum, by_key, moments_of


class LogprobSummary(MomentsSum):
    """A Sum. Result: one entry per speaker and value of `by` (default: every axis)."""

    reads_records = False

    def __init__(self, name: str, *, by: Sequence[str] | str | None = None):
        self.name = name
        self.by = (by,) if isinstance(by, str) else None if by is None else tuple(by)

    def check(self, config: Any) -> None:
        """ValueError if `by` names a column that no cell will have, or no logprobs will be recorded."""
        if self.by is not None:
            check_known(self.by, config, f"by: {', '.join(self.by)}")
        if not config.scenario.logprobs:
            raise ValueError("no logprobs will be recorded; set scenario.logprobs=true")

    def contribution(self, result: CellResult) -> Keyed:
        columns = cell_columns(result)
        by = result.cell.condition if self.by is None else {name: columns[name] for name in self.by}
        for message in result.messages[result.num_trunk_messages :]:
            surprisal, entropy = (message.metadata.get(name, ()) for name in ("surprisal", "entropy"))
            key = f"{message.author}|{by_key(dict(by))}"
            if surprisal:
                yield key, np.stack([surprisal, entropy], axis=1)
            elif message.metadata.get("n_tokens"):
                yield f"{key}|without", np.zeros((1, 1))

    def finish(self, state: State) -> dict[str, Any]:
        moments = moments_of(state)
        entries = []
        for key, found in sorted(moments.items()):
            if key.endswith("|without"):
                continue
            author, _, by = key.partition("|")
            without = moments.get(f"{key}|without")
            std = np.sqrt(found.variance())
            entries.append(
                {
                    "participant": author,
                    "by": json.loads(by),
                    "tokens": found.count,
                    "messages_without": without.count if without else 0,
                    "surprisal": float(found.mean[0]),
                    "surprisal_std": float(std[0]),
                    "perplexity": float(np.exp(found.mean[0])),
                    "entropy": float(found.mean[1]),
                    "entropy_std": float(std[1]),
                }
            )
        return {"kind": "logprob_summary", "unit": "nats per token", "summary": entries}


AGGREGATE = LogprobSummary
