"""What a sweep is asked to do: frozen dataclasses, made once from Hydra's composition and then only read.

`load` is the one door: it rejects unknown keys with the nearest known one, and says in one line what was given, what
was possible and what to do. Nothing else in this package touches Hydra or OmegaConf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .build import _plain, build


def _free(default: Any = None, factory: Any = None) -> Any:
    """A field that can change neither text nor records: it stays out of every id."""
    kwargs = {"default_factory": factory} if factory else {"default": default}
    return field(**kwargs, metadata={"identity": False})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where a model's weights come from. `models.<name>` in the configuration; participants name it."""

    source: str
    """Embedded name, hub id or local folder."""
    revision: str | None = None
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16."""
    device: str = _free("auto")
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapter name -> folder; they enter ids by content."""


@dataclass(frozen=True, kw_only=True)
class PricesConfig:
    """Dollars per million tokens."""

    prompt: float
    completion: float


@dataclass(frozen=True, kw_only=True)
class ParticipantConfig:
    """Who speaks. Exactly the options of an `interlens` participant."""

    model: str | None = None
    """A name under `models`, or an embedded name, hub id or local folder. None for kinds without weights."""
    kind: str = "model"
    """model | scripted | api."""
    temperature: float = 0.8
    top_p: float | None = 0.95
    top_k: int | None = None
    max_new_tokens: int = 512
    system_prompt: str | None = None
    """May hold `{column}` of the item row."""
    thinking: str | bool = "auto"
    adapter: str | None = None
    lines: tuple[str, ...] = ()
    """For kind scripted: what it says, in a cycle."""
    provider: str | None = None
    """For kind api: openai | anthropic | openrouter; the model's id there is `model`."""
    base_url: str | None = None
    prices: PricesConfig | None = field(default=None, metadata={"identity": False})
    """For kind api: what `run.max_cost` counts by."""
    max_in_flight: int = field(default=8, metadata={"identity": False})
    """For kind api: requests at once, per replica, to one model of one provider."""
    timeout_s: float = field(default=60.0, metadata={"identity": False})
    """For kind api: of one request."""
    seed: int | None = None

    @property
    def is_local(self) -> bool:
        """Has weights here, so that it can be captured and steered."""
        return self.kind == "model"


