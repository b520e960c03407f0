"""`sweeps aggregate DIR [name=NAME option=value ...]`: aggregates again, or new ones, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..aggregates.base import Spread
from ..aggregates.registry import kinds
from ..aggregates.results import finalize, refuse_code
from ..config.schema import AggregateConfig
from ..errors import ConfigError
from ..folder import names
from ..folder.store import Remote
from ..report.findings import said
from ..run import Run

HELP = """sweeps aggregate DIR                      all aggregates of the run's configuration, from their recorded sums
sweeps aggregate DIR name=NAME key=value  one aggregate, recomputed from what is stored: options as in `aggregate:`,
                                          starting from the configuration's own of that name; kind=KIND for a new name
  replicas=N                              N > 1: on Ray, sums with one task per unit, probes with one per place"""


def aggregate(run: Run, given: Sequence[str]) -> dict[Path | Remote, list[str]]:
    """Compute and write; the files written, and what is in each. ConfigError for what cannot be."""
    options = dict(_parsed(text) for text in given)
    replicas = options.pop("replicas", 1)
    spread: Spread | None = None
    if replicas > 1:
        from ..driver.executors import ray_tasks  # Ray is loaded where it is used

        cluster = replace(run.config.cluster, num_cpus=1, num_gpus=0, replicas=replicas)
        spread = partial(ray_tasks.spread, cluster=cluster)
    if not options and not run.config.aggregate:
        raise ConfigError(f"{str(run.root)!r} was run without aggregates; give name=NAME, one of: {', '.join(kinds())}")
    if not options:
        try:
            results = finalize(run, spread=spread)
        except ValueError as error:
            raise ConfigError(f"{str(run.root)!r}: {error}") from None
    else:
        name = options.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"which aggregate? give name=NAME; options were: {', '.join(options)}")
        base = next((dict(entry.options) for entry in run.config.aggregate if entry.name == name), {})
        if "kind" not in options:
            refuse_code(run.store, name, base)
        try:
            results = finalize(run, [AggregateConfig(name=name, options={**base, **options})], spread)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return {run.root / names.result(name): _shown(result) for name, result in results.items()}


def _shown(result: dict[str, Any]) -> list[str]:
    """Its sentences, or else how much of what it holds."""

    held = [f"{len(value)} {key}" for key, value in result.items() if isinstance(value, list)]
    return said(result) or [", ".join(held) or "nothing"]


def _parsed(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"cannot read {text!r}; options are key=value, as in pool=mean")
    try:
        return key, yaml.safe_load(value) if value else None
    except yaml.YAMLError:
        return key, value
