"""Judges: a model that is shown what was said and asked about it, after the last turn of a cell.

A local judge answers on the same engine as everybody else; an API judge in a thread. Kept as outcomes of the cell:
`<judge>` (a number, or a text), `<judge>_parsed` (1, or 0 where the answer could not be read and there is no value),
`<judge>_prompt` and `<judge>_raw` (what was asked and what came back, whole).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from interlens import participants
from interlens.views.view import View, ViewMessage
from interlens.work import TurnOptions, TurnRequest

from ..config.schema import JudgeConfig, ParticipantConfig, SweepConfig
from ..plan import items
from ..plan.judges import TRANSCRIPT

if TYPE_CHECKING:
    from interlens.work import Steps


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class Judge:
    """One judge with the participant that answers for it; each cell is judged by a clone."""

    def __init__(self, name: str, config: JudgeConfig, participant: Any):
        self.name, self.config, self._participant = name, config, participant

    def steps(self, conversation: Any) -> Steps:
        """What a scheduler runs; returns the outcomes of the conversation."""

        speaker = self._participant.clone()
        asked = items.fill(
            self.config.prompt, {**conversation.row, TRANSCRIPT: said(conversation, self.config)}, self.name
        )
        messages = [ViewMessage(role="user", content=asked or "")]
        if speaker.system_prompt:
            messages.insert(0, ViewMessage(role="system", content=speaker.system_prompt))
        view = View(pov=speaker.name, messages=tuple(messages))
        key = (conversation.seed, [*as_list(conversation.key), "judge", self.name], 0, 0)
        request = TurnRequest(options=TurnOptions(), key=key, index=len(conversation.transcript))
        reply = yield from speaker.turn(view, request)
        value = parsed(reply.content, self.config)
        outcomes = {f"{self.name}_parsed": float(value is not None), f"{self.name}_prompt": asked,
                    f"{self.name}_raw": str(reply.metadata.get("raw_completion", reply.content))}  # fmt: skip
        return outcomes if value is None else {self.name: value, **outcomes}


def as_list(key: Any) -> list:
    return list(key) if isinstance(key, (list, tuple)) else [key]


def said(conversation: Any, config: JudgeConfig) -> str:
    """What the judged participants said after the branch point, one message after the other; never the moderator."""
    people = config.participants or tuple(p.name for p in conversation.participants)
    own = list(conversation.transcript)[conversation.branch_start or 0 :]
    label = len(people) > 1
    return "\n\n".join(f"{m.author}: {m.content}" if label else m.content for m in own if m.author in people)


def parsed(answer: str, config: JudgeConfig) -> float | str | None:
    """The value in an answer, or None: its first number, within `range`; the one of `choices` it names; the text."""
    if config.answer == "number":
        found = _NUMBER.search(answer)
        value = float(found[0]) if found else None
        within = value is not None and (not config.range or config.range[0] <= value <= config.range[1])
        return value if within else None
    if config.answer == "choice":
        named = [c for c in config.choices if re.search(rf"(?<!\w){re.escape(c)}(?!\w)", answer, re.IGNORECASE)]
        return named[0] if len(named) == 1 else None
    return answer.strip() or None


def make(config: SweepConfig, models: Any) -> list[Judge]:
    """The judges of a configuration, their models loaded."""
    return [
        Judge(name, judge, _participant(config, name, judge, models)) for name, judge in config.scenario.judges.items()
    ]


def _participant(config: SweepConfig, name: str, judge: JudgeConfig, models: Any) -> Any:
    shared: dict[str, Any] = {
        "system_prompt": judge.system_prompt, "temperature": judge.temperature, "max_new_tokens": judge.max_new_tokens,
    }  # fmt: skip
    if judge.kind == "api":
        return models.api(name, judge, **shared)

    loaded = models.of(config, ParticipantConfig(model=judge.model))
    return participants.AutoModelParticipant.from_model(
        loaded.model, loaded.tokenizer, name=name, top_p=None, thinking=judge.thinking, **shared
    )
