"""Values that stand by themselves: every setting of the scenario, the cluster, the run and the models on its own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..redact import redact
from .grid import full_path
from .schema import BranchConfig, ParticipantConfig, ScenarioConfig, SweepConfig, TrunkConfig

PHASES = ("prompt", "reasoning", "answer")
"""Of a token: where it stands in its turn."""

POOLS = (None, "mean", "last", "max")
"""What a capture keeps of the chosen tokens of a message; None: each of them."""

MODES = ("add", "ablate", "norm_add", "replace")
"""What steering does with a direction."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]{0,63}")

DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu)(:\d+)?|balanced(_low_0)?|sequential")

LEAST = {
    ("cluster", "replicas"): 1, ("cluster", "rows"): 1, ("cluster", "in_flight"): 1, ("cluster", "threads"): 1,
    ("cluster", "max_deaths"): 1, ("cluster", "num_cpus"): 0, ("cluster", "num_gpus"): 0,
    ("cluster", "object_store_memory"): 80_000_000, ("run", "max_failures"): 0, ("run", "max_hours"): 0,
    ("run", "max_cost"): 0,
    ("plan", "unit_cells"): 1, ("report", "transcripts"): 0,
}  # fmt: skip
"""(section, key) -> least value; Ray starts no object store below 75 MiB."""

ABOVE_ZERO = (("run", "interval_s"), ("cluster", "stall_s"), ("cluster", "load_s"))


def check_scenario(scenario: ScenarioConfig) -> None:
    """ConfigError for participants, items, seeds or sampling that cannot be."""
    if not scenario.participants:
        raise ConfigError(
            "the scenario has no participants; set scenario.participants, or choose experiment=... or scenario=topics"
        )
    if not scenario.source:
        raise ConfigError("the scenario has no items; set scenario.items to a YAML, JSONL or Parquet file, or to rows")
    if not scenario.moderator:
        raise ConfigError("scenario.moderator is empty; give the moderator a name")
    for name, participant in scenario.participants.items():
        _check_participant(name, participant, scenario.moderator)
    _seeds("scenario.seed", (scenario.seed,))
    _check_part("trunk", scenario.trunk, 0)
    _check_part("branch", scenario.branch, 1)


def _check_participant(name: str, p: ParticipantConfig, moderator: str) -> None:
    at = f"scenario.participants.{name}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a participant; use up to 64 letters, digits, '_', '-', '.' or blanks")
    if name == moderator:
        raise ConfigError(f"{at} has the moderator's name; rename one of them (scenario.moderator)")
    one_of(f"{at}.kind", p.kind, ("model", "scripted", "api"))
    one_of(f"{at}.provider", p.provider, (None, "openai", "anthropic", "openrouter"))
    if p.thinking not in ("auto", True, False):
        raise ConfigError(f"{at}.thinking is {p.thinking!r}; possible: auto, true, false")
    if p.kind != "scripted" and not p.model:
        raise ConfigError(f"{at}.model is missing; give an embedded name (smollm2), a hub id or a folder")
    if p.base_url and redact(p.base_url) != p.base_url:
        raise ConfigError(f"{at}.base_url holds a secret; give it in the provider's environment variable instead")
    if p.max_in_flight < 1 or p.timeout_s <= 0:
        raise ConfigError(f"{at}.max_in_flight must be at least 1 and timeout_s above 0")
    if p.prices and min(p.prices.prompt, p.prices.completion) < 0:
        raise ConfigError(f"{at}.prices are {p.prices.prompt:g} and {p.prices.completion:g}; they must be at least 0")
    if p.kind == "scripted" and not p.lines:
        raise ConfigError(f"{at}.lines is empty; a scripted participant needs what it says")
    _sampling(at, p)
    _seeds(f"{at}.seed", (p.seed or 0,))


def _check_part(part: str, settings: TrunkConfig | BranchConfig, least: int) -> None:
    _sampling(f"scenario.{part}", settings)
    if settings.turns < least:
        raise ConfigError(f"scenario.{part}.turns is {settings.turns}; it must be at least {least}")
    seeds = settings.seeds
    if (isinstance(seeds, int) and seeds < 1) or (not isinstance(seeds, int) and not seeds):
        raise ConfigError(f"scenario.{part}.seeds is {seeds!r}; give a number of at least 1, or a list of seeds")
    if not isinstance(seeds, int) and len(set(seeds)) < len(seeds):
        raise ConfigError(f"scenario.{part}.seeds names a seed twice: {list(seeds)}")
    if not isinstance(seeds, int):
        _seeds(f"scenario.{part}.seeds", seeds)


