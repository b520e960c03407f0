"""From a configuration under a condition to conversations: participants, interventions and captures of every turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import donors, inputs, items, judges, shapes
from .config import CaptureConfig, InterventionConfig, JudgeConfig, ParticipantConfig, SweepConfig
from .estimate import captures_turn, speakers
from .places import Remote
from .selection import parse_tokens

if TYPE_CHECKING:
    from interlens.conversation import Conversation
    from interlens.interp.activation_cache import CaptureSpec
    from interlens.interp.steering import SteeringSpec
    from interlens.loading import Loaded
    from interlens.message import Message
    from interlens.participants import APIParticipant

    from .judges import Judge

Part = Literal["trunk", "branch"]


class Models:
    """The models of one cast, each loaded once."""

    def __init__(self, config: SweepConfig):
        self._config = config
        self._loaded: dict[str, Loaded] = {}
        self._apis: dict[tuple, APIParticipant] = {}
        self._lock = threading.Lock()
        self._told = 0.0

    def of(self, config: SweepConfig, participant: ParticipantConfig) -> Loaded:
        """The model of a local participant, with its adapter attached."""
        from interlens import loading
        from interlens.engine.engine import engine_for

        entry = shapes.model(config, participant.model or "")
        adapter = entry.adapters.get(participant.adapter, participant.adapter) if participant.adapter else None
        loaded = loading.load(
            entry.source, dtype=None if entry.dtype == "auto" else entry.dtype, revision=entry.revision,
            adapter=adapter, device=None if entry.device == "auto" else entry.device,
        )  # fmt: skip
        name = shapes.model_name(config, participant.model or "")
        if name not in self._loaded:
            engine_for(loaded.model).rows = self._config.cluster.rows
            self._loaded[name] = loaded
        return loaded

    def load(self, config: SweepConfig) -> None:
        """Load what the participants of this configuration need."""
        for participant in config.scenario.participants.values():
            if participant.is_local:
                self.of(config, participant)
        judges.make(config, self)

    def api(self, name: str, given: ParticipantConfig | JudgeConfig, **options: Any) -> APIParticipant:
        """An API participant; those of one model share their connection, its limit in flight and what they used."""
        from interlens.participants import APIParticipant
        from interlens.participants.api import Prices

        key = (given.provider or "openai", given.model, given.base_url)
        with self._lock:
            if key not in self._apis:
                told = given.prices
                prices = Prices(prompt=told.prompt, completion=told.completion) if told else None
                self._apis[key] = APIParticipant(
                    name, given.model or "", provider=key[0], base_url=given.base_url, prices=prices,
                    max_in_flight=given.max_in_flight, timeout_s=given.timeout_s,
                )  # fmt: skip
            made = self._apis[key].clone()
        for option, value in {"name": name, **options}.items():
            setattr(made, option, value)
        return made

    def stop(self) -> None:
        """Ask no API any more."""
        for api in self._apis.values():
            api.stop()

    @property
    def cost(self) -> float:
        """Dollars that API participants have used so far, failed cells included."""
        return sum(api.usage.cost for api in list(self._apis.values()))

    def newly_spent(self) -> float:
        """Dollars since this was last asked."""
        with self._lock:
            before, self._told = self._told, self.cost
            return self._told - before

    def facts(self) -> dict[str, dict[str, str]]:
        """Model name -> hashes of its weights and chat template, and its dtype."""
        from interlens.loading import weights_hash

        from .identity import digest

        return {
            name: {
                "weights": weights_hash(loaded.model), "dtype": loaded.dtype,
                "template": digest(getattr(loaded.tokenizer, "chat_template", None) or ""),
            }
            for name, loaded in self._loaded.items()
        }  # fmt: skip


@dataclass
class Setting:
    """One condition, resolved: what each turn is run with."""

    config: SweepConfig
    models: Models
    root: Path | Remote
    names: dict[str, str] = field(init=False)
    """Local participant -> model name, the partition of its records."""
    _edits: list[tuple[InterventionConfig, SteeringSpec]] = field(init=False)
    patches: list[InterventionConfig] = field(init=False)
    """In order; their sources are `donation`'s business."""
    _captures: list[tuple[CaptureConfig, CaptureSpec]] = field(init=False)
    judges: list[Judge] = field(init=False)

    def __post_init__(self) -> None:
        cast = self.config.scenario.participants
        self.names = {n: shapes.model_name(self.config, p.model) for n, p in cast.items() if p.is_local and p.model}
        self._edits = [(edit, self._steering(edit)) for edit in self.config.intervention if edit.kind == "steer"]
        self.patches = donors.patches(self.config)
        self._captures = [(capture, _capture(capture)) for capture in self.config.capture]
        self.judges = judges.make(self.config, self.models)

    def conversation(self, part: Part, row: Mapping[str, Any], before: Sequence[Message] = ()) -> Conversation:
        """A conversation about an item, standing after the messages `before` (a trunk's, its opening included)."""
        from interlens.conversation import Conversation

        scenario = self.config.scenario
        made = Conversation(
            [self._participant(name, part, row) for name in scenario.participants],
            shared_context=items.fill(scenario.first_message, row, "scenario.opening"),
            moderator_name=scenario.moderator, reasoning_visibility=scenario.reasoning_visibility, seed=scenario.seed,
        )  # fmt: skip
        made.row = row
        for message in before[len(made.transcript) :]:
            made.transcript.append(message.copy())
            made.turns_taken += message.author in scenario.participants
        return made

    def framing(self, row: Mapping[str, Any]) -> str | None:
        """What the moderator says at the branch point."""
        return items.fill(self.config.scenario.framing, row, "scenario.framing")

    def speakers(self, part: Part) -> list[str]:
        """Who speaks, turn by turn."""
        return speakers(self.config, part)

    def options(self, part: Part, turn: int, speaker: str) -> dict[str, Any]:
        """What one turn is run with, as options of `Conversation.turn`."""
        local = speaker in self.names
        edits = tuple(spec for edit, spec in self._edits if speaker in edit.participants and acts(edit, part, turn))
        specs = tuple(s for c, s in self._captures if speaker in c.participants and captures_turn(c, part, turn))
        options: dict[str, Any] = {}
        if edits:
            options["steering"] = edits
        if specs:
            options["capture"] = specs
        if local and self.config.scenario.logprobs:
            options["return_logprobs"] = True
        return options

    def _participant(self, name: str, part: Part, row: Mapping[str, Any]) -> Any:
        from interlens import participants

        given = self.config.scenario.participants[name]
        system = items.fill(given.system_prompt, row, f"scenario.participants.{name}.system_prompt")
        if given.kind == "scripted":
            return participants.ScriptedParticipant(name, list(given.lines))
        over = getattr(self.config.scenario, part)
        sampling = {
            key: getattr(given, key) if getattr(over, key) is None else getattr(over, key)
            for key in ("temperature", "top_p", "top_k", "max_new_tokens")
        }
        if given.kind == "api":
            kept = {key: sampling[key] for key in ("temperature", "top_p", "max_new_tokens")}
            return self.models.api(name, given, system_prompt=system, **kept)
        loaded = self.models.of(self.config, given)
        return participants.AutoModelParticipant.from_model(
            loaded.model, loaded.tokenizer, name=name, system_prompt=system, thinking=given.thinking, seed=given.seed,
            adapter=loaded.adapter, **sampling,
        )  # fmt: skip

    def _steering(self, edit: InterventionConfig) -> SteeringSpec:
        from interlens.interp.locate import site_width
        from interlens.interp.steering import SteeringSpec

        speaker = self.config.scenario.participants[edit.participants[0]]
        width = site_width(self.models.of(self.config, speaker).model, edit.site, edit.layers[0])
        direction = inputs.load_direction(self.config, edit.direction or "", width, self.root)
        return SteeringSpec(
            direction, layers=edit.layers, coef=edit.coef, mode=edit.mode, site=edit.site,
            tokens=parse_tokens(edit.tokens),
        )  # fmt: skip


def acts(edit: InterventionConfig, part: Part, turn: int) -> bool:
    """True if `turns:` names this turn of the trunk or branch; numbers count the branch's turns."""
    if isinstance(edit.turns, str):
        return edit.turns in (part, "all")
    return part == "branch" and turn in edit.turns


def _capture(capture: CaptureConfig) -> CaptureSpec:
    from interlens.interp.activation_cache import CaptureSpec
    from interlens.interp.select import Select

    tokens = parse_tokens(capture.tokens)
    if capture.special == "drop" and tokens != Select.special():
        tokens = tokens - Select.special()
    how: dict[str, Any] = {"pool": capture.pool, "source": capture.source, "max_norm": capture.max_norm}
    return CaptureSpec(sites=capture.sites, layers=capture.layers, tokens=tokens, **how)
