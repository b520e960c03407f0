"""The only home of Hydra: from groups, files and overrides to a checked `SweepConfig`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .aggregates import registry
from .config.build import build
from .config.grid import axes, with_controls
from .config.schema import SweepConfig
from .config.shipped import conf_dir
from .errors import ConfigError, did_you_mean
from .plan.checks import checked
from .plan.replay import scenario_of_run
from .typed import GROUPS, typed_wins


def load(overrides: Sequence[str] = (), notes: list[str] | None = None) -> SweepConfig:
    """Compose the shipped configuration with these Hydra overrides and check it.

    Raises ConfigError with one line for anything impossible. Reads item files and the headers of directions; loads no
    model.
    """

    return compose(list(overrides), notes)


QUOTING = "write key=value, and quote values with blanks, commas or parentheses, as in \"key='message(0)'\""


def compose(overrides: list[str], notes: list[str] | None = None) -> SweepConfig:
    """Compose with Hydra and check. ConfigError in one line for whatever does not fit.

    `notes` gets a line for each key of an experiment that a typed group changed.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            try:
                composed = hydra.compose("config", overrides=relaxed(overrides), return_hydra_config=True)
            except ValueError as error:  # of an override that does not fit what is there
                raise ConfigError(explain(error)) from None
            return from_composed(composed, composed.hydra, notes)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from None
    finally:
        GlobalHydra.instance().clear()
        if before is not None:
            GlobalHydra.instance().initialize(before)


def relaxed(overrides: list[str]) -> list[str]:
    """Overrides of single keys with `++`, so that a key the defaults do not spell out needs no `+`.

    Whether it exists is checked against the dataclasses. Groups and hydra's own keys stay as they are.
    """
    return [f"++{o}" if _is_plain_key(o) else o for o in overrides]


def _is_plain_key(override: str) -> bool:
    key, equals, value = override.partition("=")
    if equals and not key.strip():
        raise ConfigError(f"cannot read the override {override!r}; {QUOTING}")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        return False
    if key in GROUPS and ("{" in value or any(re.fullmatch(r"[\d.\s-]+", v) for v in value.strip("[]").split(","))):
        known = ", ".join(sorted(p.stem for p in (conf_dir() / key).glob("*.yaml")))
        raise ConfigError(f"{key} is a group: choose {key}=<{known}> and set its keys, or write an experiment file")
    return key not in GROUPS and not key.startswith("hydra.")


def explain(error: Exception) -> str:
    """Hydra's errors in one line, with the root cause and the options where a group's choice does not exist."""
    from yaml import YAMLError

    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(error).split()).replace("'++", "'")
    if key := re.fullmatch(r"invalid literal for int\(\) with base 10: '(\w+)'", text):  # OmegaConf below a list
        return f"{key[1]!r} is set below a list; name an entry of it by number, as in capture.0.{key[1]}=..."
    if "override_grammar" in text:
        shown = str(getattr(error, "override", None) or str(error).split("\n")[0]).lstrip("+")
        return f"cannot read the override {shown!r}; {QUOTING}"
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        at = f"line {mark.line + 1} of {mark.name!r}" if mark else "a file"
        return f"cannot read {at} as YAML: {getattr(error, 'problem', None) or text}"
    if kinds := re.search(r"Cannot merge (Dict|List)Config with (Dict|List)Config", f"{text} {cause}"):
        return _of_another_kind(text, *kinds.groups())
    missing = re.search(r"Could not (?:find|load) '(\w+)/([^']*)'", text)
    if missing:
        group, given = missing.groups()
        known = [p.stem for p in (conf_dir() / group).glob("*.yaml")]
        return f"no {group} {given!r}{did_you_mean(given, known)}"
    inner = " ".join(str(cause).split())
    return text if inner in text else f"{text} ({inner})"