def _sampling(at: str, given: ParticipantConfig | TrunkConfig | BranchConfig) -> None:
    for key, value, least in (
        ("max_new_tokens", given.max_new_tokens, 1), ("temperature", given.temperature, 0), ("top_k", given.top_k, 1),
    ):  # fmt: skip
        if value is not None and value < least:
            raise ConfigError(f"{at}.{key} is {value}; it must be at least {least}")
    if given.top_p is not None and not 0 < given.top_p <= 1:
        raise ConfigError(f"{at}.top_p is {given.top_p}; it must lie in (0, 1]")


def _seeds(at: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"{at}: {seed} is no seed; give whole numbers of at most 64 bits")


NOT_CUSTOM = {
    "CPU": "set cluster.num_cpus", "GPU": "set cluster.num_gpus", "memory": "Ray counts memory itself",
    "object_store_memory": "set cluster.object_store_memory",
}  # fmt: skip


def check_choices(config: SweepConfig) -> None:
    """ConfigError for a setting of the cluster, the run, the plan, a model or an analyzer that cannot be."""
    one_of("cluster.executor", config.cluster.executor, ("ray", "inline"))
    one_of("run.on_error", config.run.on_error, ("continue", "fail_fast"))
    one_of("run.progress", config.run.progress, ("auto", "rich", "plain", "none"))
    if redact(config.run.dir) != config.run.dir:
        raise ConfigError("run.dir holds a secret; give it where the store's client looks for it, not in the URL")
    one_of("scenario.reasoning_visibility", config.scenario.reasoning_visibility, ("strip", "self_retain", "shared"))
    for (section, key), least in LEAST.items():
        value = getattr(getattr(config, section), key)
        if value is not None and value < least:
            raise ConfigError(f"{section}.{key} is {value:g}; it must be at least {least:,}".replace(",", " "))
    asked = [*config.scenario.participants.items(), *config.scenario.judges.items()]
    free = [name for name, who in asked if who.kind == "api" and who.prices is None]
    if config.run.max_cost is not None and free:
        raise ConfigError(
            f"run.max_cost is {config.run.max_cost:g} dollars, and every API participant and judge needs prices: "
            f"{{prompt: ..., completion: ...}} (dollars per million tokens) to count by; without: {', '.join(free)}"
        )
    for section, key in ABOVE_ZERO:
        if (value := getattr(getattr(config, section), key)) <= 0:
            raise ConfigError(f"{section}.{key} is {value:g}; it must be above 0 seconds")
    _check_resources(config)
    _check_models(config)
    _check_analyzers(config)
    for axis in config.grid:
        if full_path(axis.path) == "scenario.opening" and config.scenario.trunk.turns:
            raise ConfigError(
                "grid.scenario.opening acts before the branch point; set scenario.trunk.turns=0 or use framing"
            )


def _check_resources(config: SweepConfig) -> None:
    for resource, amount in config.cluster.resources.items():
        if resource in NOT_CUSTOM:
            raise ConfigError(f"cluster.resources.{resource}: {NOT_CUSTOM[resource]}; resources are names of your own")
        if amount <= 0:
            raise ConfigError(f"cluster.resources.{resource} is {amount:g}; it must be above 0")


def _check_models(config: SweepConfig) -> None:
    for name, model in config.models.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name a model; use up to 64 letters, digits, '_', '-', '.' or blanks")
        one_of(f"models.{name}.dtype", model.dtype, ("auto", "float32", "bfloat16", "float16", "float64"))
        if not DEVICE.fullmatch(model.device):
            raise ConfigError(
                f"models.{name}.device is {model.device!r}; possible: auto, cpu, cuda, cuda:0, mps, balanced"
            )


def _check_analyzers(config: SweepConfig) -> None:
    for analyzer in config.scenario.analyzers:
        if not re.fullmatch(r"[\w.]+:[\w.]+", analyzer):
            raise ConfigError(f"scenario.analyzers: {analyzer!r} is no import path; write module:function")
        module, _, name = analyzer.partition(":")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"scenario.analyzers: cannot import {analyzer!r}: {error} (the working directory is searched unless it "
                "holds a run folder or lies in one; PYTHONPATH=. always is)"
            ) from None


def one_of(where: str, given: Any, possible: Sequence[Any]) -> None:
    """ConfigError unless `given` is one of `possible`."""
    if given not in possible:
        raise ConfigError(
            f"{where} is {given!r}; possible: {', '.join('null' if p is None else str(p) for p in possible)}"
        )