@dataclass(frozen=True, kw_only=True)
class TrunkConfig:
    """The shared beginning: sampled once per (item, trunk seed). turns 0: no trunk, a cell is a whole conversation."""

    turns: int = 0
    seeds: int | tuple[int, ...] = _free(1)
    """How many, or which."""
    opening: str | None = field(default=None, metadata={"later": True})
    """Overrides `scenario.opening`; as an axis (`trunk.opening`) it makes trunks that differ in what they are told."""
    temperature: float | None = None
    """Overrides every participant's own in the trunk; so do the next three."""
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class BranchConfig:
    """The continuation: once per (trunk, condition, branch seed)."""

    turns: int = 1
    seeds: int | tuple[int, ...] = _free(1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A model that is asked about what was said, after a cell's last turn. `scenario.judges.<name>`."""

    prompt: str
    """Holds `{transcript}`, what `participants` said after the branch point, and may hold `{column}` of the item row."""
    model: str
    """As a participant's."""
    kind: str = "model"
    """model | api."""
    participants: tuple[str, ...] = ()
    """Whose messages it sees; none named: everybody's, each with its speaker's name. Never the moderator's."""
    answer: str = "number"
    """number: the first one in its answer. choice: the one of `choices` that it names. text: all of it."""
    choices: tuple[str, ...] = ()
    range: tuple[float, ...] = ()
    """[lowest, highest]; a number outside it counts as unreadable."""
    system_prompt: str | None = None
    temperature: float = 0.0
    max_new_tokens: int = 16
    thinking: str | bool = "auto"
    provider: str | None = None
    base_url: str | None = None
    prices: PricesConfig | None = field(default=None, metadata={"identity": False})
    """For kind api: what `run.max_cost` counts by. The next two are a participant's too."""
    max_in_flight: int = field(default=8, metadata={"identity": False})
    timeout_s: float = field(default=60.0, metadata={"identity": False})


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    """Who talks about what. Texts may hold `{column}` of the item row."""

    items: str | tuple[Mapping[str, Any], ...] = _free("")
    """A YAML, JSONL or Parquet file (found in the working directory, then beside the shipped configuration), or the
    rows themselves. Rows enter ids by their content."""
    replay: str | None = _free(None)
    """Instead of items: conversations to capture again without sampling, a file of rows or run:<path>. See `replay`."""
    side: str = "messages"
    """The column of a replayed row that holds its conversation; as an axis (`side: [positive, negative]`), each row is
    a contrast pair."""
    participants: Mapping[str, ParticipantConfig] = field(default_factory=dict)
    """In speaking order."""
    opening: str | None = None
    """Message 0, by the moderator."""
    moderator: str = "moderator"
    framing: str | None = None
    """The moderator's message at the branch point."""
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    branch: BranchConfig = field(default_factory=BranchConfig)
    logprobs: bool = False
    reasoning_visibility: str = "strip"
    seed: int = 0
    analyzers: tuple[str, ...] = _free(())
    """`module:function`, each `(conversation) -> dict` of numbers and strings, kept as outcomes."""
    judges: Mapping[str, JudgeConfig] = _free(factory=dict)
    """Name -> judge; its answers are outcomes too."""

    @property
    def has_outcomes(self) -> bool:
        """Cells get values of their own."""
        return bool(self.analyzers or self.judges)

    @property
    def source(self) -> str | tuple[Mapping[str, Any], ...]:
        """Where the rows come from."""
        return self.replay or self.items

    @property
    def first_message(self) -> str | None:
        """What the moderator opens with."""
        return self.opening if self.trunk.opening is None else self.trunk.opening


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """Which activations are kept. The special tokens are left out before pooling unless `special` is "keep"."""

    participants: tuple[str, ...] = ()
    sites: tuple[str, ...] = ("residual",)
    layers: tuple[int, ...] | None = None
    tokens: str = "generated"
    pool: str | None = None
    turns: str | tuple[int, ...] = "branch"
    """branch | trunk | all | indices of the branch's generated turns."""
    special: str = "drop"
    max_norm: float | None = None
    """Rows of a larger norm (attention sinks) are left out before pooling, and counted in the record."""
    source: str = "run"
    routing: str = field(default="cell", metadata={"later": True})
    """For unpooled site `router`: the table `routing/` has a row per cell, or per message."""


@dataclass(frozen=True, kw_only=True)
class InterventionConfig:
    """One edit. kind steer: `direction`, `layers`, `coef`, `mode`; kind patch: `from_`, `site`, `layers`, `tokens`."""

    kind: str = "steer"
    participants: tuple[str, ...] = ()
    turns: str | tuple[int, ...] = "branch"
    tokens: str = "branch"
    site: str = "residual"
    layers: tuple[int, ...] = ()
    direction: str | None = None
    """run:<path>:<site>:<layer> | file:<path>:<layer> | random:<seed>."""
    coef: float = 1.0
    mode: str = "add"
    from_: Any = None
    """For patches, `from` in YAML: axis values of the donor ({} is the cell itself), run:<path>, or both as a map with
    `run:`. What they leave open is the recipient's own."""


@dataclass(frozen=True, kw_only=True)
class AxisConfig:
    """One axis of the grid: a dotted path into the configuration, and the named values it takes."""

    path: str
    """As written: `framing`, `trunk.x`, `intervention.coef`, `scenario.participants.bob.model`, ..."""
    labels: tuple[Any, ...]
    """What a condition and the plan's column show: the names of a map, or the values themselves."""
    values: tuple[Any, ...]

    @property
    def is_trunk(self) -> bool:
        """Makes other trunks; every other axis acts from the branch point on."""
        return self.path.startswith(("trunk.", "scenario.trunk."))


@dataclass(frozen=True, kw_only=True)
class AggregateConfig:
    """One entry of `aggregate`: a registered name and its options, checked by that aggregate."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where it runs. Never part of an id."""

    executor: str = "ray"
    """ray | inline."""
    replicas: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str | None = None
    """An existing Ray cluster; None starts one here and stops it at the end."""
    object_store_memory: int = 100_000_000
    threads: int = 1
    rows: int = 32
    """Live rows of an engine at most."""
    in_flight: int = 2
    """Units in flight per replica."""
    stall_s: float = 300.0
    load_s: float = 600.0
    max_deaths: int = 8
    """Replica deaths in a row, without a commit between them, after which the run ends."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How this run behaves. Never part of an id."""

    dir: str = ""
    retry_failed: bool = False
    on_error: str = "continue"
    """continue | fail_fast."""
    max_failures: int | None = None
    max_hours: float | None = None
    max_cost: float | None = None
    """Dollars that API participants may cost in all, over all drivers of this folder."""
    force: bool = False
    progress: str = "auto"
    """auto | rich | plain | none."""
    interval_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How cells are cut into units; fixed when they enter the plan."""

    unit_cells: int | None = None
    """None: about 512 MB of tensors, at most 2 048 cells."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What the page shows. Never part of an id."""

    transcripts: int = 200


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Everything. Plain values all the way down, so that `to_dict` travels to actors."""

    experiment: str = "sweep"
    scenario: ScenarioConfig
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    grid: tuple[AxisConfig, ...] = ()
    capture: tuple[CaptureConfig, ...] = ()
    intervention: tuple[InterventionConfig, ...] = ()
    aggregate: tuple[AggregateConfig, ...] = ()
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Source as written (direction, adapter folder, patch run) -> content hash; the run's copy is `inputs/<hash>`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars (JSON-able)."""
        return _plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepConfig:
        """The inverse of `to_dict`."""
        return build(cls, data)