def _of_another_kind(text: str, wanted: str, given: str) -> str:
    """Where a list stands for a mapping, or the other way round, as far as Hydra says where."""
    words = {"Dict": "a mapping (key: value)", "List": "a list"}
    override = re.search(r"Error merging override \+*(\S+?)=", text)
    file = re.search(r"In '([^']+)'", text)
    if override:
        return f"{override[1]} must be {words[wanted]}, got {words[given]}"
    where = f"{file[1]}.yaml" if file else "the configuration"
    lists = "capture, intervention, scenario.items, and values of the grid may be lists"
    return f"{where}: {words[given]} stands where {words[wanted]} belongs; {lists}"


def from_composed(composed: Any, hydra_config: Any, notes: list[str] | None = None) -> SweepConfig:
    """Hydra's composition, and what Hydra knows of it, as a checked `SweepConfig`.

    A multirun job gets a folder of its own, named by its content, so that the same job finds it again in any order.
    """
    from omegaconf import OmegaConf

    ours = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    ours, said = typed_wins(ours, OmegaConf.to_container(hydra_config.overrides.task))  # ty: ignore[invalid-argument-type]
    if notes is not None:
        notes += said
    plain: Any = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    plain.setdefault("experiment", OmegaConf.select(hydra_config, "runtime.choices.experiment") or "sweep")
    suffix = ""
    if str(OmegaConf.select(hydra_config, "mode")).endswith("MULTIRUN"):
        suffix = f"-{job_hash(OmegaConf.to_container(hydra_config.overrides.task))}"
    return from_plain(plain, suffix)


def job_hash(overrides: Any) -> str:
    """8 hex digits of a job's sorted overrides, without those that change no cell."""
    aside = ("run.", "cluster.", "report.", "hydra.", "cluster=")
    kept = sorted(o for o in (str(o).lstrip("+") for o in overrides) if not o.startswith(aside))
    return hashlib.blake2b("\n".join(kept).encode(), digest_size=4).hexdigest()


def from_plain(plain: Mapping[str, Any], suffix: str = "") -> SweepConfig:
    """A configuration as users write it (one-or-list sections, grids as maps), as a checked `SweepConfig`.

    `suffix` is added to its run folder's name.
    """

    data = dict(plain)
    if "inputs" in data:
        raise ConfigError("unknown key 'inputs'; what a sweep reads follows from its directions and items")
    for section in ("capture", "intervention"):
        data[section] = _one_or_list(data.get(section))
    entries = _mapping(data, "aggregate", "of aggregates to their options")
    for name in entries:
        _mapping(entries, name, "of options", "aggregate.")
    data["aggregate"] = [{"name": name, "options": options or {}} for name, options in entries.items()]
    grid = data.pop("grid", None) or {}
    data = _replayed(data)
    scenario = _mapping(data, "scenario", "of settings")
    data["scenario"] = {k: v for k, v in scenario.items() if not (k == "items" and v is None)}
    run = dict(_mapping(data, "run", "of settings"))
    if not isinstance(given := run.get("dir"), (str, type(None))):
        raise ConfigError(f"run.dir must be a text, got {given!r}")
    if given is not None and not given.strip():
        raise ConfigError("run.dir is empty; give a folder, or null for runs/<experiment>")
    run["dir"] = (run.get("dir") or f"runs/{Path(str(data.get('experiment', 'sweep'))).name}") + suffix
    data["run"] = run
    data["intervention"], points = with_controls(data["intervention"], axes(grid))
    config = checked(build(SweepConfig, {**data, "grid": points}))
    try:
        registry.build(config.aggregate, config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _mapping(data: Mapping[str, Any], key: str, what: str, where: str = "") -> Mapping[str, Any]:
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}{key} must be a mapping {what}, got {value!r}")
    return value or {}


def _replayed(data: dict[str, Any]) -> dict[str, Any]:
    """A replay of a run has that run's speakers, unless others are named."""
    scenario = data.get("scenario") or {}
    source = str(scenario.get("replay") or "")
    if not source.startswith("run:") or scenario.get("participants"):
        return data

    found = scenario_of_run(source.removeprefix("run:"))
    return {
        **data,
        "scenario": {**scenario, **found["scenario"]},
        "models": {**found["models"], **(data.get("models") or {})},
    }


def _one_or_list(value: Any) -> list:
    if value is None:
        return []
    return [value] if isinstance(value, Mapping) else value
