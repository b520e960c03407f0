"""From a configuration under a condition to conversations: participants, interventions and captures of every turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlens import participants
from interlens.conversation import Conversation
from interlens.interp.activation_cache import CaptureSpec
from interlens.interp.locate import site_width
from interlens.interp.select import Select
from interlens.interp.steering import SteeringSpec

from ..config.schema import CaptureConfig, InterventionConfig, SweepConfig
from ..config.tokens import parse_tokens
from ..config.turns import Part, acts, captures_turn, speakers
from ..folder import files, names
from ..folder.store import Store
from ..plan import directions, items, model_sizes
from ..plan import patches as patches_module
from .judges import make
from .models import Models

if TYPE_CHECKING:
    from interlens.message import Message

    from .judges import Judge


def load_models(config: SweepConfig, models: Models) -> None:
    """Load what the participants and judges of this configuration need."""
    for participant in config.scenario.participants.values():
        if participant.is_local:
            models.of(config, participant)
    make(config, models)


@dataclass
class Setting:
    """One condition, resolved: what each turn is run with."""

    config: SweepConfig
    models: Models
    store: Store
    names: dict[str, str] = field(init=False)
    """Local participant -> model name, the partition of its records."""
    _edits: list[tuple[InterventionConfig, SteeringSpec]] = field(init=False)
    patches: list[InterventionConfig] = field(init=False)
    """In order; their sources are `donation`'s business."""
    _captures: list[tuple[CaptureConfig, CaptureSpec]] = field(init=False)
    judges: list[Judge] = field(init=False)
    date: str | None = field(init=False)
    """The day on which the run began, which its prompts show; None: of a run from before days were kept."""

    def __post_init__(self) -> None:
        cast = self.config.scenario.participants
        self.names = {
            n: model_sizes.model_name(self.config, p.model) for n, p in cast.items() if p.is_local and p.model
        }
        self._edits = [(edit, self._steering(edit)) for edit in self.config.intervention if edit.kind == "steer"]
        self.patches = patches_module.patches(self.config)
        self._captures = [(capture, _capture(capture)) for capture in self.config.capture]
        self.judges = make(self.config, self.models)
        about = files.read_json(self.store, names.RUN) if self.store.exists(names.RUN) else {}
        self.date = about.get("date")

    def conversation(self, part: Part, row: Mapping[str, Any], before: Sequence[Message] = ()) -> Conversation:
        """A conversation about an item, standing after the messages `before` (a trunk's, its opening included)."""

        scenario = self.config.scenario
        made = Conversation(
            [self._participant(name, part, row) for name in scenario.participants],
            shared_context=items.fill(scenario.first_message, row, "scenario.opening"),
            moderator_name=scenario.moderator, reasoning_visibility=scenario.reasoning_visibility, seed=scenario.seed,
        )  # fmt: skip
        made.row = row
        made.date = self.date or made.date
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

        speaker = self.config.scenario.participants[edit.participants[0]]
        width = site_width(self.models.of(self.config, speaker).model, edit.site, edit.layers[0])
        direction = directions.load_direction(self.config, edit.direction or "", width, self.store)
        return SteeringSpec(
            direction, layers=edit.layers, coef=edit.coef, mode=edit.mode, site=edit.site,
            tokens=parse_tokens(edit.tokens),
        )  # fmt: skip


def _capture(capture: CaptureConfig) -> CaptureSpec:

    tokens = parse_tokens(capture.tokens)
    if capture.special == "drop" and tokens != Select.special():
        tokens = tokens - Select.special()
    how: dict[str, Any] = {"pool": capture.pool, "source": capture.source, "max_norm": capture.max_norm}
    return CaptureSpec(sites=capture.sites, layers=capture.layers, tokens=tokens, **how)
