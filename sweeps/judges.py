"""Judges: a model that is shown what was said and asked about it, after the last turn of a cell.

A local judge answers on the same engine as everybody else; an API judge in a thread. Kept as outcomes of the cell:
`<judge>` (a number, or a text), `<judge>_parsed` (1, or 0 where the answer could not be read and there is no value),
`<judge>_prompt` and `<judge>_raw` (what was asked and what came back, whole).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from . import items
from .config import ConfigError, JudgeConfig, SweepConfig, did_you_mean
from .redact import redact

if TYPE_CHECKING:
    from interlens.work import Steps

ANSWERS = ("number", "choice", "text")
TRANSCRIPT = "transcript"
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class Judge:
    """One judge with the participant that answers for it; each cell is judged by a clone."""

    def __init__(self, name: str, config: JudgeConfig, participant: Any):
        self.name, self.config, self._participant = name, config, participant

    def steps(self, conversation: Any) -> Steps:
        """What a scheduler runs; returns the outcomes of the conversation."""
        from interlens.views.view import View, ViewMessage
        from interlens.work import TurnOptions, TurnRequest

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


def check(config: SweepConfig, name: str, judge: JudgeConfig) -> None:
    """ConfigError for a judge that cannot be asked."""
    from .values import NAME, one_of

    at, cast = f"scenario.judges.{name}", config.scenario.participants
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a judge; use up to 64 letters, digits, '_', '-', '.' or blanks")
    one_of(f"{at}.kind", judge.kind, ("model", "api"))
    one_of(f"{at}.answer", judge.answer, ANSWERS)
    if f"{{{TRANSCRIPT}}}" not in judge.prompt:
        raise ConfigError(
            f"{at}.prompt does not hold {{{TRANSCRIPT}}}, so the judge would see nothing of what was said"
        )
    for who in judge.participants:
        if who not in cast:
            raise ConfigError(f"{at}.participants: no participant {who!r}{did_you_mean(who, cast)}")
    if judge.answer == "choice" and len(judge.choices) < 2:
        raise ConfigError(f"{at}.choices: {list(judge.choices)}; answer: choice needs at least two")
    if judge.range and not (len(judge.range) == 2 and judge.range[0] < judge.range[1]):
        raise ConfigError(f"{at}.range is {list(judge.range)}; give [lowest, highest]")
    if judge.base_url and redact(judge.base_url) != judge.base_url:
        raise ConfigError(f"{at}.base_url holds a secret; give it in the provider's environment variable instead")
    if judge.max_in_flight < 1 or judge.timeout_s <= 0:
        raise ConfigError(f"{at}.max_in_flight must be at least 1 and timeout_s above 0")
    if judge.temperature < 0 or judge.max_new_tokens < 1:
        raise ConfigError(f"{at}: temperature must be at least 0 and max_new_tokens at least 1")


def columns_check(config: SweepConfig) -> list[tuple[str, str]]:
    """(where, text) of prompts that an item's columns fill, the transcript left out."""
    found = config.scenario.judges.items()
    return [(f"scenario.judges.{n}.prompt", j.prompt.replace(f"{{{TRANSCRIPT}}}", "")) for n, j in found]


def make(config: SweepConfig, models: Any) -> list[Judge]:
    """The judges of a configuration, their models loaded."""
    return [
        Judge(name, judge, _participant(config, name, judge, models)) for name, judge in config.scenario.judges.items()
    ]


def _participant(config: SweepConfig, name: str, judge: JudgeConfig, models: Any) -> Any:
    from interlens import participants

    shared: dict[str, Any] = {
        "system_prompt": judge.system_prompt, "temperature": judge.temperature, "max_new_tokens": judge.max_new_tokens,
    }  # fmt: skip
    if judge.kind == "api":
        return models.api(name, judge, **shared)
    from .config import ParticipantConfig

    loaded = models.of(config, ParticipantConfig(model=judge.model))
    return participants.AutoModelParticipant.from_model(
        loaded.model, loaded.tokenizer, name=name, top_p=None, thinking=judge.thinking, **shared
    )
